"""Operations on constants, which are computed while a program is read."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from backtape.attach_jax.graph import MOST_ELEMENTS, Operation, Value
from backtape.attach_jax.shapes import MOVES, SAME


def fold(operation: Operation) -> None:
    """Computes what does not depend on what comes into the program, where it is small."""
    value, inputs = operation.outputs[0], [taken.known for taken in operation.inputs]
    compute = FOLDED.get(operation.name)
    if compute is None and operation.name in SAME:
        compute = _as_it_is
    # Constants that are broadcast take no memory, however large they are.
    is_small = operation.name == "broadcast_in_dim" or math.prod(value.shape) <= MOST_ELEMENTS
    if compute is not None and is_small and all(known is not None for known in inputs):
        found = np.asarray(compute(inputs, operation.params, value))
        value.known = np.broadcast_to(found, value.shape)


def number_of(value: Value) -> float | None:
    """The number that a value is, the same everywhere; None where it is none."""
    if value.known is None or not value.known.size:
        return None
    # What is broadcast is looked at once.
    whole = np.asarray(value.known)
    own = whole[tuple(slice(None) if step else slice(1) for step in whole.strides)]
    first = own.reshape(-1)[0]
    return float(first) if own.size == 1 or bool((own == first).all()) else None


def _as_it_is(inputs: Any, _: Any, value: Value) -> Any:
    return inputs[0].astype(value.dtype)


def _folded_iota(_: Any, params: Any, value: Value) -> Any:
    shape = [1] * len(value.shape)
    dim = int(params["dimension"])
    shape[dim] = value.shape[dim]
    return np.arange(value.shape[dim]).reshape(shape)


def _folded_concatenate(inputs: Any, params: Any, _: Value) -> Any:
    return np.concatenate(inputs, axis=params["dimension"])


# Operations on constants that are computed here.
FOLDED: Mapping[str, Callable[[Any, Any, Value], Any]] = {
    "iota": _folded_iota,
    "concatenate": _folded_concatenate,
    "lt": lambda given, _, __: given[0] < given[1],
    "le": lambda given, _, __: given[0] <= given[1],
    "gt": lambda given, _, __: given[0] > given[1],
    "ge": lambda given, _, __: given[0] >= given[1],
    "and": lambda given, _, __: given[0] & given[1],
    "or": lambda given, _, __: given[0] | given[1],
    "not": lambda given, _, __: ~given[0],
    "add": lambda given, _, __: given[0] + given[1],
    "sub": lambda given, _, __: given[0] - given[1],
    "mul": lambda given, _, __: given[0] * given[1],
    "div": lambda given, _, __: given[0] / given[1] if given[0].dtype.kind == "f" else given[0] // given[1],
    "neg": lambda given, _, __: -given[0],
    "sqrt": lambda given, _, __: np.sqrt(given[0]),
    "rsqrt": lambda given, _, __: 1 / np.sqrt(given[0]),
    "integer_pow": lambda given, params, __: given[0] ** params["y"],
    "select_n": lambda given, _, __: np.where(given[0], given[2], given[1]),
    "broadcast_in_dim": lambda given, params, value: MOVES["broadcast_in_dim"](given[0], params, value.shape),
    "reshape": lambda given, params, value: given[0].reshape(value.shape),
    "squeeze": lambda given, params, value: given[0].reshape(value.shape),
    "transpose": lambda given, params, value: MOVES["transpose"](given[0], params, value.shape),
    "slice": lambda given, params, value: MOVES["slice"](given[0], params, value.shape),
}
