"""A fused head in Pallas, interpreted: log-sum-exp, dq and dk by blocks of the vocabulary.

`wrong` names the pass whose map of k's blocks multiplies the block index by the block size, which
Pallas does itself: block j then starts at j * block * block. Block 0 is right, and so nothing is
wrong where the vocabulary is one block.
"""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from corpus import train as steps
from corpus.train import Step, together


def lse_kernel(q, k, first, top, total):
    """One block of the vocabulary for all tokens: a running maximum and sum."""

    @pl.when(pl.program_id(0) == 0)
    def _():
        top[...] = jnp.full(top.shape, -1e30, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)

    z = masked(q, k, first)
    higher = jnp.maximum(top[...], z.max(-1))
    total[...] = total[...] * jnp.exp(top[...] - higher) + jnp.exp(z - higher[:, None]).sum(-1)
    top[...] = higher


def masked(q, k, first):
    z = jnp.dot(q[...], k[...].T, preferred_element_type=jnp.float32)
    return jnp.where(first[...] >= 0, z, -jnp.inf)


def gradient_kernel(q, k, first, lse, g, dq, dk):
    """The softmax part of dq, added up over blocks, and of this block's rows of dk."""

    @pl.when(pl.program_id(0) == 0)
    def _():
        dq[...] = jnp.zeros(dq.shape, jnp.float32)

    d = (g[...][:, None] * jnp.exp(masked(q, k, first) - lse[...][:, None])).astype(q.dtype)
    dq[...] += jnp.dot(d, k[...], preferred_element_type=jnp.float32)
    dk[...] = jnp.dot(d.T, q[...], preferred_element_type=jnp.float32)


@lru_cache(maxsize=64)
def passes(block, tokens, depth, padded, wrong):
    """(forward, backward) as jitted calls."""
    grid = (padded // block,)

    def index(name):
        scale = block if wrong in (name, "both") else 1
        return lambda j: (j * scale, 0)

    whole = lambda *shape: pl.BlockSpec(shape, lambda j: (0,) * len(shape))
    k_block = lambda name: pl.BlockSpec((block, depth), index(name))
    entry = pl.BlockSpec((1, block), lambda j: (0, j))
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    forward = pl.pallas_call(
        lse_kernel, grid=grid, in_specs=[whole(tokens, depth), k_block("forward"), entry],
        out_specs=[whole(tokens), whole(tokens)], out_shape=[f32(tokens), f32(tokens)], interpret=True,
    )  # fmt: skip
    backward = pl.pallas_call(
        gradient_kernel, grid=grid,
        in_specs=[whole(tokens, depth), k_block("backward"), entry, whole(tokens), whole(tokens)],
        out_specs=[whole(tokens, depth), pl.BlockSpec((block, depth), lambda j: (j, 0))],
        out_shape=[f32(tokens, depth), f32(padded, depth)], interpret=True,
    )  # fmt: skip
    return jax.jit(forward), jax.jit(backward)


def head(job, block, wrong, reads, data, weights, denominator):
    """Values and gradients of one rank's tokens."""
    q, labels = jnp.asarray(data["q"]), data["labels"]
    vocab, depth = job.k.shape
    padded = -(-vocab // block) * block
    k = jnp.asarray(np.pad(job.k, ((0, padded - vocab), (0, 0))))
    entries = np.arange(padded, dtype=np.int32)
    first = jnp.asarray(np.where(entries < vocab, entries, -1)[None])
    beyond = 0
    if reads == "strict" and wrong:
        # Rows behind the array's end that read as NaN, for as far as the wrong map reaches.
        beyond = (padded // block - 1) * block * block + block - padded
        k = jnp.concatenate([k, jnp.full((max(beyond, 0), depth), jnp.nan, k.dtype)])
    forward, backward = passes(block, q.shape[0], depth, padded, wrong)
    top, total = forward(q, k, first)
    lse = top + jnp.log(total)
    rows = jnp.asarray(job.k)[labels].astype(jnp.float32)
    own = jnp.sum(q.astype(jnp.float32) * rows, -1)
    g = jnp.asarray(job.options.cotangent * weights / denominator, jnp.float32)
    dq, dk = backward(q, k, first, lse, g)
    dq = dq - g[:, None] * rows
    dk = dk[:vocab].at[labels].add(-g[:, None] * q.astype(jnp.float32))
    loss = jnp.sum(weights * (lse - own)) / denominator
    found = {"lse": lse, "label_logits": own, "loss": loss, "dq": dq.astype(q.dtype)}
    return {n: np.asarray(x) for n, x in found.items()}, np.asarray(dk.astype(q.dtype))


def train(job, block, wrong, reads):
    """The whole step with this head."""
    forward, addends = [], []
    for mb, data in enumerate(job.microbatches):
        weights, parts = steps.token_weights(job, mb), []
        for rank in range(job.ranks):
            rows = job.rows(rank)
            own = {name: array[rows] for name, array in data.items()}
            parts.append(head(job, block, wrong, reads, own, weights[rows], job.denominator(mb)))
        found = {n: np.concatenate([p[0][n] for p in parts]) for n in parts[0][0] if n != "loss"}
        forward.append(found | {"loss": np.float32(sum(p[0]["loss"] for p in parts))})
        addends.append({"dk": [p[1] for p in parts]})
    return together(job, Step(), forward, addends)
