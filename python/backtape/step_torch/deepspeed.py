"""DeepSpeed: which parts of parameters its optimizers update on this rank, and when gradients are reduced.

What is read of it stands in these files of DeepSpeed: runtime/zero/stage_1_and_2.py,
runtime/zero/stage3.py, runtime/bf16_optimizer.py and runtime/fp16, at release 0.19.
"""

import functools
from collections.abc import Callable, Generator, Iterator
from typing import Any

import torch

from backtape import frameworks
from backtape.step_torch import clipping
from backtape.step_torch.capture import Capture
from backtape.step_torch.optimizers import inner_of
from backtape.step_torch.outer import Outer, observe_method
from backtape.step_torch.parts import Master, Part, holder_of, rename
from backtape.step_torch.reduction import Entry, axis_of, entry, name_of, ranks_of

MUON = "Muon of DeepSpeed makes the update in the place of the gradient, before it is clipped"

# How optimizers call the copies that this rank has, the parameters, and the tensors in which these lie, by group.
OF_BF16 = ("fp32_groups_flat_partition", "bf16_groups", "bf16_groups_flat")
OF_ZERO = ("single_partition_of_fp32_groups", "bit16_groups", "bit16_groups_flat")


def attach(capture: Capture) -> None:
    """Finds the optimizers of DeepSpeed among what the job hands over, and the copies that they keep."""
    if frameworks.imported("deepspeed") is None:
        return
    rename(capture.parts, name_of_expert)
    engine = engine_of([*capture.models, *capture.owners])
    by_id = {id(part.holder()): part for part in capture.own}
    found: list[Any] = []
    for given in capture.owners:
        optimizer = of_deepspeed(given, engine)
        copies = kind_of(optimizer)
        if copies is not None and not any(optimizer is other for other in found):
            found.append(optimizer)
            _attach(capture, engine, optimizer, copies, by_id)
    if engine is not None:
        _watch_plain(capture, engine)
        own = [by_id.get(id(parameter)) for parameter in engine.module.parameters()]
        parts = [part for part in own if part is not None and part.master is None]
        capture.reductions.append((parts, functools.partial(_of_engine, engine, parts)))
    # They are told at the end of the tape, when a job may have destroyed its process groups.
    for group in filter(None, (group for given in (engine, *found) for group in _groups(given))):
        ranks_of(group)


def _groups(given: Any) -> list[Any]:
    """The process groups over which an engine, or an optimizer of DeepSpeed, reduces gradients."""
    own = getattr(given, "real_dp_process_group", None)
    several = own.values() if isinstance(own, dict) else own if isinstance(own, list) else []
    names = ("seq_data_parallel_group", "dp_process_group")
    return [*(getattr(given, name, None) for name in names), *several]


def _attach(
    capture: Capture, engine: Any, optimizer: Any, copies: "Copies", by_id: dict[int, Part]
) -> None:
    """Finds the copies of one optimizer, and observes its step."""
    parts = []
    for parameter, master in copies(optimizer):
        part = by_id.get(id(parameter))
        if part is None:
            continue
        if getattr(parameter, "use_muon", False):
            part.refuse(MUON)
            continue
        master.owner = optimizer.optimizer
        part.master = master
        _place(part, parameter)
        parts.append(part)
    _watch(capture, engine, optimizer, parts, copies)
    capture.reductions.append((parts, functools.partial(_of_optimizer, engine, optimizer, parts)))


def name_of_expert(part: Part) -> str:
    """The name of a parameter. Ranks that have other experts have them under the same names."""
    groups, parameter = frameworks.imported("deepspeed.utils.groups"), part.holder()
    group = getattr(parameter, "group_name", None)
    if groups is None or group is None or getattr(parameter, "allreduce", True):
        return part.name
    size, rank = groups._get_expert_parallel_world_size(group), groups._get_expert_parallel_rank(group)
    return part.name if size == 1 else f"{part.name}@ep{rank}"


def engine_of(given: list[Any]) -> Any:
    """The engine among the models and optimizers of a job."""
    runtime = frameworks.imported("deepspeed.runtime.engine")
    kind = getattr(runtime, "DeepSpeedEngine", None)
    found = [one for one in given if kind is not None and isinstance(one, kind)]
    return found[0] if found else None


