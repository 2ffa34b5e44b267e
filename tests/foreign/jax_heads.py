"""Heads of public training codes in JAX."""

import functools
import types
from typing import Literal, Union

import jax
import jax.numpy as jnp
import numpy as np

from foreign.case import ALL, head
from foreign.drawn import IGNORED
from foreign.sources import functions, module


def arrays(drawn, dtype):
    kind = {"bf16": jnp.bfloat16, "f32": jnp.float32}[dtype]
    return jnp.asarray(drawn.q, kind), jnp.asarray(drawn.k, kind), jnp.asarray(drawn.labels)


def captured(loss, q, k, labels, **more):
    """The step of a head that starts from q and k."""
    value, (dq, dk) = jax.jit(jax.value_and_grad(loss, (0, 1)))(q, k)
    named = {"q": q, "k": k, "labels": labels, "loss": value, "dq": dq, "dk": dk, **more}
    return {name: np.asarray(array) for name, array in named.items()}


def captured_logits(loss, logits, labels, **more):
    """The step of a head that starts from logits."""
    value, dlogits = jax.value_and_grad(loss)(logits)
    named = {"logits": logits, "labels": labels, "loss": value, "dlogits": dlogits, **more}
    return {name: np.asarray(array) for name, array in named.items()}


def unembedded(q, k):
    return jnp.einsum("bsd,vd->bsv", q, k, preferred_element_type=jnp.float32)


def weights_of(labels):
    return (labels != IGNORED).astype(jnp.float32), jnp.where(labels == IGNORED, 0, labels)


@head(
    "sdbuch/baremetal-gpt",
    ("baremetal-gpt-broken", "fc9f8c7^", {
        "what": "label rows gathered in bf16", "stages": ("dk",), "causes": ("label-scatter-low-precision",), "dtypes": ("bf16",),
    }),
    ("baremetal-gpt-mended", "fc9f8c7"),
    declared={"path": "fused", **ALL}, ignored=False,
)  # fmt: skip
def baremetal_gpt(root, drawn, dtype):
    q, k, labels = arrays(drawn, dtype)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    fused = functions(
        root, "src/bmgpt/losses.py", "fused_softmax_cross_entropy",
        jax=jax, jnp=jnp, Config=object, LMHead=object, ClassificationHead=object, Array=jax.Array,
    )  # fmt: skip
    config = types.SimpleNamespace(sharding=types.SimpleNamespace(data=("data",)))
    # Its own lse is a kernel for TPUs, of the same sums.
    dots = lambda q, k: jnp.einsum("htd,hvd->htv", q, k, preferred_element_type=jnp.float32)
    lse = lambda _kernel, q, k: jax.nn.logsumexp(dots(q, k), -1)
    with jax.set_mesh(mesh):
        at = jax.sharding.NamedSharding(mesh, jax.P("data"))
        q, labels = jax.device_put(q, at), jax.device_put(labels, at)
        k = jax.device_put(k, jax.sharding.NamedSharding(mesh, jax.P()))
        loss = lambda q, k: fused(config, types.SimpleNamespace(w=k), q, labels, (lse, None))
        return captured(loss, q, k, labels)


@head(
    "young-geng/EasyLM",
    ("easylm", "fe5b2c3"),
    declared=ALL, ignored=False,
)  # fmt: skip
def easylm(root, drawn, dtype):
    q, k, labels = arrays(drawn, dtype)
    loss = functions(root, "EasyLM/jax_utils.py", "cross_entropy_loss_and_accuracy", jax=jax, jnp=jnp)
    return captured(lambda q, k: loss(unembedded(q, k), labels)[0], q, k, labels)


def maxtext_cross_entropy(root):
    path = next(p for p in ("src/maxtext/utils/max_utils.py", "src/MaxText/max_utils.py") if (root / p).exists())
    names = ("cross_entropy_with_logits", "_cross_entropy_with_logits_fwd", "_cross_entropy_with_logits_bwd")
    return functions(root, path, *names, jax=jax, jnp=jnp)[0]


