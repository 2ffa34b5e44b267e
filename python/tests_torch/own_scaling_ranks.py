"""One rank of a torch job over gloo that sums the losses of its tokens and divides the gradients by their number in the
end, as torchtune's recipes do; run by test_own_scaling.py.

    python own_scaling_ranks.py RANK WORLD PORT DIRECTORY SCENARIO ...

A scenario is a wrapper and what is wrong. It takes two steps of two microbatches, and records the second into
DIRECTORY/SCENARIO.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import backtape
import backtape.torch

rank, world, port = map(int, sys.argv[1:4])
directory = Path(sys.argv[4])

os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "BACKTAPE_STRICT": "1"}

VOCABULARY, WIDTH, MICROBATCHES = 19, 8, 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        return self.head(hidden + torch.tanh(self.inner(hidden)))


def summed(_, bucket):
    """A hook of DDP that forgets to divide."""
    work = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return work.then(lambda done: done.value()[0])


def wrapped(wrapper, fault):
    model = Model()
    if wrapper == "fsdp2":
        fully_shard(model.inner)
        return fully_shard(model)
    model = nn.parallel.DistributedDataParallel(model)
    if fault == "hook":
        model.register_comm_hook(None, summed)
    return model


def reduced_again(gradients, fault):
    """A second reduction of what DDP has averaged."""
    if fault == "twice":
        for gradient in gradients:
            dist.all_reduce(gradient)
    if fault == "bucket":
        bucket = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(bucket)
        for gradient, sent in zip(gradients, bucket.split([own.numel() for own in gradients])):
            gradient.copy_(sent.view_as(gradient))


def divide(parameters, tokens, fault):
    """What torchtune's `scale_grads` does."""
    counted = torch.tensor(tokens, dtype=torch.float32)
    if fault != "own tokens":
        dist.all_reduce(counted)
    factor = (1 if fault == "no ranks" else world) / counted
    if fault == "apart" and rank == 1:
        factor = 0.9 * factor
    left = parameters[1:2] if fault == "one is left" else []
    for parameter in parameters:
        if not any(parameter is one for one in left):
            parameter.grad *= factor


def run(scenario):
    wrapper, _, fault = scenario.partition(" ")
    torch.manual_seed(0)
    model = wrapped(wrapper, fault)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    torch.manual_seed(1 + rank)
    target = directory / scenario.replace(" ", "-")
    with backtape.Recorder.from_env(dir=str(target), steps="1") as recorder, backtape.torch.attach(
        recorder=recorder, reduce={"*": DECLARED} if fault == "hook" else None
    ):
        for _ in range(2):
            tokens = 0
            for index in range(MICROBATCHES):
                text, labels = torch.randint(VOCABULARY, (2, 2, 7))
                labels[:, : 1 + index + 2 * rank] = -100
                counted = int((labels != -100).sum())
                tokens += counted
                loss = F.cross_entropy(model(text).flatten(0, 1), labels.flatten(), ignore_index=-100)
                (loss * counted).backward()
            reduced_again([one.grad for one in parameters], fault)
            divide(parameters, tokens, fault)
            nn.utils.clip_grad_norm_(parameters, 0.1)
            optimizer.step()
            optimizer.zero_grad()


DECLARED = [{"axis": "data", "op": "mean", "ranks": list(range(world))}]

torch.set_num_threads(1)
dist.init_process_group("gloo", rank=rank, world_size=world)
for scenario in sys.argv[5:]:
    run(scenario)
    dist.barrier()
dist.destroy_process_group()
