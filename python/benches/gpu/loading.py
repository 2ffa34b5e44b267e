"""A dump to the GPU: its shard files read by whoever opens safetensors, and by `backtape.open`.

Times are between two events of an idle stream around the call, so reading the files is in them. The
page cache is warm for one table and dropped for the other; every contender's tensors are first
compared, byte for byte, with what was recorded.
"""

import importlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import backtape

from .capture import nbytes, random_tensors
from .card import Ceilings, needed
from .losses import refused
from .table import rendered
from .timing import Contender, Turn, Unmeasured, between_events, interleaved, on_device, reason_of

# The device of NVIDIA's driver for reads past the host.
GPU_DIRECT = Path("/dev/nvidia-fs0")

Tensors = dict[str, torch.Tensor]
Load = Callable[[Path], Tensors]


def dump(folder: Path, tensors: Tensors) -> list[Path]:
    """Records a step of these tensors; its shard files."""
    room = 2 * nbytes(tensors) + (64 << 20)
    recorder = backtape.Recorder(dir=folder, steps="0", strict=True, queue_bytes=room)
    with recorder.step(0) as tape:
        for name, tensor in tensors.items():
            tape.record(name, tensor)
    summary = recorder.close()
    files = sorted(folder.glob("**/*.safetensors"))
    if summary is None or 0 not in summary.steps_committed or not files:
        raise Unmeasured(f"the dump was not written: {summary}")
    return files


def by_backtape(folder: Path, names: list[str], device: str) -> Tensors:
    """As a user of `backtape.open` does: numpy, then torch. torch has no numpy of bf16, so its bits."""
    step = backtape.open(folder).step(0)
    bits = {name: step.tensor(name).view(np.uint16) for name in names}
    return {name: torch.from_numpy(of).to(device).view(torch.bfloat16) for name, of in bits.items()}


def by_safetensors(files: list[Path], device: str) -> Tensors:
    from safetensors.torch import load_file

    return {key: tensor for file in files for key, tensor in load_file(file, device=device).items()}


def by_fastsafetensors(files: list[Path], device: str, nogds: bool) -> Tensors:
    """Whole files to the device, then tensors in place; with GPUDirect Storage or by a bounce buffer."""
    try:
        call = importlib.import_module("fastsafetensors").fastsafe_open
    except Exception as error:  # A peer may fail at import in its own ways.
        raise Unmeasured(f"fastsafetensors cannot be imported: {reason_of(error)}") from error
    if not nogds and not GPU_DIRECT.exists():
        # It would fall back to the bounce buffer, and be measured twice.
        raise Unmeasured(f"there is no {GPU_DIRECT}: GPUDirect Storage is not set up")
    with call([str(file) for file in files], device=device, nogds=nogds) as opened:
        return {key: opened.get_tensor(key) for key in opened.keys()}


def same(got: Tensors, wanted: Tensors) -> None:
    """Raises Unmeasured unless what was loaded is what was recorded."""
    bits = lambda tensor: tensor.reshape(-1).view(torch.uint8)
    if got.keys() != wanted.keys():
        raise Unmeasured(f"wrong: it gave the tensors {', '.join(sorted(got)) or 'none'}")
    for name, tensor in wanted.items():
        if got[name].device.type != tensor.device.type:
            raise Unmeasured(f"wrong: {name} is on {got[name].device}")
        if not torch.equal(bits(got[name]), bits(tensor)):
            raise Unmeasured(f"wrong: {name} has other bytes")


def contenders(
    folder: Path, files: list[Path], tensors: Tensors, device: str
) -> dict[str, Callable[[], Tensors]]:
    """Every way to the device, by name."""
    place = f"{device}:0" if device == "cuda" else device
    return {
        "backtape.open, numpy, to(cuda)": lambda: by_backtape(folder, list(tensors), place),
        "safetensors load_file": lambda: by_safetensors(files, place),
        "fastsafetensors, bounce buffer": lambda: by_fastsafetensors(files, place, True),
        "fastsafetensors, GPUDirect": lambda: by_fastsafetensors(files, place, False),
    }


def checked(load: Callable[[], Tensors], wanted: Tensors) -> Contender:
    """One that loads the right bytes; else one that says at its turn why it is not measured."""
    try:
        same(load(), wanted)
    except Exception as error:
        return refused(error)
    return on_device(load, counted=False)


def drop(files: list[Path]) -> None:
    """Takes files out of the page cache: they are clean, as the dump is durable."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def cold(load: Callable[[], Tensors], files: list[Path]) -> Contender:
    """Once by the clock with the files out of the page cache; the run that warms what a library keeps
    was that of the warm table."""

    def turn() -> Turn:
        drop(files)
        try:
            return Turn(between_events(load))
        finally:
            torch.cuda.empty_cache()

    return turn


def lines(bytes: int, rounds: int, ceilings: Ceilings, directory: str | None) -> list[str]:
    """Both tables. `directory` is on the disk that is to be read."""
    tensors = random_tensors(bytes)
    least = needed(nbytes(tensors), ceilings.to_device)
    over, of = "safetensors load_file", "of the copy ceiling"
    with tempfile.TemporaryDirectory(prefix="backtape-bench-", dir=directory) as kept:
        folder = Path(kept) / "run"
        files = dump(folder, tensors)
        loads = contenders(folder, files, tensors, "cuda")
        ready = {name: checked(load, tensors) for name, load in loads.items()}
        warm = interleaved(ready, rounds)
        told = [f"a dump of {nbytes(tensors) >> 20} MiB in {len(files)} file(s) to the GPU, page cache warm"]
        told += rendered(warm, over, ceiling=least, of=of)
        right = {name: cold(loads[name], files) for name, outcome in warm.items() if outcome.measured}
        told += ["the same, its files dropped from the page cache before each turn"]
        told += rendered(interleaved(right, rounds), over, ceiling=least, of=of)
    return told
