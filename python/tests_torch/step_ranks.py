"""One rank of a torch job over gloo whose step is recorded, run by test_step_algebra.py.

    python step_ranks.py RANK WORLD PORT DIRECTORY SCENARIO ...

A scenario records into DIRECTORY/SCENARIO/run. What the dump must hold it copies by itself and saves
as DIRECTORY/SCENARIO/expected-RANK.npz, an array under each name as `STAGE:PARAMETER`, with
`#MICROBATCH` at its end where there is one.
"""

import copy
import os
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grad_norm_

import backtape
import backtape.torch

rank, world, port = map(int, sys.argv[1:4])
directory = Path(sys.argv[4])

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
os.environ |= {"BACKTAPE_STRICT": "1"}

expected = {}


def expect(name, tensor):
    """Notes what the dump must hold, as it is now; of a DTensor what torch gathers."""
    if isinstance(tensor, DTensor):
        tensor = tensor.full_tensor()
    tensor = tensor.detach().clone()
    # numpy has no bf16: its bits.
    expected[name] = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


class Model(nn.Module):
    """Linear layers of uneven sizes; `unused` takes no gradient in the first microbatch."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 10)
        self.outer = nn.Linear(10, 7, bias=False)
        self.unused = nn.Linear(7, 3)

    def forward(self, x, all_of_it=True):
        x = self.outer(torch.tanh(self.inner(x)))
        return self.unused(x) if all_of_it else x


def model(seed=0):
    torch.manual_seed(seed)
    return Model()


def batch(microbatch, of=None):
    draw = torch.Generator().manual_seed(100 + 10 * (rank if of is None else of) + microbatch)
    return torch.randn(4, 6, generator=draw)


def loss_of(module, microbatch, of=None, **options):
    return module(batch(microbatch, of), **options).square().mean() / 2


def recorder(mesh=None, steps="0"):
    return backtape.Recorder.from_env(mesh=mesh, steps=steps)


def local_gradients(seed, microbatches, of=None, **options):
    """Each microbatch's gradients of a model of its own, without communication."""
    reference = model(seed)
    for i in range(microbatches):
        reference.zero_grad()
        loss_of(reference, i, of, **options).backward()
        yield i, {name: one.grad for name, one in reference.named_parameters()}


def expect_local(dtype=torch.float32):
    for i, gradients in local_gradients(0, 2):
        for name, gradient in gradients.items():
            expect(f"grad:{name}#{i}", gradient.to(dtype))


def expect_each(stage, module, of=lambda one: one):
    for name, one in module.named_parameters():
        if of(one) is not None:
            expect(f"{stage}:{name}", of(one))


def clip_and_step(module, optimizer, plain=None):
    """The end of the step, with copies of each stage; `plain`: the module without wrappers."""
    plain = plain or module
    expect_each("reduced", plain, lambda one: one.grad)
    norm = clip_grad_norm_(module.parameters(), 0.05)
    expect_each("clipped", plain, lambda one: one.grad)
    expect_each("before", plain)
    optimizer.step()
    expect_each("after", plain)
    for kind in ("exp_avg", "exp_avg_sq"):
        expect_each(f"state_after.{kind}", plain, lambda one: optimizer.state[one][kind])
    return norm


def ddp(no_sync, hook=False):
    """Two microbatches under DDP, the first kept to each rank or reduced too."""
    module = nn.parallel.DistributedDataParallel(model())
    if hook:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        module.register_comm_hook(None, bf16_compress_hook)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    expect_local()
    with recorder({"data": world}) as recording, recording.step(0) as tape:
        backtape.torch.step_algebra(tape, module, optimizer)
        for i in range(2):
            with module.no_sync() if no_sync and i == 0 else torch.enable_grad():
                loss_of(module, i).backward()
        norm = clip_and_step(module, optimizer, module.module)
    expect("norm", norm)
    if no_sync:
        (_, first), (_, second) = local_gradients(0, 2)
        for name, gradient in first.items():
            expect(f"accumulated:{name}", gradient + second[name])


def fsdp2(shape, names, synced=True, precision=False):
    """Uneven parameters over a mesh of this shape."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    module = model()
    options = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)} if precision else {}
    fully_shard(module.inner, mesh=mesh, **options)
    fully_shard(module, mesh=mesh, **options)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    # FSDP2 has autograd give gradients in the dtype that it sends.
    expect_local(torch.bfloat16 if precision else torch.float32)
    with recorder(mesh) as recording, recording.step(0) as tape:
        capture = backtape.torch.step_algebra(tape, module, optimizer)
        for i in range(2):
            module.set_requires_gradient_sync(synced or i == 1)
            loss_of(module, i).backward()
        # Norms of the job's own: one that it never gathers, one that it does.
        kept, gathered = (torch.linalg.vector_norm(module.outer.weight.grad) for _ in range(2))
        for one in (kept, gathered):
            capture.norm(one, parameters=[module.outer.weight])
        expect("outer-norm", gathered.full_tensor())
        norm = clip_and_step(module, optimizer)
        norm = norm.full_tensor()
    expect("norm", norm)
    if not synced:
        (_, first), (_, second) = local_gradients(0, 2)
        for name, gradient in first.items():
            expect(f"accumulated:{name}", gradient + second[name])


def fsdp1(original, synced=True):
    """Flat parameters, cut back into what they were made of."""
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

    module = FSDP(model(), use_orig_params=original, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    expect_local()
    with recorder({"data": world}) as recording, recording.step(0) as tape:
        backtape.torch.step_algebra(tape, module, optimizer)
        for i in range(2):
            with torch.enable_grad() if synced or i == 1 else module.no_sync():
                loss_of(module, i).backward()
        before = [dict(one) for one in gathered_gradients(2)]
        norm = module.clip_grad_norm_(0.05)
        with FSDP.summon_full_params(module, writeback=False):
            expect_each("before", unwrapped(module))
        optimizer.step()
        with FSDP.summon_full_params(module, writeback=False):
            expect_each("after", unwrapped(module))
    expect("norm", norm)
    for name in before[0]:
        expect(f"near-reduced:{name}", sum(one[name] for one in before) / world)


def unwrapped(module):
    """The module in an FSDP1 wrapper."""
    return module.module


def gathered_gradients(microbatches):
    """Each rank's gradient over all microbatches, computed here."""
    for one in range(world):
        total = None
        for _, gradients in local_gradients(0, microbatches, of=one):
            if total is None:
                total = {name: gradient.clone() for name, gradient in gradients.items()}
            else:
                total = {name: total[name] + gradient for name, gradient in gradients.items()}
        yield total


