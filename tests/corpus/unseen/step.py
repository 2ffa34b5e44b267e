"""One step of a job in numpy: another code path than the JAX programs of `corpus.heads`.

`How` says how the program is written; its defaults are right. The loss head is whole (softmax,
then two products) or fused (the label's part by gather and scatter), sums are taken in f32.
"""

from dataclasses import dataclass

import numpy as np

from corpus.job import DTYPES
from corpus.train import Captured


@dataclass(frozen=True)
class How:
    """What a program does; every field is one fault, or the place of one."""

    logits: str | None = None  # what logits are rounded to, in both passes
    p: str | None = None  # what p is rounded to before 1 is taken off it
    minus: str | None = None  # what p - onehot is rounded to before g multiplies it
    dlogits: str | None = None
    unscaled: str | None = None  # dlogits are rounded to this before the cotangent multiplies them
    chunks: tuple = ()  # index arrays over a rank's tokens: dk is summed over them
    chunk_sum: str = "f32"
    chunk_part: str | None = None  # what a chunk's own product is rounded to
    shards: int = 1  # equal parts of a rank's tokens, each with chunks and a sum of its own
    tiles: tuple = ()  # spans of the vocabulary over which dq is summed
    tile_sum: str = "f32"
    left_out: tuple = ()  # of "cotangent", "mean", "weights"
    side: str = "both"  # where they are left out: "dq", "dk", "both"
    smoothing_over: int | None = None  # classes that smoothing counts: a tensor rank's
    weights: tuple = ()  # [rank][microbatch]: how often a reduced gradient holds each
    per_rank: tuple = ()  # [of rank][rank][microbatch], where every rank holds another sum
    k_rows: tuple = ()  # row of k that each row of the softmax path reads
    wide_output: bool = False  # gradients are handed out in f32


def rounded(x, dtype):
    return x if dtype is None else x.astype(DTYPES[dtype]).astype(np.float32)


def backward_pieces(job, mb, rows, how, side):
    """(dlogits [T, V] f32, forward values) of one rank's tokens of a microbatch, as the program
    has them on its way to dq or to dk."""
    o, data, f32 = job.options, job.microbatches[mb], np.float32
    q, k = data["q"][rows].astype(f32), job.k.astype(f32)
    used = k if not how.k_rows else k[list(how.k_rows)]
    labels, weights = data["labels"][rows], job.counted(mb)[rows].astype(f32)
    kept = labels != o.ignore_label if o.ignore_label is not None else np.full(labels.shape, True)
    labels, valid, at = np.where(kept, labels, 0), job.classes, np.arange(len(labels))
    z = (q @ used.T)[:, :valid] * f32(1 / o.temperature)
    if job.bias is not None:
        z = z + job.bias[:valid]
    slope = None
    if o.softcap is not None:
        bent = np.tanh(z / f32(o.softcap))
        z, slope = f32(o.softcap) * bent, 1 - bent**2
    z = rounded(z, how.logits)
    top = z.max(-1, keepdims=True)
    lse = (top + np.log(np.exp(z - top).sum(-1, keepdims=True, dtype=f32)))[:, 0]
    label_logits = z[at, labels] * kept
    s = f32(o.smoothing(how.smoothing_over or valid))
    over = how.smoothing_over or valid
    spread = (z.sum(-1) if over == valid else z[:, :over].sum(-1)) / f32(over)
    nll = lse - (1 - s) * label_logits - s * spread + f32(o.z_loss) * lse**2
    number = f32(job.denominator(mb))
    loss = f32((weights * nll * kept).sum(dtype=f32) / number)
    out = how.left_out if how.side in ("both", side) else ()
    scale = f32(1 if "cotangent" in out else o.cotangent) / (f32(1) if "mean" in out else number)
    w = kept.astype(f32) if "weights" in out else weights
    after = f32(1)
    if how.unscaled:
        scale, after = scale / f32(o.cotangent), f32(o.cotangent)
    g = (w * scale)[:, None]
    p = rounded(np.exp(z - lse[:, None]), how.p)
    lean = p * (1 + 2 * f32(o.z_loss) * lse[:, None])
    if o.label_smoothing:
        lean -= s / f32(over)
    lean[at, labels] -= 1 - s
    lean = rounded(lean, how.minus)
    d = lean * g * (1 if slope is None else slope) * f32(1 / o.temperature)
    d = rounded(d, how.unscaled) * after
    d = rounded(d, how.dlogits) * kept[:, None]
    forward = {"lse": lse, "label_logits": label_logits, "loss": loss}
    return d.astype(f32), q, used[:valid], forward


def in_parts(parts, total, part):
    """A sum of arrays, every partial sum rounded."""
    found = None
    for one in parts:
        one = rounded(one, part)
        found = one if found is None else found + one
        found = rounded(found, total)
    return found


def gradient_of_k(d, q, how):
    """dk over a rank's tokens, in shards and chunks."""
    own, sums = np.array_split(np.arange(len(q)), how.shards), []
    for shard in own:
        chunks = [np.intersect1d(c, shard) for c in how.chunks] if how.chunks else [shard]
        chunks = [c for c in chunks if len(c)]
        sums.append(in_parts((d[c].T @ q[c] for c in chunks), how.chunk_sum, how.chunk_part))
    return in_parts(sums, how.chunk_sum if how.shards > 1 else None, None)


def gradient_of_q(d, k, how):
    tiles = how.tiles or ((0, d.shape[1]),)
    return in_parts((d[:, a:b] @ k[a:b] for a, b in tiles), how.tile_sum, how.tile_sum)


def run(job, how=How()):
    """The whole step."""
    out = np.float32 if how.wide_output else DTYPES[job.dtype]
    forward, addends = [], []
    for mb in range(job.count):
        tokens, losses, dks = {}, [], []
        for rank in range(job.ranks):
            rows = job.rows(rank)
            d, q, k, found = backward_pieces(job, mb, rows, how, "dq")
            losses.append(found.pop("loss"))
            found["dq"] = gradient_of_q(d, k, how).astype(out)
            if how.side != "both":
                d = backward_pieces(job, mb, rows, how, "dk")[0]
            dk = np.zeros(job.k.shape, np.float32)
            dk[: job.classes] = gradient_of_k(d, q, how)
            dks.append(dk.astype(out))
            for name, x in found.items():
                tokens.setdefault(name, []).append(x)
        forward.append({n: np.concatenate(x) for n, x in tokens.items()} | {"loss": np.float32(sum(losses))})
        addends.append({"dk": dks})
    wide = [[mb["dk"][r].astype(np.float32) for mb in addends] for r in range(job.ranks)]
    divisor = np.float32(job.count if job.options.microbatch_reduction == "mean" else 1)
    of = lambda w: sum(np.float32(w[r][m]) * wide[r][m] for r in range(job.ranks) for m in range(job.count)) / divisor
    accumulated = [sum(own) / divisor for own in wide]
    # What is reduced are the sums that were accumulated, where each rank holds its own.
    reduced = of(how.weights) if how.weights else sum(accumulated)
    replicas = [of(w) for w in how.per_rank] if how.per_rank else None
    reduced = reduced if replicas is None else replicas[0]
    norm = float(np.linalg.norm(reduced.astype(np.float64)))
    return Captured(forward, addends, accumulated, reduced, replicas, grad_norm=norm)
