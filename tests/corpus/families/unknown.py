"""Faults that no catalogue entry describes: the right answer is that it is not known."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from corpus import train
from corpus.case import Case, draw_kept, plant, switched
from corpus.families.scale import code_for
from corpus.job import draw_job, pick
from corpus.record import names_of
from corpus.train import Step


@plant("unknown-probabilities")
def probabilities(rng, seed):
    """Another function in the place of the softmax, in the backward only."""
    kinds = ["exp by a power", "exp by a table", "focal", "top 20 only", "smoothed by frequency", "temperature of the position"]
    job = draw_job(rng, seed, dtype=pick(rng, ["bf16", "f32"]))
    code = code_for(rng, job, "kernel")
    kept = draw_kept(rng, parts=False)
    case = switched("unknown-probabilities", job, kept, (code, Step()), (replace(code, twist=pick(rng, kinds)), Step()))
    case.kind, case.accept = "unknown", [{"unknown"}]
    return case


def narrow(x, like):
    return np.asarray(x).astype(np.asarray(like).dtype)


def position_factor(job, forward, addends, rng):
    """q's gradient grows along the sequence."""
    for found in forward:
        t = np.arange(found["dq"].shape[0])[:, None]
        found["dq"] = narrow(found["dq"].astype(np.float32) * (1 + 0.3 * np.sin(t / 40)), found["dq"])


def rows_sorted(job, forward, addends, rng):
    """A gather after a sort by norm that was not undone: dk's rows stand in another order."""
    for sums in addends:
        sums["dk"] = [x[np.argsort(-np.abs(x.astype(np.float32)).sum(1), kind="stable")] for x in sums["dk"]]


def columns_swapped(job, forward, addends, rng):
    """Halves of the hidden dimension change places, as between two layouts of rotary embeddings."""
    half = job.k.shape[1] // 2
    for found in forward:
        x = found["dq"]
        found["dq"] = np.concatenate([x[:, half:], x[:, :half]], 1)


def dropout_left(job, forward, addends, rng):
    """A dropout mask of rate 0.1 on q, in dk only."""
    for mb, sums in enumerate(addends):
        q = job.microbatches[mb]["q"].astype(np.float32)
        kept = (rng.random(q.shape) < 0.9) / 0.9
        replaced_q(job, sums, forward[mb], mb, q * kept)


def previous_q(job, forward, addends, rng):
    """dk of every microbatch from the hidden states of the one before."""
    for mb, sums in enumerate(addends):
        q = job.microbatches[mb - 1]["q"].astype(np.float32)
        replaced_q(job, sums, forward[mb], mb, q if job.count > 1 else np.roll(q, 1, axis=0))


@jax.jit
def softmax_gradient(q, k, bias):
    return jax.nn.softmax(jnp.einsum("td,vd->tv", q, k, preferred_element_type=jnp.float32) + bias)


def replaced_q(job, sums, found, mb, q):
    """dk = dlogitsᵀ q with another q than the one that made dlogits."""
    data, weights, n = job.microbatches[mb], job.counted(mb), job.denominator(mb)
    bias = np.zeros(job.vocab, np.float32) if job.bias is None else job.bias
    p = np.asarray(softmax_gradient(data["q"], job.k, bias))
    d = p - (np.arange(job.vocab) == data["labels"][:, None])
    d = d * (job.options.cotangent * weights / n)[:, None]
    for rank in range(job.ranks):
        rows = job.rows(rank)
        sums["dk"][rank] = narrow(d[rows].T @ q[rows], sums["dk"][rank])


def noise_added(job, forward, addends, rng):
    """Gradient noise of 2 %, as for privacy."""
    for sums in addends:
        for rank, x in enumerate(sums["dk"]):
            spread = 0.02 * np.abs(x.astype(np.float32)).mean()
            sums["dk"][rank] = narrow(x.astype(np.float32) + spread * rng.standard_normal(x.shape), x)


def rows_clipped(job, forward, addends, rng):
    """Every token's gradient clipped to the median norm."""
    for found in forward:
        x = found["dq"].astype(np.float32)
        norms = np.linalg.norm(x, axis=1, keepdims=True)
        limit = np.median(norms[norms > 0])
        found["dq"] = narrow(x * np.minimum(1, limit / np.maximum(norms, 1e-30)), found["dq"])


def signs_only(job, forward, addends, rng):
    """Compressed for the wire: the sign of every element times its row's mean size."""
    for sums in addends:
        for rank, x in enumerate(sums["dk"]):
            wide = x.astype(np.float32)
            sums["dk"][rank] = narrow(np.sign(wide) * np.abs(wide).mean(1, keepdims=True), x)


def frequent_damped(job, forward, addends, rng):
    """Rows of frequent labels divided by the root of their count."""
    for mb, sums in enumerate(addends):
        labels = job.microbatches[mb]["labels"]
        hits = np.bincount(labels[labels >= 0], minlength=job.vocab)
        factor = 1 / np.sqrt(np.maximum(hits, 1))[:, None]
        sums["dk"] = [narrow(x.astype(np.float32) * factor, x) for x in sums["dk"]]


def projected(job, forward, addends, rng):
    """dq without its part along q, as a normalised head would have it."""
    for mb, found in enumerate(forward):
        q, x = (v.astype(np.float32) for v in (job.microbatches[mb]["q"], found["dq"]))
        along = (x * q).sum(1, keepdims=True) / np.maximum((q * q).sum(1, keepdims=True), 1e-30)
        found["dq"] = narrow(x - along * q, found["dq"])


CHANGES = {
    "dq by position": position_factor, "dk rows sorted": rows_sorted, "columns swapped": columns_swapped,
    "dropout in dk": dropout_left, "dk from another microbatch's q": previous_q, "noise": noise_added,
    "dq rows clipped": rows_clipped, "signs": signs_only, "frequent rows damped": frequent_damped,
    "dq without its part along q": projected,
}  # fmt: skip


@plant("unknown-gradients")
def gradients(rng, seed):
    """Something is done to a gradient after it was right."""
    what = pick(rng, list(CHANGES))
    plain = {"softcap": None, "z_loss": 0.0, "temperature": 1.0}
    job = draw_job(rng, seed, dtype=pick(rng, ["bf16", "f32"]), options=plain, padded=False)
    code = code_for(rng, job)
    kept = draw_kept(rng, parts=False)
    names, own = frozenset(names_of(kept) | {"loss", "dk", "dq"}), int(rng.integers(2**31))
    change = lambda forward, addends: CHANGES[what](job, forward, addends, np.random.default_rng(own))
    run = lambda change: lambda: (job, train.train(job, code, names=names, change=change))
    parameters = {"dtype": job.dtype, "ranks": job.ranks, "microbatches": job.count, "head": code.head, "what": what}
    return Case("unknown-gradients", [{"unknown"}], kept, run(change), run(None), parameters, kind="unknown")
