"""One rank of a torch job over gloo that treats its gradients by code of its own before ranks bring them together, run
by test_step_late_reductions.py.

    python late_reductions.py RANK WORLD PORT DIRECTORY SCENARIO ...

A scenario takes two steps of two microbatches, and records the second into DIRECTORY/SCENARIO.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

import backtape
import backtape.torch

rank, world, port = map(int, sys.argv[1:4])
directory = Path(sys.argv[4])

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "BACKTAPE_STRICT": "1"}

MICROBATCHES = 2
ALLOWED = 0.01


class ReducesInside(torch.optim.SGD):
    """Ranks give it their own gradients, and it averages them in its step."""

    def step(self, closure=None):
        own = [one.grad for group in self.param_groups for one in group["params"]]
        for one in own:
            dist.all_reduce(one)
            one /= world
        super().step(closure)


def shrink(module):
    """Clips by the rank's own norm, by code that nobody knows."""
    norm = torch.cat([one.grad.flatten() for one in module.parameters()]).norm()
    for one in module.parameters():
        one.grad *= min(1.0, ALLOWED / float(norm))


def communicate(module):
    for one in module.parameters():
        dist.all_reduce(one.grad)
        one.grad /= world


def exchanged(module):
    """A flat buffer that is written back in another order."""
    first, second = module[0].weight.grad, module[2].weight.grad
    first[:], second[:] = second.clone(), first.clone()


class Job:
    """What each scenario does before the optimizer's step."""

    def __init__(self, scenario):
        self.scenario = scenario
        self.module = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.is_sharded = scenario.startswith("fsdp2")
        if self.is_sharded:
            fully_shard(self.module)
        kind = ReducesInside if scenario == "inside" else torch.optim.SGD
        self.optimizer = kind(self.module.parameters(), lr=0.1, momentum=0.9)

    def step(self, loss):
        self.optimizer.zero_grad()
        for index in range(MICROBATCHES):
            if self.is_sharded:
                first = self.scenario == "fsdp2 reduced after the first pass"
                self.module.set_requires_gradient_sync(index == (0 if first else MICROBATCHES - 1))
            loss(self.module).backward()
            if self.scenario == "smaller each time" and index == 0:
                for one in self.module.parameters():
                    one.grad *= 0.5 + 0.2 * rank
        if self.scenario == "clipped by hand first":
            shrink(self.module)
        if self.scenario == "norm for the log first":
            nn.utils.get_total_norm([one.grad for one in self.module.parameters()])
        if self.scenario == "clipped first":
            nn.utils.clip_grad_norm_(self.module.parameters(), ALLOWED)
        if self.scenario not in ("inside", "not at all") and not self.is_sharded:
            communicate(self.module)
        if self.scenario == "norm for the log first":
            nn.utils.clip_grad_norm_(self.module.parameters(), ALLOWED)
        if self.scenario == "exchanged":
            exchanged(self.module)
        self.optimizer.step()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    for scenario in sys.argv[5:]:
        torch.manual_seed(0)
        job = Job(scenario)
        draw = torch.Generator().manual_seed(1 + rank)
        loss = lambda module: (1 + rank) * module(torch.randn(16, 6, generator=draw)).square().mean()
        name = scenario.replace(" ", "-")
        reduce = None if job.is_sharded else {"*": [{"axis": "data", "op": "mean"}]}
        with backtape.Recorder.from_env(dir=directory / name, mesh={"data": world}, steps="1") as recorder:
            for number in range(2):
                with recorder.step(number) as tape:
                    backtape.torch.step_algebra(
                        tape, job.module, job.optimizer, reduce=reduce, rules={"ReducesInside": "SGD"}
                    )
                    job.step(loss)
        dist.barrier()
    dist.destroy_process_group()
