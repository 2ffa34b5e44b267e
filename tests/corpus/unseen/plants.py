"""Faults of jobs that nobody here has seen: everything about them is drawn, from one of two sets of
ranges that have nothing in common. What is developed looks at the first alone.
"""

from dataclasses import dataclass, replace

import numpy as np

from corpus.case import Case, draw_kept
from corpus.unseen.step import How, run
from corpus.job import DTYPES, Job, Options, hidden_states, pick, zipf_labels

# cause -> function(rng, ranges) -> Case.
UNSEEN = {}


@dataclass(frozen=True)
class Ranges:
    """Half-open ranges of what is drawn."""

    tokens: tuple  # of a rank's microbatch
    vocab: tuple
    depth: tuple
    pieces: tuple  # chunks or tiles of a sum
    ranks: tuple
    microbatches: tuple
    spread: tuple  # of the logits
    cotangents: tuple
    smoothing: tuple


RANGES = {
    "develop": Ranges((96, 260), (150, 500), (12, 40), (6, 24), (2, 4), (2, 4), (0.8, 1.6), (3.0, 0.37, -1.25), (0.03, 0.12)),
    "held-out": Ranges((280, 520), (520, 900), (44, 72), (24, 64), (4, 7), (4, 7), (1.7, 2.6), (5.5, -0.61, 0.17, 12.0), (0.13, 0.3)),
}  # fmt: skip


def unseen(cause):
    def keep(draw):
        UNSEEN[cause] = draw
        return draw

    return keep


def whole(rng, bounds):
    return int(rng.integers(*bounds))


