"""One rank of a torch job over gloo, run by test_processes.py.

    python ranks.py RANK WORLD PORT DIRECTORY SCENARIO

A scenario records into DIRECTORY/run and prints one line of JSON on rank 0 where the test wants to
know more than the dump holds. What a dump must hold is saved by the scenario itself, gathered by
torch, as DIRECTORY/expected-NAME.npy.
"""

import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import backtape
import backtape.torch

rank, world, port = map(int, sys.argv[1:4])
directory, scenario = Path(sys.argv[4]), sys.argv[5]

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
os.environ |= {"BACKTAPE_STEPS": "0", "BACKTAPE_DIR": str(directory / "run"), "BACKTAPE_STRICT": "1"}


def expect(name, tensor):
    """What the dump must hold of `name`, as torch itself gathers it."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    if rank == 0:
        np.save(directory / f"expected-{name}.npy", tensor.detach().float().numpy())


class Model(nn.Module):
    """An embedding, a hidden layer and an unembedding, of uneven sizes."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.inner = nn.Linear(6, 10, bias=False)
        self.outer = nn.Linear(10, 6, bias=False)
        self.head = nn.Linear(6, 13, bias=False)

    def forward(self, tokens, labels, microbatch=0):
        x = self.outer(torch.tanh(self.inner(self.embed(tokens))))
        rows = {"microbatch": microbatch, "placement": {"dp": 0}}
        q = backtape.torch.tap_grad("dq", backtape.torch.tap("q", x, **rows), **rows)
        addend = {"placement": {"dp": "mean"}, "when": "pre_reduce"}
        options = {"microbatch": microbatch} | addend
        k = backtape.torch.tap_grad("dk", self.head.weight, **options)
        return F.cross_entropy(F.linear(q, k), labels)


def batch(seed):
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(13, (5,), generator=draw), torch.randint(13, (5,), generator=draw)


def recorder(mesh=None):
    return backtape.Recorder.from_env(mesh=mesh)


def placements():
    """DTensors in every placement, uneven and with ranks that hold nothing."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    from torch.distributed.tensor.placement_types import _StridedShard

    cases = {
        "rows": [Shard(0), Replicate()],
        "columns": [Replicate(), Shard(1)],
        "both": [Shard(0), Shard(1)],
        "twice": [Shard(0), Shard(0)],
        "whole": [Replicate(), Replicate()],
        "strided": [_StridedShard(0, split_factor=2), Shard(0)],
        "crossed": [_StridedShard(1, split_factor=2), Shard(1)],
    }
    draw = torch.Generator().manual_seed(7)
    with recorder(mesh) as recording, recording.step(0) as tape:
        for dtype in (torch.bfloat16, torch.float64):
            for name, layout in cases.items():
                for shape in ((7, 5), (3, 9), (1, 4)):
                    full = torch.randn(shape, generator=draw).to(dtype)
                    name_ = f"{name}-{shape[0]}-{str(dtype)[6:]}"
                    tape.record(name_, distribute_tensor(full, mesh, layout, src_data_rank=None))
                    expect(name_, full)
        addend = torch.full((4, 3), float(rank + 1))
        split = DTensor.from_local(addend, mesh, [Partial("sum"), Shard(0)])
        tape.record("addends", split)
        expect("addends", split)


def ddp():
    """Gradients before and after the all-reduce, with no_sync on the first microbatch."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Model())
    own = None
    with recorder({"dp": world}) as recording, recording.step(0) as tape:
        for i in range(2):
            with model.no_sync() if i == 0 else torch.enable_grad():
                loss = model(*batch(10 * rank + i), microbatch=i) / 2
                options = {"microbatch": i, "placement": {"dp": "mean"}, "when": "pre_reduce"}
                with backtape.torch.gradients(tape, model, names="outer*", **options):
                    loss.backward()
            if i == 0:
                own = model.module.outer.weight.grad.clone()
        backtape.torch.record_gradients(tape, model, when="post_reduce")
        backtape.torch.record_parameters(tape, model)
    gathered = [torch.empty_like(own) for _ in range(world)]
    dist.all_gather(gathered, own)
    for i, one in enumerate(gathered):
        expect(f"own-{i}", one)
    for name, parameter in model.module.named_parameters():
        expect(f"grad.{name}", parameter.grad)
        expect(name, parameter)


def fsdp2():
    """Gradients of unsharded weights by taps, of sharded ones after the reduce-scatter; FSDP over
    tensor parallelism cuts strided shards."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Model()
    parallelize_module(model, mesh["tp"], {"inner": ColwiseParallel(), "outer": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    with recorder(mesh) as recording, recording.step(0) as tape:
        loss = model(*batch(mesh.get_local_rank("dp")))
        loss.backward()
        backtape.torch.record_gradients(tape, model, when="post_reduce")
        backtape.torch.record_parameters(tape, model)
    for name, parameter in model.named_parameters():
        expect(f"grad.{name}", parameter.grad)
        expect(name, parameter)


def fsdp1(original):
    """Flat parameters, cut back into what they were made of."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    torch.manual_seed(0)
    reference = Model()
    torch.manual_seed(0)
    model = FSDP(Model(), use_orig_params=original, device_id=torch.device("cpu"))
    # Every rank has the same batch, so the mean over ranks is the gradient of one.
    with recorder() as recording, recording.step(0) as tape:
        model(*batch(3)).backward()
        backtape.torch.record_gradients(tape, model, when="post_reduce")
        backtape.torch.record_parameters(tape, model)
    reference(*batch(3)).backward()
    for name, parameter in reference.named_parameters():
        expect(f"grad.{name}", parameter.grad)
        expect(name, parameter)


SCENARIOS = {
    "placements": placements,
    "ddp": ddp,
    "fsdp2": fsdp2,
    "fsdp1": lambda: fsdp1(False),
    "fsdp1-original": lambda: fsdp1(True),
}

torch.set_num_threads(1)
dist.init_process_group("gloo", rank=rank, world_size=world)
SCENARIOS[scenario]()
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    print(json.dumps({"done": scenario}))
