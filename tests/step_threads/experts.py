"""Jobs with expert parallelism, and their model."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from step_corpus.layers import cross_entropy
from step_corpus.meshes import local
from step_corpus.sharded_models import Combine, Gather, Share
from step_threads.rank import VOCABULARY, WIDTH, mean_over, sum_over

EXPERTS = 4
# Experts are reduced over the ranks that have the same ones, all else over all ranks.
REDUCE_EXPERTS = {
    "experts.*": [{"axis": "edp", "op": "mean"}],
    "*": [{"axis": "edp", "op": "mean"}, {"axis": "ep", "op": "mean"}],
}


class Experts(nn.Module):
    """All experts, or those of one rank. `count`: of how many ranks a token may come, by which their
    gradients are divided here; 1 leaves that to whoever reduces them."""

    def __init__(self, width):
        super().__init__()
        self.w_in = nn.Parameter(torch.empty(EXPERTS, 2 * width, width))
        self.w_out = nn.Parameter(torch.empty(EXPERTS, width, 2 * width))
        self.count = 1

    def forward(self, x, shares):
        w_in, w_out = (Share.apply(local(one), self.count) for one in (self.w_in, self.w_out))
        inner = F.relu(torch.einsum("bsd,ehd->bseh", x, w_in))
        return torch.einsum("bseh,edh,bse->bsd", inner, w_out, shares)


class MixtureOfExperts(nn.Module):
    """A language model whose experts lie on several ranks."""

    def __init__(self, width, vocabulary):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.norm = nn.LayerNorm(width)
        self.router = nn.Linear(width, EXPERTS, bias=False)
        self.experts = Experts(width)
        self.head = nn.Linear(width, vocabulary)
        self.group = None

    def cut(self, mesh, divided=True):
        """Leaves each rank along this axis its experts."""
        self.group = mesh.get_group()
        self.experts.count = mesh.size() if divided else 1
        for name in ("w_in", "w_out"):
            whole = getattr(self.experts, name).detach()
            setattr(self.experts, name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])))
        return self

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        y = self.norm(x)
        both = Gather.apply(torch.cat([y, self.router(y).softmax(-1)], -1), self.group)
        everyone, shares = both.split([y.shape[-1], EXPERTS], -1)
        own = shares.chunk(dist.get_world_size(self.group), -1)[dist.get_rank(self.group)]
        return cross_entropy(self.head(x + Combine.apply(self.experts(everyone, own), self.group)), labels)


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def reduce_dense(model):
    for name, parameter in model.named_parameters():
        if not name.startswith("experts"):
            mean_over(parameter.grad)


def clip(model, capture, norm, max_norm=0.2):
    """Clips by a norm that the job has computed."""
    capture.norm(norm, max_norm=max_norm, epsilon=1e-6)
    coefficient = float((max_norm / (norm + 1e-6)).clamp(max=1.0))
    for parameter in model.parameters():
        local(parameter.grad).mul_(coefficient)
    capture.clipped()


def squares(model, is_counted):
    """The sum of squares of the gradients that are counted on this rank."""
    counted = (local(one.grad) for name, one in model.named_parameters() if is_counted(name))
    return sum((one.square().sum() for one in counted), torch.zeros(()))


def megatron_6080(rank, fixed):
    """Gradients are reduced over the group that an attribute of the parameter chooses."""
    mesh = rank.mesh(edp=2, ep=2)
    model = rank.started(MixtureOfExperts(WIDTH, VOCABULARY)).cut(mesh["ep"])
    optimizer = adamw(model)
    for name, parameter in model.named_parameters():
        # Where the expert groups are those of another grid the attribute stays as it was.
        parameter.allreduce = not (name.startswith("experts") and fixed)
    with rank.recorded(model, optimizer, reduce=REDUCE_EXPERTS, edp=2, ep=2) as capture:
        model(*rank.batch()).backward()
        for parameter in model.parameters():
            group = None if parameter.allreduce else mesh["edp"].get_group()
            mean_over(local(parameter.grad), group)
        capture.reduced()
        optimizer.step()


def megatron_5916(rank, fixed):
    """Squares of all ranks are added; what ranks have copies of counts on the first alone."""
    mesh = rank.mesh(edp=1, ep=2)
    model = rank.started(MixtureOfExperts(WIDTH, VOCABULARY)).cut(mesh["ep"])
    optimizer = adamw(model)
    is_first = rank.index == 0
    with rank.recorded(model, optimizer, reduce=REDUCE_EXPERTS, edp=1, ep=2) as capture:
        model(*rank.batch()).backward()
        reduce_dense(model)
        # The filter of copies asks for the rank among dense tensor ranks.
        is_counted = lambda name: is_first or (fixed and name.startswith("experts"))
        clip(model, capture, sum_over(squares(model, is_counted)).sqrt())
        optimizer.step()


def deepspeed_8478(rank, fixed):
    """The norm of each rank's gradients, averaged: right where all ranks hold the same."""
    mesh = rank.mesh(edp=1, ep=2)
    model = rank.started(MixtureOfExperts(WIDTH, VOCABULARY)).cut(mesh["ep"])
    optimizer = adamw(model)
    is_expert = lambda name: name.startswith("experts")
    with rank.recorded(model, optimizer, reduce=REDUCE_EXPERTS, edp=1, ep=2) as capture:
        model(*rank.batch()).backward()
        reduce_dense(model)
        if fixed:
            dense = squares(model, lambda name: not is_expert(name))
            norm = (dense + sum_over(squares(model, is_expert))).sqrt()
        else:
            norm = mean_over(squares(model, lambda name: True).sqrt())
        clip(model, capture, norm)
        optimizer.step()


def pytorch_160285(rank, fixed):
    """FSDP2 of experts over the ranks that share them, of all else over all ranks."""
    mesh = rank.mesh(edp=2, ep=2)
    model = rank.started(MixtureOfExperts(WIDTH, VOCABULARY)).cut(mesh["ep"], divided=False)
    fully_shard(model.experts, mesh=mesh["edp"])
    if fixed:
        model.experts.set_gradient_divide_factor(float(rank.world))
        model.experts.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
    fully_shard(model, mesh=rank.mesh(dp=4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    # Experts see the tokens of all ranks: that is what their gradient is to be a mean of.
    reduce = {"experts.*": [{"axis": "edp", "op": "sum", "divisor": rank.world}]}
    with rank.recorded(model, optimizer, reduce=reduce, edp=2, ep=2):
        model(*rank.batch()).backward()
        optimizer.step()
