"""Optimizers of frameworks that are around one of torch: they bring gradients to copies of more bits, take a
norm of them, clip them, have torch's optimizer step, and bring what it made back to the parameters.

Each framework has a file that finds these copies and says when a gradient is reduced. What all of
them do is here.
"""

import functools
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any

from backtape.step_torch.capture import Capture
from backtape.step_torch.clipping import EPSILON, add
from backtape.step_torch.parts import Master, Part

TOGETHER = "the loss scale is taken out together with the clipping"


@dataclass(eq=False)
class Outer:
    """An optimizer of a framework around one of torch, or around several."""

    capture: Capture
    optimizer: Any
    inner: list[Any]  # the optimizers of torch
    parts: list[Part]
    # What the loss was multiplied by; 1.0 where it was not.
    scale: Callable[[], float]
    max_norm: float  # 0.0 where nothing is clipped
    # The norm of the step that is over, without the loss scale; None where none was computed.
    norm: Callable[[Any], Any]
    # The loss scale is taken out before the norm is computed, and that is seen.
    unscales_first: bool = False
    # The gradients are reduced when the step begins.
    reduced_at_begin: bool = False
    # The state of a part of the parameters is in memory while these are stepped, and no longer.
    is_swapped_out: bool = False
    # What other ranks update of a parameter comes to this one after the step.
    is_gathered_late: bool = False
    # All groups of each optimizer of torch: a framework may show it one after the other.
    groups: list[list[dict[str, Any]]] = field(default_factory=list)
    stepped: set[int] = field(default_factory=set)  # ids of what stepped in the step that runs
    is_running: bool = False
    turns: int = 0
    scale_at_begin: float = 1.0  # the loss scale when the step began

    def continues_step(self, optimizer: Any) -> bool:
        """Whether an optimizer of torch goes on with the step that it has begun, with other parameters."""
        continues = self.is_running and id(optimizer) in self.stepped
        self.stepped.add(id(optimizer))
        return continues

    def groups_of(self, optimizer: Any) -> list[dict[str, Any]]:
        """All groups of an optimizer of torch."""
        known = dict(zip(map(id, self.inner), self.groups))
        return known.get(id(optimizer), optimizer.param_groups)

    def watch(self) -> None:
        """Observes the step."""

        def observe(optimizer: Any, *_: Any, **__: Any) -> Generator[None, Any, None]:
            if optimizer is not self.optimizer:
                return
            try:
                self._begin()
                result = yield
                self._end(result)
            finally:
                self.is_running = False

        observe_method(self.capture, self.optimizer, "step", observe)

    def take(self, stage: str, parts: Iterable[Part] | None = None) -> None:
        """Records the gradients that are there now."""
        parts = self.parts if parts is None else parts
        self.capture.take(stage, [part for part in parts if part.gradient() is not None])

    def unscaled(self) -> None:
        """Says that the loss scale was taken out, if there is one."""
        if self.capture.loss_scale is not None:
            self.take("unscaled")

    def _begin(self) -> None:
        self.is_running, self.turns = True, self.turns + 1
        self.stepped = set()
        if self.turns > 1:
            return
        scale = self.scale_at_begin = float(self.scale())
        if scale != 1.0:
            self.capture.loss_scale = scale
        if self.max_norm > 0:
            self.capture.note_clipped(self.parts)
        for part in self.parts:
            if scale != 1.0 and self.max_norm > 0 and not self.unscales_first:
                part.leave_out("unscaled", TOGETHER)
            self._value("before", part)
        if self.reduced_at_begin:
            self.take("reduced")
        for step in self._steps():
            step.groups = step.hyper_parameters()
            step.parts()  # notes which parameters it has
            if not self.is_swapped_out:
                step.take_values("before", step.own_parts(self.parts))

    def _end(self, result: Any) -> None:
        if self.turns > 1:
            return
        for step in self._steps():
            step.skipped = step.skipped or not self.stepped
            if self.stepped and not self.is_swapped_out:
                with self.capture.guarded(type(step.optimizer).__name__):
                    step.take_values("after", step.own_parts(self.parts))
        for part in self.parts if self.stepped else ():
            if self.is_gathered_late and part.master is not None:
                self._own_share(part, part.master)
            else:
                self._value("after", part)
        # The norm for which a step is left out clips nothing.
        value = self.norm(result) if self.stepped else None
        if value is not None:
            self._norm(value)

    def _steps(self) -> list[Any]:
        """What is recorded of the optimizers of torch."""
        steps = self.capture.steps
        return [step for step in steps if any(one is step.optimizer for one in self.inner)]

    def _norm(self, value: Any) -> None:
        parts = [
            part
            for part in self.parts
            # What other ranks hold of it has a gradient where this rank computed one.
            if (part.taken if part.updated().holder() is not None else part.passes)
        ]
        stage = "reduced" if self.capture.loss_scale is None else "unscaled"
        entry = add(self.capture, value, 2.0, parts, stage)
        # It was computed before the optimizer stepped.
        entry["after"] = []
        if self.max_norm > 0:
            entry |= {"max_norm": float(self.max_norm), "epsilon": EPSILON}

    def _own_share(self, part: Part, master: Master) -> None:
        with self.capture.guarded(part.name):
            value, copy = part.value(), master.holder()
            if value is not None and copy is not None:
                own = value.detach().reshape(-1)[master.begin : master.begin + copy.numel()]
                self.capture.record("after", part, own, where=master.where)

    def _value(self, when: str, part: Part) -> None:
        with self.capture.guarded(part.name):
            value = part.value()
            if value is not None:
                self.capture.record(when, part, value)


def observe_method(capture: Capture, owner: Any, name: str, observer: Any) -> None:
    """Observes a method by the class that defines it, or by the object where a job has put another in there. The
    observer takes the object first."""
    if name in vars(owner):
        capture.patches.attribute(owner, name, functools.partial(observer, owner))
        return
    kind = next((kind for kind in type(owner).__mro__ if name in vars(kind)), None)
    if kind is None:
        raise AttributeError(f"{type(owner).__name__} of this release has no {name}")
    capture.patches.attribute(kind, name, observer)