def of_deepspeed(given: Any, engine: Any) -> Any:
    """The optimizer of DeepSpeed that a job means: it may be in a wrapper of another library, and the job may hand
    over the optimizer of torch that is in it."""
    chain = [given]
    while len(chain) < 8 and inner_of(chain[-1]) is not None:
        chain.append(inner_of(chain[-1]))
    around = getattr(engine, "optimizer", None)
    if any(one is getattr(around, "optimizer", None) for one in chain):
        chain.append(around)
    return next((one for one in chain if kind_of(one) is not None), given)


Copies = Callable[[Any], Iterator[tuple[Any, Master]]]


def kind_of(optimizer: Any) -> Copies | None:
    """What lists the copies that an optimizer of DeepSpeed keeps; None for any other optimizer."""
    if not type(optimizer).__module__.startswith("deepspeed."):
        if not any(kind.__module__.startswith("deepspeed.") for kind in type(optimizer).__mro__):
            return None
    if hasattr(optimizer, "fp32_partitioned_groups_flat"):
        return of_stage3
    if any(hasattr(optimizer, copies) for copies, *_ in (OF_ZERO, OF_BF16)):
        return of_fragments
    if hasattr(optimizer, "fp32_groups_flat"):
        return of_flat_groups
    return of_groups if hasattr(optimizer, "fp32_groups") else None


def of_fragments(optimizer: Any) -> Iterator[tuple[Any, Master]]:
    """ZeRO stages 1 and 2, and the optimizer of bf16: each rank has a part of all parameters of a group, one after
    the other."""
    distributed = frameworks.used("torch.distributed")
    copies, groups, flats = next(own for own in (OF_ZERO, OF_BF16) if hasattr(optimizer, own[0]))
    for index, parameters in enumerate(getattr(optimizer, groups)):
        holder = functools.partial(_item, optimizer, copies, index)
        gradients = None
        if copies == OF_BF16[0]:
            name = "fp32_groups_gradient_flat_partition"
            gradients = functools.partial(_item, optimizer, name, index)
        size, flat = holder().numel(), _item(optimizer, flats, index)
        begin = distributed.get_rank(optimizer.real_dp_process_group[index]) * size
        for parameter in parameters:
            # DeepSpeed's own map is of the order in which the parameters were given, and is not right where
            # `round_robin_gradients` has them lie in another one.
            start = (parameter.data_ptr() - flat.data_ptr()) // flat.itemsize
            first = max(start, begin)
            last = min(start + parameter.numel(), begin + size)
            if first >= last:
                yield parameter, Master(lambda: None, group=index)
                continue
            where = {"global_shape": tuple(parameter.shape), "flat_offset": first - start}
            span = (first - begin, last - begin)
            yield parameter, Master(holder, span, where, index, gradients=gradients, index=index)


def of_stage3(optimizer: Any) -> Iterator[tuple[Any, Master]]:
    """ZeRO stage 3: each rank has a part of each parameter."""
    for index, parameters in enumerate(optimizer.fp16_groups):
        holder = functools.partial(_item, optimizer, "fp32_partitioned_groups_flat", index)
        group = optimizer.sub_group_to_group_id[index]
        for parameter in parameters:
            _, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start, length = own_range(parameter)
            if not length:
                yield parameter, Master(lambda: None, group=group)
                continue
            where = {"global_shape": tuple(parameter.ds_shape), "flat_offset": start}
            span = (offset, offset + length)
            yield parameter, Master(holder, span, where, group, index=index)


def of_flat_groups(optimizer: Any) -> Iterator[tuple[Any, Master]]:
    """The optimizer of f16 without ZeRO: the copies of a group's parameters, one after the other."""
    for index, parameters in enumerate(optimizer.fp16_groups):
        holder = functools.partial(_item, optimizer, "fp32_groups_flat", index)
        start = 0
        for parameter in parameters:
            where = {"global_shape": tuple(parameter.shape), "flat_offset": 0}
            span = (start, start + parameter.numel())
            yield parameter, Master(holder, span, where, index, follows=True)
            start += parameter.numel()


