"""Clipping by code of the job's own, of a job that declares nothing: found by what it does to gradients.

After each backward pass the gradients are kept. Where the optimizer then takes all of them times one
number below 1, and that number brings their norm to a round limit, the job has clipped them to it. Any
other change of gradients is left to the replay, which tells it.
"""

from collections.abc import Generator
from typing import Any

import torch

from backtape.step_torch import clipping
from backtape.step_torch.capture import Capture
from backtape.step_torch.parts import Gradient, Part, local
from backtape.torch_arrays import is_dtensor

# How far the factors of several gradients may be apart: each is of two numbers of the gradient's format.
APART = 1e-4
# How far a coefficient may be from the one of a round limit: a norm in f32 errs by parts of a million.
NEAR = 1e-5
# What jobs add to the norm before they divide by it.
ADDED = (0.0, 1e-6)


class Kept:
    """The gradients as the last backward pass has left them."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._of: dict[int, torch.Tensor] = {}

    def backward(
        self, *_: Any, accumulate_grad: bool = False, **__: Any
    ) -> Generator[None, Any, None]:
        """Sees one run of torch's engine."""
        yield
        if accumulate_grad and not any(step.count for step in self._capture.steps):
            held = ((id(part), _held(part)) for part in self._capture.own)
            self._of = {key: gradient.clone() for key, gradient in held if gradient is not None}

    def look(self, parts: list[Part]) -> None:
        """Before an optimizer takes its gradients: declares a clipping that they show. The norm is of all
        gradients, or of those of this optimizer."""
        for chosen in (list(self._capture.own), parts):
            clipped = [part for part in chosen if _held(part) is not None]
            taken = any(part.taken & {"reduced", "clipped"} for part in clipped)
            if clipped and not taken and all(id(part) in self._of for part in clipped):
                if self._declare(clipped):
                    return

    def _declare(self, parts: list[Part]) -> bool:
        kept = self._of
        found = [_factor(kept[id(part)], _held(part)) for part in parts]
        # A gradient of zeros fits any factor.
        factors = [factor for factor in found if factor != 0.0]
        if not factors or None in factors:
            return False
        most, least = max(factors), min(factors)  # type: ignore[type-var]
        if not 0 < most < 1 or most - least > APART * most:
            return False
        norm = torch.stack([kept[id(part)].double().square().sum() for part in parts]).sum().sqrt()
        limits = [round_limit((float(norm) + added) * most) for added in ADDED]
        limit = next((limit for limit in limits if limit is not None), None)
        if limit is None:
            return False
        for part in parts:
            gradient = Gradient(kept[id(part)], None, part.where)
            self._capture.take_gradient("reduced", part, gradient)
        entry = clipping.add(self._capture, norm, 2.0, parts, "reduced")
        entry |= {"max_norm": limit, "epsilon": None}
        self._capture.note_clipped(parts)
        return True


def round_limit(found: float) -> float | None:
    """The number of two digits that this is; None where it is none."""
    limit = float(f"{found:.1e}")
    return limit if abs(found - limit) <= NEAR * limit else None


def _held(part: Part) -> torch.Tensor | None:
    """The gradient of a parameter that lies whole on this rank; None where it does not, or there is none."""
    holder = part.holder()
    whole = part.master is None and part.flat is None and part.sharded is None
    if not whole or holder is None or holder.grad is None or is_dtensor(holder) or holder.grad.is_sparse:
        return None
    return local(holder.grad)


def _factor(before: torch.Tensor, now: torch.Tensor | None) -> float | None:
    """The one number that a gradient was multiplied by; 0 where it is all zeros, None where it is not one
    number."""
    if now is None or now.shape != before.shape or not bool(before.isfinite().all()):
        return None
    largest = before.abs().argmax()
    if not before.reshape(-1)[largest]:
        return None if bool(now.any()) else 0.0
    factor = float(now.reshape(-1)[largest]) / float(before.reshape(-1)[largest])
    off = (now.double() - factor * before.double()).abs().max()
    # Half a unit in the last place of the largest, here and in the factor.
    allowed = 2 * torch.finfo(now.dtype).eps * float(now.abs().max())
    return factor if float(off) <= allowed else None
