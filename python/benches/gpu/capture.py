"""Recording tensors of a GPU, by what a training script calls: what the training stream loses, when
the bytes are durable, and what the device itself did: copies and, where the checksum is taken there,
its kernels.

Nothing private of backtape is named. What the device did is read off the profilers of torch and of jax,
which see the copies and kernels of every stream of the process, whoever launched them.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import backtape
import backtape.torch

from . import activity
from .activity import Activity, Event, activity_of
from .card import Ceilings, needed
from .children import objects, search_path
from .table import Outcome, rendered, row
from .timing import Turn, Unmeasured, between_events, interleaved

# Of one recorded tensor.
TENSOR_BYTES = 64 << 20
# A step may take this long to be committed.
PATIENCE_S = 60
# Products of the training work are this wide: some milliseconds each.
WORK = 4096


def random_tensors(bytes: int, device: str = "cuda") -> dict[str, torch.Tensor]:
    """bf16 in tensors of at most 64 MiB."""
    each = min(bytes, TENSOR_BYTES) // 2
    count = max(1, bytes // (2 * each))
    return {f"x{i}": torch.randn(each, device=device).bfloat16() for i in range(count)}


def nbytes(tensors: dict[str, torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


class Recording:
    """A recorder that has recorded such a step before, as in a job that has run for long: step 0 is
    committed before step 1 is measured, the coordinator is found and memory for staging is there."""

    def __init__(self, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        self.folder, self.tensors = folder, tensors
        room = 2 * nbytes(tensors) + (64 << 20)
        self.recorder = backtape.Recorder(dir=folder, steps="0,1", strict=True, queue_bytes=room)
        self.step(0)
        until = time.monotonic() + PATIENCE_S
        while not list(folder.glob("**/manifest*.json")):
            if time.monotonic() > until:
                raise Unmeasured(f"step 0 was not committed within {PATIENCE_S} s")
            time.sleep(0.01)

    def step(self, number: int = 1) -> None:
        """What a training script does in a recorded step."""
        with self.recorder.step(number) as tape:
            for name, tensor in self.tensors.items():
                tape.record(name, tensor)

    def close(self) -> None:
        """Returns when the step is durable and committed."""
        summary = self.recorder.close()
        if summary is None or summary.omissions or summary.faults or 1 not in summary.steps_committed:
            raise Unmeasured(f"the step was not recorded whole: {summary}")


def recorded(tensors: dict[str, torch.Tensor], use: Callable[[Recording], Any]) -> Any:
    """What `use` returns of a new recording, whose files are dropped behind it."""
    folder = Path(tempfile.mkdtemp(prefix="backtape-bench-"))
    try:
        return use(Recording(folder / "run", tensors))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def agree(tensors: dict[str, torch.Tensor]) -> None:
    """Raises Unmeasured where a byte of the dump is not the device's."""

    def use(recording: Recording) -> None:
        recording.step()
        recording.close()
        step = backtape.open(recording.folder).step(1)
        for name, tensor in tensors.items():
            wanted = tensor.view(torch.uint8).cpu().numpy()
            if not np.array_equal(step.tensor(name).reshape(-1).view(np.uint8), wanted):
                raise Unmeasured(f"wrong: the dump of {name} has other bytes than the device")

    recorded(tensors, use)


class Work:
    """Training work in the current stream, about as long as `milliseconds`, before and behind what is
    recorded."""

    def __init__(self, milliseconds: float) -> None:
        self.lhs, self.rhs = (torch.randn(WORK, WORK, device="cuda").bfloat16() for _ in range(2))
        self.out = torch.empty_like(self.lhs)
        self.products = 1
        self()
        self.products = max(1, round(milliseconds / max(between_events(self), 1e-3)))

    def __call__(self) -> None:
        for _ in range(self.products):
            torch.mm(self.lhs, self.rhs, out=self.out)


class Sides:
    """What stands between two pieces of training work: nothing, a raw copy, or a recorded step."""

    def __init__(self, tensors: dict[str, torch.Tensor], ceilings: Ceilings) -> None:
        self.tensors = tensors
        self.pinned = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            for name, tensor in tensors.items()
        }
        self.beside = torch.cuda.Stream()
        copy = needed(nbytes(tensors), ceilings.to_host)
        self.work = Work(copy if copy is not None else 10.0)

    def copy(self) -> None:
        """The bytes to pinned memory that was there before, in the current stream."""
        for name, tensor in self.tensors.items():
            self.pinned[name].copy_(tensor, non_blocking=True)

    def copy_beside(self) -> None:
        """The same in a stream of its own, which waits for the training's and not the other way."""
        self.beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.beside):
            self.copy()

    def around(self, between: Callable[[], None]) -> float:
        """Milliseconds from the first work's begin to the second's end, in the training's stream."""

        def run() -> None:
            self.work()
            between()
            self.work()

        milliseconds = between_events(run)
        torch.cuda.synchronize()
        return milliseconds

    def recorded(self) -> float:
        def use(recording: Recording) -> float:
            milliseconds = self.around(recording.step)
            recording.close()
            return milliseconds

        return recorded(self.tensors, use)


