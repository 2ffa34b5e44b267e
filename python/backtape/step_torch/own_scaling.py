"""Multiplications of gradients by code of the job's own, after the last backward pass and before anything takes them.

Recipes that sum the losses of tokens divide all gradients by the number of tokens in the end. A sample of each
gradient is kept when a backward pass has ended, and taken again when its reduced gradient is recorded: where the
second is one number times the first, that number is declared. What a backward pass or a communication does is no
such multiplication.
"""

import math
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import torch

from backtape import frameworks
from backtape.step_torch.capture import Capture
from backtape.step_torch.moves import elements_of
from backtape.step_torch.parts import Gradient, Part, local
from backtape.torch_parameters import in_backward

# Elements of a gradient that stand for it.
SAMPLE = 128

# How far an element may be from the product, in units of its format's epsilon: the product and what it is
# multiplied by are rounded.
ROUNDINGS = 4

# The variable of torch's decorator that holds the undecorated function.
DECORATED = "func"

# What a job may change gradients by that other ranks take part in.
COLLECTIVES = ("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor", "broadcast")


def start(capture: Capture) -> None:
    """Observes backward passes and the communications of the job's own."""
    if "_engine_run_backward" not in vars(torch.autograd):
        return
    scalings = Scalings(capture)
    capture.scalings = scalings
    capture.patches.attribute(torch.autograd, "_engine_run_backward", scalings.backward)
    distributed = frameworks.imported("torch.distributed.distributed_c10d")
    for name in COLLECTIVES if distributed is not None else ():
        if name in vars(distributed):
            capture.patches.inside(distributed, name, DECORATED, scalings.communicated)


class Scalings:
    """The samples of the gradients of a step."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._runs = False  # a backward pass
        self._kept: dict[int, torch.Tensor] = {}  # as the last backward pass left it, by the id of a parameter
        self._left: dict[int, Any] = {}  # which gradient that was
        self._places: dict[Any, list[Part]] = {}  # whose gradients lie in some memory
        self._changed: set[int] = set()  # those whose gradient changed between two passes
        self._sent = 0  # elements of the largest other tensor that was communicated since
        # The sample before, and when the gradient was recorded.
        self._taken: dict[int, tuple[torch.Tensor, torch.Tensor] | None] = {}

    def backward(
        self, *_: Any, accumulate_grad: bool = False, **__: Any
    ) -> Generator[None, Any, None]:
        """Sees one run of torch's engine."""
        is_outer = accumulate_grad and not self._runs and not in_backward()
        if is_outer:
            self._begin()
            self._runs = True
        try:
            yield
        finally:
            self._runs = self._runs and not is_outer
        if is_outer:
            self._keep(self._capture.own)

    def _begin(self) -> None:
        """Before a backward pass. Where the gradient is not as the last pass left it, the job sums those of its
        passes elsewhere, or changes the sum with each: what it does after the last one says nothing of that."""
        is_other = lambda part: id(part) in self._left and self._left[id(part)] != state_of(part)
        self._changed.update(id(part) for part in self._capture.own if is_other(part))
        self._kept.clear()
        self._places.clear()
        self._sent = 0

    def communicated(self, *args: Any, **options: Any) -> Generator[None, Any, None]:
        """Sees a communication: what it makes of a gradient is no multiplication of the job's own."""
        result = yield
        if self._runs or in_backward() or not self._kept:
            return
        for tensor in tensors_of([*args, *options.values()]):
            reached = self._places.get(place_of(tensor), [])
            if not reached:
                # Gradients may have been copied into it, and be copied back.
                self._sent = max(self._sent, tensor.numel())
            for part in reached:
                self._kept.pop(id(part), None)
            if result is None:  # Otherwise it goes on while the job does.
                self._keep(reached)

    def _keep(self, parts: Iterable[Part]) -> None:
        for part in parts:
            gradient = None if "reduced" in part.taken or part.later else own_gradient(part)
            sample = None if gradient is None else elements_of(gradient, SAMPLE)
            if gradient is not None and sample is not None:
                self._kept[id(part)] = sample
                self._left[id(part)] = state_of(part)
                of_place = self._places.setdefault(place_of(gradient), [])
                if part not in of_place:
                    of_place.append(part)

    def look(self, part: Part) -> None:
        """Before the reduced gradient of a parameter is recorded."""
        before = None if self._runs or id(part) in self._changed else self._kept.get(id(part))
        gradient = own_gradient(part) if before is not None else None
        if before is None or gradient is None:
            return
        now = elements_of(gradient, SAMPLE) if gradient.numel() > self._sent else None
        # What cannot be compared is no gradient that was left as it is.
        self._taken[id(part)] = None if now is None else (before, now)

    def factors(self) -> dict[str, float]:
        """What the gradients were multiplied by, by the names of parameters of which that is known; none where
        all of them were left as they are. This waits for the device."""
        known = ((part, self._taken[id(part)]) for part in self._capture.own if id(part) in self._taken)
        found = {part.name: math.nan if samples is None else factor_of(*samples) for part, samples in known}
        factors = {name: factor for name, factor in found.items() if factor is not None}
        is_multiplied = any(factor != 1.0 for factor in factors.values() if not math.isnan(factor))
        return factors if is_multiplied else {}


def state_of(part: Part) -> tuple[int, int] | None:
    """Which gradient a parameter has in `.grad`, and how often torch has changed it in place."""
    gradient = part.own_gradient()
    return None if gradient is None else (id(gradient.whole), gradient.whole._version)


def own_gradient(part: Part) -> torch.Tensor | None:
    """What this rank holds of the `.grad` that a backward pass fills; None where a framework, or the job by
    `reduce=`, makes the reduced gradient of it."""
    is_own = part.master is None or part.master.follows
    gradient: Gradient | None = part.own_gradient() if is_own and part.summed is None else None
    return None if gradient is None or gradient.whole.is_sparse else local(gradient.own())


def factor_of(before: torch.Tensor, now: torch.Tensor) -> float | None:
    """The one number that a sample was multiplied by, 1 where it was not, NaN where all of it is zero; None where
    it is not one number."""
    if before.shape != now.shape:
        return None
    if before.dtype == now.dtype and torch.equal(before, now):
        return 1.0 if bool(before.any()) else math.nan
    old, new = before.cpu().double(), now.cpu().double()
    squares = float(old @ old)
    factor = float(old @ new) / squares if squares else 0.0
    wanted = factor * old
    epsilon = max(torch.finfo(one.dtype).eps for one in (before, now))
    allowed = ROUNDINGS * epsilon * wanted.abs() + torch.finfo(now.dtype).tiny
    is_one = factor != 0.0 and bool(wanted.isfinite().all()) and bool(((new - wanted).abs() <= allowed).all())
    return factor if is_one else None


def tensors_of(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """The tensors among some arguments, and in lists of them."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield local(value)
        elif isinstance(value, (list, tuple)):
            yield from tensors_of(value)


def place_of(tensor: torch.Tensor) -> tuple[Any, int]:
    """The memory that a tensor lies in."""
    return tensor.device, tensor.untyped_storage().data_ptr()
