"""One rank of a torch job over gloo whose model has 413 parameters, run by test_step_many_parameters.py.

    python many_parameters.py RANK WORLD PORT DIRECTORY FAULT ...

A fault is recorded into DIRECTORY/FAULT. `one`: the gradients of `up.weight` of every layer are summed
over the ranks once more after DDP averaged them; `two`: besides it the norms of the layers decay, which
their group declares not to.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn

import backtape
import backtape.torch

rank, world, port = map(int, sys.argv[1:4])
directory = Path(sys.argv[4])
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

LAYERS, WIDTH, VOCABULARY, LENGTH, DECAY = 24, 8, 32, 6, 0.1


class Layer(nn.Module):
    """A layer of 17 parameters."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        y = self.norm1(x)
        scores = self.q(y) @ self.k(y).transpose(-1, -2) / WIDTH**0.5
        x = x + self.out(torch.softmax(scores, -1) @ self.v(y))
        return x + self.scale * self.down(torch.tanh(self.up(self.norm2(x))))


class Model(nn.Module):
    """24 layers and 5 parameters around them."""

    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class AdamW(torch.optim.AdamW):
    """Torch's, but the norms of the layers decay as matrices do."""

    def step(self, closure=None):
        for one in self.decaying:
            one.data.mul_(1 - self.param_groups[0]["lr"] * DECAY)
        return super().step(closure)


def optimizer_of(model, fault):
    matrices = [one for one in model.parameters() if one.dim() > 1]
    others = [one for one in model.parameters() if one.dim() == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": others, "weight_decay": 0.0}]
    if fault != "two":
        return torch.optim.AdamW(groups, lr=1e-2)
    optimizer = AdamW(groups, lr=1e-2)
    named = model.named_parameters()
    optimizer.decaying = [one for name, one in named if "layers" in name and ".norm" in name]
    return optimizer


def main(fault):
    torch.manual_seed(0)
    model = Model()
    assert len(list(model.parameters())) == 413
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = optimizer_of(model, fault)
    recorder = backtape.Recorder.from_env(
        steps="1", dir=directory / fault, mesh={"data": world}, rank=rank, world_size=world, strict=True
    )
    with recorder:
        for step in range(2):
            with recorder.step(step) as tape:
                optimizer.zero_grad()
                capture = backtape.torch.step_algebra(tape, wrapped, optimizer)
                for i in range(2):
                    draw = torch.Generator().manual_seed(100 * step + 10 * rank + i)
                    tokens = torch.randint(VOCABULARY, (4, LENGTH + 1), generator=draw)
                    logits = wrapped(tokens[:, :-1]).transpose(1, 2)
                    (nn.functional.cross_entropy(logits, tokens[:, 1:]) / 2).backward()
                for layer in model.layers:
                    dist.all_reduce(layer.up.weight.grad)
                capture.reduced()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    for fault in sys.argv[5:]:
        main(fault)
    dist.destroy_process_group()
