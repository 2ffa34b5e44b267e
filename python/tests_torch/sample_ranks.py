"""One rank of a torch job over gloo of whose step a sample is recorded, run by test_step_sample.py.

    python sample_ranks.py RANK WORLD PORT DIRECTORY SCENARIO ...

A scenario records into DIRECTORY/SCENARIO.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.utils import clip_grad_norm_

import backtape
import backtape.torch

rank, world, port = map(int, sys.argv[1:4])
directory = Path(sys.argv[4])

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "BACKTAPE_STRICT": "1"}

SAMPLE = {"sample": 160, "sample_seed": 2}


def model():
    """Layers of uneven sizes, so that a sharded one is cut within blocks and rows."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(19, 41), nn.Tanh(), nn.Linear(41, 23))


def batch(step, microbatch):
    draw = torch.Generator().manual_seed(1000 * rank + 10 * step + microbatch)
    return torch.randn(8, 19, generator=draw)


def flat(module):
    return FullyShardedDataParallel(module, device_id=torch.device("cpu"))


def train(module, where, steps, options, count=2, reduced=None, norm=None):
    """Trains `count` steps; the losses. reduced: changes gradients before they are clipped; norm: what
    norms and clips in place of torch's function, of the step that is recorded last."""
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    losses = []
    recording = backtape.Recorder.from_env(steps=steps, dir=where, mesh={"data": world})
    with recording:
        for step in range(count):
            with recording.step(step) as tape:
                capture = backtape.torch.step_algebra(tape, module, optimizer, **options)
                for i in range(2):
                    loss = module(batch(step, i)).square().mean() / 2
                    loss.backward()
                    losses.append(loss.detach())
                if reduced is not None and tape.active:
                    reduced(module)
                if norm is not None and tape.active:
                    norm(capture, module)
                elif isinstance(module, FullyShardedDataParallel):
                    module.clip_grad_norm_(0.05)
                else:
                    clip_grad_norm_(module.parameters(), 0.05)
                optimizer.step()
            optimizer.zero_grad()
    return losses, optimizer


def sampled(wrap, **faults):
    train(wrap(model()), current / "run", "1", SAMPLE, **faults)


def doubled(module):
    """Rank 1 multiplies what it holds of a reduced gradient."""
    if rank == 1:
        module[2].weight.grad.to_local().mul_(2)


def of_one_rank(capture, module):
    """The norm of what a rank holds, which it takes for the whole."""
    own = [one.grad.to_local() for one in module.parameters()]
    capture.norm(nn.utils.get_total_norm(own).item())


def same_bits():
    """200 steps without recording, with everything recorded and with a sample."""
    modes = {"none": ("none", {}), "everything": ("0-199", {}), "sampled": ("0-199", SAMPLE)}
    results = []
    for mode, (steps, options) in modes.items():
        module = nn.parallel.DistributedDataParallel(model())
        losses, optimizer = train(module, current / mode, steps, options, count=200)
        state = [entry for one in optimizer.state.values() for entry in one.values()]
        results.append([*losses, *module.parameters(), *state])
    plain, *recorded = results
    for other in recorded:
        assert len(plain) == len(other)
        assert all(torch.equal(a, b) for a, b in zip(plain, other))


SCENARIOS = {
    "ddp": lambda: sampled(nn.parallel.DistributedDataParallel),
    "fsdp2": lambda: sampled(fully_shard),
    "fsdp1": lambda: sampled(flat),
    "rank-doubled": lambda: sampled(fully_shard, reduced=doubled),
    "norm-local": lambda: sampled(fully_shard, norm=of_one_rank),
    "same-bits": same_bits,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    for scenario in sys.argv[5:]:
        current = directory / scenario
        current.mkdir(exist_ok=True)
        SCENARIOS[scenario]()
        dist.barrier()
    dist.destroy_process_group()
