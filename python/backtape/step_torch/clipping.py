"""Norms of gradients and clipping, as torch's own functions do it.

torch.nn.utils computes a norm in `_get_total_norm` and clips by it in `_clip_grads_with_norm_`;
`clip_grad_norm_` calls both, and training frameworks call them one by one. FSDP1 has a method of its
own. A norm that is a DTensor is not gathered here: a rank that is not recorded would not take part,
and the job would hang. Its value is known where the job gathers it itself, and what this rank holds
of it is declared either way.
"""

from collections.abc import Generator, Iterable, Sequence
from typing import Any

import torch
import torch.nn.utils.clip_grad

from backtape import frameworks
from backtape.step_torch.capture import Capture, changed
from backtape.step_torch.parts import Part, local
from backtape.torch_arrays import is_dtensor

# What torch adds to the norm before it divides the limit by it.
EPSILON = 1e-6

# The variable of torch's decorator that holds the undecorated function.
DECORATED = "func"

Gradients = torch.Tensor | Iterable[torch.Tensor]


def start(capture: Capture) -> None:
    """Observes torch's functions that norm and clip."""
    module = torch.nn.utils.clip_grad
    observers = {"clip_grad_value_": _by_value(capture)}
    if {"_get_total_norm", "_clip_grads_with_norm_"} <= vars(module).keys():
        observers |= {"_get_total_norm": _norm(capture), "_clip_grads_with_norm_": _clip(capture)}
    else:
        # Before torch 2.6 one function does all of it.
        observers["clip_grad_norm_"] = norm_and_clip(capture)
    for name, observer in observers.items():
        capture.patches.inside(module, name, DECORATED, observer)
    fsdp = frameworks.imported("torch.distributed.fsdp")
    if fsdp is not None and any(part.flat for part in capture.parts):
        kind = fsdp.FullyShardedDataParallel
        capture.patches.attribute(kind, "clip_grad_norm_", _by_fsdp1(capture))
    stage = frameworks.imported("torch.distributed.pipelining.stage")
    for kind in vars(stage).values() if stage is not None else ():
        if isinstance(kind, type) and "scale_grads" in vars(kind):
            capture.patches.attribute(kind, "scale_grads", _averaged(capture))
    tensor = frameworks.imported("torch.distributed.tensor")
    if tensor is not None:
        capture.patches.attribute(tensor.DTensor, "full_tensor", _gathered(capture))


def _norm(capture: Capture) -> Any:
    def observe(
        tensors: Gradients, norm_type: Any = 2.0, *_: Any, **__: Any
    ) -> Generator[None, Any, None]:
        gradients = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        normed, others = _parts_of_gradients(capture, gradients)
        parts = of_this_step(capture, normed)
        if normed and not parts:
            return
        others += len(normed) - len(parts)
        capture.take("reduced", parts)
        stage = stage_of(parts)
        value = yield
        add(capture, value, norm_type, parts, stage, others=others)

    return observe


def _clip(capture: Capture) -> Any:
    def observe(
        parameters: Gradients, max_norm: Any, total_norm: Any, *_: Any, **__: Any
    ) -> Generator[None, Any, None]:
        given = _parts_of_parameters(capture, parameters)
        parts = of_this_step(capture, given)
        if given and not parts:
            return
        capture.take("reduced", parts)
        entry = _same_norm(capture, total_norm, parts)
        rest = _left_of(capture, entry, parts)
        if entry is None and (entry := _given_norm(capture, total_norm)):
            entry["parameters"] += [p.name for p in parts if p.name not in entry["parameters"]]
        elif entry is None:
            kind = _last_kind(capture, parts)
            others = len(given) - len(parts)
            entry = add(capture, total_norm, kind, parts, stage_of(parts), others) | {"given": True}
            capture.norms[-1] = entry
        # The job may have changed it in place, as to combine the stages of a pipeline.
        entry |= {"value": kept(total_norm), "max_norm": float(max_norm), "epsilon": EPSILON}
        yield
        capture.note_clipped([*parts, *rest])
        for part in rest:
            part.announced = True

    return observe


def norm_and_clip(capture: Capture) -> Any:
    def observe(
        parameters: Gradients, max_norm: Any, norm_type: Any = 2.0, *_: Any, **__: Any
    ) -> Generator[None, Any, None]:
        given = _parts_of_parameters(capture, parameters)
        parts = of_this_step(capture, given)
        if given and not parts:
            return
        capture.take("reduced", parts)
        stage = stage_of(parts)
        value = yield
        entry = add(capture, value, norm_type, parts, stage, len(given) - len(parts))
        entry |= {"max_norm": float(max_norm), "epsilon": EPSILON}
        capture.note_clipped(parts)

    return observe


