"""Jobs with tensor parallelism by code of their own, and their model: attention over latent keys."""

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from step_corpus.layers import cross_entropy
from step_corpus.meshes import local
from step_corpus.sharded_models import is_cut
from step_threads.experts import clip
from step_threads.rank import VOCABULARY, WIDTH, sum_over

HEADS, HEAD, ROPE, LATENT = 4, 6, 2, 8


class ToRegion(torch.autograd.Function):
    """What all tensor ranks hold goes to each one's part of a layer: gradients are summed on the way back."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return sum_over(gradient.contiguous().clone())


class FromRegion(torch.autograd.Function):
    """The sum of what the tensor ranks computed; its gradient is that of each."""

    @staticmethod
    def forward(ctx, x):
        return sum_over(x.contiguous().clone())

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class LatentAttention(nn.Module):
    """A layer of attention whose heads are cut over ranks, between an embedding and a head.

    q_a and kv_a are the same on each rank, q_b, kv_b, out and sink are cut by heads. `k_pe` is one key for
    all heads; `sums_k_pe`: its gradient is summed over the ranks that have the heads. A norm of what heads
    give takes out what sinks do, so a model has one of the two.
    """

    def __init__(self, has_sinks):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.q_a = nn.Linear(WIDTH, LATENT, bias=False)
        self.q_norm = nn.RMSNorm(LATENT)
        self.q_b = nn.Parameter(torch.empty(HEADS * (HEAD + ROPE), LATENT))
        self.kv_a = nn.Linear(WIDTH, LATENT + ROPE, bias=False)
        self.kv_b = nn.Parameter(torch.empty(HEADS * 2 * HEAD, LATENT))
        self.sink = nn.Parameter(torch.empty(HEADS)) if has_sinks else None
        self.out_norm = nn.Identity() if has_sinks else nn.RMSNorm(HEAD)
        self.out = nn.Parameter(torch.empty(WIDTH, HEADS * HEAD))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.sums_k_pe = True

    def cut(self, mesh):
        """Leaves each rank its heads."""
        for name, axis in (("q_b", 0), ("kv_b", 0), ("sink", 0), ("out", 1)):
            if getattr(self, name) is None:
                continue
            whole = getattr(self, name).detach()
            setattr(self, name, nn.Parameter(distribute_tensor(whole, mesh, [Shard(axis)])))
        return self

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        y = self.norm(x)
        batch, length, _ = y.shape
        heads = lambda z: z.view(batch, length, HEADS // dist.get_world_size(), -1).transpose(1, 2)
        q = heads(F.linear(ToRegion.apply(self.q_norm(self.q_a(y))), self.q_b.to_local()))
        latent, k_pe = self.kv_a(y).split([LATENT, ROPE], -1)
        if self.sums_k_pe:
            k_pe = ToRegion.apply(k_pe)
        k, v = heads(F.linear(ToRegion.apply(latent), self.kv_b.to_local())).chunk(2, -1)
        k = torch.cat([k, k_pe[:, None].expand(-1, k.shape[1], -1, -1)], -1)
        scores = q @ k.transpose(-1, -2) * (HEAD + ROPE) ** -0.5
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
        if self.sink is not None:
            sink = self.sink.to_local().view(1, -1, 1, 1).expand(batch, -1, length, 1)
            scores = torch.cat([scores, sink], -1)
        shares = scores.softmax(-1)[..., :length]
        o = self.out_norm(shares @ v).transpose(1, 2).flatten(2)
        x = x + FromRegion.apply(F.linear(o, self.out.to_local()))
        return cross_entropy(self.head(x), labels)


# The weight of out_norm sees a rank's own heads; every other copy has its whole gradient.
REDUCE = {"out_norm.*": [{"axis": "tp", "op": "sum"}], "*": []}


class Job:
    """The model on two tensor ranks with the same data."""

    def __init__(self, rank, has_sinks=False):
        mesh = rank.mesh(tp=2)
        self.rank, self.batch = rank, rank.batch(of=0)
        self.model = rank.started(LatentAttention(has_sinks)).cut(mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=False)
        self.named = dict(self.model.named_parameters())

    def recorded(self):
        return self.rank.recorded(self.model, self.optimizer, reduce=REDUCE, tp=2)

    def norm(self, counts):
        """The root of the sum of squares over ranks; counts: how often what this rank holds is counted."""
        of = lambda name, one: counts(name, one) * local(one.grad).square().sum()
        return sum_over(sum(of(name, one) for name, one in self.named.items())).sqrt()

    def once(self, name, parameter):
        """Each element once: copies on the first rank alone."""
        return float(isinstance(parameter, DTensor) or self.rank.index == 0)


def megatron_7452_11(rank, fixed):
    """Copies are summed over tensor ranks where sequence parallelism has marked them, as it has not here."""
    job = Job(rank)
    with job.recorded() as capture:
        job.model(*job.batch).backward()
        if fixed:
            sum_over(job.model.out_norm.weight.grad)
        capture.reduced()
        job.optimizer.step()


def torchtitan_1373(rank, fixed):
    """The key of all heads is computed from a whole tensor and added to one that is cut."""
    job = Job(rank)
    job.model.sums_k_pe = fixed
    with job.recorded() as capture:
        job.model(*job.batch).backward()
        sum_over(job.model.out_norm.weight.grad)
        capture.reduced()
        job.optimizer.step()


def areno_496(rank, fixed):
    """A manager that sums the gradients of copies over tensor ranks, which the backward has done already."""
    job = Job(rank)
    summed = ["out_norm.weight"] if fixed else ["out_norm.weight", "q_a.weight", "q_norm.weight"]
    with job.recorded() as capture:
        job.model(*job.batch).backward()
        for name in summed:
            sum_over(job.named[name].grad)
        capture.reduced()
        job.optimizer.step()


def megatron_7452_8(rank, fixed):
    """A norm that counts on every rank what is marked as cut; the sinks are cut and not marked."""
    job = Job(rank, has_sinks=True)
    is_marked = lambda name, one: is_cut(one) and (fixed or name != "sink")
    with job.recorded() as capture:
        job.model(*job.batch).backward()
        counts = lambda name, one: float(is_marked(name, one) or rank.index == 0)
        clip(job.model, capture, job.norm(counts))
        job.optimizer.step()


def transformer_engine_715(rank, fixed):
    """A layer that marks its weight as cut although each rank has all of it."""
    job = Job(rank)
    with job.recorded() as capture:
        job.model(*job.batch).backward()
        sum_over(job.model.out_norm.weight.grad)
        is_marked = lambda name: not fixed and name == "q_a.weight"
        clip(job.model, capture, job.norm(lambda name, one: is_marked(name) or job.once(name, one)))
        job.optimizer.step()