def job_of(rng, r, *, dtype="bf16", ranks=1, count=None, sequences=None, options=None, confident=0.3, uneven=True, tokens=None, dtypes=None, path="plain", tensor=1, gain=12):  # fmt: skip
    """A job in these ranges. `sequences`: its tokens are rows of so many sequences."""
    tokens, vocab, depth = tokens or whole(rng, r.tokens), whole(rng, r.vocab), whole(rng, r.depth)
    if sequences:
        tokens = tokens // sequences * sequences
    vocab -= vocab % tensor
    count = count or int(rng.integers(1, 3))
    o = {"ignore_label": pick(rng, [-100, None]), "denominator": "valid", "cotangent": pick(rng, [1.0, *r.cotangents])}
    o |= {"scope": pick(rng, ["global", "global", "microbatch"])}
    options = Options(**(o | (options or {})))
    if options.scope == "microbatch":
        options = replace(options, microbatch_reduction="mean")
    k = rng.standard_normal((vocab, depth)).astype(DTYPES[dtype])
    job = Job(dtype, ranks, options, k, [], sequence=tokens // sequences if sequences else None, tensor=tensor)
    for _ in range(count):
        labels = zipf_labels(rng, tokens * ranks, vocab, rng.uniform(1.05, 1.5))
        q = hidden_states(rng, k.astype(np.float64), labels, confident, rng.uniform(*r.spread), gain)
        if options.ignore_label is not None and uneven:
            shares = rng.uniform(0.5, 0.97, ranks)
            kept = np.concatenate([rng.random(tokens) < share for share in shares])
            labels[~kept] = options.ignore_label
        job.microbatches.append({"q": q.astype(DTYPES[dtype]), "labels": labels})
    held = {"logits": "f32"} if dtypes is None else dtypes
    job.declared = {"path": path, "dtypes": held}
    return job


def exact(job):
    """What a job of this precision rounds, all of it declared."""
    return {"logits": "f32", "p": "f32", "lse": "f32", "dlogits": job.dtype, "accumulate": "f32", "reduce": "f32"}


def case(cause, job, kept, right, wrong, accept=None, **more):
    runs = [lambda how=how: (job, run(job, how)) for how in (wrong, right)]
    changed = {n: getattr(wrong, n) for n in vars(wrong) if getattr(wrong, n) != getattr(right, n)}
    short = {n: v for n, v in changed.items() if not isinstance(v, tuple) or len(v) < 9}
    size = {"tokens": job.microbatches[0]["q"].shape[0], "vocab": job.vocab, "depth": job.k.shape[1]}
    parameters = size | {"ranks": job.ranks, "microbatches": job.count} | short | more.pop("parameters", {})
    return Case(cause, accept or [{cause}], kept, *runs, parameters, **more)


def cuts(rng, n, pieces, how):
    """Borders of `pieces` pieces of n things: equal, the rest first or last, or a first one of its
    own."""
    size = max(1, -(-n // pieces))
    if how == "split":
        return [0, *np.cumsum([len(x) for x in np.array_split(np.arange(n), pieces)]).tolist()]
    first = {"rest last": size, "rest first": n % size or size, "own start": int(rng.integers(1, size + 1))}[how]
    return sorted({0, n, *range(first, n, size)})


@unseen("chunk-accumulator-low-precision")
def chunks(rng, r):
    """dk over chunks along S of [B, S], or along the flat tokens: any count, size and start."""
    along = rng.random() < 0.6
    sequences = int(rng.integers(2, 6)) if along else None
    dtype = pick(rng, ["bf16", "bf16", "f16"])
    job = job_of(rng, r, dtype=dtype, sequences=sequences, path="chunked", ranks=pick(rng, [1, 1, 2]), gain=6)
    if rng.random() < 0.5:
        job.declared["dtypes"] = exact(job)
    own = job.microbatches[0]["q"].shape[0] // job.ranks
    places = np.arange(own)
    if along:
        places = places.reshape(-1, job.sequence)
    length = places.shape[-1]
    kind = pick(rng, ["split", "rest last", "rest first", "own start"])
    borders = cuts(rng, length, min(whole(rng, r.pieces), max(2, length // 3)), kind)
    pieces = [places[..., a:b].reshape(-1) for a, b in zip(borders, borders[1:])]
    if rng.random() < 0.25:
        pieces = pieces[::-1]
    pieces = tuple(tuple(map(int, c)) for c in pieces)
    part = job.dtype if rng.random() < 0.6 else None
    right = How(dlogits=pick(rng, [job.dtype, None]) if "p" not in job.declared["dtypes"] else job.dtype, chunks=pieces)
    wrong = replace(right, chunk_sum=job.dtype, chunk_part=part)
    words = {"along S": bool(along), "borders": kind, "chunks": len(pieces)}
    return case("chunk-accumulator-low-precision", job, draw_kept(rng), right, wrong, parameters=words)


@unseen("chunk-shards")
def chunk_shards(rng, r):
    """The same in shards that a compiler cut: each runs the same program, so with chunks of the same
    size, and then their sum is taken."""
    shards = int(rng.integers(2, 5))
    count = max(2, whole(rng, r.pieces) // shards)
    n = whole(rng, r.tokens) // shards * shards
    job = job_of(rng, r, path="chunked", ranks=1, gain=6, tokens=n)
    pieces = []
    for own in np.array_split(np.arange(n), shards):
        borders = cuts(rng, len(own), count, "rest last")
        pieces += [tuple(map(int, own[a:b])) for a, b in zip(borders, borders[1:])]
    right = How(dlogits="bf16", chunks=tuple(pieces), shards=shards)
    found = case("chunk-accumulator-low-precision", job, draw_kept(rng), right, replace(right, chunk_sum="bf16", chunk_part="bf16"))
    found.cause = "chunk-shards"
    return found


@unseen("tile-add-low-precision")
def tiles(rng, r):
    """Tiles added to dq and dk in bf16, over any number of ranks."""
    job = job_of(rng, r, path="fused", ranks=pick(rng, [1, 2, whole(rng, r.ranks)]), gain=6)
    own = job.microbatches[0]["q"].shape[0] // job.ranks
    borders = cuts(rng, own, whole(rng, r.pieces), "rest last")
    chunks = tuple(tuple(range(a, b)) for a, b in zip(borders, borders[1:]))
    borders = cuts(rng, job.vocab, whole(rng, r.pieces), "rest last")
    right = How(dlogits="bf16", chunks=chunks, tiles=tuple(zip(borders, borders[1:])))
    wrong = replace(right, chunk_sum="bf16", chunk_part="bf16", tile_sum="bf16")
    return case("tile-add-low-precision", job, draw_kept(rng), right, wrong)


@unseen("label-prob-rounded-early")
def early(rng, r):
    """p in few bits before 1 is taken off; the difference, and its product with g, again."""
    dtype = pick(rng, ["bf16", "bf16", "f16"])
    job = job_of(rng, r, dtype=dtype, ranks=pick(rng, [1, 2]), confident=0.7)
    job.declared["dtypes"] = exact(job) if rng.random() < 0.7 else {"logits": "f32", "p": "f32"}
    right = How(dlogits=job.dtype)
    wrong = replace(right, p=job.dtype, minus=job.dtype if rng.random() < 0.5 else None)
    return case("label-prob-rounded-early", job, draw_kept(rng), right, wrong)


@unseen("underflow")
def underflow(rng, r):
    """dlogits in f16 before the loss scale multiplies them: the scale comes too late."""
    scale = float(2 ** int(rng.integers(6, 15)))
    job = job_of(rng, r, dtype=pick(rng, ["f16", "bf16", "f32"]), ranks=pick(rng, [1, 2]), options={"cotangent": scale}, confident=0.1)
    right = How()
    return case("underflow", job, draw_kept(rng), right, replace(right, unscaled="f16"))


@unseen("cotangent-dropped")
def dropped(rng, r):
    """The cotangent, the mean, or both left out of dq, dk or both."""
    out = pick(rng, [("cotangent",), ("cotangent", "mean"), ("mean",)])
    options = {"cotangent": pick(rng, r.cotangents) if "cotangent" in out else 1.0}
    job = job_of(rng, r, dtype=pick(rng, ["bf16", "f32"]), ranks=pick(rng, [1, 2]), options=options)
    right = How(dlogits=pick(rng, [None, job.dtype]))
    wrong = replace(right, left_out=out, side=pick(rng, ["dq", "dk", "dq", "dk", "both"]))
    kept = draw_kept(rng, loss=True)
    return case("cotangent-dropped", job, kept, right, wrong)


@unseen("smoothing-mismatch")
def smoothing(rng, r):
    """Every tensor rank smooths over its own part of the vocabulary."""
    tensor = pick(rng, [2, 3, 4])
    formula = pick(rng, ["uniform", "megatron"])
    options = {"label_smoothing": float(rng.uniform(*r.smoothing)), "smoothing_formula": formula}
    job = job_of(rng, r, dtype=pick(rng, ["bf16", "f32"]), tensor=tensor, options=options)
    job.k = job.k[: job.vocab // tensor * tensor]
    right = How(dlogits=pick(rng, [None, job.dtype]))
    wrong = replace(right, smoothing_over=job.vocab // tensor)
    return case("smoothing-mismatch", job, draw_kept(rng), right, wrong, parameters={"tensor": tensor})


@unseen("sync-wrong-microbatch")
def lost(rng, r):
    """Gradients are reduced over ranks at one microbatch only, and the rest is lost or stays local."""
    ranks, count = whole(rng, r.ranks), whole(rng, r.microbatches)
    job = job_of(rng, r, dtype=pick(rng, ["bf16", "f32"]), ranks=ranks, count=count)
    at, kind = int(rng.integers(count)), pick(rng, ["early", "no_sync", "lost"])
    # Early: what was there by then is reduced, later microbatches stay each rank's own.
    mean = pick(rng, [1, 1, ranks])
    held = lambda m: m <= at if kind == "early" else m == at
    if kind == "early" and at == count - 1:
        at -= 1
    if kind == "lost":
        # The mean over all microbatches, or over the one that is left; of ranks, too.
        once = pick(rng, [1.0, float(count), 1.0 / ranks])
        weights = tuple(tuple(once * (m == at) for m in range(count)) for _ in range(ranks))
        right, wrong = How(), How(weights=weights)
    else:
        per = lambda me, rank, m: float(held(m)) / mean + float(not held(m) and me == rank)
        sums = tuple(tuple(tuple(per(me, rank, m) for m in range(count)) for rank in range(ranks)) for me in range(ranks))
        right, wrong = How(), How(per_rank=sums)
    kept = draw_kept(rng, reduced=True, accumulated=False)
    # A sum that lacks the same microbatches on all ranks alike is a window too.
    accept = [{"sync-wrong-microbatch"}, {"accumulation-window"}, {"dropped-batch"}]
    return case("sync-wrong-microbatch", job, kept, right, wrong, accept, parameters={"kind": kind, "at": at})


@unseen("block-index-times-block")
def blocks(rng, r):
    """Blocks of k are read at i b b, the last one beyond the end."""
    job = job_of(rng, r, dtype=pick(rng, ["bf16", "f32"]))
    block = int(rng.integers(5, max(6, job.vocab // 8)))
    beyond = pick(rng, ["clamped", "last row"])
    rows = []
    for v in range(job.vocab):
        i, at = divmod(v, block)
        start = i * block * block
        if beyond == "clamped":
            start = min(start, job.vocab - block)
        rows.append(min(start + at, job.vocab - 1))
    return case("block-index-times-block", job, draw_kept(rng), How(), How(k_rows=tuple(rows)), parameters={"block": block, "beyond": beyond})


@unseen("clean")
def clean(rng, r):
    """No fault: the program's roundings alone."""
    job = job_of(rng, r, dtype=pick(rng, ["bf16", "f16", "f32"]), ranks=pick(rng, [1, whole(rng, r.ranks)]), sequences=pick(rng, [None, 3]))
    how = How(dlogits=pick(rng, [None, job.dtype]))
    found = case("clean", job, draw_kept(rng), how, how, [set()], kind="clean")
    return found
