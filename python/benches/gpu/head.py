"""The loss head that contenders compute: its inputs, what is right in f64, and how far bf16 may be off.

The bounds are derived, not tuned. q and k are bf16, products are summed in f32 or better, u is the
unit roundoff of bf16, 2^-8:

- a logit may be rounded to bf16 and its sum of D products to f32: |dz| <= u |z| + 2 D 2^-24 |q| |k|;
- so lse errs by at most sum p |dz|, and p by the factor exp(|dz| + |dlse|) - 1;
- the loss is a mean of T errors of lse - z that are each at most so large and fall to either side: by
  Hoeffding's inequality it is off by more than 6 times the root of the sum of their squares, over T,
  once in 3e7 right contenders;
- p and the entry p - onehot may each be rounded to bf16: 2 u (p + onehot);
- a gradient is a sum of entries times rows. In a policy that keeps it in bf16 it is rounded once in
  each of `roundings` partial sums, at random: the squares of those errors add up to at most
  roundings (u M)^2 for each element, with M the sum of the magnitudes.

A row of a gradient is right where the norm of its error is at most that of the second and fourth, plus
twice that of the last, whose errors vary around the root of their expected square. An output of zeros,
one without the label's part, one of another scale or with rows of other tokens lies beyond in the
rows whose label has a p well below 1 (test_bench_gpu.py).
"""

import math
from dataclasses import dataclass, field

import torch

from .timing import Unmeasured

# Unit roundoffs.
BF16, F32 = 2.0**-8, 2.0**-24
# Of a sum of errors to either side, over the root of the sum of their squares: 2 exp(-6^2 / 2) = 3e-8.
HOEFFDING = 6
# Standard deviation of the logits of classes that are not the label. With 1 a few entries of a token
# exceed 2^-12 at V 256,000, so CCE leaves out most tiles, as its paper finds in a trained model.
SPREAD = 1.0
# Bytes of one [tokens, V] matrix of the reference.
CHUNK_BYTES = 512 << 20


@dataclass(frozen=True)
class Shape:
    """Tokens, classes, depth."""

    tokens: int
    vocab: int
    depth: int

    def __str__(self) -> str:
        return f"T {self.tokens}, V {self.vocab}, D {self.depth}"


# Gemma 2 (2B), the head of the CCE paper.
CCE = Shape(8192, 256_000, 2304)
# Several tiles, chunks and bands of every contender, and whole multiples of 8: nobody is refused.
SMALL = Shape(512, 2048, 256)


@dataclass
class Head:
    """q [T, D] and k [V, D] in bf16, labels [T] in int64."""

    q: torch.Tensor
    k: torch.Tensor
    labels: torch.Tensor

    @property
    def shape(self) -> Shape:
        return Shape(self.q.shape[0], *self.k.shape)


def random_head(shape: Shape, device: str, seed: int) -> Head:
    """As of a trained model: of the labels p lies anywhere from near 0 to near 1, of nearly all others
    below what bf16 sees beside 1."""
    generator = torch.Generator(device).manual_seed(seed)
    draw = {"generator": generator, "device": device}
    labels = torch.randint(shape.vocab, (shape.tokens,), **draw)
    q = torch.randn(shape.tokens, shape.depth, **draw)
    k = (torch.randn(shape.vocab, shape.depth, **draw) * (SPREAD / math.sqrt(shape.depth))).bfloat16()
    wanted = math.log(shape.vocab) + SPREAD**2 / 2 + 2 * torch.randn(shape.tokens, **draw)
    rows = k[labels].float()
    missing = wanted - (q * rows).sum(1)
    q += missing[:, None] * rows / rows.square().sum(1, keepdim=True)
    return Head(q.bfloat16(), k, labels)