def of_groups(optimizer: Any) -> Iterator[tuple[Any, Master]]:
    """The same with one copy for each parameter."""
    for index, (parameters, copies) in enumerate(zip(optimizer.fp16_groups, optimizer.fp32_groups)):
        for parameter, copy in zip(parameters, copies):
            yield parameter, Master(holder_of(copy, None), group=index, follows=True)


def own_range(parameter: Any) -> tuple[int, int]:
    """Where the part that this rank has of a parameter of stage 3 begins, and its length without what
    fills it up."""
    size = parameter.partition_numel()
    start = frameworks.used("torch.distributed").get_rank(parameter.ds_process_group) * size
    return start, max(min(size, parameter.ds_numel - start), 0)


def _item(optimizer: Any, name: str, index: int) -> torch.Tensor | None:
    return getattr(optimizer, name)[index]  # type: ignore[no-any-return]


def _place(part: Part, parameter: Any) -> None:
    """Notes that a parameter of stage 3 is whole only while it is used."""
    if not hasattr(parameter, "ds_tensor"):
        return
    start, length = own_range(parameter)
    part.leaf, part.span = parameter, (0, length)
    part.holder = (lambda: parameter.ds_tensor) if length else (lambda: None)
    part.where = {"global_shape": tuple(parameter.ds_shape), "flat_offset": start}


def _watch(
    capture: Capture, engine: Any, optimizer: Any, parts: list[Part], copies: Copies
) -> None:
    """Observes a step of an optimizer of DeepSpeed. What the engine is configured by is what is meant."""
    has_config = hasattr(optimizer, "loss_scale_config")

    def scale() -> float:
        held = optimizer.loss_scale_config.cur_scale if has_config else getattr(optimizer, "loss_scale", 1.0)
        return float(held)

    def norm(_: Any) -> Any:
        value = getattr(optimizer, "_global_grad_norm", None)
        # One optimizer keeps the norm with the loss scale in it.
        return value if value is None or copies is not of_groups else float(value) / outer.scale_at_begin

    inner = optimizer.optimizer
    own = getattr(optimizer, "clip_grad", 0.0) if engine is None else engine.gradient_clipping()
    max_norm = float(own or 0.0)
    groups = [inner.param_groups]
    outer = Outer(capture, optimizer, [inner], parts, scale, max_norm, norm, groups=groups)
    of_zero = hasattr(optimizer, OF_ZERO[0]) or copies is of_stage3
    outer.reduced_at_begin = not of_zero
    outer.is_swapped_out = bool(getattr(optimizer, "swap_optimizer", False))
    capture.outers.append(outer)
    outer.watch()
    if of_zero:
        _watch_zero(capture, outer)


def _watch_zero(capture: Capture, outer: Outer) -> None:
    """Observes when the gradients of ZeRO are in the place of those of the copies, and when they are not brought
    there, as some are infinite."""

    def unscaled(given: Any, *_: Any, **__: Any) -> Generator[None, Any, None]:
        if given is not outer.optimizer or outer.turns > 1:
            return
        now = [part for part in outer.parts if part.gradient() is not None]
        capture.take("reduced", now)
        yield
        if not outer.max_norm and capture.loss_scale is not None:
            capture.take("unscaled", now)
        elif not outer.max_norm:
            capture.same(now)

    def updated(
        given: Any, has_overflow: Any = False, *_: Any, **__: Any
    ) -> Generator[None, Any, None]:
        if given is outer.optimizer and outer.is_running and has_overflow and outer.turns == 1:
            for part in outer.parts:
                part.master.gradients = functools.partial(_averaged, given, part.master)
            capture.take("reduced", outer.parts)
            for part in outer.parts:
                part.master.gradients = None
        yield

    observers = {"unscale_and_clip_grads": unscaled, "_update_scale": updated}
    for name, observer in observers.items():
        observe_method(capture, outer.optimizer, name, observer)


