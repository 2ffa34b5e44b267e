"""Operations that put the elements of a value to other places: what they do to the rows of a fact."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from backtape.attach_jax.facts import Along, Chosen, Labels, Row, Vector


def moved(fact: Any, name: str, params: dict[str, Any], shape: Sequence[int], result: Sequence[int]) -> Any:
    """The fact after one of `MOVES`; None where the classes are taken apart. shape, result: of the value
    before and after."""
    if isinstance(fact, Chosen):
        labels = moved(fact.labels, name, params, shape, result)
        vector = moved(fact.vector, name, params, shape, result)
        return None if labels is None or vector is None else Chosen(labels, vector)
    if isinstance(fact, Row):
        index = MOVES[name](fact.index, params, result)
        if fact.label_index is None:
            return replace(fact, index=index)
        return replace(fact, index=index, label_index=MOVES[name](fact.label_index, params, result))
    if isinstance(fact, (Vector, Labels)):
        return _vector(fact, name, params, result)
    if isinstance(fact, Along):
        dim = _dimension(fact.dim, name, params, shape, result)
        if dim is None or result[dim] != len(fact.numbers):
            return None
        return replace(fact, dim=dim)
    return None


def _vector(fact: Any, name: str, params: dict[str, Any], result: Sequence[int]) -> Any:
    """A fact with a dimension of classes: its index is 1 wide there."""
    shape = list(fact.index.shape)
    shape[fact.dim] = fact.width
    dim = _dimension(fact.dim, name, params, shape, result)
    if dim is None:
        return None
    kept = list(result)
    width, kept[dim] = kept[dim], 1
    if name == "slice":
        first = params["start_indices"][fact.dim]
        step = (params["strides"] or [1] * len(shape))[fact.dim]
        if (first, step) != (0, 1):
            return None
        start, stop = list(params["start_indices"]), list(params["limit_indices"])
        start[fact.dim], stop[fact.dim] = 0, 1
        params = params | {"start_indices": start, "limit_indices": stop}
        index = MOVES[name](fact.index, params, kept)
        fact = replace(fact, index=index, dim=dim, width=width)
        if isinstance(fact, Vector) and width != shape[dim]:
            is_known = fact.form.valid is not None and fact.form.valid < width
            fact = fact if is_known else replace(fact, form=replace(fact.form, valid=width, mask=None))
        return fact
    if width != fact.width:
        return None
    return replace(fact, index=MOVES[name](fact.index, params, kept), dim=dim)


def _dimension(
    dim: int, name: str, params: dict[str, Any], shape: Sequence[int], result: Sequence[int]
) -> int | None:
    """Where a dimension comes to lie; None where it is taken apart or goes."""
    if name == "transpose":
        return list(params["permutation"]).index(dim)
    if name == "broadcast_in_dim":
        return int(params["broadcast_dimensions"][dim])
    if name == "squeeze":
        gone = [int(d) for d in params["dimensions"]]
        return None if dim in gone else dim - sum(d < dim for d in gone)
    if name == "expand_dims":
        return dim
    if name == "reshape":
        before = math.prod(shape[:dim])
        for place, length in enumerate(result):
            if length == shape[dim] and math.prod(result[:place]) == before:
                return place
        return None
    return dim


def _broadcast(index: np.ndarray, params: dict[str, Any], result: Sequence[int]) -> np.ndarray:
    shape = [1] * len(result)
    for dim, place in enumerate(params["broadcast_dimensions"]):
        shape[int(place)] = index.shape[dim]
    return np.broadcast_to(index.reshape(shape), tuple(result))


def _sliced(index: np.ndarray, params: dict[str, Any], result: Sequence[int]) -> np.ndarray:
    steps = params["strides"] or [1] * index.ndim
    cuts = zip(params["start_indices"], params["limit_indices"], steps)
    return index[tuple(slice(int(first), int(stop), int(step)) for first, stop, step in cuts)]


def _reshaped(index: np.ndarray, params: dict[str, Any], result: Sequence[int]) -> np.ndarray:
    return index.reshape(tuple(result))


def _transposed(index: np.ndarray, params: dict[str, Any], result: Sequence[int]) -> np.ndarray:
    return index.transpose([int(d) for d in params["permutation"]])


MOVES = {
    "reshape": _reshaped,
    "squeeze": _reshaped,
    "expand_dims": _reshaped,
    "broadcast_in_dim": _broadcast,
    "transpose": _transposed,
    "slice": _sliced,
}

# Operations after which every element is what and where it was.
SAME = (
    "convert_element_type", "copy", "copy_p", "stop_gradient", "optimization_barrier", "sharding_constraint", "reshard",
    "reduce_precision", "name", "mesh_cast", "pvary", "pcast", "pbroadcast",
)  # fmt: skip
