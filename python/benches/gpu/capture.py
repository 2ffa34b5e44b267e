"""Recording tensors of a GPU, by what a training script calls: what the training stream loses, when
the bytes are durable, and what the device itself did: copies and, where the checksum is taken there,
its kernels.

Nothing private of backtape is named. What the device did is read off torch's profiler, which sees
the copies and kernels of every stream of the process, whoever launched them.
"""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import backtape
import backtape.torch

from .card import Ceilings, needed
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
    """A recorder that has found its coordinator, as in a job that has run for long: step 0 is
    committed before step 1 is measured."""

    def __init__(self, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        self.folder, self.tensors = folder, tensors
        room = 2 * nbytes(tensors) + (64 << 20)
        self.recorder = backtape.Recorder(dir=folder, steps="0,1", strict=True, queue_bytes=room)
        with self.recorder.step(0) as tape:
            tape.record("first", np.zeros(1))
        until = time.monotonic() + PATIENCE_S
        while not list(folder.glob("**/manifest*.json")):
            if time.monotonic() > until:
                raise Unmeasured(f"step 0 was not committed within {PATIENCE_S} s")
            time.sleep(0.01)

    def step(self) -> None:
        """What a training script does in a recorded step."""
        with self.recorder.step(1) as tape:
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
        return by_host(lambda: [tensor.to("cpu", non_blocking=True) for tensor in sides.tensors.values()])

    def durable() -> Turn:
        def use(recording: Recording) -> Turn:
            return by_host(lambda: (recording.step(), recording.close()))

        return recorded(sides.tensors, use)

    names = {"raw copy to pinned memory": pinned, "tensor.to('cpu')": fresh}
    return interleaved(names | {"backtape, durable and committed": durable}, rounds)


@dataclass
class Activity:
    """What the device did in a recorded step, in milliseconds of its own clock."""

    copies: float = 0.0
    # From the first copy's begin to the last one's end.
    span: float = 0.0
    kernels: float = 0.0
    names: tuple[str, ...] = ()


def activity_of(events: Iterable[Any]) -> Activity:
    """Of the events of torch's profiler, whose times are microseconds."""
    copies, kernels = [], []
    for event in events:
        if "CUDA" not in str(event.device_type):
            continue
        name, span = event.name, (event.time_range.start, event.time_range.end)
        if "Memcpy DtoH" in name:
            copies.append(span)
        elif not name.startswith(("Memcpy", "Memset")):
            kernels.append((name, span))
    took = lambda spans: sum(end - begin for begin, end in spans) / 1e3
    found = Activity(took(copies), 0.0, took(span for _, span in kernels))
    found.names = tuple(sorted({name for name, _ in kernels}))
    if copies:
        found.span = (max(end for _, end in copies) - min(begin for begin, _ in copies)) / 1e3
    return found


def profiled(sides: Sides) -> Activity:
    """A recorded step under the profiler, with no training work around it."""
    from torch.profiler import ProfilerActivity, profile

    def use(recording: Recording) -> Activity:
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
            recording.step()
            recording.close()
            torch.cuda.synchronize()
        return activity_of(found.events())

    return recorded(sides.tensors, use)


def device_lines(activities: list[Activity], bytes: int, ceilings: Ceilings) -> list[str]:
    """The medians of what the device did, as shares of what the card reaches."""
    median = lambda of: sorted(map(of, activities))[len(activities) // 2]
    copies, span = median(lambda one: one.copies), median(lambda one: one.span)
    lines = ["what the device did in a recorded step, by its own clock"]
    for name, taken in (("copies to the host, busy", copies), ("first copy to the last", span)):
        lines.append(share(name, taken, needed(bytes, ceilings.to_host), "of the copy ceiling"))
    kernels = median(lambda one: one.kernels)
    if not activities[0].names:
        why = "no kernel ran on the device: this build takes the checksum of a torch tensor on the host"
        lines.append(row("checksum on the device", note=f"not measured: {why}"))
    else:
        lines.append(share("kernels (the checksum)", kernels, needed(bytes, ceilings.read), "of the read ceiling"))
        lines.append(f"  kernels: {'; '.join(name[:60] for name in activities[0].names)}")
    return lines


def share(name: str, taken: float, least: float | None, of: str) -> str:
    """One time of the device and what part of it the card would need."""
    if taken <= 0:
        return row(name, note="not measured: the profiler saw none")
    columns = [f"{taken:.3f} ms"] + ([] if least is None else [f"{100 * least / taken:.1f} %"])
    return row(name, *columns, note=of)


def lines(bytes: int, rounds: int, ceilings: Ceilings) -> list[str]:
    """The line of device-to-host staging and that of the checksum."""
    tensors = random_tensors(bytes)
    agree(tensors)
    sides = Sides(tensors, ceilings)
    size = f"{len(tensors)} x {TENSOR_BYTES >> 20} MiB in bf16"
    told = [f"device-to-host staging, {size}: the training's stream, work before and behind"]
    told += rendered(stream_outcomes(sides, rounds), "work alone")
    told += ["until the bytes are there, by the host's clock: ratios alone; a raw copy is not durable"]
    told += rendered(until_there(sides, rounds), "raw copy to pinned memory", times=False)
    activities = [profiled(sides) for _ in range(min(3, rounds))]
    return told + device_lines(activities, nbytes(tensors), ceilings)