def _averaged(optimizer: Any, master: Master) -> torch.Tensor | None:
    """The gradients of the parts that this rank has, before they are one tensor."""
    if master.holder() is None:
        return None
    averaged = optimizer.averaged_gradients.get(master.index)
    return None if averaged is None else torch.cat([one.reshape(-1) for one in averaged])


def _watch_plain(capture: Capture, engine: Any) -> None:
    """DeepSpeed's own function that norms and clips gradients of f32."""
    runtime = frameworks.imported("deepspeed.runtime.engine")
    if "clip_grad_norm_" in vars(runtime):
        capture.patches.attribute(runtime, "clip_grad_norm_", clipping.norm_and_clip(capture))


def _of_engine(
    engine: Any, parts: list[Part], capture: Capture, reductions: dict[str, list[Entry]]
) -> None:
    """What the engine reduces of parameters that no optimizer of DeepSpeed has."""
    ranks = ranks_of(engine.seq_data_parallel_group)
    axis = axis_of(capture.tape.mesh, ranks, "data")
    told = _operation(engine, len(ranks), len(ranks), engine)
    for part in parts:
        if part.trainable:
            reductions[part.name] += _of_tied(capture, engine, part)
            sent = name_of(engine.communication_data_type)
            reductions[part.name].append(entry(axis, ranks=ranks, dtype=sent, **told))


def _of_optimizer(
    engine: Any,
    optimizer: Any,
    parts: list[Part],
    capture: Capture,
    reductions: dict[str, list[Entry]],
) -> None:
    """What is reduced of the parameters that an optimizer of DeepSpeed has."""
    whole = getattr(optimizer, "dp_process_group", None) or getattr(
        engine, "seq_data_parallel_group", None
    )
    for part in parts:
        group, sent = whole, _sent(engine, optimizer, part)
        own = getattr(optimizer, "real_dp_process_group", None)
        if isinstance(own, (list, dict)) and part.master is not None:
            group = own[part.master.group]
        if group is None:
            part.leave_out("reduce", "hand over the engine of DeepSpeed as the model")
            continue
        ranks = ranks_of(group)
        told = _operation(engine or optimizer, len(ranks), len(ranks_of(whole)), optimizer)
        axis = axis_of(capture.tape.mesh, ranks, "data")
        dtype = None if sent is None else name_of(sent)
        reductions[part.name] += _of_tied(capture, engine, part)
        reductions[part.name].append(entry(axis, ranks=ranks, dtype=dtype, **told))


def _sent(engine: Any, optimizer: Any, part: Part) -> Any:
    """The dtype in which the gradient of a parameter is sent."""
    sent = getattr(engine or optimizer, "communication_data_type", None)
    of_all = getattr(optimizer, "communication_data_type", None)
    if of_all is not None and hasattr(optimizer, "get_param_comm_dtype"):
        # Under autocast by DeepSpeed it is that of the parameter's module.
        own = optimizer.get_param_comm_dtype(part.holder() if part.leaf is None else part.leaf)
        sent = own if own != of_all else sent
    # What is sent in more bits is rounded to those of the gradient.
    summed = getattr(optimizer, "gradient_accumulation_dtype", sent)
    return summed if sent is not None and summed.itemsize < sent.itemsize else sent


def _of_tied(capture: Capture, engine: Any, part: Part) -> Iterator[Entry]:
    """The sum over the stages of a pipeline that share a parameter."""
    module = getattr(engine, "module", None)
    if not hasattr(module, "get_tied_weights_and_groups"):
        return
    for weight, group in module.get_tied_weights_and_groups():
        if weight is part.holder():
            ranks = ranks_of(group)
            yield entry(axis_of(capture.tape.mesh, ranks, "pipe"), "sum", ranks, name_of(weight.dtype))


def _operation(configured: Any, count: int, size: int, owner: Any) -> dict[str, Any]:
    """What is done over `count` ranks, where `size` ranks have other data: the gradients of experts are divided by the
    number of all, and those of parts of a sequence by the number of sequences."""
    if not getattr(configured, "gradient_average", True):
        return {"op": "sum"}
    divisor = size / float(getattr(owner, "sequence_parallel_size", 1) or 1)
    return {"op": "mean"} if divisor == count else {"op": "sum", "divisor": divisor}
