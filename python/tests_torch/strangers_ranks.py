"""One rank of a torch job over gloo, as strangers to backtape wrote them, run by test_step_of_strangers_ranks.py.

    python strangers_ranks.py RANK WORLD PORT DIRECTORY SCENARIO ...

A scenario takes two steps of three microbatches, and records the second into DIRECTORY/SCENARIO.
"""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn

import backtape
import backtape.torch

rank, world, port = map(int, sys.argv[1:4])
directory = Path(sys.argv[4])

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "BACKTAPE_STRICT": "1"}

MICROBATCHES = 3


class Model(nn.Module):
    """Two layers, of which the last has a bias of one element."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 10)
        self.outer = nn.Linear(10, 1)

    def forward(self, x):
        return self.outer(torch.tanh(self.inner(x)))


def own_reduction(form):
    """Gradients are brought together by code of the job, which says what is meant by `reduce=`.

    `again`: `.grad` is summed over ranks after each microbatch, and holds what was summed before; `again-mean`: what
    comes of it is divided by the number of ranks at the end.
    `sum`: nobody divides by the number of ranks.
    """
    module = Model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

    def communicate():
        for one in module.parameters():
            dist.all_reduce(one.grad)

    def step(loss):
        for index in range(MICROBATCHES):
            loss(module).backward()
            if form.startswith("again") or index == MICROBATCHES - 1:
                communicate()
        for one in module.parameters() if form in ("right", "again-mean") else ():
            one.grad /= world
        optimizer.step()
        optimizer.zero_grad()

    op = "sum" if form == "again" else "mean"
    return module, optimizer, step, {"reduce": {"*": [{"axis": "data", "op": op}]}}


def first():
    """DDP communicates with the first of three microbatches, where it should with the last."""
    module = nn.parallel.DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

    def step(loss):
        for index in range(MICROBATCHES):
            with nullcontext() if index == 0 else module.no_sync():
                loss(module).backward()
        optimizer.step()
        optimizer.zero_grad()

    return module, optimizer, step, {}


SCENARIOS = {
    "right": lambda: own_reduction("right"),
    "again": lambda: own_reduction("again"),
    "again-mean": lambda: own_reduction("again-mean"),
    "sum": lambda: own_reduction("sum"),
    "first": first,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    for scenario in sys.argv[5:]:
        torch.manual_seed(0)
        module, optimizer, step, options = SCENARIOS[scenario]()
        draw = torch.Generator().manual_seed(1 + rank)
        loss = lambda module: module(torch.randn(16, 6, generator=draw)).square().mean()
        mesh = {"data": world}
        with backtape.Recorder.from_env(dir=directory / scenario, mesh=mesh, steps="1") as recorder:
            for number in range(2):
                with recorder.step(number) as tape:
                    backtape.torch.step_algebra(tape, module, optimizer, **options)
                    step(loss)
        dist.barrier()
    dist.destroy_process_group()