@head(
    "AI-Hypercomputer/maxtext",
    ("maxtext", "e591f30cb"),
    declared={"reduction": "mean", "denominator": "weights", "z_loss": 1e-2},
)  # fmt: skip
def maxtext(root, drawn, dtype):
    q, k, labels = arrays(drawn, dtype)
    xent = maxtext_cross_entropy(root)
    weights, labels = weights_of(labels)

    def loss(q, k):
        each, _ = xent(unembedded(q, k), jax.nn.one_hot(labels, k.shape[0]), 1e-2)
        return jnp.sum(each * weights) / jnp.sum(weights)

    return captured(loss, q, k, labels, weights=weights)


@head(
    "AI-Hypercomputer/maxtext",
    ("maxtext-tiled-broken", "d60bb24e9^", {
        "what": "cotangent of the loss dropped for the hidden states", "stages": ("dq",), "causes": ("cotangent-dropped",),
    }),
    ("maxtext-tiled-mended", "d60bb24e9"),
    ("maxtext-tiled", "e591f30cb"),
    declared={"path": "chunked", "reduction": "mean", "denominator": "weights", "z_loss": 1e-2}, multiple=(1, 4, 1),
)  # fmt: skip
def maxtext_tiled(root, drawn, dtype):
    q, k, labels = arrays(drawn, dtype)
    weights, labels = weights_of(labels)
    same = lambda value, *_, **__: value
    # On one device a sharding constraint is the identity.
    shared = {"ShardMode": types.SimpleNamespace(EXPLICIT=object()), "create_sharding": lambda *_, **__: None}
    tiled = functions(
        root, "src/maxtext/utils/vocabulary_tiling.py", "vocab_tiling_linen_loss",
        jax=jax, jnp=jnp, functools=functools, maybe_shard_with_name=same, all_gather_over_fsdp=same,
        get_logical_axis_rules=lambda: None, nn=types.SimpleNamespace(get_partition_spec=lambda _: None),
        max_utils=types.SimpleNamespace(cross_entropy_with_logits=maxtext_cross_entropy(root)), **shared,
    )  # fmt: skip
    config = types.SimpleNamespace(
        enable_dropout=False, shard_mode=None, debug_sharding=False, num_vocab_tiling=4, vocab_size=k.shape[0],
        z_loss_multiplier=1e-2,
    )  # fmt: skip
    unembed = lambda params, hidden, **_: jnp.einsum(
        "td,vd->tv", hidden, params["params"]["k"], preferred_element_type=jnp.float32
    )
    model = types.SimpleNamespace(apply=unembed, mesh=None)
    data = {"targets": labels, "targets_segmentation": weights.astype(jnp.int32)}

    def loss(q, k):
        total, _ = tiled(q, data, config, model, {"params": {"k": k}}, True)
        return total / jnp.sum(weights)

    return captured(loss, q, k, labels, weights=weights)


@head(
    "google-deepmind/optax",
    ("optax-integer-labels", "2edbcbe2"),
    declared={"reduction": "sum"}, ignored=False,
)  # fmt: skip
def optax_integer_labels(root, drawn, dtype):
    q, k, labels = arrays(drawn, dtype)
    xent = functions(
        root, "optax/losses/_classification.py", "softmax_cross_entropy_with_integer_labels",
        jax=jax, jnp=jnp, utils=types.SimpleNamespace(check_subdtype=lambda *_: None),
        canonicalize_axis=lambda axis, rank: axis % rank, Union=Union,
    )  # fmt: skip
    return captured(lambda q, k: xent(unembedded(q, k), labels).sum(), q, k, labels)


@head(
    "openxla/tokamax",
    ("tokamax-chunked", "783ea95"),
    declared={"path": "chunked", "reduction": "sum", "k_layout": "dv"},
    ignored=False, multiple=(4, 64, 256),
)  # fmt: skip
def tokamax_chunked(root, drawn, dtype):
    q, k, labels = arrays(drawn, dtype)
    q, labels, k = q.reshape(-1, q.shape[-1]), labels.reshape(-1), k.T
    names = ("linear_softmax_cross_entropy_loss_fwd_chunked_xla", "linear_softmax_cross_entropy_loss_bwd_chunked_xla")
    free = type("Any", (), {"__class_getitem__": lambda cls, _: cls})
    known = {"jax": jax, "jnp": jnp, "functools": functools, "Real": free, "Integer": free, "Array": object}
    path = "tokamax/_src/ops/linear_softmax_cross_entropy_loss/chunked_xla.py"
    forward, backward = functions(root, path, *names, **known, Literal=Literal)
    sizes = {"b_block_sz": 128, "v_block_sz": 128, "reduction": "sum"}
    value, lse = forward(q, labels, k, **sizes)
    dq, dk = backward(jnp.float32(1.0), lse, q, labels, k, **sizes)
    named = {"q": q, "k": k, "labels": labels, "loss": value, "lse": lse, "dq": dq, "dk": dk}
    return {name: np.asarray(array) for name, array in named.items()}