def stream_outcomes(sides: Sides, rounds: int) -> dict[str, Outcome]:
    """The training's stream with nothing, a copy in it, a copy beside it, and a recorded step."""
    return interleaved(
        {
            "work alone": lambda: Turn(sides.around(lambda: None)),
            "raw copy in the stream": lambda: Turn(sides.around(sides.copy)),
            "raw copy in a stream beside": lambda: Turn(sides.around(sides.copy_beside)),
            "backtape, a recorded step": lambda: Turn(sides.recorded()),
        },
        rounds,
    )


def by_host(run: Callable[[], None]) -> Turn:
    """A turn by the clock of the host: only ratios of it are printed."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    return Turn(1e3 * (time.perf_counter() - begin))


def until_there(sides: Sides, rounds: int) -> dict[str, Outcome]:
    """Until the bytes are in host memory for a copy, and on disk and committed for a recorded step."""

    def pinned() -> Turn:
        return by_host(lambda: (sides.copy(), torch.cuda.synchronize()))

    def fresh() -> Turn:
        to_host = lambda: [tensor.to("cpu", non_blocking=True) for tensor in sides.tensors.values()]
        return by_host(lambda: (to_host(), torch.cuda.synchronize()))

    def durable() -> Turn:
        def use(recording: Recording) -> Turn:
            return by_host(lambda: (recording.step(), recording.close()))

        return recorded(sides.tensors, use)

    names = {"raw copy to pinned memory": pinned, "tensor.to('cpu', non_blocking)": fresh}
    return interleaved(names | {"backtape, durable and committed": durable}, rounds)


def spans(events: Iterable[Any]) -> Iterator[Event]:
    """The device's among the events of torch's profiler, whose times are microseconds."""
    for event in events:
        if "CUDA" in str(event.device_type):
            yield event.name, event.time_range.start, event.time_range.end


def profiled(sides: Sides) -> Activity:
    """A recorded step under the profiler, with no training work around it."""
    from torch.profiler import ProfilerActivity, profile

    def use(recording: Recording) -> Activity:
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
            recording.step()
            recording.close()
            torch.cuda.synchronize()
        return activity_of(spans(found.events()))

    return recorded(sides.tensors, use)


def in_jax(python: str | None, megabytes: int, rounds: int, platform: str = "cuda") -> tuple[int, list[Activity]]:
    """The same of jax arrays, by a program in XLA's environment: bytes, and what the device did."""
    if python is None or not shutil.which(python):
        raise Unmeasured(f"there is no environment with jax at {python or '--xla-python'}")
    environment = os.environ | search_path()
    command = [python, "-m", "gpu.xla_capture", str(megabytes), str(rounds), platform]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    found = objects(ended.stdout)
    if ended.returncode or not found:
        said = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
        raise Unmeasured(said[-1] if said else f"it ended with code {ended.returncode}")
    return found[-1]["bytes"], [Activity(**step) for step in found[-1]["steps"]]


def device_lines(sides: Sides, bytes: int, rounds: int, python: str | None, ceilings: Ceilings) -> list[str]:
    """What the device did for torch's tensors and for jax' arrays."""
    needs = lambda bytes: (needed(bytes, ceilings.to_host), needed(bytes, ceilings.read))
    told = ["what the device did in a recorded step of torch tensors, by its own clock"]
    told += activity.lines([profiled(sides) for _ in range(rounds)], *needs(bytes))
    told.append("the same of jax arrays; the proof of place is the checksum")
    try:
        size, seen = in_jax(python, bytes >> 20, rounds)
    except Unmeasured as error:
        return [*told, row("jax", note=f"not measured: {error}")]
    return told + activity.lines(seen, *needs(size))


def lines(bytes: int, rounds: int, ceilings: Ceilings, python: str | None) -> list[str]:
    """The line of device-to-host staging and that of the checksum."""
    tensors = random_tensors(bytes)
    agree(tensors)
    sides = Sides(tensors, ceilings)
    size = f"{len(tensors)} x {next(iter(tensors.values())).nbytes >> 20} MiB in bf16"
    told = [f"device-to-host staging, {size}: the training's stream, work before and behind"]
    told += rendered(stream_outcomes(sides, rounds), "work alone")
    told += ["until the bytes are there, by the host's clock: ratios alone; a raw copy is not durable"]
    told += rendered(until_there(sides, rounds), "raw copy to pinned memory", times=False)
    return told + device_lines(sides, nbytes(tensors), min(3, rounds), python, ceilings)
