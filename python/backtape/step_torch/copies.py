"""Copies of parameters that a job has an optimizer update in their place, as mixed precision by hand keeps them.

They are found by their values: one tensor for each parameter, one for several of them, or on each rank its share of
all of them.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from backtape.step_torch import moves
from backtape.step_torch.capture import Capture
from backtape.step_torch.parts import Master, Part, cut, holder_of, state_of
from backtape.torch_arrays import is_dtensor

STALE = (
    "the copies changed and no parameter did before the tape ended: have it end after the copies are "
    "brought back to the parameters; if it does, nothing brings them back (master-stale)"
)

# A parameter, its elements in a tensor that holds several, and the place of these in the parameter.
Found = tuple[Part, tuple[int, int] | None, dict[str, Any]]


@dataclass
class Match:
    """What an optimizer holds, and the parameters of which that is the copy."""

    group: int
    tensor: torch.Tensor
    pieces: list[Found]
    is_share: bool = False

    def key(self) -> tuple[Any, ...] | None:
        """What tensors have in common that cannot be told apart: all their elements are one number."""
        flat = self.tensor.detach().reshape(-1)
        is_constant = bool((flat == flat[0]).all())
        return (tuple(self.tensor.shape), float(flat[0])) if is_constant else None


def attach(capture: Capture, optimizers: list[torch.optim.Optimizer]) -> None:
    """Finds the copies that the optimizers hold in place of parameters."""
    held = {
        id(tensor)
        for optimizer in optimizers
        for group in optimizer.param_groups
        for tensor in group["params"]
    }
    own = {id(part.in_groups()) for part in capture.own}
    lone = [part for part in capture.own if is_lone(part) and id(part.in_groups()) not in held]
    for optimizer in optimizers:
        foreign = [
            (index, tensor)
            for index, group in enumerate(optimizer.param_groups)
            for tensor in group["params"]
            if id(tensor) not in own and tensor.numel() and tensor.is_floating_point()
        ]
        if not lone or not foreign or any(is_dtensor(tensor) for _, tensor in foreign):
            continue
        matches = told_apart(matches_of(foreign, lone, capture.tape.rank), len(foreign))
        for match in matches:
            left = None if match.tensor.grad is None else state_of(match.tensor.grad)
            for part, span, where in match.pieces:
                holder = holder_of(match.tensor, None)
                part.master = Master(
                    holder, span, where, match.group, optimizer, follows=True, left=left
                )
                capture.copied.append(part)
        lone = [part for part in lone if part.master is None]
        if any(match.is_share for match in matches):
            for part in lone:
                part.master = Master(lambda: None, owner=optimizer, follows=True)


def matches_of(
    foreign: list[tuple[int, torch.Tensor]], lone: list[Part], rank: int
) -> Iterator[Match]:
    """The parameters of which each tensor is the copy, every one once."""
    for group, tensor in foreign:
        pieces = of_one(tensor, lone) or of_several(tensor, lone)
        share = [] if pieces else share_of(tensor, lone, rank)
        found = {id(part) for part, _, _ in pieces or share}
        # What is shared lies on several ranks, and the next group begins behind it.
        lone = [part for part in lone if id(part) not in found]
        if pieces or share:
            yield Match(group, tensor, pieces or share, bool(share))


def told_apart(matches: Iterator[Match], count: int) -> list[Match]:
    """Those of the matches that are none by chance. A tensor of one number is like any other of its shape: it counts
    where all that the optimizer holds was found, something that is not of one number among it, and such tensors are
    in one group alone, so that their order tells them apart."""
    listed = list(matches)
    keys = [match.key() for match in listed]
    telling = [match for match, key in zip(listed, keys) if key is None]
    if not telling or len(listed) < count:
        return telling
    groups: dict[Any, set[int]] = {}
    for match, key in zip(listed, keys):
        groups.setdefault(key, set()).add(match.group)
    return [match for match, key in zip(listed, keys) if key is None or len(groups[key]) == 1]


def is_lone(part: Part) -> bool:
    """Whether a copy may stand for the parameter: it is a plain tensor, and nobody says what stands for it."""
    value = part.holder()
    is_known = part.master is not None or part.flat is not None or part.sharded is not None
    is_plain = isinstance(value, torch.Tensor) and not is_dtensor(value) and value.numel() > 0
    return part.trainable and not is_known and is_plain


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
    if not found or bool(tensor[start:].any()):
        return []
    # Where as many are left of what is of one number, it may be the copy of those.
    alike = {(size, float(flat[0])) for size, flat in _constants(part for part, _, _ in found)}
    others = {(size, float(flat[0])) for size, flat in _constants(left)}
    return [] if alike & others else found


def _constants(parts: Iterable[Part]) -> Iterator[tuple[int, torch.Tensor]]:
    """The parameters of which all elements are one number: how many, and they."""
    for part in parts:
        flat = values_of(part).reshape(-1)
        if bool((flat == flat[0]).all()):
            yield flat.numel(), flat


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
    return part.holder().detach()  # type: ignore[union-attr]


def is_copy(tensor: torch.Tensor, values: list[torch.Tensor]) -> bool:
    """Whether a tensor, rounded to the format of these values, is these values one after the other."""
    flat, start = tensor.detach().reshape(-1), 0
    for value in values:
        piece = flat[start : start + value.numel()]
        start += value.numel()
        # Of as many bits it may be the parameter itself before the job replaced it.
        is_narrow = piece.itemsize <= value.itemsize
        if is_narrow or not torch.equal(piece.to(value.device, value.dtype), value.reshape(-1)):
            return False
    return start == flat.numel() > 0


def finish(capture: Capture) -> None:
    """Records the parameters to which the copies were brought back."""
    stepped = [part for part in capture.copied if part.stepped_by]
    are_brought_back = any(moves.has_changed(part) for part in stepped) or all(map(is_same, stepped))
    for part in stepped:
        if are_brought_back:
            capture.record("after", part, values_of(part))
        else:
            part.leave_out("after", STALE)


def is_same(part: Part) -> bool:
    """Whether what this rank has of the copy is the parameter when it is rounded, as where the step changed
    nothing."""
    master = part.updated()
    copy, value = master.holder(), values_of(part).reshape(-1)
    if copy is None:
        return True
    own = cut(copy, master.span).reshape(-1)
    start = master.where.get("flat_offset", 0)
    return is_copy(own, [value[start : start + own.numel()]])
