"""Models whose parameters lie on several ranks by code of the model: of tensor and expert parallelism."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from step_corpus.layers import cross_entropy


class Feed(nn.Module):
    """A feed-forward layer, whose matrices are cut by tensor parallelism."""

    def __init__(self, width, inner):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Parallel(nn.Module):
    """An embedding, layers that are cut, and a head."""

    def __init__(self, width, vocabulary, depth, times=2):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Feed(width, times * width) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(x), labels)


def cut_by_tensor_parallelism(model, mesh):
    """Columns of `up`, rows of `down`; all else is the same on each rank."""
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


class Gather(torch.autograd.Function):
    """The tokens of all ranks of a group, in order; backward: the sum of their gradients."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient.chunk(dist.get_world_size(ctx.group))[dist.get_rank(ctx.group)], None


class Combine(torch.autograd.Function):
    """The sum over ranks of what their experts answer, of this rank's tokens; backward: all gradients."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()

    @staticmethod
    def backward(ctx, gradient):
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size(ctx.group))]
        dist.all_gather(parts, gradient.contiguous(), group=ctx.group)
        return torch.cat(parts), None


class Share(torch.autograd.Function):
    """A weight whose gradient is of all ranks' tokens, where the others' are of one rank's."""

    @staticmethod
    def forward(ctx, weight, count):
        ctx.count = count
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx, gradient):
        return gradient / ctx.count, None


class ShardedExperts(nn.Module):
    """Experts that are cut over a mesh axis: each rank answers all tokens with its own."""

    def __init__(self, width, vocabulary, depth, gated=False):
        super().__init__()
        self.gated = gated
        self.embed = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, 4, bias=False)
        self.experts_in = nn.Parameter(torch.empty(4, (4 if gated else 2) * width, width))
        self.experts_out = nn.Parameter(torch.empty(4, width, 2 * width))
        self.head = nn.Linear(width, vocabulary)
        self.group = None

    def cut(self, mesh):
        """Leaves each rank along this axis its experts."""
        self.group = mesh.get_group()
        for name in ("experts_in", "experts_out"):
            whole = getattr(self, name).detach()
            setattr(self, name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])))
        return self

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        y = self.norm(x)
        shares = self.router(y).softmax(-1)
        both = Gather.apply(torch.cat([y, shares], -1), self.group)
        everyone, shares = both.split([y.shape[-1], 4], -1)
        rank, count = dist.get_rank(self.group), dist.get_world_size(self.group)
        own = [Share.apply(one.to_local(), count) for one in (self.experts_in, self.experts_out)]
        inner = torch.einsum("bsd,ehd->bseh", everyone, own[0])
        if self.gated:
            gate, value = inner.chunk(2, -1)
            inner = F.silu(gate) * value
        else:
            inner = F.relu(inner)
        out = torch.einsum("bseh,edh,bse->bsd", inner, own[1], shares.chunk(count, -1)[rank])
        return cross_entropy(self.head(x + Combine.apply(out, self.group)), labels)


def is_cut(parameter):
    """Whether ranks hold different parts of it."""
    return isinstance(parameter, DTensor) and any(one.is_shard() for one in parameter.placements)
