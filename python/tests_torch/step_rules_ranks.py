"""One rank of a job of FSDP2 with an optimizer of its own, run by test_step_rules.py.

    python step_rules_ranks.py RANK WORLD PORT DIRECTORY FAULT

The second step is recorded into DIRECTORY/run; FAULT is what the optimizer of rank 1 does wrong in
it, or `-`.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from own_optimizers import Model, Tiger, tiger
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import backtape
import backtape.torch

rank, world, port = map(int, sys.argv[1:4])
directory, fault = Path(sys.argv[4]), sys.argv[5]
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("data",))
    torch.manual_seed(0)
    module = Model()
    fully_shard(module, mesh=mesh)
    optimizer = Tiger(module.parameters(), lr=1e-3, beta=0.9, weight_decay=0.1)
    draw = torch.Generator().manual_seed(rank)
    recorder = backtape.Recorder.from_env(
        dir=directory / "run", mesh=mesh, rank=rank, world_size=world, steps="1", strict=True
    )
    with recorder:
        for step in range(2):
            optimizer.fault = fault if step == rank == 1 else None
            with recorder.step(step) as tape:
                optimizer.zero_grad()
                backtape.torch.step_algebra(tape, module, optimizer, rules={"Tiger": tiger})
                module(torch.randn(32, 24, generator=draw)).square().mean().backward()
                optimizer.step()
    dist.destroy_process_group()
