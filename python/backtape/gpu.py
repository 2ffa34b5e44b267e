"""Captures of arrays on an NVIDIA GPU, without the training thread waiting for one.

An array is handed over as a DLPack capsule. A stream of backtape's own has the device compute the
fingerprint and copies the bytes to pinned memory; the recorder's thread waits for that when it
reads them (dumper/src/device). A GPU is opened in the background: with the recorder where the job
uses it already, else at its first capture. Until it is open, where pinned memory is full, and
wherever anything is missing, the caller is given None and copies as it would without this module,
which waits for the copy.

BACKTAPE_GPU_PINNED (256MiB): pinned memory of the host for each GPU; 0 turns this off.
BACKTAPE_GPU_SNAPSHOTS (256MiB): memory of each GPU for tensors that the job may change while they
are copied; where it is full a torch job's stream waits for the copy, on the device. Copies of jax
arrays, which the job may donate, take at most as much again, of XLA's memory; where that is full,
the call waits for the copy to the host.
"""

import functools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from backtape import _native
from backtape.cuda_wheels import preload
from backtape.failopen import CAUGHT, describe

log = logging.getLogger("backtape")

# DLPack's number of a CUDA device.
CUDA = 2

# What each variable is where it is not set.
DEFAULTS = {"BACKTAPE_GPU_PINNED": "256MiB", "BACKTAPE_GPU_SNAPSHOTS": "256MiB"}

# What was logged already: each once, as a step has hundreds of tensors.
_told: set[str] = set()


def sizes(environment: Mapping[str, str]) -> tuple[int, int]:
    """Bytes of pinned memory and of snapshots; 0 of the first where captures are off."""
    pinned, snapshots = (
        _native._bytes_of(name, environment.get(name) or default)
        for name, default in DEFAULTS.items()
    )
    return pinned, snapshots


class Held:
    """So many bytes that are taken for as long as this lives."""

    def __init__(self, size: int) -> None:
        self.size = size


class Room:
    """Bytes that may be held at a time."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.held: weakref.WeakSet[Held] = weakref.WeakSet()

    def take(self, size: int) -> Held | None:
        """So many of them, until what is returned is dropped; None where that is more than are left."""
        if sum(one.size for one in self.held) + size > self.size:
            return None
        taken = Held(size)
        self.held.add(taken)
        return taken


class Door:
    """The way to one GPU, which opens in the background; `gpu` is None until it has, or for good."""

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
    """The one door of this process to a GPU."""
    return Door(ordinal)


def expect() -> None:
    """Opens the GPUs that this process computes on already: mostly its first recorded step is the one
    that is asked for. Of a job that has not used its GPU yet, the first capture opens it.
    """
    try:
        for ordinal in in_use():
            door(ordinal)
    except CAUGHT as error:
        tell(f"a GPU is opened at its first capture: {describe(error)}")


def in_use() -> set[int]:
    """CUDA's numbers of those GPUs; no framework is imported or set up for it."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.version.cuda and torch.cuda.is_initialized():
        return {int(torch.cuda.current_device())}
    # jax has no public word for it, and asking for its devices would set them up.
    bridge = sys.modules.get("jax._src.xla_bridge")
    if bridge is None or not bridge.backends_are_initialized():
        return set()
    devices = sys.modules["jax"].local_devices()
    mine = [device for device in devices if device.platform == "gpu" and "cuda" in device.client.platform_version]
    return {int(device.local_hardware_id) for device in mine}


def tell(message: str) -> None:
    """Logs a message, once. A handler of the job's that raises is the job's affair elsewhere."""
    if message not in _told:
        _told.add(message)
        try:
            log.warning("[backtape] %s", message)
        except CAUGHT:
            pass


