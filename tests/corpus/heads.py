"""The loss heads of the corpus, in JAX, for the tokens of one rank and microbatch.

`plain`: logits are held whole, autodiff does the backward. `kernel`: the same by a hand-written
backward, as a fused cross-entropy kernel has it. `fused`: log-sum-exp over vocabulary tiles, the
label's logit by a gather. `chunked`: a scan over token chunks that sums dk on the way.

`Code` says how the program is written; its defaults are right, and every fault is one change of it.
q [T, D], k [V, D], labels [T] int32, weights [T] f32 (0: ignored), `denominator` a scalar.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

NARROW = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32}


@dataclass(frozen=True)
class Code:
    """How the head and the step around it are written. Hashable, for jit."""

    head: str = "plain"
    tile: int = 128  # vocabulary entries
    chunk: int = 64  # tokens
    devices: int = 1  # over which XLA cuts the tokens of one rank by itself
    # Precision.
    gather: str = "f32"  # of k's rows for the label's logit, and of its transpose
    chunk_sum: str = "f32"  # dk over token chunks
    tile_sum: str = "f32"  # dq over vocabulary tiles, dk over token blocks
    gemm: str | None = None  # q and k in the GEMMs, where it is not their own
    gemm_backward: str | None = None
    early_p: str | None = None  # p, before 1 is taken off it
    forward_logits: str = "f32"
    backward_logits: str = "f32"
    kept_lse: str = "f32"  # between forward and backward
    shown_dlogits: str | None = None  # as they are kept, for the tape and for the bias
    dlogits: str | None = None  # as the GEMMs take them; None: the inputs' dtype
    out: str | None = None  # dq and dk; None: the inputs' dtype
    loss_in: str | None = None  # the difference lse - label's logit
    filter: float = 0.0
    # Scale.
    backward_softcap: bool = True
    softcap: float | None = None  # another one than declared
    backward_zloss: float = 1.0
    zloss: float | None = None
    backward_smoothing: bool = True
    smoothing_formula: str | None = None
    backward_temperature: bool = True
    temperature: float | None = None
    bias_times: float = 1.0
    cotangent: str = "both"  # which gradients it multiplies: both, dq, dk, none
    token_weights: bool = True  # in the backward
    # Index.
    masks_tail: bool = True
    maximum: bool = True  # taken off before exp
    # Anything else: the name of a twist of its own.
    twist: str | None = None


def rounded(x, name):
    """x as a format holds it, in its own dtype. tf32 is f32 with 10 bits of mantissa."""
    if name is None:
        return x
    if name != "tf32":
        return x.astype(NARROW[name]).astype(x.dtype)
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    kept = (bits + 0x0FFF + ((bits >> 13) & 1)) & jnp.uint32(0xFFFFE000)
    return jax.lax.bitcast_convert_type(kept, jnp.float32).astype(x.dtype)


def for_gemm(x, name):
    """An operand as the matrix unit takes it."""
    return rounded(x, name) if name in (None, "tf32") else x.astype(NARROW[name])


def raw_logits(q, k, code, backward=False):
    """[T, V] f32."""
    to = (code.gemm_backward if backward else None) or code.gemm
    q, k = for_gemm(q, to), for_gemm(k, to)
    return jnp.einsum("td,vd->tv", q, k, preferred_element_type=jnp.float32)


def transform(raw, bias, o, code, first=0):
    """Logits as the softmax takes them; columns `first` onwards of the vocabulary."""
    if bias is not None:
        raw = raw + code.bias_times * bias
    z = raw / (code.temperature or o.temperature)
    cap = code.softcap if code.softcap is not None else o.softcap
    if cap:
        capped = cap * jnp.tanh(z / cap)
        z = capped if code.backward_softcap else z + jax.lax.stop_gradient(capped - z)
    if o.valid_vocab is not None:
        mask = -jnp.inf if o.mask_value is None else o.mask_value
        z = jnp.where(first + jnp.arange(z.shape[-1]) < o.valid_vocab, z, mask)
    return z


def classes_of(k, o):
    return k.shape[0] if o.valid_vocab is None else o.valid_vocab


def smoothing_of(o, code, classes):
    formula = code.smoothing_formula or o.smoothing_formula
    return o.label_smoothing * (classes / (classes - 1) if formula == "megatron" else 1.0)


def token_losses(z, labels, o, code, classes):
    """(loss of each token, lse, label's logit)."""
    lse = jax.nn.logsumexp(z, axis=-1) if code.maximum else jnp.log(jnp.sum(jnp.exp(z), axis=-1))
    own = jnp.take_along_axis(z, labels[:, None], axis=-1)[:, 0]
    s = smoothing_of(o, code, classes)
    loss = lse - (1 - s) * own
    if o.label_smoothing:
        loss = loss - s * jnp.mean(z[:, :classes], axis=-1)
    return loss + z_term(lse, o, code), lse, own


def z_term(lse, o, code):
    factor = o.z_loss if code.zloss is None else code.zloss
    squared = factor * lse**2
    kept = jax.lax.stop_gradient(squared)
    return kept + code.backward_zloss * (squared - kept)


def reduced(losses, weights, denominator):
    return jnp.sum(weights * losses) / denominator


def differentiated(loss_of, q, k, bias, cotangent):
    """Values and gradients of `loss_of(q, k, bias) -> loss, values`."""
    loss, pull, held = jax.vjp(loss_of, q, k, bias, has_aux=True)
    dq, dk, dbias = pull(jnp.asarray(cotangent, loss.dtype))
    return held | {"loss": loss, "dq": dq, "dk": dk} | ({} if bias is None else {"dbias": dbias})


def plain(q, k, bias, labels, weights, denominator, o, code):
    def loss_of(q, k, bias):
        z = transform(rounded(raw_logits(q, k, code), code.forward_logits), bias, o, code)
        losses, lse, own = token_losses(z, labels, o, code, classes_of(k, o))
        return reduced(losses, weights, denominator), {"lse": lse, "label_logits": own, "logits": z}

    return differentiated(loss_of, q, k, bias, o.cotangent)


# --- kernel: forward and backward written by hand, as a fused kernel's launcher has them --------


def dlogits_of(saved, g, o, code):
    """[T, V] f32: the gradient with respect to q k + bias, by the formula."""
    q, k, bias, labels, lse = saved
    raw = rounded(raw_logits(q, k, code, backward=True), code.backward_logits)
    z = transform(raw, bias, o, code)
    classes, entry = classes_of(k, o), jnp.arange(k.shape[0])
    p = jnp.exp(z - lse[:, None])
    zloss = o.z_loss if code.zloss is None else code.zloss
    s = smoothing_of(o, code, classes) if code.backward_smoothing else 0.0
    target = (1 - s) * (entry == labels[:, None]) + jnp.where(entry < classes, s / classes, 0.0)
    # Narrowed before the label's 1 comes off it, little of p - 1 is left where p is near 1.
    p = twisted(code, rounded(p, code.early_p), z, lse, labels)
    d = (1 + 2 * code.backward_zloss * zloss * lse)[:, None] * p - target
    cap = code.softcap if code.softcap is not None else o.softcap
    if cap and code.backward_softcap:
        d = d * (1 - jnp.where(entry < classes, z / cap, 0.0) ** 2)
    if code.backward_temperature:
        d = d / (code.temperature or o.temperature)
    if code.filter:
        d = filtered(d, code.filter, code.tile)
    return g[:, None] * d


def twisted(code, p, z, lse, labels):
    """p with a fault that is in no catalogue."""
    entry = jnp.arange(p.shape[1])
    own = jnp.take_along_axis(p, labels[:, None], axis=-1)
    if code.twist == "exp by a power":
        return jnp.maximum(1 + (z - lse[:, None]) / 64, 0) ** 64
    if code.twist == "exp by a table":
        step = jnp.floor((z - lse[:, None]) * 8)
        return p * (1 + 0.01 * jnp.sin(step * 12.9898))
    if code.twist == "focal":
        return p + ((1 - own) ** 2 - 1) * (p - (entry == labels[:, None]))
    if code.twist == "top 20 only":
        least = jnp.sort(z, axis=-1)[:, -20][:, None]
        return jnp.where(z >= least, p, 0.0)
    if code.twist == "smoothed by frequency":
        share = jnp.zeros(p.shape[1]).at[labels].add(1.0 / labels.size)
        return p + 0.1 * ((entry == labels[:, None]) - share)
    if code.twist == "temperature of the position":
        warmer = jax.nn.softmax(z / (1 + jnp.arange(p.shape[0]) / p.shape[0])[:, None], axis=-1)
        return warmer
    return p


def filtered(d, least, tile):
    """Drops the blocks of d in which nothing reaches `least`."""
    rows, columns = d.shape
    fill = (-rows % tile, -columns % tile)
    blocks = jnp.pad(jnp.abs(d), ((0, fill[0]), (0, fill[1])))
    blocks = blocks.reshape((rows + fill[0]) // tile, tile, (columns + fill[1]) // tile, tile)
    kept = jnp.repeat(jnp.repeat(blocks.max((1, 3)) >= least, tile, 0), tile, 1)
    return jnp.where(kept[:rows, :columns], d, 0.0)


def kernel(q, k, bias, labels, weights, denominator, o, code):
    z = transform(rounded(raw_logits(q, k, code), code.forward_logits), bias, o, code)
    losses, lse, own = token_losses(z, labels, o, code, classes_of(k, o))
    if code.loss_in is not None:
        narrow = NARROW[code.loss_in]
        losses = (lse.astype(narrow) - own.astype(narrow)).astype(jnp.float32)
    saved = (q, k, bias, labels, rounded(lse, code.kept_lse))
    g = weights / denominator if code.token_weights else (weights != 0) / denominator
    narrow = NARROW[code.dlogits] if code.dlogits else q.dtype
    gemm = code.gemm_backward or code.gemm
    out = NARROW[code.out] if code.out else q.dtype
    given = lambda name: o.cotangent if code.cotangent in ("both", name) else 1.0
    to_q, to_k = (dlogits_of(saved, given(name) * g, o, code) for name in ("dq", "dk"))
    product = lambda spec, d, x: jnp.einsum(
        spec, for_gemm(d.astype(narrow), gemm), for_gemm(x, gemm), preferred_element_type=jnp.float32
    )
    to_k_shown = rounded(to_k, code.shown_dlogits)
    found = {
        "lse": lse, "label_logits": own, "loss": reduced(losses, weights, denominator),
        "dlogits": to_k_shown, "logits": z, "dq": product("tv,vd->td", to_q, k).astype(out),
        "dk": product("tv,td->vd", to_k, q).astype(out),
    }  # fmt: skip
    return found | ({} if bias is None else {"dbias": code.bias_times * to_k_shown.sum(0)})


# --- fused: no more than one tile of logits ---------------------------------------------------


def tiles_of(k, bias, tile):
    """[n, tile, D], [n, tile] and the first entry of each; the last is filled up with zeros."""
    count = -(-k.shape[0] // tile)
    fill = count * tile - k.shape[0]
    bias = jnp.zeros(k.shape[0], jnp.float32) if bias is None else bias
    rows = jnp.pad(k, ((0, fill), (0, 0))).reshape(count, tile, -1)
    return rows, jnp.pad(bias, (0, fill)).reshape(count, tile), jnp.arange(count) * tile


def tile_logits(q, rows, bias, first, vocab, o, code):
    z = transform(raw_logits(q, rows, code), bias, o, code, first)
    if not code.masks_tail:
        return z
    return jnp.where(first + jnp.arange(rows.shape[0]) < vocab, z, -jnp.inf)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def tiled_lse(q, k, bias, o, code):
    """[T] f32, by a running maximum and sum."""

    def add(running, tile):
        top, total = running
        z = rounded(tile_logits(q, *tile, k.shape[0], o, code), code.forward_logits)
        higher = jnp.maximum(top, z.max(axis=-1)) if code.maximum else jnp.zeros_like(top)
        total = total * jnp.exp(top - higher) + jnp.exp(z - higher[:, None]).sum(axis=-1)
        return (higher, total), None

    start = jnp.full(q.shape[0], -1e30, jnp.float32), jnp.zeros(q.shape[0], jnp.float32)
    (top, total), _ = jax.lax.scan(add, start, tiles_of(k, bias, code.tile))
    return top + jnp.log(total)


def tiled_forward(q, k, bias, o, code):
    lse = tiled_lse(q, k, bias, o, code)
    return lse, (q, k, bias, rounded(lse, code.kept_lse))


def tiled_backward(o, code, saved, g):
    """p comes from the kept lse, a tile at a time."""
    q, k, bias, lse = saved
    out = q.dtype if code.out is None else NARROW[code.out]
    narrow = q.dtype if code.dlogits is None else NARROW[code.dlogits]
    sums = NARROW[code.tile_sum]

    def gradients(dq, tile):
        rows, row_bias, first = tile
        raw = raw_logits(q, rows, code, backward=True)
        z, pull = jax.vjp(lambda raw: transform(raw, row_bias, o, code, first), raw)
        if code.masks_tail:
            z = jnp.where(first + jnp.arange(rows.shape[0]) < k.shape[0], z, -jnp.inf)
        p = rounded(jnp.exp(rounded(z, code.backward_logits) - lse[:, None]), code.early_p)
        if code.filter:
            p = jnp.where(jnp.max(p) < code.filter, 0.0, p)
        (dz,) = pull(g[:, None] * p)
        narrowed = dz.astype(narrow)
        step = jnp.einsum("tv,vd->td", narrowed, rows, preferred_element_type=jnp.float32)
        dq = (dq + step.astype(sums)).astype(sums)
        return dq, (token_blocks(narrowed, q, code, sums).astype(out), dz.sum(0))

    start = jnp.zeros(q.shape, sums)
    dq, (dk, dbias) = jax.lax.scan(gradients, start, tiles_of(k, bias, code.tile))
    held = None if bias is None else code.bias_times * dbias.reshape(-1)[: k.shape[0]]
    return dq.astype(out), dk.reshape(-1, k.shape[1])[: k.shape[0]], held


def token_blocks(dlogits, q, code, sums):
    """dlogitsᵀ q [tile, D]: whole in f32, or added block by block where `sums` is narrower."""
    product = lambda a, b: jnp.einsum("tv,td->vd", a, b, preferred_element_type=jnp.float32)
    if sums == jnp.float32:
        return product(dlogits, q)
    fill = ((0, -q.shape[0] % code.chunk), (0, 0))
    blocks = [jnp.pad(x, fill).reshape(-1, code.chunk, x.shape[1]) for x in (dlogits, q)]
    add = lambda total, block: (total + product(*block).astype(sums), None)
    start = jnp.zeros((dlogits.shape[1], q.shape[1]), sums)
    return jax.lax.scan(add, start, tuple(blocks))[0]


tiled_lse.defvjp(tiled_forward, tiled_backward)


def label_logit(q, k, bias, labels, o, code):
    """[T] f32. The transpose of the gather adds one addend a token to its label's row, in the
    dtype that was gathered."""
    rows = k.astype(NARROW[code.gather])[labels]
    raw = jnp.sum(q.astype(jnp.float32) * rows.astype(jnp.float32), axis=-1)
    if bias is not None:
        raw = raw + code.bias_times * bias[labels]
    plain_options = raw / (code.temperature or o.temperature)
    cap = code.softcap if code.softcap is not None else o.softcap
    if not cap:
        return plain_options
    capped = cap * jnp.tanh(plain_options / cap)
    if code.backward_softcap:
        return capped
    return plain_options + jax.lax.stop_gradient(capped - plain_options)


def fused(q, k, bias, labels, weights, denominator, o, code):
    lse, lse_pull = jax.vjp(lambda *x: tiled_lse(*x, o, code), q, k, bias)
    own, label_pull = jax.vjp(lambda *x: label_logit(*x, labels, o, code), q, k, bias)
    g = o.cotangent * weights / denominator
    _, z_pull = jax.vjp(lambda lse: lse + z_term(lse, o, code), lse)
    dq_lse, dk_lse, dbias_lse = lse_pull(z_pull(g)[0])
    dq_label, dk_label, dbias_label = label_pull(-g)
    losses = lse - own + z_term(lse, o, code)
    found = {
        "lse": lse, "label_logits": own, "loss": reduced(losses, weights, denominator),
        "dq_lse": dq_lse, "dq_label": dq_label, "dq": dq_lse + dq_label,
        "dk_lse": dk_lse, "dk_label": dk_label, "dk": dk_lse + dk_label,
    }  # fmt: skip
    return found | ({} if bias is None else {"dbias": dbias_lse + dbias_label})


# --- chunked: gradients while the chunk's logits are there ------------------------------------


def chunked(q, k, bias, labels, weights, denominator, o, code):
    """dk is summed over the chunks in `code.chunk_sum`, from zero, in token order."""
    tokens, size = q.shape[0], code.chunk
    count = -(-tokens // size)
    fill = lambda x: jnp.pad(x, ((0, count * size - tokens),) + ((0, 0),) * (x.ndim - 1))
    cut = lambda x: fill(x).reshape(count, size, *x.shape[1:])
    sums, wide = NARROW[code.chunk_sum], replace(code, out="f32")

    def add(dk, one):
        found = kernel(one[0], k, bias, one[1], one[2], denominator, o, wide)
        dk = dk + found["dk"].astype(sums)
        kept = {name: found[name] for name in ("lse", "label_logits", "loss")}
        kept["dq"] = found["dq"].astype(NARROW[code.out] if code.out else q.dtype)
        return dk, kept | ({} if bias is None else {"dbias": found["dbias"]})

    start = jnp.zeros(k.shape, sums)
    dk, held = jax.lax.scan(add, start, (cut(q), cut(labels), cut(weights)))
    flat = lambda x: x.reshape(count * size, *x.shape[2:])[:tokens]
    found = {name: flat(held[name]) for name in ("lse", "label_logits", "dq")}
    found |= {"loss": held["loss"].sum(), "dk": dk.astype(NARROW[code.out] if code.out else k.dtype)}
    return found | ({} if bias is None else {"dbias": held["dbias"].sum(0)})


HEADS = {"plain": plain, "kernel": kernel, "fused": fused, "chunked": chunked}
