"""The loss scale: torch's GradScaler, before and after it takes the scale out of the gradients."""

from collections.abc import Generator, Iterator
from typing import Any

import torch

from backtape.step_torch.capture import Capture
from backtape.step_torch.optimizers import Step


def start(capture: Capture) -> None:
    """Observes GradScaler and those of its subclasses that do it in their own way, as FSDP1's does."""
    for kind in kinds(torch.amp.GradScaler):
        if "unscale_" in vars(kind):
            capture.patches.attribute(kind, "unscale_", _unscale(capture))
        if "step" in vars(kind):
            capture.patches.attribute(kind, "step", _step(capture))
        if "scale" in vars(kind):
            capture.patches.attribute(kind, "scale", _scale(capture))


def kinds(kind: type) -> Iterator[type]:
    """A class and all of its subclasses."""
    yield kind
    for subclass in kind.__subclasses__():
        yield from kinds(subclass)


def step_of(capture: Capture, optimizer: Any) -> Step | None:
    """The step of this optimizer, if it is one of those that are recorded."""
    return next((step for step in capture.steps if step.is_of(optimizer)), None)


def _scale(capture: Capture) -> Any:
    def observe(scaler: Any, *_: Any, **__: Any) -> Generator[None, Any, None]:
        result = yield
        if scaler.is_enabled():
            capture.scales.multiplied(scaler, result)
            if capture.scaled_loss is None:
                capture.scaled_loss = capture.scales.of(scaler)

    return observe


def _unscale(capture: Capture) -> Any:
    def observe(scaler: Any, optimizer: Any, *_: Any, **__: Any) -> Generator[None, Any, None]:
        step = step_of(capture, optimizer)
        if step is None or not scaler.is_enabled():
            return
        parts = step.parts()
        capture.loss_scale = float(scaler.get_scale())
        capture.take("reduced", parts)
        yield
        capture.take("unscaled", parts)

    return observe


def _step(capture: Capture) -> Any:
    def observe(scaler: Any, optimizer: Any, *_: Any, **__: Any) -> Generator[None, Any, None]:
        step = step_of(capture, optimizer)
        if step is None or not scaler.is_enabled():
            return
        capture.loss_scale = float(scaler.get_scale())
        begun = step.count
        yield
        if step.count == begun:
            step.skipped = True

    return observe
