"""Copies of parameters that a job has an optimizer update in their place, as mixed precision by hand keeps them.

They are found by their values: one tensor for each parameter, one for several of them, or on each rank its share of
all of them.
"""

import functools
from collections.abc import Iterator
from typing import Any

import torch

from backtape.step_torch import moves
from backtape.step_torch.capture import Capture
from backtape.step_torch.parts import Master, Part, local

STALE = (
    "the copies changed and no parameter did before the tape ended: have it end after the copies are "
    "brought back to the parameters"
)

# A parameter, its elements in a tensor that holds several, and the place of these in the parameter.
Found = tuple[Part, tuple[int, int] | None, dict[str, Any]]


def attach(capture: Capture, optimizers: list[torch.optim.Optimizer]) -> None:
    """Finds the copies that the optimizers hold in place of parameters."""
    listed = [
        (optimizer, group, tensor)
        for optimizer in optimizers
        for group, of_group in enumerate(optimizer.param_groups)
        for tensor in of_group["params"]
    ]
    held = {id(tensor) for _, _, tensor in listed}
    own = {id(part.in_groups()) for part in capture.own}
    lone = [part for part in capture.own if is_lone(part) and id(part.in_groups()) not in held]
    sharing = None  # an optimizer of which each rank has a share
    for optimizer, group, tensor in listed:
        if id(tensor) in own or not lone or not tensor.is_floating_point():
            continue
        pieces = of_one(tensor, lone) or of_several(tensor, lone)
        if not pieces:
            pieces = share_of(tensor, lone, capture.tape.rank)
            sharing = optimizer if pieces else sharing
        for part, span, where in pieces:
            holder = functools.partial(_same, tensor)
            part.master = Master(holder, span, where, group, optimizer, follows=True)
            capture.copied.append(part)
        lone = [part for part in lone if part.master is None]
    for part in lone if sharing is not None else ():
        part.master = Master(lambda: None, owner=sharing, follows=True)


def is_lone(part: Part) -> bool:
    """Whether a copy may stand for the parameter: it is a plain tensor, and nobody says what stands for it."""
    value = part.holder()
    is_known = part.master is not None or part.flat is not None or part.sharded is not None
    return part.trainable and not is_known and value is not None and type(local(value)) is torch.Tensor


def of_one(tensor: torch.Tensor, lone: list[Part]) -> list[Found]:
    """The parameter of which it is the copy. Of several with the same values, as all ones, it is the first one that
    has none yet."""
    alike = (part for part in lone if values_of(part).shape == tensor.shape)
    own = next((part for part in alike if is_copy(tensor, [values_of(part)])), None)
    return [] if own is None else [(own, None, {})]


def of_several(tensor: torch.Tensor, lone: list[Part]) -> list[Found]:
    """The parameters of which it has the copies, one after the other, perhaps with zeros behind them. They are looked
    for in the order of the model, from the last one that was found on."""
    found: list[Found] = []
    left, start = list(lone), 0
    while left and tensor.ndim == 1 and start < tensor.numel():
        sizes = [values_of(part).numel() for part in left]
        fits = (
            at
            for at, (part, size) in enumerate(zip(left, sizes))
            if is_copy(tensor[start : start + size], [values_of(part)])
        )
        at = next(fits, None)
        if at is None:
            break
        part, size = left[at], sizes[at]
        where = {"global_shape": tuple(values_of(part).shape), "flat_offset": 0}
        found.append((part, (start, start + size), where))
        left = left[at + 1 :] + left[:at]
        start += size
    return found if found and not bool(tensor[start:].any()) else []


def share_of(tensor: torch.Tensor, lone: list[Part], rank: int) -> list[Found]:
    """The same where each rank has as many elements, in the order of the ranks, with zeros behind the last."""
    count, whole = tensor.numel(), sum(values_of(part).numel() for part in lone)
    if tensor.ndim != 1 or not count < whole or rank * count >= whole:
        return []
    pieces = list(spans(lone, rank * count, min((rank + 1) * count, whole)))
    values = []
    for part, (begin, end), where in pieces:  # type: ignore[misc]
        start = where["flat_offset"]
        values.append(values_of(part).reshape(-1)[start : start + end - begin])
    own = tensor[: sum(value.numel() for value in values)]
    return pieces if is_copy(own, values) else []


def spans(parts: list[Part], begin: int, end: int) -> Iterator[Found]:
    """Where the elements [begin, end) of the parameters, one after the other, lie in a tensor of them."""
    start = 0
    for part in parts:
        value = values_of(part)
        first, last = max(start, begin), min(start + value.numel(), end)
        if first < last:
            where = {"global_shape": tuple(value.shape), "flat_offset": first - start}
            yield part, (first - begin, last - begin), where
        start += value.numel()


def values_of(part: Part) -> torch.Tensor:
    """The values of a parameter."""
    return local(part.holder())  # type: ignore[arg-type]


def is_copy(tensor: torch.Tensor, values: list[torch.Tensor]) -> bool:
    """Whether a tensor, rounded to the format of these values, is these values one after the other."""
    flat, start = tensor.detach().reshape(-1), 0
    for value in values:
        piece = flat[start : start + value.numel()]
        start += value.numel()
        is_narrow = piece.itemsize < value.itemsize
        if is_narrow or not torch.equal(piece.to(value.device, value.dtype), value.reshape(-1)):
            return False
    return start == flat.numel() > 0


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def finish(capture: Capture) -> None:
    """Records the parameters to which the copies were brought back."""
    stepped = [part for part in capture.copied if part.stepped_by]
    has_changed = any(moves.has_changed(part) for part in stepped)
    for part in stepped:
        if has_changed:
            capture.record("after", part, values_of(part))
        else:
            part.leave_out("after", STALE)
