"""Loss heads in plain jnp, differentiated by JAX: an oracle that shares nothing with the replayer.

Forward only: every gradient comes from `jax.vjp`, none from a formula. Shapes are those of the job:
`[T]` or `[B, S]` tokens, k in its own layout. Written to be read, not to be fast.

`x` holds what is differentiated: q and k, or logits, or logprobs; bias; and zeros that are added to
a value on the way (`at_logits`, `at_logprobs`), so that its gradient is a gradient like the others.
"""

import jax
import jax.numpy as jnp
import numpy as np

DEFAULTS = {
    "loss": "softmax_xent", "reduction": "mean", "denominator": "valid", "scope": "global",
    "microbatches": 1, "microbatch_reduction": "mean", "ignore_label": None, "z_loss": 0.0,
    "z_loss_in_loss": True, "softcap": None, "label_smoothing": 0.0, "smoothing_formula": "uniform",
    "temperature": 1.0, "logit_scale": 1.0, "valid_vocab": None, "mask_value": None,
    "k_layout": "vd", "labels_shifted": True, "cotangent": 1.0,
}  # fmt: skip
GRPO = {
    "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "kl_beta": 0.0, "kl": "k3",
    "ratio": "token", "average": "token",
}  # fmt: skip


class Options:
    """The options of a head, defaults filled in, as attributes."""

    def __init__(self, declared):
        self.__dict__.update(DEFAULTS | declared)
        self.grpo = GRPO | declared.get("grpo", {})

    def classes(self, vocab):
        return vocab if self.valid_vocab is None else self.valid_vocab


def product(q, k, o, narrow=False):
    """q k: in f32 at least, or as the inputs' dtype gives it (`narrow`)."""
    wide = jnp.promote_types(q.dtype, jnp.float32)
    spec = "...d,dv->...v" if o.k_layout == "dv" else "...d,vd->...v"
    return jnp.einsum(spec, q, k, preferred_element_type=q.dtype if narrow else wide).astype(wide)


def logits_of(raw, bias, o, twist=""):
    """Logits as the softmax takes them: without the padded columns where nothing masks them."""
    if bias is not None:
        raw = raw + bias
    z = raw * o.logit_scale / o.temperature
    if o.softcap is not None:
        capped = o.softcap * jnp.tanh(z / o.softcap)
        # Planted: the derivative of the softcap forgotten.
        z = z + jax.lax.stop_gradient(capped - z) if twist == "no softcap derivative" else capped
    vocab = z.shape[-1]
    if o.mask_value is None:
        return z[..., : o.classes(vocab)]
    return jnp.where(jnp.arange(vocab) < o.classes(vocab), z, o.mask_value)


def targets(data, o, shape):
    """Labels (0 where a token takes no part), which tokens take part, and their weights."""
    labels = data.get("labels", np.zeros(shape, np.int32))
    weights = data.get("weights", np.ones(shape, np.float32))
    counted = np.full(shape, True) if o.ignore_label is None else labels != o.ignore_label
    if not o.labels_shifted:
        labels, counted, weights = (np.roll(each, -1, -1) for each in (labels, counted, weights))
        counted[..., -1] = False
    return np.where(counted, labels, 0), counted, weights


def smoothed(o, classes):
    """The share of the target that is spread over the classes."""
    if o.smoothing_formula == "megatron":
        return o.label_smoothing * classes / (classes - 1)
    return o.label_smoothing


def at_label(z, labels):
    return jnp.take_along_axis(z, labels[..., None], -1)[..., 0]


def cross_entropy(z, labels, o, z_loss, vocab):
    """Loss of each token."""
    classes = o.classes(vocab)
    s = smoothed(o, classes)
    target = (1 - s) * jax.nn.one_hot(labels, classes, dtype=z.dtype) + s / classes
    token = -jnp.sum(target * jax.nn.log_softmax(z)[..., :classes], -1)
    return token + z_loss * jax.nn.logsumexp(z, -1) ** 2


def cross_entropy_in_parts(z, z_label, labels, o, vocab):
    """The same with the label's logit from logits of its own, which tells the parts apart."""
    classes = o.classes(vocab)
    s = smoothed(o, classes)
    lse = jax.nn.logsumexp(z, -1)
    spread = jnp.mean(z[..., :classes], -1)
    return lse - (1 - s) * at_label(z_label, labels) - s * spread + o.z_loss * lse**2


def policy_loss(logp, data, weights, o):
    """Loss of each token of a policy loss; sequences lie along the last dimension."""
    g = o.grpo
    advantages = jnp.asarray(data["advantages"])
    if advantages.shape != logp.shape:
        advantages = advantages[..., None]
    log_ratio = logp - data.get("old_logprobs", jax.lax.stop_gradient(logp))
    if g["ratio"] == "sequence":
        log_ratio = mean_of_sequence(log_ratio, weights)[..., None]
    ratio = jnp.exp(log_ratio)
    clipped = jnp.clip(ratio, 1 - g["clip_low"], 1 + g["clip_high"])
    gain = jnp.minimum(ratio * advantages, clipped * advantages)
    if g["dual_clip"] is not None:
        gain = jnp.where(advantages < 0, jnp.maximum(gain, g["dual_clip"] * advantages), gain)
    if g["kl_beta"] == 0:
        return -gain + jnp.zeros_like(logp)
    d = data["ref_logprobs"] - logp
    kl = {"k1": -d, "k2": d * d / 2, "k3": jnp.exp(d) - d - 1}[g["kl"]]
    return -gain + g["kl_beta"] * kl