def tensor_parallel(with_fsdp):
    """Columns, then rows; a norm whose gradient is an addend on each rank."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module,
    )  # fmt: skip
    from torch.distributed.tensor import Replicate, Shard

    names, shape = (("dp", "tp"), (2, 2)) if with_fsdp else (("tp",), (world,))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    torch.manual_seed(0)
    module = nn.Sequential()
    module.norm = nn.LayerNorm(6)
    module.inner = nn.Linear(6, 10, bias=False)
    module.outer = nn.Linear(10, 6, bias=False)
    reference = copy.deepcopy(module)
    plan = {
        "norm": SequenceParallel(sequence_dim=0),
        "inner": ColwiseParallel(input_layouts=Shard(0)),
        "outer": RowwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(module, mesh["tp"], plan)
    if with_fsdp:
        fully_shard(module, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    inputs = batch(0, of=mesh.get_local_rank("dp") if with_fsdp else 0)
    tp = mesh.get_local_rank("tp")
    own = inputs.chunk(2)[tp]
    with recorder(mesh) as recording, recording.step(0) as tape:
        backtape.torch.step_algebra(tape, module, optimizer)
        module(own).square().mean().backward()
        optimizer.step()
    expect_each("after", module)
    for name in ("inner.weight", "outer.weight") + (("norm.weight",) if with_fsdp else ()):
        expect(f"reduced:{name}", module.get_parameter(name).grad)
    reference(inputs).square().mean().backward()
    expect_each("whole", reference, lambda one: one.grad)


def zero():
    """ZeroRedundancyOptimizer: each rank steps a share of the parameters."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    module = nn.parallel.DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(
        module.parameters(), optimizer_class=torch.optim.AdamW, lr=0.01
    )
    with recorder({"data": world}) as recording, recording.step(0) as tape:
        backtape.torch.step_algebra(tape, module, optimizer)
        loss_of(module, 0).backward()
        expect_each("before", module.module)
        optimizer.step()
        expect_each("after", module.module)
    for name, one in module.module.named_parameters():
        if one in optimizer.optim.state:
            expect(f"state_after.exp_avg:{name}", optimizer.optim.state[one]["exp_avg"])


def same_bits():
    """50 steps under DDP, FSDP2 and FSDP1, with and without recording."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    def flat(module):
        return FullyShardedDataParallel(module, device_id=torch.device("cpu"))

    def trained(wrap, steps):
        module = wrap(model())
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        where = directory / "same-bits" / wrap.__name__
        recording = backtape.Recorder.from_env(steps=steps, dir=where, mesh={"data": world})
        with recording:
            for step in range(50):
                with recording.step(step) as tape:
                    assert tape.active == (steps != "none")
                    backtape.torch.step_algebra(tape, module, optimizer)
                    for i in range(2):
                        loss_of(module, 2 * step + i).backward()
                    clip_grad_norm_(module.parameters(), 0.05)
                    optimizer.step()
                optimizer.zero_grad()
        state = [entry for one in optimizer.state.values() for entry in one.values()]
        tensors = [*module.parameters(), *state]
        return [one.to_local() if isinstance(one, DTensor) else one for one in tensors]

    for wrap in (nn.parallel.DistributedDataParallel, fully_shard, flat):
        plain, recorded = trained(wrap, "none"), trained(wrap, "0-49")
        assert len(plain) == len(recorded) == (4 if wrap is flat else 20)
        assert all(torch.equal(a, b) for a, b in zip(plain, recorded)), wrap


SCENARIOS = {
    "ddp": lambda: ddp(False),
    "ddp-no-sync": lambda: ddp(True),
    "ddp-bf16": lambda: ddp(True, hook=True),
    "fsdp2": lambda: fsdp2((world,), ("shard",)),
    "fsdp2-no-sync": lambda: fsdp2((world,), ("shard",), synced=False),
    "fsdp2-bf16": lambda: fsdp2((world,), ("shard",), precision=True),
    "hsdp": lambda: fsdp2((2, 2), ("copies", "shard"), synced=False),
    "fsdp1": lambda: fsdp1(False),
    "fsdp1-original": lambda: fsdp1(True),
    "fsdp1-no-sync": lambda: fsdp1(True, synced=False),
    "tp": lambda: tensor_parallel(False),
    "tp-fsdp2": lambda: tensor_parallel(True),
    "zero": zero,
    "same-bits": same_bits,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    for scenario in sys.argv[5:]:
        where = directory / scenario
        where.mkdir(exist_ok=True)
        os.environ["BACKTAPE_DIR"] = str(where / "run")
        expected.clear()
        SCENARIOS[scenario]()
        np.savez(where / f"expected-{rank}.npz", **expected)
        dist.barrier()
    dist.destroy_process_group()
