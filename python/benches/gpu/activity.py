"""What a device did in a recorded step, by its own clock, as a profiler saw it: copies to the host, and
kernels, which are the checksum's, as nothing else is computed then."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .table import row

# A copy to the host, as the profilers of torch and of XLA call it.
TO_HOST = ("Memcpy DtoH", "MemcpyD2H")
# What is neither a kernel nor such a copy.
OTHERS = ("Memcpy", "Memset")

# Name, begin and end in microseconds.
Event = tuple[str, float, float]


@dataclass
class Activity:
    """Milliseconds of the device."""

    copies: float = 0.0
    # From the first copy's begin to the last one's end.
    span: float = 0.0
    kernels: float = 0.0
    names: tuple[str, ...] = ()


def activity_of(events: Iterable[Event]) -> Activity:
    """The copies and kernels among the events of a device."""
    copies: list[tuple[float, float]] = []
    kernels: list[tuple[str, float]] = []
    for name, begin, end in events:
        if name.startswith(TO_HOST):
            copies.append((begin, end))
        elif not name.startswith(OTHERS):
            kernels.append((name, end - begin))
    found = Activity(kernels=sum(taken for _, taken in kernels) / 1e3)
    found.names = tuple(sorted({name for name, _ in kernels}))
    if copies:
        found.copies = sum(end - begin for begin, end in copies) / 1e3
        found.span = (max(end for _, end in copies) - min(begin for begin, _ in copies)) / 1e3
    return found


def lines(seen: Sequence[Activity], copy: float | None, read: float | None) -> list[str]:
    """Medians, as shares of what the card would need: `copy` milliseconds to the host, `read` to read
    the bytes once."""
    median = lambda of: statistics.median(map(of, seen))
    told = [
        share("copies to the host, busy", median(lambda one: one.copies), copy, "of the copy ceiling"),
        share("first copy to the last", median(lambda one: one.span), copy, "of the copy ceiling"),
    ]
    if not any(one.names for one in seen):
        why = "the profiler saw nothing of the device"
        if any(one.copies for one in seen):
            why = "no kernel ran on the device: this build takes the checksum of these arrays on the host"
        return [*told, row("checksum on the device", note=f"not measured: {why}")]
    kernels = median(lambda one: one.kernels)
    names = sorted({name[:60] for one in seen for name in one.names})
    told.append(share("kernels (the checksum)", kernels, read, "of the read ceiling"))
    return [*told, f"  kernels: {'; '.join(names)}"]


def share(name: str, taken: float, least: float | None, of: str) -> str:
    """One time of the device and what part of it the card would need."""
    if taken <= 0:
        return row(name, note="not measured: the profiler saw none of it")
    columns = [f"{taken:.3f} ms"] + ([] if least is None else [f"{100 * least / taken:.1f} %"])
    return row(name, *columns, note=of)
