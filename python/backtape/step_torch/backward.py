"""Gradients of each microbatch, before they are added to `.grad` and before any communication.

A microbatch is a backward pass. A counter for each model counts those that reach it, so a parameter
that gets no gradient in one pass has its later ones under the right index. Passes are told apart
where torch starts its engine, which checkpointing does again inside of a pass: that is still the
same one. What `torch.autograd.grad` computes goes into no `.grad`, and is not recorded.
"""

import functools
from collections import defaultdict
from collections.abc import Generator
from typing import Any

import torch

from backtape import frameworks
from backtape.step_torch import moves
from backtape.step_torch.capture import Capture, partial_axes
from backtape.step_torch.parts import Part, local
from backtape.step_torch.scales import Scales
from backtape.torch_parameters import in_backward

TWICE = "its gradient came in several pieces in one backward pass: only the first is recorded"
EARLY = (
    "a norm was taken, or the gradient was clipped, before this backward pass: what was recorded as the "
    "reduced gradient is not all of it"
)
FUSED = "a fused kernel of Megatron-LM adds its gradient to main_grad (gradient_accumulation_fusion)"
UNSEEN = "its gradient came without a backward pass that reaches its hook"


class Passes:
    """Numbers the backward passes that run, and those of them that reach each model."""

    def __init__(self, models: int, scales: Scales) -> None:
        self._scales = scales
        self._last: list[Any] = [None] * models  # the pass that last reached each model
        self._index = [-1] * models
        self._count = 0
        # The pass that runs; 0 where the engine was started unseen, None where it runs for
        # torch.autograd.grad.
        self._current: int | None = 0

    def observe(
        self, losses: Any, *_: Any, accumulate_grad: bool = False, **__: Any
    ) -> Generator[None, Any, None]:
        """Sees one run of the engine, which begins at the losses."""
        before = self._current
        if not accumulate_grad:
            self._current = None
        elif not in_backward():
            self._count += 1
            self._current = self._count
            self._scales.begin(losses)
        try:
            yield
        finally:
            self._current = before

    def microbatch(self, model: int) -> int | None:
        """The index of the pass that runs, which has reached this model; None where it fills no `.grad`."""
        if self._current is None:
            return None
        current: Any = self._current or ("graph task", torch._C._current_graph_task_id())
        if current != self._last[model]:
            self._last[model] = current
            self._index[model] += 1
        return self._index[model]


def start(capture: Capture) -> None:
    """Records gradients that are there already, and sets the hooks."""
    for part in capture.own:
        gradient = part.gradient()
        # Nothing that a job calls clears it, as it does `.grad`.
        if (carried := _not_reduced(part)) is not None:
            capture.record("stale", part, carried, addend=True, where=part.whole)
        elif gradient is not None and bool(local(gradient.own()).any()):
            capture.record("stale", part, gradient.own(), addend=True, where=gradient.where)
    moves.begin(capture.models, capture.own)
    passes = Passes(len(capture.models), capture.scales)
    if "_engine_run_backward" in vars(torch.autograd):
        capture.patches.attribute(torch.autograd, "_engine_run_backward", passes.observe)
    flat: defaultdict[int, list[Part]] = defaultdict(list)
    for part in capture.own:
        if not part.trainable:
            part.leave_out("grad", "it is frozen: it takes no gradient")
        elif part.flat is not None:
            flat[id(part.flat[0])].append(part)
        elif part.sharded is None:
            reached = part.holder() if part.leaf is None else part.leaf
            if reached is not None and reached.requires_grad:
                hook = functools.partial(_arrived, capture, passes, part)
                capture.handles.append(reached.register_hook(hook))
    _watch_flat(capture, passes, flat)
    _watch_sharded(capture, passes)
    _watch_ddp(capture)


def _not_reduced(part: Part) -> torch.Tensor | None:
    """The gradient of passes before the tape that FSDP2 has kept to this rank: the next reduction takes it too."""
    carried = getattr(part.sharded, "unsharded_accumulated_grad", None)
    if carried is None or not bool(local(carried).any()):
        return None
    return _placed(part.sharded, local(carried))