def of_torch(piece: Any, dtype: str, first: Sequence[int]) -> _native.Arriving | None:
    """A CUDA tensor on its way to the host, or None. `first` is its place in the global tensor.

    The job may change the tensor by what it puts on its stream from now on, so the device makes a
    snapshot, in that stream's order. Asked for with `stream=-1` the capsule orders nothing itself.
    """
    import torch

    if not piece.is_cuda or torch.version.cuda is None or not piece.nbytes:
        return None
    # A subclass may have to do something first (wait for a collective): `copy_` does it.
    if type(piece) is not torch.Tensor:
        return None
    here = door(piece.device.index)
    if here.gpu is None or torch.cuda.is_current_stream_capturing():
        return None
    try:
        # torch hands over tensors of the current device alone.
        with torch.cuda.device(piece.device):
            values = piece.resolve_conj().resolve_neg().contiguous()
            raw = values.reshape(-1).view(torch.uint8)
            stream = torch.cuda.current_stream().cuda_stream
            arriving = here.gpu.capture(
                raw.__dlpack__(stream=-1),
                dtype,
                ranges(first, piece.shape),
                stream=stream,
                # A copy that was just made for us is nobody else's.
                changing=values.data_ptr() == piece.data_ptr(),
            )
    except CAUGHT as error:
        return given_up(here, error)
    return arriving or full(here)


def of_jax(array: Any, dtype: str, first: Sequence[int], sums: Any) -> _native.Arriving | None:
    """A jax array of one CUDA device on its way to the host, or None; `sums` are its fingerprint as
    XLA computes it, uint32 [1, 2] on the same device, or None.

    What travels is a copy that XLA makes on the device, in the order of the job's programs. The array itself
    must not be held: XLA refuses to run a program that is given ("donated") a buffer that a capsule holds
    ("Donation requested for buffer with external reference"), and the job would end. (On a CPU it copies.)
    """
    if next(iter(array.devices())).platform != "gpu":
        return None
    if not array.nbytes or array.sharding.memory_kind not in (None, "device"):
        return None
    here: Door | None = None
    try:
        kind, ordinal = array.__dlpack_device__()
        if int(kind) != CUDA:
            return None
        here = door(int(ordinal))
        if here.gpu is None:
            return None
        held = here.copies.take(array.nbytes)
        if held is None:
            return full(here, "BACKTAPE_GPU_SNAPSHOTS", "the GPU's memory for copies of jax arrays")
        mine = copied(array)
        # jax has that stream wait for the copy, and does not wait itself.
        stream = here.gpu.stream
        arriving = here.gpu.capture(
            mine.__dlpack__(stream=stream),
            dtype,
            ranges(first, array.shape),
            sums=None if sums is None else sums.__dlpack__(stream=stream),
            hold=held,
        )
    except CAUGHT as error:
        return given_up(here, error)
    return arriving or full(here)


def copied(array: Any) -> Any:
    """A copy of a jax array on its own device, which is computed behind what the job has launched there.

    Raises BufferError where XLA has no memory for it: that is no fault of the device.
    """
    try:
        return copying()(array)
    except RuntimeError as error:
        raise BufferError(f"XLA did not copy it: {error}") from error


@functools.cache
def copying() -> Any:
    """The program that copies; one that returns its argument would share its memory."""
    import jax

    return jax.jit(jax.numpy.copy)


def ranges(first: Sequence[int], extent: Sequence[int]) -> list[tuple[int, int]]:
    """A box as ranges [start, end) per dimension."""
    return [(int(lo), int(lo) + int(size)) for lo, size in zip(first, extent)]


def given_up(here: Door | None, error: BaseException) -> None:
    """After a fault: of the device for good, of one tensor for that tensor."""
    if here is not None and isinstance(error, RuntimeError):
        here.shut(error)
    else:
        tell(f"a capture from a GPU waits for its copy: {describe(error)}")


def full(here: Door, variable: str = "BACKTAPE_GPU_PINNED", what: str = "pinned memory") -> None:
    """Memory that is full: each kind is said once."""
    tell(
        f"captures from GPU {here.ordinal} wait for their copies where {what} is full: "
        f"{variable} says how much there is"
    )