@dataclass
class Bounded:
    """Some rows of a gradient: what is right, how far a right one may be off for sure, the
    magnitudes that it is summed from, and what a filter may leave out."""

    right: torch.Tensor
    off: torch.Tensor
    magnitude: torch.Tensor
    dropped: torch.Tensor

    @classmethod
    def zeros(cls, rows: int, depth: int, device: torch.device) -> "Bounded":
        return cls(*(torch.zeros(rows, depth, dtype=torch.float64, device=device) for _ in range(4)))

    def add(self, rows: slice | torch.Tensor, parts: "Entries", side: torch.Tensor) -> None:
        """Adds a chunk's entries times the rows of the other matrix."""
        magnitudes = side.abs()
        self.right[rows] += (parts.entry @ side).double()
        self.off[rows] += (parts.off @ magnitudes).double()
        self.magnitude[rows] += (parts.magnitude @ magnitudes).double()
        self.dropped[rows] += (parts.dropped @ magnitudes).double()


@dataclass
class Entries:
    """A part of dlogits: entries, how far they may be off, their magnitudes, what may be dropped."""

    entry: torch.Tensor
    off: torch.Tensor
    magnitude: torch.Tensor
    dropped: torch.Tensor

    def rows(self, at: torch.Tensor) -> "Entries":
        return Entries(*(part[at] for part in vars(self).values()))

    def columns(self, at: torch.Tensor) -> "Entries":
        """As rows: transposed."""
        return Entries(*(part[:, at].T for part in vars(self).values()))


@dataclass
class Expected:
    """What is right: the loss, and dq and dk at some rows."""

    tokens: torch.Tensor
    classes: torch.Tensor
    dq: Bounded
    dk: Bounded
    loss: float = 0.0
    loss_off: float = 0.0


@dataclass(frozen=True)
class Policy:
    """What a contender says about its own arithmetic: how often a partial sum of dq and of dk is
    rounded to bf16, and below which |entry| it leaves out whole tiles of entries."""

    dq_roundings: int = 2
    dk_roundings: int = 2
    filter: float = 0.0