def mean_of_sequence(values, weights):
    total = weights.sum(-1)
    return jnp.sum(weights * values, -1) / np.where(total == 0, 1, total)


def count(data, o, shape):
    """What one microbatch adds to the denominator."""
    _, counted, weights = targets(data, o, shape)
    if o.loss == "grpo":
        held = counted & (weights != 0)
        if o.grpo["average"] == "sequence":
            return np.any(held, -1).sum()
        if o.denominator == "valid":
            return held.sum()
    counts = {"valid": counted.sum(), "all": counted.size, "weights": (weights * counted).sum()}
    return counts[o.denominator]


def denominators(microbatches, o):
    """What each microbatch's loss is divided by."""
    if o.reduction != "mean":
        return [1.0] * len(microbatches)
    if not isinstance(o.denominator, str):
        return [o.denominator] * len(microbatches)
    counts = [float(count(data, o, shape_of(data))) for data in microbatches]
    return [sum(counts)] * len(counts) if o.scope == "global" else counts


def shape_of(data):
    """The leading dimensions: those of tokens."""
    if "q" in data or "logits" in data:
        return data.get("q", data.get("logits")).shape[:-1]
    return data["logprobs"].shape


def head(x, data, o, denominator, narrow=False, twist=""):
    """(loss as it is differentiated, everything on the way) of one microbatch."""
    labels, counted, weights = targets(data, o, shape_of(data))
    weights = np.where(counted, weights, 0).astype(data.get("weights", weights).dtype)
    seen, vocab = {}, 0
    if "logprobs" in x:
        logp = x["logprobs"]
    else:
        raw = x["logits"] if "logits" in x else product(x["q"], x["k"], o, narrow)
        vocab = raw.shape[-1]
        z = logits_of(raw + x["at_logits"], x.get("bias"), o, twist)
        labels = jnp.asarray(labels)
        seen |= {"logits": z, "lse": jax.nn.logsumexp(z, -1), "label_logits": at_label(z, labels)}
        every = jax.nn.log_softmax(z)
        seen |= {"every_logprob": every[..., : o.classes(vocab)]}
        logp = seen["logprobs"] = at_label(every, labels)
    if o.loss == "grpo":
        token = shown = policy_loss(logp + x["at_logprobs"], data, weights, o)
    else:
        token = cross_entropy(z, labels, o, o.z_loss, vocab)
        shown = token if o.z_loss_in_loss else cross_entropy(z, labels, o, 0.0, vocab)
    seen["loss"] = reduced(shown, weights, o, denominator)
    return reduced(token, weights, o, denominator), seen


def reduced(token, weights, o, denominator):
    token = jnp.where(weights != 0, weights * token, 0)
    if o.reduction == "none":
        return token
    if o.loss == "grpo" and o.grpo["average"] == "sequence":
        total = weights.sum(-1, keepdims=True)
        token = token / np.where(total == 0, 1, total)
    return jnp.sum(token) / denominator


def gradients(x, data, o, denominator, **how):
    """(forward values, gradient of each of `x`), by reverse mode."""
    loss, pull, seen = jax.vjp(lambda x: head(x, data, o, denominator, **how), x, has_aux=True)
    upstream = jnp.asarray(o.cotangent, loss.dtype) * data.get("cotangent", 1.0)
    (found,) = pull(jnp.broadcast_to(upstream, loss.shape).astype(loss.dtype))
    return seen, found


def parts(x, data, o, denominator):
    """dq and dk by the label's logit, and by everything else."""
    labels, counted, weights = targets(data, o, shape_of(data))
    weights = np.where(counted, weights, 0)

    def loss(dense, label):
        both = (product(*qk, o) for qk in (dense, label))
        z, z_label = (logits_of(raw, x.get("bias"), o) for raw in both)
        vocab = x["k"].shape[1 if o.k_layout == "dv" else 0]
        token = cross_entropy_in_parts(z, z_label, jnp.asarray(labels), o, vocab)
        return reduced(token, weights, o, denominator)

    value, pull = jax.vjp(loss, (x["q"], x["k"]), (x["q"], x["k"]))
    (dq_lse, dk_lse), (dq_label, dk_label) = pull(
        jnp.broadcast_to(o.cotangent * data.get("cotangent", 1.0), value.shape).astype(value.dtype)
    )
    return {"dq_lse": dq_lse, "dk_lse": dk_lse, "dq_label": dq_label, "dk_label": dk_label}
