"""Which parameters are recorded, and which elements of them.

Of a gradient that is not recorded whole every rank declares the sum of the squares of all that it
holds: norms are judged by these.
"""

import fnmatch
import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from backtape._native import sums_of
from backtape.sampling import Region, Sampling
from backtape.step_torch.parts import Part, local
from backtape.torch_arrays import dtype_name, held_by_this_rank, is_dtensor, is_plain

# Elements that are widened to f64 at a time: the copy stays in the processor's cache.
CHUNK = 1 << 17

# What `sums_of` takes, in one pass where torch needs several.
SUMMED = (torch.float32, torch.bfloat16)

Globs = str | Sequence[str]
Groups = int | str | Sequence[int | str] | None


def choose(parts: list[Part], optimizers: Sequence[Any], names: Globs, groups: Groups) -> None:
    """Marks the parameters that are recorded: their name fits a glob, and they are in one of the
    groups, where there are any. Raises ValueError for a group that no optimizer has."""
    globs = [names] if isinstance(names, str) else list(names)
    asked = None if groups is None else listed(groups)
    chosen: set[int] = set()
    for wanted in asked or ():
        members = [
            id(parameter)
            for optimizer in optimizers
            for index, group in enumerate(optimizer.param_groups)
            if is_group(wanted, index, group)
            for parameter in group["params"]
        ]
        members += [
            id(part.in_groups())
            for part in parts
            for optimizer in optimizers
            if is_master_of(part, optimizer)
            and part.in_groups() is not None
            and part.master.group is not None
            and is_group(wanted, part.master.group, optimizer.param_groups[part.master.group])
        ]
        if not members:
            known = ", ".join(
                group_name(index, group)
                for optimizer in optimizers
                for index, group in enumerate(optimizer.param_groups)
            )
            raise ValueError(f"groups={groups!r}: no optimizer has a group {wanted!r}, but {known}")
        chosen.update(members)
    lost = [part.name for part in parts if part.master is not None and part.master.group is None]
    if asked is not None and lost:
        raise ValueError(
            f"groups={groups!r}: of {lost[0]} this rank has no elements, and does not know its group; use names="
        )
    for part in parts:
        fits = any(fnmatch.fnmatchcase(part.name, glob) for glob in globs)
        part.recorded = fits and (asked is None or id(part.in_groups()) in chosen)
    # The other names of a tied parameter are told with the first.
    recorded = {part.name for part in parts if part.recorded}
    for part in parts:
        if asked is not None and part.same_as is not None:
            part.recorded = part.recorded or part.same_as in recorded


def is_master_of(part: Part, optimizer: Any) -> bool:
    """Whether this optimizer has the parameter's copy, or part of it on other ranks."""
    return part.master is not None and part.master.owner is optimizer


def listed(groups: int | str | Sequence[int | str]) -> list[int | str]:
    """One or several groups as a list."""
    return [groups] if isinstance(groups, (int, str)) else list(groups)


def is_group(wanted: int | str, index: int, group: dict[str, Any]) -> bool:
    """Whether a job means this group of an optimizer: by its index, or by the name that it gave it."""
    return group.get("name") == wanted if isinstance(wanted, str) else index == wanted


def group_name(index: int, group: dict[str, Any]) -> str:
    """A group in words."""
    return f"{index} ({group['name']})" if "name" in group else str(index)


def shape_of(part: Part) -> tuple[int, ...] | None:
    """The shape of the whole parameter; None where this rank knows none."""
    if part.flat is not None:
        flat, index = part.flat
        return tuple(flat._shapes[index])
    if "global_shape" in part.where:
        return tuple(part.where["global_shape"])
    holder = part.holder()
    return None if holder is None else tuple(holder.shape)


def regions_of(sampling: Sampling | None, part: Part) -> tuple[Region, ...] | None:
    """The regions of a parameter that stand for it; None where it is recorded whole."""
    shape = None if sampling is None else shape_of(part)
    if sampling is None or shape is None:
        return None
    return sampling.regions(part.name, shape)


def note_squares(
    part: Part, stage: str, gradient: torch.Tensor, where: dict[str, Any]
) -> int | None:
    """Notes the sum of the squares of a gradient that is not recorded whole, and which part of it this
    rank holds, as `where` says. The number is read when the step ends, so nothing waits here. Returns the sum of the
    gradient's bits where it was found on the way."""
    bits = None
    if gradient.dtype in SUMMED and is_plain(gradient):
        name = dtype_name(gradient.dtype)
        part.squares[stage], bits = sums_of(gradient.data_ptr(), gradient.nbytes, name)
    else:
        part.squares[stage] = squares(gradient)
    if not part.held:
        pieces = where.get("pieces", [((0, None), where)])
        held = [held_at(gradient[slice(*rows)] if "pieces" in where else gradient, own) for rows, own in pieces]
        part.held = {
            "shape": shape_of(part),
            "held": [box for boxes in held for box in boxes],
            "dtype": dtype_name(gradient.dtype),
        }
    return bits


def held_at(gradient: torch.Tensor, where: dict[str, Any]) -> list[Region]:
    """The boxes of the parameter that this rank holds of a gradient at a place."""
    box = run = None
    if not is_dtensor(gradient) and "global_shape" in where:
        shape = tuple(where["global_shape"])
        box = (shape, tuple(where.get("offsets") or (0,) * len(shape)))
        if "flat_offset" in where:
            run = where["flat_offset"], tuple(where.get("extent") or shape)
    return held_by_this_rank(gradient, box, run)


def squares(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of the squares of all that this rank holds of a tensor, in f64, on its device."""
    here = local(tensor)
    if here.is_complex():
        here = torch.view_as_real(here)
    flat = here.reshape(-1)
    pieces = (flat,) if flat.is_cuda else flat.split(CHUNK)
    # torch widens all that it is given at once.
    norms = [torch.linalg.vector_norm(piece, dtype=torch.float64) for piece in pieces]
    return torch.stack(norms).square().sum()


def declared_squares(parts: Iterable[Part]) -> dict[str, Any]:
    """What is declared of the gradients that are not recorded whole, by the names of the parameters."""
    noted = [(part, stage) for part in parts for stage in part.squares]
    by_device: dict[torch.device, list[tuple[Part, str]]] = {}
    declared: dict[str, Any] = {}
    for part, stage in noted:
        total = part.squares[stage]
        if isinstance(total, torch.Tensor):
            by_device.setdefault(total.device, []).append((part, stage))
        else:
            declared.setdefault(part.name, dict(part.held))[stage] = in_json(total)
    # One wait for each device, and not one for each number.
    for those in by_device.values():
        sums = torch.stack([part.squares[stage] for part, stage in those]).tolist()
        for (part, stage), total in zip(those, sums):
            declared.setdefault(part.name, dict(part.held))[stage] = in_json(total)
    return declared


def in_json(total: float) -> float | str:
    """A sum as JSON has it."""
    return total if math.isfinite(total) else str(total)


def declared_sample(sampling: Sampling | None, parts: Iterable[Part]) -> dict[str, Any] | None:
    """What is declared of a sample: how it was asked for, and the boxes of each parameter; None where
    everything is recorded whole."""
    if sampling is None:
        return None
    sampled = {
        part.name: {"shape": shape_of(part), "boxes": part.regions}
        for part in parts
        if part.recorded and part.regions is not None
    }
    return {"sample": sampling.amount, "seed": sampling.seed, "parameters": sampled}