def _by_fsdp1(capture: Capture) -> Any:
    def observe(
        module: torch.nn.Module, max_norm: Any, norm_type: Any = 2.0
    ) -> Generator[None, Any, None]:
        own = set(map(id, module.parameters()))
        flat = {id(parameter) for parameter in _flat_parameters(module)}
        given = [
            part
            for part in capture.own
            if id(part.holder()) in own or (part.flat is not None and id(part.flat[0]) in flat)
        ]
        parts = of_this_step(capture, given)
        if given and not parts:
            return
        capture.take("reduced", parts)
        stage, before = stage_of(parts), len(capture.norms)
        value = yield
        # Where nothing is sharded it has called torch's own function, which was observed.
        if len(capture.norms) == before:
            entry = add(capture, value, norm_type, parts, stage, len(given) - len(parts))
            entry |= {"max_norm": float(max_norm), "epsilon": EPSILON}
        capture.note_clipped(parts)

    return observe


def _flat_parameters(module: torch.nn.Module) -> list[Any]:
    return [handle.flat_param for handle in getattr(module, "_all_handles", ())]


def _by_value(capture: Capture) -> Any:
    def observe(
        parameters: Gradients, clip_value: Any, *_: Any, **__: Any
    ) -> Generator[None, Any, None]:
        given = _parts_of_parameters(capture, parameters)
        parts = of_this_step(capture, given)
        if given and not parts:
            return
        rest = _left_of_groups(capture, parts)
        capture.take("reduced", [*parts, *rest])
        capture.clip_value = float(clip_value)
        for part in (*parts, *rest):
            part.clip_value = capture.clip_value
        yield
        capture.note_clipped([*parts, *rest])
        for part in rest:
            part.announced = True

    return observe


def _left_of_groups(capture: Capture, parts: list[Part]) -> list[Part]:
    """The other parameters of groups of an optimizer of which more than half are clipped by value. As with those
    that a norm counts, what the optimizer takes of them is held against it where no other call clips them. Fewer
    than half may be all that the job means to clip."""
    for step in capture.steps:
        step.parts()  # notes which optimizer has which
    given, left = {*parts}, []
    for place in {part.place for part in parts if part.place is not None}:
        of_place = (part for part in capture.own if part.place == place and not part.later)
        of_place = [part for part in of_place if part.gradient() is not None]
        if 2 * len(given & {*of_place}) > len(of_place):
            left += [part for part in of_place if part not in given and not part.clipped]
    return left


def _averaged(capture: Capture) -> Any:
    def observe(_: Any, factor: Any, *__: Any, **___: Any) -> Generator[None, Any, None]:
        # torch's pipelines divide what is summed over microbatches by their number.
        capture.divisor = float(factor)
        yield

    return observe


def _gathered(capture: Capture) -> Any:
    def observe(tensor: Any, *_: Any, **__: Any) -> Generator[None, Any, None]:
        result = yield
        for entry in capture.norms:
            if entry["source"] is tensor:
                entry["value"] = kept(result)
                # The job may clip by what it has gathered.
                entry["source"] = result

    return observe


def declared(
    capture: Capture,
    value: Any,
    max_norm: float | None,
    kind: Any,
    epsilon: float | None,
    parameters: Sequence[torch.Tensor] | None,
) -> None:
    """A norm that the job says itself."""
    given = [*capture.own] if parameters is None else _parts_of_parameters(capture, parameters)
    chosen = of_this_step(capture, given)
    if given and not chosen:
        return
    capture.take("reduced", chosen)
    entry = add(capture, value, kind, chosen, stage_of(chosen), len(given) - len(chosen))
    if max_norm is not None:
        entry |= {"max_norm": float(max_norm), "epsilon": epsilon}
        capture.note_clipped(chosen)
        for part in chosen:
            part.announced = True


def of_this_step(capture: Capture, parts: list[Part]) -> list[Part]:
    """Those of the parameters whose gradients are of the step that is recorded. Where a backward pass has
    come after an optimizer's step, as for a second task of the job, the gradients of what it stepped
    are of its next one."""
    if not any(part.later for part in parts):
        return parts
    for step in capture.steps:
        step.parts()  # notes which optimizer has which
    places = [(part, part.place) for part in parts if not part.later]
    return [part for part, place in places if place and not capture.steps[place[0]].ended]