def expected(
    head: Head, tokens: torch.Tensor, classes: torch.Tensor, dtype: torch.dtype, filter: float = 0.0
) -> Expected:
    """The mean cross-entropy of all tokens and its gradients at some tokens and classes, a chunk of
    tokens at a time, in `dtype`; written out, by none of the formulas or calls of a contender."""
    shape, device = head.shape, head.q.device
    zeros = lambda rows: Bounded.zeros(len(rows), shape.depth, device)
    found = Expected(tokens, classes, zeros(tokens), zeros(classes))
    k = head.k.to(dtype)
    longest = k.square().sum(1).max().sqrt()
    squares = 0.0
    height = max(1, CHUNK_BYTES // (shape.vocab * k.element_size()))
    for start in range(0, shape.tokens, height):
        part = slice(start, min(start + height, shape.tokens))
        q = head.q[part].to(dtype)
        entries, loss, off = chunk(q, k, head.labels[part], longest, filter)
        found.loss += float(loss.double().sum()) / shape.tokens
        squares += float(off.double().square().sum())
        for one in vars(entries).values():
            one /= shape.tokens
        inside = ((tokens >= part.start) & (tokens < part.stop)).nonzero()[:, 0]
        found.dq.add(inside, entries.rows(tokens[inside] - part.start), k)
        found.dk.add(slice(None), entries.columns(classes), q)
    found.loss_off = HOEFFDING * math.sqrt(squares) / shape.tokens
    return found


def chunk(
    q: torch.Tensor, k: torch.Tensor, labels: torch.Tensor, longest: torch.Tensor, filter: float
) -> tuple[Entries, torch.Tensor, torch.Tensor]:
    """The entries of some tokens' rows of dlogits, times T; their losses, and how far those may be
    off."""
    rows = torch.arange(len(labels), device=labels.device)
    logits = q @ k.T
    highest = logits.max(1, keepdim=True).values
    lse = (logits - highest).exp().sum(1, keepdim=True).log() + highest
    loss = lse[:, 0] - logits[rows, labels]
    norms = q.square().sum(1, keepdim=True).sqrt() * longest
    off = logits.abs() * BF16 + 2 * k.shape[1] * F32 * norms
    p = (logits - lse).exp_()
    del logits
    lse_off = (p * off).sum(1, keepdim=True)
    loss_off = lse_off[:, 0] + off[rows, labels]
    relative = (off + lse_off).expm1_()
    magnitude = p.clone()
    magnitude[rows, labels] += 1
    off = p * relative + 2 * BF16 * magnitude
    p[rows, labels] -= 1
    size = p.abs()
    # A contender compares its own p, which may be off, with the filter's limit.
    return Entries(p, off, magnitude, size * (size < filter * (1 + relative))), loss, loss_off


def whole(head: Head, filter: float = 0.0) -> Expected:
    """At every row, in f64: for a small head."""
    shape, device = head.shape, head.q.device
    every = lambda count: torch.arange(count, device=device)
    return expected(head, every(shape.tokens), every(shape.vocab), torch.float64, filter)


def sampled(head: Head, seed: int, filter: float = 0.0, count: int = 64) -> Expected:
    """At `count` tokens, and at their labels and as many other classes, in f32: what a kernel may get
    wrong only where products of the sizes overflow shows there."""
    shape, device = head.shape, head.q.device
    generator = torch.Generator(device).manual_seed(seed)
    draw = {"generator": generator, "device": device}
    tokens = torch.randint(shape.tokens, (count,), **draw)
    tokens[0], tokens[-1] = 0, shape.tokens - 1
    classes = torch.cat([head.labels[tokens], torch.randint(shape.vocab, (count,), **draw)])
    classes[-1] = shape.vocab - 1
    return expected(head, tokens.unique(), classes.unique(), torch.float32, filter)


@dataclass
class Result:
    """What a contender gave, in whatever dtype."""

    loss: torch.Tensor | float
    dq: torch.Tensor
    dk: torch.Tensor
    # Rows that dq and dk hold; all of them where nothing is said.
    tokens: torch.Tensor | None = field(default=None)
    classes: torch.Tensor | None = field(default=None)


def check(result: Result, right: Expected, policy: Policy) -> None:
    """Raises Unmeasured where a contender is wrong: NaN never passes."""
    loss = float(result.loss)
    if not abs(loss - right.loss) <= right.loss_off:
        raise Unmeasured(f"wrong: its loss is {loss:.6f}, {right.loss:.6f} +- {right.loss_off:.6f} is right")
    for name, got, kept, rows, wanted, roundings in [
        ("dq", result.dq, result.tokens, right.tokens, right.dq, policy.dq_roundings),
        ("dk", result.dk, result.classes, right.classes, right.dk, policy.dk_roundings),
    ]:
        check_rows(name, got if kept is not None else got[rows], rows, wanted, roundings)


def check_rows(
    name: str, got: torch.Tensor, rows: torch.Tensor, wanted: Bounded, roundings: int
) -> None:
    """Raises Unmeasured for the worst row that is not right."""
    if got.shape != wanted.right.shape:
        raise Unmeasured(f"wrong: its {name} has rows of shape {tuple(got.shape)}")
    norm = lambda values: values.square().sum(1).sqrt()
    error = norm(got.double().to(wanted.right.device) - wanted.right)
    rounding = BF16 * math.sqrt(roundings)
    allowed = norm(wanted.off + wanted.dropped) + 2 * rounding * norm(wanted.magnitude)
    good = error <= allowed
    if not bool(good.all()):
        times = (error / allowed.clamp_min(1e-300)).nan_to_num(math.inf)
        worst = int(times.argmax())
        raise Unmeasured(
            f"wrong: row {int(rows[worst])} of its {name} is off by {float(times[worst]):.1f} times what "
            f"bf16 explains; so are {int((~good).sum())} of {len(rows)} rows"
        )
