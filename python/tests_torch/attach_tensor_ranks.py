"""A training job under tensor parallelism that knows nothing of backtape, for torchrun:
`attach_tensor_ranks.py KIND [FAULT]`."""

import contextlib
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

# A number of classes that two ranks do not share evenly.
VOCAB, WIDTH = 31, 16


class Model(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.up = nn.Linear(WIDTH, 32)
        self.down = nn.Linear(32, WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=bias)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        hidden = hidden + self.down(torch.tanh(self.up(hidden)))
        return self.head(F.layer_norm(hidden, (WIDTH,)))


def parallel(kind):
    """The model, whose logits ranks share, gather, or have whole by an unembedding that each has."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    head = ColwiseParallel(
        output_layouts=Replicate() if kind == "gathered" else Shard(-1), use_local_output=kind == "gathered"
    )
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()} | ({} if kind == "whole" else {"head": head})
    return parallelize_module(Model(bias=kind == "gathered"), mesh, plan)


def main(kind, fault=""):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = parallel(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if fault == "logits":
        model.head.register_forward_hook(scaled)
    torch.manual_seed(1)  # All ranks have the same tokens.
    with loss_parallel() if kind == "shared" else contextlib.nullcontext():
        for _ in range(2):
            for _ in range(2):
                tokens, labels = torch.randint(VOCAB, (2, 3, 8))
                labels[0, :3] = -100
                loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
                (loss / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    dist.destroy_process_group()


def scaled(module, given, logits):
    logits.register_hook(lambda gradient: gradient * 1.01)
    return logits


main(*sys.argv[1:])
