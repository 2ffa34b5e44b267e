"""Operations of autograd after which a row is still the logits of one token, and which token each row is of."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


class Unfollowed(Exception):
    """Why the graph cannot be followed, as the end of a sentence."""


@dataclass
class Rows:
    """Which token each row of a tensor is of, while operations between product and loss are followed."""

    index: torch.Tensor  # has the tensor's shape, but 1 in the dimension of the classes
    classes: int  # that dimension
    width: int  # its length


def kind_of(node: Any) -> str:
    """The operation of a node: "Mm" of MmBackward0."""
    return str(node.name()).rsplit("::", 1)[-1].split("Backward")[0]


def _reshaped(node: Any, rows: Rows, shape: tuple[int, ...]) -> Rows:
    """A view that keeps the classes in one dimension."""
    before = math.prod(rows.index.shape[: rows.classes])
    for dimension, length in enumerate(shape):
        if length == rows.width and math.prod(shape[:dimension]) == before:
            kept = (*shape[:dimension], 1, *shape[dimension + 1 :])
            return Rows(rows.index.reshape(kept), dimension, rows.width)
    raise Unfollowed("a view takes the classes apart")


def _same(node: Any, rows: Rows, shape: tuple[int, ...]) -> Rows:
    return rows


def _whole(node: Any, rows: Rows, shape: tuple[int, ...]) -> Rows:
    """A DTensor as a tensor."""
    length = rows.index.shape[: rows.classes] + (rows.width,) + rows.index.shape[rows.classes + 1 :]
    if tuple(length) != shape:
        raise Unfollowed("each rank takes its own part of the logits")
    return rows


def _transposed(node: Any, rows: Rows, shape: tuple[int, ...]) -> Rows:
    count = rows.index.dim()
    if kind_of(node) == "T":
        first, second = 0, count - 1
    else:
        first, second = (number_of(d, count) for d in (node._saved_dim0, node._saved_dim1))
    moved = {first: second, second: first}
    classes = moved.get(rows.classes, rows.classes)
    return Rows(rows.index.transpose(first, second), classes, rows.width)


def _permuted(node: Any, rows: Rows, shape: tuple[int, ...]) -> Rows:
    order = [number_of(d, rows.index.dim()) for d in node._saved_dims]
    return Rows(rows.index.permute(order), order.index(rows.classes), rows.width)


def _sliced(node: Any, rows: Rows, shape: tuple[int, ...]) -> Rows:
    dimension = number_of(node._saved_dim, rows.index.dim())
    start, end, step = (_signed(getattr(node, f"_saved_{name}")) for name in ("start", "end", "step"))
    if dimension != rows.classes:
        taken = rows.index.movedim(dimension, 0)[start:end:step].movedim(0, dimension)
        return Rows(taken, rows.classes, rows.width)
    if start not in (0, -rows.width) or step != 1:
        raise Unfollowed("the loss does not read the classes from the first one on")
    return Rows(rows.index, rows.classes, shape[dimension])


def _selected(node: Any, rows: Rows, shape: tuple[int, ...]) -> Rows:
    dimension = number_of(node._saved_dim, rows.index.dim())
    if dimension == rows.classes:
        raise Unfollowed("one class alone is read")
    classes = rows.classes - (dimension < rows.classes)
    return Rows(rows.index.select(dimension, int(node._saved_index)), classes, rows.width)


def _indexed(node: Any, rows: Rows, shape: tuple[int, ...]) -> Rows:
    """`logits[mask]`, or rows by their numbers: indices of leading dimensions only."""
    if any(is_packed(raw) for raw in node._raw_saved_indices if raw is not None):
        raise Unfollowed("a hook for saved tensors has the index that chooses rows")
    given = [index.cpu() if index is not None else None for index in node._saved_indices]
    while given and given[-1] is None:
        given.pop()
    taken = sum(1 if index is None or index.dtype != torch.bool else index.dim() for index in given)
    if any(index is None for index in given) or taken > rows.classes:
        raise Unfollowed("the classes are read by an index")
    index = rows.index[tuple(given)]
    return Rows(index, index.dim() - (rows.index.dim() - rows.classes), rows.width)


def number_of(dimension: Any, count: int) -> int:
    """A dimension, counted from the first one."""
    return _signed(dimension) % count


def _signed(value: Any) -> int:
    """A number of autograd, which gives a negative one as an unsigned one."""
    number = int(value)
    return number - 2**64 if number >= 2**63 else number


def _factor(node: Any) -> float:
    """The number that an operation multiplies by."""
    for name in ("other", "self"):
        if is_packed(getattr(node, f"_raw_saved_{name}", None)):
            continue
        value = getattr(node, f"_saved_{name}", None)
        if value is None or isinstance(value, (int, float)):
            number = value
        else:
            number = float(value) if value.dim() == 0 and not value.requires_grad else None
        if number is not None:
            return float(number)
    raise Unfollowed("they are multiplied by a tensor")


def is_packed(raw: Any) -> bool:
    """Whether a tensor that autograd saves is in the hands of a hook, which is to be asked once only: that of
    activation checkpointing or offloading."""
    return getattr(raw, "unpack_hook", None) is not None


# Operations after which a row is still the logits of one token.
FORWARD: dict[str, Callable[[Any, Rows, tuple[int, ...]], Rows]] = {
    "View": _reshaped,
    "UnsafeView": _reshaped,
    "ReshapeAlias": _reshaped,
    "Unsqueeze": _reshaped,
    "Squeeze": _reshaped,
    "Alias": _same,
    # What DDP puts around the outputs of its model where it looks for unused parameters.
    "_DDPSink": _same,
    # Of a DTensor, which has the shape of the whole.
    "Redistribute": _same,
    "_ToTorchTensor": _whole,
    "Clone": _same,
    "ToCopy": _same,
    "T": _transposed,
    "Transpose": _transposed,
    "Permute": _permuted,
    "Slice": _sliced,
    "Select": _selected,
    "Index": _indexed,
}

SCALES: dict[str, Callable[[Any], float]] = {"Mul": _factor, "Div": lambda node: 1 / _factor(node)}