@head(
    "demon2036/MLLM-JAX",
    ("mllm-jax-cross-entropy", "cef0a7e"),
    declared={"loss": "xent_logits", "reduction": "sum", "ignore_label": IGNORED, "temperature": 0.7}, dtypes=("f32",),
)  # fmt: skip
def mllm_jax_cross_entropy(root, drawn, dtype):
    q, k, labels = arrays(drawn, dtype)
    kernels = module(root, "plugins/training/kernels/tiled_cross_entropy_pallas.py")
    config = kernels.CrossEntropyKernelConfig(block_size=64, temperature=0.7)
    kernel = kernels.build_cross_entropy_per_token_pallas(config, interpret=True)
    return captured_logits(lambda logits: kernel(logits, labels)[0].sum(), unembedded(q, k), labels)


@head(
    "demon2036/MLLM-JAX",
    ("mllm-jax-grpo-broken", "cef0a7e^", {
        "what": "index maps in elements", "stages": ("logprobs", "loss", "dlogits"), "causes": ("block-index-times-block",),
    }),
    ("mllm-jax-grpo-mended", "cef0a7e"),
    declared={"loss": "grpo", "reduction": "sum", "grpo": {"clip_low": 0.2, "clip_high": 0.2}},
    ignored=False, dtypes=("f32",),
)  # fmt: skip
def mllm_jax_grpo(root, drawn, dtype):
    q, k, labels = arrays(drawn, dtype)
    kernels = module(root, "plugins/training/kernels/grpo_loss_pallas.py")
    logits = unembedded(q, k)
    advantages = jnp.asarray(drawn.rng.standard_normal(labels.shape[0]), jnp.float32)
    logp = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1)[..., 0]
    old = logp + jnp.asarray(drawn.rng.standard_normal(labels.shape) * 0.2, jnp.float32)
    kernel = kernels.build_grpo_per_token_loss_pallas(kernels.GRPOKernelConfig(block_size=64), interpret=True)
    run = lambda logits: kernel(logits, labels, old, advantages)
    more = {"advantages": advantages, "old_logprobs": old, "logprobs": run(logits)[1]}
    return captured_logits(lambda logits: run(logits)[0].sum(), logits, labels, **more)


@head(
    "google-deepmind/optax",
    ("optax-masked-broken", "8852a728^", {
        "what": "0 times infinity in masked columns", "stages": ("loss", "dlogits"), "causes": ("zero-times-inf", "nan-origin"),
    }),
    ("optax-masked-mended", "8852a728"),
    declared={"loss": "xent_logits", "reduction": "sum", "valid_vocab": 113}, ignored=False, dtypes=("f32",),
)  # fmt: skip
def optax_masked(root, drawn, dtype):
    q, k, labels = arrays(drawn, dtype)
    labels = labels % 113
    xent = functions(
        root, "optax/losses/_classification.py", "softmax_cross_entropy", "?weighted_logsoftmax", "?_weighted_logsoftmax_jvp",
        jax=jax, jnp=jnp, chex=types.SimpleNamespace(Array=jax.Array, assert_type=lambda *_: None), Union=Union,
        utils=types.SimpleNamespace(check_subdtype=lambda *_: None), canonicalize_axis=lambda axis, rank: axis % rank,
    )  # fmt: skip
    logits = jnp.where(jnp.arange(k.shape[0]) < 113, unembedded(q, k), -jnp.inf)
    chosen = jax.nn.one_hot(labels, k.shape[0])
    return captured_logits(lambda logits: xent(logits, chosen).sum(), logits, labels)
