"""Sizes and initial weights of the examples' transformer, the same in every framework."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    vocab: int  # with padding
    width: int  # D
    layers: int
    heads: int
    length: int  # the longest row


def init_parameters(shape):
    """Master weights as f32 numpy arrays, the same on every rank.

    The leading dimension of a block's weights is the layer. Drawn with numpy because compiling
    jax's generator takes longer than training a few steps.
    """
    n, d = shape.layers, shape.width
    tables = {"embed": shape.vocab, "position": shape.length, "unembed": shape.vocab}
    matrices = {"qkv": (d, 3 * d), "attention_out": (d, d)}
    matrices |= {"mlp_in": (d, 4 * d), "mlp_out": (4 * d, d)}
    draw = np.random.default_rng(0).standard_normal
    params = {name: np.float32(0.02) * draw((rows, d), np.float32) for name, rows in tables.items()}
    for name, (fan_in, fan_out) in matrices.items():
        params[name] = np.float32(fan_in**-0.5) * draw((n, fan_in, fan_out), np.float32)
    ones = {"attention_norm": (n, d), "mlp_norm": (n, d), "final_norm": (d,)}
    return params | {name: np.ones(size, np.float32) for name, size in ones.items()}