def _arrived(capture: Capture, passes: Passes, part: Part, gradient: torch.Tensor) -> None:
    """A hook of a tensor: records the gradient of this backward pass, which stays as it is."""
    with capture.guarded(part.name):
        reached = part.holder() if part.leaf is None else part.leaf
        if getattr(reached, "grad_added_to_main_grad", False):
            part.leave_out("grad", FUSED)  # What comes here is no gradient.
            return
        if part.place is not None and capture.steps[part.place[0]].ended:
            part.later = True  # This gradient is of the next update.
            return
        with capture.lock:
            index = passes.microbatch(part.model)
            if index is None:
                return
            # An optimizer may have its closure run several passes within its step.
            is_in_step = part.place is not None and capture.steps[part.place[0]].count > 0
            if "reduced" in part.taken and not is_in_step:
                part.leave_out("reduced", EARLY)
            if index not in part.passes and was_spent(capture, part):
                part.passes.clear()
                if part.values is not None:
                    part.values.is_fresh = True
                if "accumulated" not in part.taken:
                    part.reductions = 0
                part.first_pass = index
            part.loss_scale = capture.scales.current
            capture.microbatches[part.model] = max(capture.microbatches[part.model], index + 1)
            stale = part.summed() if part.summed is not None and not part.passes else None
            again = index in part.passes
            if not again:
                part.passes.append(index)
        if again:
            part.leave_out("grad", TWICE)
            return
        if stale is not None and bool(stale.any()):
            capture.record("stale", part, stale, addend=True, where=part.whole)
        moves.at_pass(part)
        part.partial.update(partial_axes(gradient))
        capture.record("grad", part, gradient, microbatch=index, addend=True, where=part.whole)


def was_spent(capture: Capture, part: Part) -> bool:
    """Whether the gradients of the passes before were for something else than the update that is
    recorded, as the first pass of SAM, or that of a generator which reaches the discriminator: `.grad`
    is empty again, and since the last pass this parameter changed or an optimizer stepped."""
    holder = part.holder()
    # FSDP keeps sums over microbatches elsewhere than in `.grad`, and so do optimizers of frameworks.
    is_elsewhere = part.summed is not None or part.master is not None and not part.master.follows
    if holder is None or part.sharded is not None or part.flat is not None or is_elsewhere:
        return False
    marks = (holder._version, *(step.count for step in capture.steps))
    before, part.marks = part.marks, marks
    if not part.passes:
        return False
    # torch does not count what is written through `.data`.
    if before == marks and not (holder.grad is None and moves.has_moved(part)):
        return False
    return holder.grad is None or not bool(local(holder.grad).any())


def _watch_ddp(capture: Capture) -> None:
    """Under DDP a gradient that was summed over microbatches stands in `.grad` for a moment only: after
    the last backward has added to it, and before its bucket is reduced."""
    for module in (module for model in capture.models for module in model.modules()):
        if not isinstance(module, torch.nn.parallel.DistributedDataParallel):
            continue
        own = {
            id(parameter)
            for name, parameter in module.module.named_parameters()
            if name not in module.parameters_to_ignore
        }
        for part in capture.own:
            holder = part.holder()
            if holder is not None and id(holder) in own and holder.requires_grad:
                hook = functools.partial(_added, capture, part, module)
                capture.handles.append(holder.register_post_accumulate_grad_hook(hook))


def _added(capture: Capture, part: Part, module: Any, parameter: torch.Tensor) -> None:
    """A hook of DDP's parameters, after a gradient was added to `.grad` and before it is reduced."""
    with capture.guarded(part.name):
        gradient = parameter.grad
        if module.require_backward_grad_sync and gradient is not None and part.passes:
            reduced_from(capture, part, gradient, whole=False)


def reduced_from(capture: Capture, part: Part, gradient: torch.Tensor, whole: bool) -> None:
    """Records what goes into a communication, unless it is the gradient of the only microbatch."""
    if part.later:  # It is of the optimizer's next step.
        return
    with capture.lock:
        part.reductions += 1
        first, several = part.reductions == 1, len(part.passes) > 1
    if not first:
        reason = "each of several backward passes was reduced by itself and added to the others"
        part.leave_out("accumulated", reason)
    elif several:
        part.taken.add("accumulated")
        where = part.whole if whole else part.where
        capture.record("accumulated", part, gradient, addend=True, where=where)


