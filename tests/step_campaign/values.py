"""What gradients and parameters look like: what is usual, and what is right and seldom."""

import numpy as np
import torch

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
# Decades of the size of a gradient that a format holds, with its square in f32.
DECADES = {"float64": (-12, 6), "float32": (-12, 6), "bfloat16": (-12, 6), "float16": (-5, 1)}


def name_of(dtype):
    """A dtype of torch as the contract writes it."""
    return str(dtype).removeprefix("torch.")


def rows(draw, shape):
    """The gradient of an embedding: most rows are zeros."""
    values = draw.standard_normal(shape)
    if values.ndim:
        values[draw.random(shape[0]) < 0.8] = 0
    return values


def outliers(draw, shape):
    values = draw.standard_normal(shape)
    return np.where(draw.random(shape) < 0.02, 1e4 * values, values)


def one(draw, shape):
    """One element is not zero."""
    values = np.zeros(shape)
    if values.size:
        values.flat[draw.integers(values.size)] = draw.standard_normal()
    return values


# How the elements of a gradient are distributed, and how often that is drawn.
KINDS = {
    "normal": (8, lambda draw, shape: draw.standard_normal(shape)),
    "rows": (3, rows),
    "outliers": (2, outliers),
    "heavy": (1, lambda draw, shape: np.clip(draw.standard_cauchy(shape), -1e5, 1e5)),
    "wide": (1, lambda draw, shape: draw.choice([-1, 1], shape) * 10 ** draw.uniform(-9, 0, shape)),
    "positive": (1, lambda draw, shape: np.abs(draw.standard_normal(shape))),
    "alike": (1, lambda draw, shape: np.full(shape, draw.standard_normal())),
    "signs": (1, lambda draw, shape: draw.choice([-1.0, 1.0], shape)),
    "integers": (1, lambda draw, shape: draw.integers(-4, 5, shape).astype(float)),
    "one": (1, one),
    "zeros": (1, lambda draw, shape: np.zeros(shape)),
    "denormal": (1, lambda draw, shape: draw.standard_normal(shape) * 1e-40),
}


def kind_of(draw):
    weights = np.array([weight for weight, _ in KINDS.values()], float)
    return str(draw.choice(list(KINDS), p=weights / weights.sum()))


def gradients(draw, shape, kind, scale, addends, dtype):
    """One gradient for each addend; what they have in common is drawn, and how far they cancel."""
    make = KINDS[kind][1]
    common = make(draw, shape)
    share = draw.choice([0.0, 0.3, 1.0])
    cancels = draw.random() < 0.1
    made = []
    for index in range(addends):
        own = make(draw, shape) * share + common
        if cancels:
            own = own if index % 2 else -own
        if kind == "rows" and np.ndim(own) and share:
            # Each batch has tokens of its own.
            own = np.where(make(draw, shape) == 0, 0, own)
        made.append(torch.tensor(np.asarray(own * scale), dtype=torch.float64).to(dtype))
    return made


def parameter(draw, shape, dtype):
    """A parameter's values."""
    kind = draw.choice(["normal", "small", "ones", "zeros", "large"], p=[0.6, 0.15, 0.1, 0.1, 0.05])
    values = {
        "normal": lambda: draw.standard_normal(shape),
        "small": lambda: 0.02 * draw.standard_normal(shape),
        "ones": lambda: np.ones(shape),
        "zeros": lambda: np.zeros(shape),
        "large": lambda: 100 * draw.standard_normal(shape),
    }[str(kind)]()
    return torch.tensor(np.asarray(values), dtype=torch.float64).to(dtype)
