"""Trainers of transformers, trl and peft on a tiny model: `hf.py TRAINER DIRECTORY`. The trainers are as their
libraries have them."""

import sys
import warnings
from pathlib import Path

sys.path.append(str(Path(__file__).parents[3] / "python/tests_frameworks"))

import tiny  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

trainer, directory = sys.argv[1:]
torch.set_num_threads(1)
warnings.filterwarnings("ignore")


def trainer_of_transformers():
    tokens = tiny.tokenizer()
    rows = tiny.sentences({"text": (12, 13)})
    rows = rows.map(lambda row: {"input_ids": tokens(row["text"])["input_ids"]})
    rows = rows.map(lambda row: {"labels": row["input_ids"]}).select_columns(["input_ids", "labels"])
    settings = transformers.TrainingArguments(**tiny.arguments(directory), weight_decay=0.1)
    return transformers.Trainer(
        tiny.model(), settings, train_dataset=rows, data_collator=transformers.default_data_collator
    )


def sft(**more):
    import trl

    settings = trl.SFTConfig(**tiny.arguments(directory), max_length=32)
    rows = tiny.sentences({"text": (8, 20)})
    return trl.SFTTrainer(tiny.model(), settings, train_dataset=rows, processing_class=tiny.tokenizer(), **more)


def lora():
    import peft

    kind = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], lora_dropout=0.1)
    return sft(peft_config=kind)


def dpo():
    import trl

    settings = trl.DPOConfig(**tiny.arguments(directory, per_device_train_batch_size=2), max_length=32)
    rows = tiny.sentences({"prompt": (3, 6), "chosen": (4, 9), "rejected": (4, 9)})
    rows = rows.map(lambda row: {name: f" {row[name]}" for name in ("chosen", "rejected")})
    return trl.DPOTrainer(
        tiny.model(), tiny.model(seed=1), settings, train_dataset=rows, processing_class=tiny.tokenizer()
    )


def grpo():
    import trl

    sizes = {"num_generations": 4, "max_completion_length": 8}
    settings = trl.GRPOConfig(**tiny.arguments(directory), **sizes)
    return trl.GRPOTrainer(
        tiny.model(), lambda completions, **_: [float(sum(map(ord, text)) % 7) for text in completions], settings,
        train_dataset=tiny.sentences({"prompt": (3, 6)}), processing_class=tiny.tokenizer(padding_side="left"),
    )  # fmt: skip


def reward():
    import trl

    settings = trl.RewardConfig(**tiny.arguments(directory), max_length=32)
    config = tiny.model().config
    config.num_labels = 1
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    rows = tiny.sentences({"chosen": (4, 9), "rejected": (4, 9)})
    return trl.RewardTrainer(model, settings, train_dataset=rows, processing_class=tiny.tokenizer())


TRAINERS = {
    "trainer": trainer_of_transformers, "sft": sft, "lora": lora, "dpo": dpo, "grpo": grpo, "reward": reward
}  # fmt: skip
TRAINERS[trainer]().train()
