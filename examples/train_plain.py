"""Trains a small language model on two ranks. Nothing in it knows of backtape.

    torchrun --standalone --nproc-per-node 2 examples/train_plain.py
    backtape run --dir dumps/plain -- torchrun --standalone --nproc-per-node 2 examples/train_plain.py

`--bug` trains it with a line that is wrong: the last microbatch of a step is left within `no_sync`, too.
"""

import contextlib
import os
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

VOCABULARY, WIDTH, LENGTH, MICROBATCHES = 256, 64, 32, 2


class Model(nn.Module):
    """Residual layers between an embedding and its transpose."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)

    def forward(self, tokens, labels):
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + F.gelu(layer(hidden))
        logits = self.head(self.norm(hidden)).float()
        return F.cross_entropy(logits.view(-1, VOCABULARY), labels.reshape(-1), ignore_index=-1)


def main(bug, steps=3):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    text = torch.tensor(list(open(os.__file__, "rb").read()))
    model = nn.parallel.DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())
    for step in range(steps):
        for microbatch in range(MICROBATCHES):
            starts = torch.randint(len(text) - LENGTH, (4,)).tolist()
            rows = torch.stack([text[start : start + LENGTH + 1] for start in starts])
            is_last = microbatch == MICROBATCHES - 1
            with contextlib.nullcontext() if is_last and not bug else model.no_sync():
                loss = model(rows[:, :-1], rows[:, 1:])
                (loss / MICROBATCHES).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss.item():.6f} grad_norm {float(norm):.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main("--bug" in sys.argv)