def add(
    capture: Capture, value: Any, kind: Any, parts: list[Part], stage: str, others: int = 0
) -> dict[str, Any]:
    """Adds a norm to those of the step. Its number is read when the step ends, so nothing waits here.

    stage: what the gradients are now, which the norm is of.
    others: how many gradients it counts that are of no parameter of the models.
    """
    entry: dict[str, Any] = {
        "source": value,
        "value": kept(value),
        "local": local(value).clone() if kept(value) is None else None,
        "kind": None if kind is None else float(kind),
        "max_norm": None,
        "epsilon": None,
        "of": stage,
        "parameters": [part.name for part in parts],
        "others": others,
        # The optimizers that had stepped already.
        "after": [step for step in capture.steps if step.ended and set(step.parts()) & {*parts}],
    }
    capture.norms.append(entry)
    return entry


def kept(value: Any) -> Any:
    """A norm as it is now, or None for a DTensor that lies on several ranks."""
    if not isinstance(value, torch.Tensor):
        return float(value)
    if is_dtensor(value) and not all(axis.is_replicate() for axis in value.placements):
        return None
    return local(value).clone()


def stage_of(parts: list[Part]) -> str:
    """The stage at which the gradients are now. A gradient that was clipped before counts as `clipped`."""
    if any(part.clipped and not (part.announced and not changed(part)) for part in parts):
        return "clipped"
    return "unscaled" if any("unscaled" in part.taken for part in parts) else "reduced"


def _same_norm(capture: Capture, value: Any, parts: list[Part]) -> dict[str, Any] | None:
    """The norm that the job clips by, if it is one that was computed before: of these parameters, or of
    more, which the job clips in several calls."""
    names = {part.name for part in parts}
    for entry in reversed(capture.norms):
        if entry["source"] is value and names <= set(entry["parameters"]):
            return entry
    return None


def _left_of(capture: Capture, entry: dict[str, Any] | None, parts: list[Part]) -> list[Part]:
    """The other parameters that a norm counts: to be clipped by it, too, in another call. Where that does not
    come, what the optimizer takes of them is held against it."""
    names = set() if entry is None else {*entry["parameters"]} - {part.name for part in parts}
    return [part for part in capture.own if part.name in names and not part.clipped]


def _given_norm(capture: Capture, value: Any) -> dict[str, Any] | None:
    """The norm that the job made by itself and has clipped other parameters by already."""
    given = (entry for entry in capture.norms if entry.get("given"))
    return next((entry for entry in given if entry["source"] is value), None)


def _last_kind(capture: Capture, parts: list[Part]) -> float | None:
    """The kind of the norm that the job clips by, when it has made another number of what torch gave:
    as where stages of a pipeline add theirs up."""
    last = _last_norm(capture, parts)
    return None if last is None else last["kind"]


def _last_norm(capture: Capture, parts: list[Part]) -> dict[str, Any] | None:
    """The last norm, if it is of exactly these parameters."""
    if not capture.norms or set(capture.norms[-1]["parameters"]) != {part.name for part in parts}:
        return None
    return capture.norms[-1]


def _parts_of_parameters(capture: Capture, parameters: Gradients) -> list[Part]:
    """The parameters that take part in a norm: those of these tensors that have a gradient."""
    given = [parameters] if isinstance(parameters, torch.Tensor) else parameters
    ids = {id(parameter) for parameter in given if parameter.grad is not None}
    return [part for part in capture.own if any(id(tensor) in ids for tensor in part.tensors())]


def _parts_of_gradients(
    capture: Capture, gradients: list[torch.Tensor]
) -> tuple[list[Part], int]:
    """The parameters whose gradients these are, and how many gradients are of none. A gradient is known
    by the memory that it lies in, as a job may norm the local part of a DTensor."""
    places = {_place(gradient): 0 for gradient in gradients}
    parts = []
    for part in capture.own:
        # Beside that of a copy the parameter may have its own.
        own = [part.gradient(), part.own_gradient()]
        of_part = {_place(gradient.whole) for gradient in own if gradient is not None}
        known = of_part & places.keys()
        for place in known:
            places[place] += 1
        if known:
            parts.append(part)
    return parts, sum(count == 0 for count in places.values())


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    here = local(tensor)
    if not here.numel():
        return ("empty", id(tensor))
    return here.device, here.data_ptr(), here.numel()
