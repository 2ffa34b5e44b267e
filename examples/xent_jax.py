"""Softmax cross-entropy heads for one rank's tokens, with their gradients kept apart.

Shapes: q [T, D] and k [V, D] in bf16; labels [T] int32; weights [T] f32; `denominator` a scalar.
Rows of k from `valid_vocab` on are padding and never get probability.

`plain_head` holds all T x V logits and leaves the backward to autodiff. `fused_head` never holds
more than one tile of them: the log-sum-exp runs over vocabulary tiles and recomputes them in its
backward; the label's logit takes its own path, a gather of k's rows.
"""

from functools import partial

import jax
import jax.numpy as jnp

# What a padded vocabulary entry's logit becomes. Not -inf: a tile may hold nothing else, and the
# running maximum would then subtract -inf from -inf.
MASK = -0.7 * float(jnp.finfo(jnp.float32).max)


def tile_logits(q, k_tile, first, valid_vocab):
    """[T, tile] f32: logits of the vocabulary entries from `first` on; padding is masked."""
    logits = jnp.einsum("td,vd->tv", q, k_tile, preferred_element_type=jnp.float32)
    entry = first + jnp.arange(k_tile.shape[0])
    return jnp.where(entry < valid_vocab, logits, MASK)


def tiles_of(k, tile):
    """Tiles [n, tile, D] of k [V, D] and the first entry of each; the last is padded with zeros."""
    count = -(-k.shape[0] // tile)
    padded = jnp.pad(k, ((0, count * tile - k.shape[0]), (0, 0)))
    return padded.reshape(count, tile, -1), jnp.arange(count) * tile


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def tiled_lse(q, k, valid_vocab, tile):
    """[T] f32: log of the sum of exp(logits) over the vocabulary, one tile at a time."""

    def add_tile(running, k_tile_and_first):
        top, total = running
        logits = tile_logits(q, *k_tile_and_first, valid_vocab)
        new_top = jnp.maximum(top, logits.max(axis=-1))
        # What was summed below a smaller maximum is scaled down to the new one.
        total = total * jnp.exp(top - new_top) + jnp.exp(logits - new_top[:, None]).sum(axis=-1)
        return (new_top, total), None

    empty = jnp.full(q.shape[0], MASK, jnp.float32), jnp.zeros(q.shape[0], jnp.float32)
    (top, total), _ = jax.lax.scan(add_tile, empty, tiles_of(k, tile))
    return top + jnp.log(total)


def tiled_lse_forward(q, k, valid_vocab, tile):
    lse = tiled_lse(q, k, valid_vocab, tile)
    return lse, (q, k, lse)


def tiled_lse_backward(valid_vocab, tile, saved, g):
    """dq [T, D] and dk [V, D] for the cotangent g [T]: p is recomputed from lse, tile by tile."""
    q, k, lse = saved

    def tile_gradients(dq, k_tile_and_first):
        k_tile, first = k_tile_and_first
        p = jnp.exp(tile_logits(q, k_tile, first, valid_vocab) - lse[:, None])
        # The matrix unit takes bf16: dlogits are rounded once here, sums stay in f32.
        dlogits = (g[:, None] * p).astype(q.dtype)
        dq += jnp.einsum("tv,vd->td", dlogits, k_tile, preferred_element_type=jnp.float32)
        dk = jnp.einsum("tv,td->vd", dlogits, q, preferred_element_type=jnp.float32)
        return dq, dk.astype(k.dtype)

    dq, dk = jax.lax.scan(tile_gradients, jnp.zeros(q.shape, jnp.float32), tiles_of(k, tile))
    return dq.astype(q.dtype), dk.reshape(-1, k.shape[1])[: k.shape[0]]


tiled_lse.defvjp(tiled_lse_forward, tiled_lse_backward)


def label_logit(q, k, labels, gather_dtype):
    """[T] f32: each token's logit for its own label.

    `gather_dtype` decides the precision of dk, not of the result: the transpose of this gather is
    a scatter-add of one addend per token into the label's row, and it accumulates in the dtype
    that was gathered. In bf16 a label with 200 hits keeps 8 bits of a running sum of 200 addends,
    while loss and dq stay right. In f32 the sum is rounded to k's dtype once, at its end.
    """
    rows = k.astype(gather_dtype)[labels]
    return jnp.sum(q.astype(jnp.float32) * rows.astype(jnp.float32), axis=-1)


def fused_head(q, k, labels, weights, denominator, *, valid_vocab, tile, gather_dtype):
    """This rank's loss and gradients, the log-sum-exp path and the label path apart."""
    lse, lse_vjp = jax.vjp(lambda q, k: tiled_lse(q, k, valid_vocab, tile), q, k)
    label_logits, label_vjp = jax.vjp(lambda q, k: label_logit(q, k, labels, gather_dtype), q, k)
    g = weights / denominator
    dq_lse, dk_lse = lse_vjp(g)
    dq_label, dk_label = label_vjp(-g)
    return {
        "label_logits": label_logits,
        "lse": lse,
        "loss": jnp.sum(weights * (lse - label_logits)) / denominator,
        "dq_lse": dq_lse,
        "dq_label": dq_label,
        "dq": dq_lse + dq_label,
        "dk_lse": dk_lse,
        "dk_label": dk_label,
        "dk": dk_lse + dk_label,
    }


def plain_head(q, k, labels, weights, denominator, *, valid_vocab):
    """This rank's loss and gradients from materialised logits and ordinary autodiff."""

    def loss_of(q, k):
        logits = tile_logits(q, k, 0, valid_vocab)
        lse = jax.nn.logsumexp(logits, axis=-1)
        label_logits = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
        return jnp.sum(weights * (lse - label_logits)) / denominator, (lse, label_logits)

    differentiate = jax.value_and_grad(loss_of, argnums=(0, 1), has_aux=True)
    (loss, (lse, label_logits)), (dq, dk) = differentiate(q, k)
    return {"label_logits": label_logits, "lse": lse, "loss": loss, "dq": dq, "dk": dk}