def _watch_flat(capture: Capture, passes: Passes, flat: dict[int, list[Part]]) -> None:
    """FSDP1: a flat parameter takes one gradient, which is cut here into those of its parameters.
    flat: the parameters by the id of their flat one."""

    def hook(parts: list[Part], gradient: torch.Tensor) -> None:
        for part, piece in _cut(parts, gradient):
            _arrived(capture, passes, part, piece)

    def observe(_: Any, handle: Any, *__: Any) -> Generator[None, Any, None]:
        parts = flat.get(id(handle.flat_param), [])
        if parts and handle.flat_param.grad is not None:
            for part, piece in _cut(parts, handle.flat_param.grad.detach()):
                reduced_from(capture, part, piece, whole=True)
        yield

    if not flat:
        return
    for parts in flat.values():
        parameter = parts[0].flat[0]  # type: ignore[index]
        if parameter.requires_grad:
            hook_of_one = functools.partial(hook, parts)
            capture.handles.append(parameter.register_hook(hook_of_one))
    runtime = frameworks.imported("torch.distributed.fsdp._runtime_utils")
    for name in ("_reduce_grad", "_reduce_grad_no_shard"):
        if name in vars(runtime):
            capture.patches.attribute(runtime, name, observe)


def _cut(parts: list[Part], gradient: torch.Tensor) -> list[tuple[Part, torch.Tensor]]:
    """The gradients of the parameters in that of the whole flat parameter, which has padding between."""
    flat = parts[0].flat[0]  # type: ignore[index]
    offsets, offset = [], 0
    for length, padding in zip(flat._numels_with_padding, flat._is_padding_mask):
        if not padding:
            offsets.append(offset)
        offset += length
    pieces = []
    for part in parts:
        index = part.flat[1]  # type: ignore[index]
        shape = flat._shapes[index]
        piece = gradient[offsets[index] : offsets[index] + shape.numel()].view(shape)
        pieces.append((part, piece))
    return pieces


def _watch_sharded(capture: Capture, passes: Passes) -> None:
    """FSDP2: the whole parameter, which it makes at the first forward, takes the gradient of each
    microbatch; what it reduces goes through one function."""
    parts = {id(part.sharded): part for part in capture.own if part.sharded is not None}
    if not parts:
        return
    watched: set[int] = set()

    def watch(sharded: Any) -> None:
        whole = getattr(sharded, "_unsharded_param", None)
        part = parts.get(id(sharded))
        if part is None or whole is None or id(whole) in watched or not whole.requires_grad:
            return
        watched.add(id(whole))
        hook = functools.partial(_arrived, capture, passes, part)
        capture.handles.append(whole.register_hook(hook))

    def unsharded(sharded: Any) -> Generator[None, Any, None]:
        yield
        watch(sharded)

    def reduced(
        sharded: list[Any], gradients: list[torch.Tensor], *_: Any, **__: Any
    ) -> Generator[None, Any, None]:
        for parameter, gradient in zip(sharded, gradients):
            if part := parts.get(id(parameter)):
                reduced_from(capture, part, _placed(parameter, gradient), whole=True)
            # FSDP frees the gradients by clearing its list.
            del gradient
        yield

    for part in parts.values():
        watch(part.sharded)
    kind = type(next(iter(parts.values())).sharded)
    capture.patches.attribute(kind, "to_unsharded", unsharded)
    groups = frameworks.imported(f"{kind.__module__}_group")
    if groups is not None and "foreach_reduce" in vars(groups):
        capture.patches.attribute(groups, "foreach_reduce", reduced)


def _placed(sharded: Any, gradient: torch.Tensor) -> torch.Tensor:
    """The whole gradient of FSDP2 as it lies on the mesh of tensor parallelism, if there is one."""
    whole = sharded._unsharded_param
    if not hasattr(whole, "device_mesh"):
        return gradient
    tensor = frameworks.used("torch.distributed.tensor")
    return tensor.DTensor.from_local(  # type: ignore[no-any-return]
        gradient,
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
