"""The optimizer's step: parameters, state and hyper-parameters before and after it.

torch calls an optimizer's hooks around `step`, however it is called: by the job, by GradScaler or
by a wrapper. Of an optimizer that calls the `step` of its base class, the outer call counts.
"""

import contextlib
import functools
import math
import numbers
from collections.abc import Callable, Generator
from typing import Any

import torch

from backtape import frameworks
from backtape.failopen import text_of
from backtape.step_torch import moves, reduction
from backtape.step_torch.capture import WHOLE, Capture, changed
from backtape.step_torch.choice import is_master_of
from backtape.step_torch.parts import Part, cut, local

LATER = "an optimizer stepped it once more, by another gradient: the first step is recorded"
ANEW = (
    "the optimizer called its closure several times: the reduced gradient is that of the first call, "
    "and gradients of microbatches are those of all calls"
)

# Switches that apex and DeepSpeed keep beside the groups.
OF_ALL_GROUPS = ("adam_w_mode",)

# What torch keeps in a group beside hyper-parameters.
NOT_HYPER = {"params", "param_names"}


class Step:
    """The step of one optimizer, which `given` is or wraps."""

    def __init__(self, capture: Capture, index: int, given: Any) -> None:
        self.capture = capture
        self.index = index
        self.given = given
        self.optimizer = unwrapped(given)
        self.sharded = is_zero(self.optimizer)
        # The optimizer of a framework around it.
        around = (one for one in capture.outers if any(self.optimizer is own for own in one.inner))
        self.outer = next(around, None)
        for part in capture.own:
            if is_master_of(part, self.optimizer):
                part.place = part.place or (index, part.master.group)
                part.places.add(part.place)
        self.groups: list[dict[str, Any]] = []
        # Its tensors that are no parameters, when it stepped: a copy of more bits has a gradient.
        self.others: list[dict[str, Any]] = []
        self.count = 0  # how often the optimizer has stepped
        self.ended = False  # its first step is over
        self.depth = 0  # calls of `step` that run: one inside another is that of a base class
        self.has_closure = False  # the job has its gradients computed inside of the step
        self.again = False  # it stepped once more, and no backward pass came between
        self.skipped = False

    def is_of(self, optimizer: Any) -> bool:
        """Whether this is the step of that optimizer."""
        return optimizer is self.given or optimizer is self.optimizer

    def start(self) -> None:
        """Sets the hooks."""
        optimizer = self.optimizer
        self.capture.handles += [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
        ]
        # torch sets the hooks of a class when an optimizer of just that class is made: the `step` that a
        # job's own class calls of its base may have none.
        for kind in type(optimizer).__mro__[1:]:
            if kind is torch.optim.Optimizer:
                break
            step = vars(kind).get("step")
            if step is not None and not getattr(step, "hooked", False):
                self.capture.patches.attribute(kind, "step", self._of_base)

    def parts(self) -> list[Part]:
        """The parameters of which it has values on this rank; the group of each is noted."""
        groups = {
            id(parameter): group
            for group, of_group in enumerate(self.optimizer.param_groups)
            for parameter in of_group["params"]
        }
        parts, steps = [], self.capture.steps
        for part in self.capture.own:
            listed = part.in_groups()
            if listed is not None and id(listed) in groups:
                is_copy = is_master_of(part, self.optimizer)
                place = (self.index, part.master.group if is_copy else groups[id(listed)])
                part.places.add(place)
                # What is recorded is the step of the first optimizer that takes one.
                if part.place is None or self.count and not steps[part.place[0]].count:
                    part.place = place
                if part.updated().holder() is not None:
                    parts.append(part)
        return parts

    def first_parts(self) -> list[Part]:
        """The same without those that another optimizer has stepped before."""
        return [part for part in self.parts() if part.place and part.place[0] == self.index]

    def own_parts(self, parts: list[Part]) -> list[Part]:
        """Those of some parameters that it steps on this rank."""
        own = [part for part in parts if part.place is not None and part.place[0] == self.index]
        return [part for part in own if part.updated().holder() is not None]

    def hyper_parameters(self) -> list[dict[str, Any]]:
        """What each group sets."""
        optimizer = self.optimizer
        # Switches that others put into the groups change nothing of what a class of torch does.
        is_of_torch = type(optimizer).__module__.startswith("torch.optim")
        known = set(optimizer.defaults) if is_of_torch else None
        groups = optimizer.param_groups if self.outer is None else self.outer.groups_of(optimizer)
        own = {name: vars(optimizer)[name] for name in OF_ALL_GROUPS if name in vars(optimizer)}
        switches = {name: bool(value) for name, value in own.items()}
        return [switches | hyper_parameters(group, known) for group in groups]

    def foreign(self) -> list[torch.Tensor]:
        """The tensors that the optimizer has and that are of no parameter of the models."""
        own = {id(part.in_groups()) for part in self.capture.own}
        listed = [
            parameter for group in self.optimizer.param_groups for parameter in group["params"]
        ]
        return [parameter for parameter in listed if id(parameter) not in own]

    def _before(self, _: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Runs before the step. Returns other arguments of it where one is a closure."""
        # To look into a step that is compiled would break its graph, and change its arithmetic.
        if torch.compiler.is_compiling():
            return None
        with self.capture.guarded(type(self.optimizer).__name__):
            self.depth += 1
            if self.depth > 1:
                self._begin_inner()
                return None
            # A framework steps the groups of an optimizer one by one.
            if self.outer is None or not self.outer.continues_step(self.optimizer):
                self.count += 1
            self.has_closure = callable(options.get("closure")) or (
                len(args) > 1 and callable(args[1])
            )
            self._note_gradients()
            if self.count > 1:
                return None
            reduction.note(self.capture)
            # What torch tells its fused optimizers, which take the scale out themselves.
            infinite = getattr(self.optimizer, "found_inf", None)
            self.skipped = infinite is not None and bool(local(infinite))
            parts = self.first_parts()
            if getattr(self.optimizer, "grad_scale", None) is not None:
                for part in parts:
                    part.leave_out("unscaled", "the optimizer takes the loss scale out itself")
            # Those of a framework are known since its own step began.
            self.groups = self.hyper_parameters() if self.outer is None else self.groups
            self.others = [
                {"shape": list(one.shape), "grad": one.grad is not None} for one in self.foreign()
            ]
            for part in parts:
                moves.at_step(part)
            if self.outer is None or self.outer.is_swapped_out:
                self.take_values("before", parts)
            if callable(options.get("closure")):
                return args, options | {"closure": self._watched(options["closure"], parts)}
            if len(args) > 1 and callable(args[1]):
                return (args[0], self._watched(args[1], parts), *args[2:]), options
            self._take_gradients(parts)
        return None

    def _of_base(self, optimizer: Any, *_: Any, **__: Any) -> Generator[None, Any, None]:
        """Sees the `step` of a base class, which the job's own class calls."""
        is_inner = optimizer is self.optimizer and self.depth > 0
        if is_inner:
            with self.capture.guarded(type(self.optimizer).__name__):
                self._begin_inner()
        yield
        self.ended = self.ended or is_inner

    def _begin_inner(self) -> None:
        """Takes what a job's own class changed in its `step` before it called that of its base."""
        if self.count == 1 and not self.ended:
            self.groups = self.hyper_parameters()
            if not self.has_closure:
                self._take_gradients(self.first_parts())

    def _note_gradients(self) -> None:
        """Notes of which parameters it steps now, and whether it stepped them before by the same gradient."""
        held = self.parts()
        own = [part for part in held if self.has_closure or part.gradient() is not None]
        for part in own:
            # A gradient that the job wrote between two steps is of the second of them.
            if part.stepped_by and part.stepped is not None and part.stepped != gradient_of(part):
                part.later = True
                part.leave_out("later_steps", LATER)
            else:
                part.stepped_by.add(self.index)
        is_second = self.count == 2 and bool(own) and not self.has_closure
        if is_second and not any(part.later for part in held):
            self.again = True

    def _watched(self, closure: Callable[[], Any], parts: list[Part]) -> Callable[[], Any]:
        """A closure with which a job has its gradients computed inside of the step: they are recorded
        when it has run for the first time."""
        calls = 0

        @functools.wraps(closure)
        def watched() -> Any:
            nonlocal calls
            result = closure()
            calls += 1
            with self.capture.guarded(type(self.optimizer).__name__):
                if calls == 1:
                    self._take_gradients(parts)
                for part in parts if calls == 2 else ():
                    part.leave_out("grad", ANEW)
            return result

        return watched

    def _after(self, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        with self.capture.guarded(type(self.optimizer).__name__):
            self.depth -= 1
            # What the step of the base took is taken, whatever the job's own does after it.
            self.ended = True
            # What is around an optimizer records them before and after its own step, as it may change them.
            if self.depth == 0 and self.count == 1 and (self.outer is None or self.outer.is_swapped_out):
                self.take_values("after", self.first_parts())
            for part in self.parts() if self.depth == 0 else ():
                part.stepped = gradient_of(part)

    def _take_gradients(self, parts: list[Part]) -> None:
        """Records the gradient that the optimizer takes: under `clipped` where it is another than that
        which was recorded before."""
        capture = self.capture
        if capture.own_clipping is not None:
            with capture.guarded("clipping by the job's own code"):
                capture.own_clipping.look(parts)
        for part in parts:
            seen = bool(part.taken & {"reduced", "unscaled"})
            with capture.guarded(part.name):
                capture.take_unscaled_copy(part)
                if part.clipped or (seen and part.recorded and changed(part) and not is_widened(part)):
                    capture.take("clipped", [part])
                elif not seen:
                    capture.take("reduced", [part])

    def take_values(self, when: str, parts: list[Part]) -> None:
        """Records the parameters or the copies that it updates, and the optimizer's state."""
        state = self.optimizer.optim.state if self.sharded else self.optimizer.state
        for part in parts:
            self._take_value(when, part)
            holder = part.updated().holder()
            if self.sharded and self.optimizer._param_to_rank.get(holder) != self.optimizer.rank:
                part.leave_out("state", "another rank holds the optimizer's state of it")
                continue
            for name, entry in dict(state.get(holder, {})).items():
                self._take_state(when, part, holder, str(name), entry)

    def _take_value(self, when: str, part: Part) -> None:
        value, master = part.value(), part.master
        is_copy = master is not None and master.holder() is not None
        # A copy is brought back to the parameter after the step, and what does that records it.
        if value is not None and self.outer is None and (not is_copy or when == "before"):
            self.capture.record(when, part, value)
        if is_copy:
            copy = cut(master.holder(), master.span).detach()
            self.capture.record(f"master_{when}", part, copy, where=master.where)

    def _take_state(self, when: str, part: Part, holder: Any, name: str, entry: Any) -> None:
        if entry is None:  # a slot that the optimizer does not use, as SGD's without momentum
            return
        number, updated = number_of(entry, name, holder), part.updated()
        if number is not None:
            pair = part.scalars.setdefault(name, [None, None])
            pair[when == "after"] = number
        elif not isinstance(entry, torch.Tensor):
            part.leave_out(f"state.{name}", f"it is a {type(entry).__name__} and no tensor")
        elif updated.where and entry.numel() != holder.numel():
            part.leave_out(f"state.{name}", "it has not the shape of the flattened parameters")
        elif updated.where:
            own = cut(entry.detach(), updated.span)
            self.capture.record(f"state_{when}.{name}", part, own, where=updated.where)
        else:
            self.capture.record(f"state_{when}.{name}", part, entry.detach(), where=WHOLE)


def start(capture: Capture) -> None:
    """Sets the hooks of every optimizer."""
    for given in capture.owners:
        with capture.guarded(type(given).__name__):
            try:
                step = Step(capture, len(capture.steps), given)
            except TypeError as error:
                capture.unknown.append(str(error))
                raise
            capture.steps.append(step)
            step.start()
    if any(step.foreign() for step in capture.steps):
        # An optimizer that holds other tensors in place of parameters: whether these change tells.
        capture.unheld = [
            part for part in capture.not_stepped() if part.place is None and part.trainable
        ]
        take_unheld(capture, "before")


def take_unheld(capture: Capture, when: str) -> None:
    """Records the values of parameters that no optimizer holds."""
    for part in capture.unheld:
        value = part.value()
        if value is not None:
            capture.record(when, part, value)


def known(owners: list[Any]) -> list[torch.optim.Optimizer]:
    """The optimizers of torch among what a job hands over."""
    found = []
    for given in owners:
        with contextlib.suppress(TypeError):
            found.append(unwrapped(given))
    return found


def unwrapped(given: Any) -> torch.optim.Optimizer:
    """The optimizer of torch that steps: wrappers have it as `.optimizer`. Raises TypeError where there
    is none."""
    optimizer = found = given
    for _ in range(8):
        # A framework has optimizers around torch's that are no optimizers of torch.
        optimizer = inner_of(optimizer)
        if optimizer is None:
            break
        found = optimizer if isinstance(optimizer, torch.optim.Optimizer) else found
    optimizer = found
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"{type(given).__name__} is no torch.optim.Optimizer and has none as .optimizer: its "
            "step cannot be recorded; hand over the optimizer that it wraps"
        )
    if not hasattr(optimizer, "_optimizer_step_pre_hooks"):
        raise TypeError(
            f"{type(given).__name__} does not set up what torch.optim.Optimizer does: its step cannot "
            "be recorded; hand over the optimizer that it wraps, if its own step is the job's"
        )
    return optimizer


def is_widened(part: Part) -> bool:
    """Whether the gradient of a copy is that of the parameter in more bits, which was recorded."""
    holder, gradient = part.holder(), part.gradient()
    is_copy = part.master is not None and part.master.follows
    if not is_copy or gradient is None or gradient.span is not None or holder is None or holder.grad is None:
        return False
    narrow = holder.grad
    is_alike = narrow.shape == gradient.whole.shape and narrow.dtype != gradient.whole.dtype
    return is_alike and torch.equal(narrow.to(gradient.whole.dtype), gradient.whole)


def inner_of(optimizer: Any) -> Any:
    """What a wrapper has as `.optimizer`; None where it has none, or will not say which of several."""
    try:
        return getattr(optimizer, "optimizer", None)
    except Exception:  # noqa: BLE001  that of the wrapper's own code
        return None


def gradient_of(part: Part) -> tuple[Any, ...] | None:
    """Which gradient a parameter has, and how often torch has changed it in place; None without one."""
    gradient = part.gradient()
    return None if gradient is None else (id(gradient.whole), gradient.whole._version)


def is_zero(optimizer: Any) -> bool:
    """Whether it is a ZeroRedundancyOptimizer, which updates a share of the parameters on each rank."""
    module = frameworks.imported("torch.distributed.optim")
    kind = getattr(module, "ZeroRedundancyOptimizer", None)
    return kind is not None and isinstance(optimizer, kind)


def hyper_parameters(group: dict[str, Any], switches: set[str] | None = None) -> dict[str, Any]:
    """What a group sets, as JSON has it. switches: the names of those that the optimizer has, if that is
    known."""
    is_other = lambda name, value: (
        switches is not None and isinstance(value, bool) and name not in switches
    )
    return {
        str(name): as_json(value)
        for name, value in group.items()
        if name not in NOT_HYPER and not is_other(name, value)
    }


def number_of(entry: Any, name: str, holder: torch.Tensor) -> Any:
    """A number of the optimizer's state; None for what is none. A tensor without dimensions is one,
    unless the parameter has none either: then `step` alone is."""
    if isinstance(entry, torch.Tensor):
        if entry.ndim or (holder.ndim == 0 and name != "step"):
            return None
        return as_json(entry)
    return as_json(entry) if isinstance(entry, numbers.Real) else None


def as_json(value: Any) -> Any:
    """A value as JSON has it. A number that JSON has not is the text "inf", "-inf" or "nan"."""
    if isinstance(value, torch.Tensor):
        value = local(value).item() if value.numel() == 1 else text_of(value)
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    if isinstance(value, dict):
        return {str(name): as_json(item) for name, item in value.items()}
    return text_of(value)
