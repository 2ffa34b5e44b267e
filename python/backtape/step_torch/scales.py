"""Which loss scale each backward pass has, where scalers multiply losses by others."""

import weakref
from collections.abc import Sequence
from typing import Any

import torch


class Scales:
    """The loss scales that scalers have, and that of the backward pass which runs."""

    def __init__(self) -> None:
        self._read: dict[int, tuple[Any, Any, float]] = {}  # by the id of a scaler: it, its mark, the scale
        self._losses: dict[int, tuple[Any, float]] = {}  # by the id of a scaled loss: it, the scale
        self._since: set[float] = set()  # what was multiplied by since the last backward pass began
        self.current: float | None = None  # None where it is not known

    def of(self, scaler: Any) -> float:
        """The scale of a scaler. It is read once unless it changes, as it waits for the device."""
        held, mark = getattr(scaler, "_scale", None), None
        # torch counts no changes of what was made in inference mode.
        if isinstance(held, torch.Tensor) and not held.is_inference():
            mark = (id(held), held._version)
        _, known, scale = self._read.get(id(scaler), (None, None, 0.0))
        if mark is None or known != mark:
            scale = float(scaler.get_scale())
            self._read[id(scaler)] = (scaler, mark, scale)
        return scale

    def multiplied(self, scaler: Any, result: Any) -> None:
        """Notes what a scaler has made of a loss, or of several."""
        scale = self.of(scaler)
        self._since.add(scale)
        for loss in result if isinstance(result, (list, tuple)) else [result]:
            if isinstance(loss, torch.Tensor):
                self._losses[id(loss)] = (weakref.ref(loss), scale)

    def begin(self, losses: Sequence[Any]) -> None:
        """Notes that a backward pass begins at these tensors. Of one that no scaler has made, as a scaled
        loss that was divided, the scale is that of the calls since the last pass, if it is one."""
        known = [self._losses.get(id(loss)) for loss in losses]
        scales = {entry[1] for entry, loss in zip(known, losses) if entry and entry[0]() is loss}
        scales = scales or self._since
        self.current = next(iter(scales)) if len(scales) == 1 else None
        self._since = set()
