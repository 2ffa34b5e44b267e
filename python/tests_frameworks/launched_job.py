"""Trainings that launchers of other libraries start, and that know nothing of backtape: `launched_job.py accelerate`
or `launched_job.py deepspeed STAGE`. With `attach` as the last word they have the one line of docs/attach.md."""

import sys

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCABULARY, WIDTH, LENGTH = 64, 16, 8
# The launcher of DeepSpeed adds a word of its own.
library, *more = [word for word in sys.argv[1:] if not word.startswith("--local_rank") and word != "attach"]


def attach(*given):
    """The one line, where it is asked for."""
    if sys.argv[-1] == "attach":
        import backtape.torch

        backtape.torch.attach(*given)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        return self.head(torch.tanh(self.mix(self.embed(tokens))))


def loss_of(model, rows):
    return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1).float(), rows[:, 1:].flatten())


def by_accelerate():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(torch.randint(VOCABULARY, (48, LENGTH + 1)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    attach(model, optimizer)
    for rows in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, rows))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    return accelerator.num_processes


def by_deepspeed(stage):
    import deepspeed

    # A path for inference alone, which has to be compiled and leaves files in /dev/shm.
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
    deepspeed.init_distributed("gloo")
    settings = {
        "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.05,
        "zero_optimization": {"stage": int(stage)}, "steps_per_print": 10**9,
    }  # fmt: skip
    module = Model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=settings)
    attach(engine)
    torch.manual_seed(1 + torch.distributed.get_rank())
    for _ in range(6):
        engine.backward(loss_of(engine, torch.randint(VOCABULARY, (4, LENGTH + 1))))
        engine.step()
    return torch.distributed.get_world_size()


torch.set_num_threads(1)
ranks = {"accelerate": by_accelerate, "deepspeed": by_deepspeed}[library](*more)
torch.distributed.destroy_process_group()
sys.stdout.write(f"trained on {ranks} ranks\n")
