"""A small decoder-only transformer: f32 master weights, bf16 compute, sharded over `fsdp`."""

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

COMPUTE = jnp.bfloat16


def parameter_specs():
    """Where each parameter lives: matrices are split over `fsdp`, vectors are replicated.

    The unembedding [V, D] is split along D: each rank then holds a slice of every row, and a
    label's gradient is spread over the ranks evenly however frequent the label is.
    """
    return {
        "embed": P(None, "fsdp"),
        "position": P(None, "fsdp"),
        "attention_norm": P(),
        "qkv": P(None, "fsdp", None),
        "attention_out": P(None, None, "fsdp"),
        "mlp_norm": P(),
        "mlp_in": P(None, "fsdp", None),
        "mlp_out": P(None, None, "fsdp"),
        "final_norm": P(),
        "unembed": P(None, "fsdp"),
    }


def rms_norm(x, scale):
    """x [..., D] over its root mean square, computed in f32, back in x's dtype."""
    x32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + 1e-6)
    return (x32 * inverse * scale).astype(x.dtype)


def block(x, layer, heads):
    """One transformer block on x [B, S, D]."""
    rows, length, width = x.shape
    weight = {name: layer[name].astype(COMPUTE) for name in layer if not name.endswith("norm")}
    qkv = rms_norm(x, layer["attention_norm"]) @ weight["qkv"]
    query, key, value = jnp.split(qkv.reshape(rows, length, 3 * heads, width // heads), 3, axis=2)
    mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    x = x + mixed.reshape(rows, length, width) @ weight["attention_out"]
    inner = jax.nn.gelu(rms_norm(x, layer["mlp_norm"]) @ weight["mlp_in"])
    return x + inner @ weight["mlp_out"]


BLOCK_WEIGHTS = ("attention_norm", "qkv", "attention_out", "mlp_norm", "mlp_in", "mlp_out")


def backbone(params, tokens, heads):
    """Hidden states q [B*S, D] in bf16 of tokens [B, S]: all of the model but the unembedding."""
    # FSDP: a table is brought together before it is read. Left split along D, every activation
    # would have to change from split by row to split by column and back.
    whole = lambda name: jax.lax.with_sharding_constraint(params[name], P())
    embed, position = whole("embed"), whole("position")
    # Gathered from the f32 master and rounded after: the transpose, a scatter-add over tokens,
    # then accumulates in f32. Gathering from a bf16 copy would be the label-gather bug again.
    x = embed[tokens] + position[: tokens.shape[1]]
    layers = {name: params[name] for name in BLOCK_WEIGHTS}
    x, _ = jax.lax.scan(lambda x, layer: (block(x, layer, heads), None), x.astype(COMPUTE), layers)
    return rms_norm(x, params["final_norm"]).reshape(-1, x.shape[-1])
