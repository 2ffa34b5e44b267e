"""Softmax cross-entropy heads in torch for one rank's tokens: plain, and fused over tiles.

Shapes: q [T, D] and k [V, D] in bf16; labels [T] int64; weights [T] f32. Rows of k from `valid_vocab`
on are padding and never get probability. Sums stay in f32, as in xent_jax.py.

The taps are what backtape needs to see between the stages: outside a recorded step each is its
argument.
"""

import torch

from backtape.torch import tap, tap_grad

# What a padded vocabulary entry's logit becomes; see xent_jax.py.
MASK = -0.7 * torch.finfo(torch.float32).max


def tile_logits(q, k_tile, first, valid_vocab):
    """[T, tile] f32: logits of the vocabulary entries from `first` on; padding is masked."""
    # A product of two bf16 numbers is exact in f32: so is this one, whatever the matrix unit does.
    logits = q.float() @ k_tile.float().T
    entry = torch.arange(first, first + k_tile.shape[0], device=q.device)
    return torch.where(entry < valid_vocab, logits, MASK)


class TiledLse(torch.autograd.Function):
    """[T] f32: log of the sum of exp(logits) over the vocabulary, one tile at a time."""

    @staticmethod
    def forward(ctx, q, k, valid_vocab, tile):
        top = torch.full((q.shape[0],), MASK, device=q.device)
        total = torch.zeros_like(top)
        for first in range(0, k.shape[0], tile):
            logits = tile_logits(q, k[first : first + tile], first, valid_vocab)
            new_top = torch.maximum(top, logits.amax(-1))
            # What was summed below a smaller maximum is scaled down to the new one.
            total = total * (top - new_top).exp() + (logits - new_top[:, None]).exp().sum(-1)
            top = new_top
        lse = top + total.log()
        ctx.save_for_backward(q, k, lse)
        ctx.sizes = valid_vocab, tile
        return lse

    @staticmethod
    def backward(ctx, g):
        """dq [T, D] and dk [V, D] for the cotangent g [T]: p is recomputed from lse, tile by tile."""
        q, k, lse = ctx.saved_tensors
        valid_vocab, tile = ctx.sizes
        dq = torch.zeros(q.shape, device=q.device)
        dk = torch.empty_like(k)
        for first in range(0, k.shape[0], tile):
            k_tile = k[first : first + tile]
            p = (tile_logits(q, k_tile, first, valid_vocab) - lse[:, None]).exp()
            # The matrix unit takes bf16: dlogits are rounded once here, sums stay in f32.
            dlogits = (g[:, None] * p).to(q.dtype).float()
            dq += dlogits @ k_tile.float()
            dk[first : first + tile] = (dlogits.T @ q.float()).to(k.dtype)
        return dq.to(q.dtype), dk, None, None


def label_logit(q, k, labels, gather_dtype):
    """[T] f32: each token's logit for its own label.

    `gather_dtype` decides the precision of dk, not of the result: the backward of this gather is a
    scatter-add of one addend per token into the label's row, in the dtype that was gathered.
    """
    rows = k.to(gather_dtype)[labels]
    return (q.float() * rows.float()).sum(-1)


def fused_head(q, k, labels, valid_vocab, tile, gather_dtype, rows, addend):
    """lse and label logits [T], each through its own path; `rows` and `addend` are what the tape
    is told of arrays [T, ...] and [V, D]."""
    q_lse, q_label = (tap_grad(name, q, **rows) for name in ("dq_lse", "dq_label"))
    k_lse, k_label = (tap_grad(name, k, **addend) for name in ("dk_lse", "dk_label"))
    lse = TiledLse.apply(q_lse, k_lse, valid_vocab, tile)
    return lse, label_logit(q_label, k_label, labels, gather_dtype)


def plain_head(q, k, labels, valid_vocab):
    """The same from materialised logits and ordinary autodiff."""
    logits = tile_logits(q, k, 0, valid_vocab)
    return torch.logsumexp(logits, -1), logits.gather(-1, labels[:, None])[:, 0]


def token_losses(job, q, k, labels, microbatch):
    """[T] f32: the loss of each token, its head taped."""
    rows = {"microbatch": microbatch, "placement": job.by_rows}
    addend = {"microbatch": microbatch, "placement": job.by_addend, "when": "pre_reduce"}
    q = tap_grad("dq", tap("q", q, **rows), **rows)
    k = tap_grad("dk", k, **addend)
    if job.fused:
        gather = job.gather_dtype
        lse, label_logits = fused_head(q, k, labels, job.valid_vocab, job.tile, gather, rows, addend)
    else:
        lse, label_logits = plain_head(q, k, labels, job.valid_vocab)
    tap("lse", lse, **rows)
    tap("label_logits", label_logits, **rows)
    tap("labels", labels, **rows)
    return lse - label_logits
