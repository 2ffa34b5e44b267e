"""Trainings with a callback of backtape: `callback_jobs.py TRAINER DIRECTORY STEPS [raises|second]`. STEPS may be
"none", for a callback that is given none. `raises` has the training raise in its third step; `second` has it follow
another training of two steps, without a trainer."""

import sys
import warnings

import torch

trainer, directory, steps, *more = sys.argv[1:]
given = {} if steps == "none" else {"steps": steps, "dir": directory}
torch.set_num_threads(1)
warnings.filterwarnings("ignore")


class Fault(Exception):
    """That of the training's own data."""


def of_transformers():
    import tiny
    import transformers

    from backtape.transformers import BacktapeCallback

    tokens = tiny.tokenizer()
    rows = tiny.sentences({"text": (12, 13)})
    rows = rows.map(lambda row: {"input_ids": tokens(row["text"])["input_ids"]})
    rows = rows.map(lambda row: {"labels": row["input_ids"]})
    return transformers.Trainer(
        tiny.model(), transformers.TrainingArguments(**tiny.arguments(f"{directory}.out")),
        train_dataset=rows.select_columns(["input_ids", "labels"]),
        data_collator=failing if "raises" in more else transformers.default_data_collator,
        callbacks=[BacktapeCallback(**given)],
    ).train()  # fmt: skip


batches = 0


def failing(rows):
    import transformers

    global batches
    batches += 1
    if batches > 5:
        raise Fault
    return transformers.default_data_collator(rows)


def of_trl():
    import tiny
    import trl

    from backtape.transformers import BacktapeCallback

    settings = trl.SFTConfig(**tiny.arguments(f"{directory}.out"), max_length=32)
    trl.SFTTrainer(
        tiny.model(), settings, train_dataset=tiny.sentences({"text": (8, 20)}), processing_class=tiny.tokenizer(),
        callbacks=[BacktapeCallback(**given)],
    ).train()  # fmt: skip


def of_lightning():
    import lightning

    from backtape.lightning import BacktapeCallback

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(64, 16), torch.nn.Linear(16, 64, bias=False)

        def training_step(self, batch, index):
            if "raises" in more and index == 5:
                raise Fault
            logits = self.head(torch.tanh(self.embed(batch[:, :-1])))
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    torch.manual_seed(0)
    rows = torch.randint(64, (64, 9))
    quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    lightning.Trainer(
        max_steps=3, accelerator="cpu", accumulate_grad_batches=2, gradient_clip_val=0.3, **dict.fromkeys(quiet, False),
        callbacks=[BacktapeCallback(**given)],
    ).fit(Model(), torch.utils.data.DataLoader(rows, batch_size=4))  # fmt: skip


def without_trainer():
    model = torch.nn.Linear(8, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        torch.nn.functional.cross_entropy(model(torch.randn(4, 8)), torch.randint(64, (4,))).backward()
        optimizer.step()
        optimizer.zero_grad()


if "second" in more:
    without_trainer()
train = {"transformers": of_transformers, "trl": of_trl, "lightning": of_lightning}[trainer]
try:
    train()
except Fault:
    print("the training raised")
print("the job goes on", flush=True)
