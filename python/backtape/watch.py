"""The numbers that `Recorder.watch` is given, kept until they can be read without waiting.

Reading a jax array that a device still computes (`is_ready()` is False) would hold the job up until
the device has caught up. A torch tensor on a device is copied to the host in the stream that
computes it, and an event says when the copy has arrived. Both are read by a later call, about a
step later.
"""

from collections import deque
from typing import Any, Iterator

import numpy as np

from backtape.frameworks import used

# How many steps' numbers may wait for a device, whose memory they hold. Beyond that the oldest is
# dropped.
MAX_PENDING = 16


class Readings:
    """Numbers of steps, in their order, that nobody has looked at yet."""

    def __init__(self) -> None:
        self._pending: deque[tuple[int, Any, Any]] = deque(maxlen=MAX_PENDING)

    def add(self, step: int, loss: Any, grad_norm: Any) -> None:
        """Keeps the numbers of a step."""
        self._pending.append((int(step), started(loss), started(grad_norm)))

    def ready(self) -> Iterator[tuple[int, float | None, float | None]]:
        """Steps whose numbers can be read now, the oldest first; each is returned once. Raises
        ValueError or TypeError for a value that is no number, and goes on after it when called
        again."""
        while self._pending:
            step, *values = self._pending[0]
            if not all(is_ready(value) for value in values):
                return
            # Taken out first: a value that cannot be read is not tried again at every step.
            self._pending.popleft()
            loss, grad_norm = map(number, values)
            yield step, loss, grad_norm


class DeviceCopy:
    """A number of a torch device on its way to the host."""

    def __init__(self, tensor: Any) -> None:
        torch = used("torch")
        with torch.cuda.device(tensor.device):
            self._host = torch.empty((), dtype=torch.float64, pin_memory=True)
            self._host.copy_(tensor.detach().reshape(()).double(), non_blocking=True)
            self._there = torch.cuda.Event()
            self._there.record()

    def is_ready(self) -> bool:
        return self._there.query()

    def __float__(self) -> float:
        return float(self._host)


def started(value: Any) -> Any:
    """The value, or a copy that is on its way to the host where reading the value would wait for a
    torch device."""
    return DeviceCopy(value) if getattr(value, "is_cuda", False) else value


def is_ready(value: Any) -> bool:
    """False while a device computes the value."""
    ready = getattr(value, "is_ready", None)
    return ready is None or bool(ready())


def number(value: Any) -> float | None:
    """The value as a number; None stays None. Raises ValueError or TypeError where it is none."""
    if value is None or isinstance(value, (int, float, DeviceCopy)):
        return None if value is None else float(value)
    if hasattr(value, "detach"):
        return float(value.detach())
    array = np.asarray(value)
    if array.size != 1:
        raise ValueError(f"an array of {array.size} elements is no number: watch(loss=loss.mean())")
    return float(array.reshape(()).astype(np.float64))
