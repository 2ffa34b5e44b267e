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
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

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
    said = {"reduce": {"*": [{"axis": "data", "op": op}]}}
    return module, optimizer, step, {} if form == "undeclared" else said


def shares(form):
    """Each rank updates its share of a flat copy of all parameters, and the shares are gathered.

    `shares-lost`: the last rank keeps its own old values of what the first one updates.
    """
    module = nn.parallel.DistributedDataParallel(Model().to(torch.bfloat16))
    own = [*module.parameters()]
    flat = nn.utils.parameters_to_vector(own).detach().float()
    size = -(-flat.numel() // world)
    padded = torch.cat([flat, flat.new_zeros(size * world - flat.numel())])
    share = nn.Parameter(padded[rank * size : (rank + 1) * size].clone())
    optimizer = torch.optim.AdamW([share], lr=1e-2)

    def step(loss):
        loss(module).backward()
        whole = torch.cat([one.grad.float().reshape(-1) for one in own])
        whole = torch.cat([whole, whole.new_zeros(size * world - whole.numel())])
        share.grad = whole[rank * size : (rank + 1) * size].clone()
        optimizer.step()
        gathered = [torch.empty_like(share) for _ in range(world)]
        dist.all_gather(gathered, share.detach())
        if form == "shares-lost" and rank == world - 1:
            old = nn.utils.parameters_to_vector(own).detach().float()
            gathered[0] = old[:size]
        nn.utils.vector_to_parameters(torch.cat(gathered)[: flat.numel()].to(torch.bfloat16), own)
        module.zero_grad()

    return module, optimizer, step, {}


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


def moved(form):
    """Weights of an average are put in and given back before the step, or are not (`left`); `sam`: a pass at perturbed
    weights gives the gradient, or `several` do, `kept` beside that of the pass before."""
    model = Model()
    if form.startswith("fsdp1"):
        module = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    elif form.startswith("fsdp2"):
        module = fully_shard(model, mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("data",)))
        module.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply
    else:
        module = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

    @torch.no_grad()
    def step(loss):
        optimizer.zero_grad()
        with torch.enable_grad():
            loss(module).backward()
        kept = [one.detach().clone() for one in module.parameters()]
        for one in module.parameters():
            one.data.mul_(0.5)
        if form.startswith("sam"):
            if "kept" not in form:
                optimizer.zero_grad()
            for left in reversed(range(MICROBATCHES if "several" in form else 1)):
                with torch.enable_grad(), module.no_sync() if left else nullcontext():
                    loss(module).backward()
        for one, value in zip(module.parameters(), kept) if "left" not in form else ():
            one.data.copy_(value)
        optimizer.step()

    return module, optimizer, step, {}


def second_task(form):
    """DDP reduces the passes of a second task, too, which come after the optimizer's step.

    `task-first`: it communicates with the first of three microbatches, where it should with the last.
    """
    module = nn.parallel.DistributedDataParallel(Model())
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)

    def step(loss):
        own = 0 if form == "task-first" else MICROBATCHES - 1
        for index in range(MICROBATCHES):
            with nullcontext() if index == own else module.no_sync():
                loss(module).backward()
        optimizer.step()
        optimizer.zero_grad()
        for index in range(MICROBATCHES):
            with nullcontext() if index == MICROBATCHES - 1 else module.no_sync():
                loss(module).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.01)
        optimizer.zero_grad()

    return module, optimizer, step, {}


def apart(form):
    """Ranks hold other parameters of one name, or copies that drifted apart, and communicate nothing."""
    module = Model()
    with torch.no_grad():
        for one in module.parameters():
            one += (1.0 if form == "parts" else 1e-3) * rank * torch.randn_like(one)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    return module, optimizer, one_pass(module, optimizer), {"reduce": {"*": []}}


def of_some_ranks(form):
    """`rates`: the second rank has a learning rate of its own; `held`: its optimizer holds the first layer alone."""
    model = Model()
    module = nn.parallel.DistributedDataParallel(model)
    own = model.inner.parameters() if form == "held" and rank else model.parameters()
    optimizer = torch.optim.SGD(own, lr=0.2 if form == "rates" and rank else 0.1)
    return module, optimizer, one_pass(module, optimizer), {}


def divided(form):
    """FSDP2 divides the gradients of the first layer by a number that the job sets, or those of all."""
    module = Model()
    for one in (module.inner, module):
        fully_shard(one, mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("data",)))
    for one in (module.inner, module):
        one.set_force_sum_reduction_for_comms(True)  # gloo cannot multiply
    for one in (module.inner,) if form == "divisors" else (module.inner, module):
        one.set_gradient_divide_factor(2.0 * world)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return module, optimizer, one_pass(module, optimizer), {}


def one_pass(module, optimizer):
    def step(loss):
        optimizer.zero_grad()
        loss(module).backward()
        optimizer.step()

    return step


SCENARIOS = {
    "parts": lambda: apart("parts"),
    "near": lambda: apart("near"),
    "rates": lambda: of_some_ranks("rates"),
    "held": lambda: of_some_ranks("held"),
    "divisors": lambda: divided("divisors"),
    "one-divisor": lambda: divided("one-divisor"),
    "right": lambda: own_reduction("right"),
    "again": lambda: own_reduction("again"),
    "again-mean": lambda: own_reduction("again-mean"),
    "sum": lambda: own_reduction("sum"),
    "undeclared": lambda: own_reduction("undeclared"),
    "shares": lambda: shares("shares"),
    "shares-lost": lambda: shares("shares-lost"),
    "first": first,
    "sam": lambda: moved("sam"),
    "sam-several": lambda: moved("sam-several"),
    "sam-kept": lambda: moved("sam-kept"),
    "sam-left": lambda: moved("sam-left"),
    "fsdp1": lambda: moved("fsdp1"),
    "fsdp2": lambda: moved("fsdp2"),
    "fsdp2-left": lambda: moved("fsdp2-left"),
    "task": lambda: second_task("task"),
    "task-first": lambda: second_task("task-first"),
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    for scenario in sys.argv[5:]:
        torch.manual_seed(0)
        module, optimizer, step, options = SCENARIOS[scenario]()
        draw = torch.Generator().manual_seed(1 + rank)
        dtype = next(module.parameters()).dtype
        loss = lambda module: module(torch.randn(16, 6, generator=draw).to(dtype)).float().square().mean()
        mesh = {"data": world}
        with backtape.Recorder.from_env(dir=directory / scenario, mesh=mesh, steps="1") as recorder:
            for number in range(2):
                with recorder.step(number) as tape:
                    backtape.torch.step_algebra(tape, module, optimizer, **options)
                    step(loss)
        dist.barrier()
    dist.destroy_process_group()
