"""Captures of arrays on an NVIDIA GPU, without the training thread waiting for one.

An array is handed over as a DLPack capsule (`jax_arrays.from_gpu`, `torch_arrays.from_gpu`). On a
stream of backtape's own the device computes the fingerprint and copies the bytes to pinned memory;
the recorder's thread waits for that when it reads them (dumper/src/device). A GPU is opened in the
background: with the recorder where the job uses it already, and at its first capture otherwise.
Until it is open, where pinned memory is full, and wherever anything is missing, the array is copied
as it would be without this module: the training thread waits for the copy.

BACKTAPE_GPU_PINNED (256MiB): pinned memory of the host for each GPU; 0 turns this off.
BACKTAPE_GPU_SNAPSHOTS (256MiB): memory of each GPU for tensors that the job may change while they
are copied. Where it is full, a torch job's stream waits for the copy, on the device. Copies of jax
arrays, which the job may donate, take at most as much again of XLA's memory; where that is full,
the training thread waits for the copy to the host.
"""

import functools
import logging
import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from backtape import _native, frameworks
from backtape.cuda_wheels import preload
from backtape.failopen import CAUGHT, describe

log = logging.getLogger("backtape")

# DLPack's number of a CUDA device.
CUDA = 2

# The variables, and their values where they are not set.
DEFAULTS = {"BACKTAPE_GPU_PINNED": "256MiB", "BACKTAPE_GPU_SNAPSHOTS": "256MiB"}

# The messages that were logged. Each is logged once, as a step has hundreds of tensors.
_told: set[str] = set()


def sizes(environment: Mapping[str, str]) -> tuple[int, int]:
    """The bytes of pinned memory, 0 where captures are off, and of snapshots. Raises ValueError that
    names the variable for text that is no size."""
    pinned, snapshots = (
        _native._bytes_of(name, environment.get(name) or default)
        for name, default in DEFAULTS.items()
    )
    return pinned, snapshots


class Held:
    """Bytes of a `Room` that are taken for as long as this object lives."""

    def __init__(self, size: int) -> None:
        self.size = size


class Room:
    """A number of bytes, of which parts are taken and given back."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.held: weakref.WeakSet[Held] = weakref.WeakSet()

    def take(self, size: int) -> Held | None:
        """Takes `size` bytes until the object that is returned is dropped; None where fewer are left."""
        if sum(one.size for one in self.held) + size > self.size:
            return None
        taken = Held(size)
        self.held.add(taken)
        return taken


class Door:
    """One GPU, which is opened in the background. `gpu` is None until that is done, and for good where
    it fails."""

    def __init__(self, ordinal: int) -> None:
        self.gpu: _native.Gpu | None = None
        self.ordinal = ordinal
        self.copies = Room(0)
        try:
            pinned, snapshots = sizes(os.environ)
            self.copies = Room(snapshots)
            if pinned:
                # Compiling and pinning take longer than a training step has to spare.
                opening = threading.Thread(
                    target=self._open, args=(pinned, snapshots), name="backtape-gpu", daemon=True
                )
                opening.start()
        except CAUGHT as error:
            self._tell(error)

    def _open(self, pinned: int, snapshots: int) -> None:
        try:
            preload(("nvrtc",))
            self.gpu = _native.Gpu(self.ordinal, pinned, snapshots)
        except CAUGHT as error:
            self._tell(error)

    def shut(self, error: BaseException) -> None:
        """No more captures from this GPU."""
        self.gpu = None
        self._tell(error)

    def _tell(self, error: BaseException) -> None:
        tell(f"captures from GPU {self.ordinal} wait for their copies: {describe(error)}")


@functools.cache
def door(ordinal: int) -> Door:
    """This process's one Door of a GPU, which begins to open with the first call."""
    return Door(ordinal)


def expect() -> None:
    """Opens the GPUs that this process computes on already, so that they are open at the first recorded
    step, which mostly is the one that matters. A GPU that the job has not used yet is opened by its
    first capture.
    """
    try:
        for ordinal in in_use():
            door(ordinal)
    except CAUGHT as error:
        tell(f"a GPU is opened at its first capture: {describe(error)}")


def in_use() -> set[int]:
    """CUDA's numbers of the GPUs that this process computes on. Imports and initialises no
    framework."""
    torch = frameworks.imported("torch")
    if torch is not None and torch.version.cuda and torch.cuda.is_initialized():
        return {int(torch.cuda.current_device())}
    # jax has no public function that says so, and asking for its devices would initialise them.
    jax, bridge = map(frameworks.imported, ("jax", "jax._src.xla_bridge"))
    if jax is None or bridge is None or not bridge.backends_are_initialized():
        return set()
    devices = jax.local_devices()
    mine = [device for device in devices if device.platform == "gpu" and "cuda" in device.client.platform_version]
    return {int(device.local_hardware_id) for device in mine}


def tell(message: str) -> None:
    """Logs a message once. What a handler of the job's log raises is dropped."""
    if message not in _told:
        _told.add(message)
        try:
            log.warning("[backtape] %s", message)
        except CAUGHT:
            pass


def ranges(first: Sequence[int], extent: Sequence[int]) -> list[tuple[int, int]]:
    """A box as ranges [start, end) per dimension."""
    return [(int(lo), int(lo) + int(size)) for lo, size in zip(first, extent)]


def given_up(here: Door | None, error: BaseException) -> None:
    """Logs a fault of a capture. One of the device ends captures from it; any other concerns the one
    tensor."""
    if here is not None and isinstance(error, RuntimeError):
        here.shut(error)
    else:
        tell(f"a capture from a GPU waits for its copy: {describe(error)}")


def full(here: Door, variable: str = "BACKTAPE_GPU_PINNED", what: str = "pinned memory") -> None:
    """Logs that some kind of memory is full, once for each kind."""
    tell(
        f"captures from GPU {here.ordinal} wait for their copies where {what} is full: "
        f"{variable} says how much there is"
    )
