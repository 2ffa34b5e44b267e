"""One rank of small torch jobs that take the same step in different ways, run by test_step_against.py.

    python step_against_ranks.py RANK WORLD PORT DIRECTORY JOB...

A job is NAME=OPTIONS in JSON and records into DIRECTORY/NAME. All jobs have the same 16 rows of data: each
rank and microbatch takes its share of them.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.utils import clip_grad_norm_

import backtape
import backtape.torch

rank, world, port = map(int, sys.argv[1:4])
directory = Path(sys.argv[4])
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "BACKTAPE_STRICT": "1"}

WIDTH, ROWS = 8, 16


class Separate(nn.Module):
    """Attention with three projections, a norm and a layer behind it."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)
        self.out = nn.Linear(WIDTH, 5, bias=False)

    def projected(self, x):
        return self.q(x), self.k(x), self.v(x)

    def forward(self, x):
        q, k, v = self.projected(x)
        weights = torch.softmax(q @ k.transpose(-1, -2), dim=-1)
        return self.last(self.norm(x + weights @ v))

    def last(self, x):
        return self.out(x)


class Fused(Separate):
    """The same with one projection in place of three."""

    def __init__(self):
        super().__init__()
        three = [self.q, self.k, self.v]
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        with torch.no_grad():
            self.qkv.weight.copy_(torch.cat([one.weight for one in three]))
            self.qkv.bias.copy_(torch.cat([one.bias for one in three]))
        del self.q, self.k, self.v

    def projected(self, x):
        return self.qkv(x).chunk(3, dim=-1)


class Kernels(Separate):
    """The same with the matrices as jax frameworks keep them, and their names."""

    def __init__(self):
        super().__init__()
        for name in ("q", "k", "v", "out"):
            linear = getattr(self, name)
            held = nn.ParameterDict({"kernel": nn.Parameter(linear.weight.detach().T.clone())})
            if linear.bias is not None:
                held["b"] = nn.Parameter(linear.bias.detach().clone())
            delattr(self, name)
            setattr(self, f"dense_{name}", held)

    def projected(self, x):
        dense = (self.dense_q, self.dense_k, self.dense_v)
        return tuple(x @ one["kernel"] + one["b"] for one in dense)

    def last(self, x):
        return x @ self.dense_out["kernel"]


MODELS = {"separate": Separate, "fused": Fused, "kernels": Kernels}


def batch(step, microbatch, microbatches):
    """The rows of this rank's microbatch, `[rows, 3, WIDTH]`, and their targets."""
    draw = torch.Generator().manual_seed(100 + step)
    x, y = torch.randn(ROWS, 3, WIDTH, generator=draw), torch.randn(ROWS, 3, 5, generator=draw)
    of = ROWS // (world * microbatches)
    start = (rank * microbatches + microbatch) * of
    return x[start : start + of], y[start : start + of]


def job(
    name, model="separate", wrap=None, microbatches=1, seed=0, lr=1e-3, steps=1, fault=None, grow=1.0,
    scale=None, autocast=False,
):  # fmt: skip
    torch.manual_seed(seed)
    module = plain = MODELS[model]()
    if grow != 1.0:
        with torch.no_grad():
            plain.out.weight.mul_(grow)
    if wrap in ("ddp", "zero"):
        module = nn.parallel.DistributedDataParallel(plain)
    if wrap == "fsdp2":
        fully_shard(module, mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("shard",)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=lr, weight_decay=0.01)
    if wrap == "zero":
        optimizer = ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=lr, weight_decay=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
    mesh = {"data": world} if world > 1 else None
    with backtape.Recorder.from_env(dir=directory / name, steps="0-9", mesh=mesh) as recorder:
        for step in range(steps):
            with recorder.step(step) as tape:
                if fault != "not recorded":
                    backtape.torch.step_algebra(tape, module, optimizer)
                else:
                    tape.record("x", torch.zeros(3))
                for i in range(microbatches):
                    x, y = batch(step, i, microbatches)
                    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                        out = module(x)
                    loss = (out - y).square().mean()
                    loss = loss if fault == "loss not divided" else loss / microbatches
                    scaler.scale(loss).backward()
                if fault == "reduced twice":
                    dist.all_reduce(plain.out.weight.grad)
                scaler.unscale_(optimizer)
                clip_grad_norm_(module.parameters(), 0.05)
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    for one in sys.argv[5:]:
        name, _, options = one.partition("=")
        job(name, **json.loads(options or "{}"))
        dist.barrier()
    dist.destroy_process_group()
