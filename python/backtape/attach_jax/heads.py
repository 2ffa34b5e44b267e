"""What is heard of the loss heads of a step, and what is recorded and declared of them.

A callback says of which head in the program it is and from which device, and not the how-manieth run of a loop
or of a compiled function it belongs to. On each device the runs come one after the other, so they are counted
as they arrive. What has arrived is kept until the step ends: then it is known how many runs there were, and they
become the microbatches of the head, in the order of the program.
"""

import itertools
import threading
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from backtape.attach_jax.declared import sourced
from backtape.attach_jax.sites import NO_CLASS, Site
from backtape.shards import Key, Shard
from backtape.tape import Tape, open_tape

UNKNOWN = (
    "no gradient came from a softmax cross-entropy that backtape finds in the functions that are differentiated; tap "
    "the head by hand, or use one of backtape.jax.losses"
)
NO_GRADIENT = (
    "no gradient was taken by jax.grad, jax.value_and_grad or jax.vjp in a function that jit compiles, while the step "
    "was recorded"
)
LARGE = "the loss is recorded {} times, as its unembedding is large (head_bytes=)"
CHANGED = "the loss is computed again after the unembedding was changed, which is not recorded"
ANOTHER = "the loss is computed with another unembedding too, which is not recorded"
OTHERWISE = "the loss is computed in another way too, which is not recorded"
TARGETS = "its targets are probabilities and not labels"
PARTLY = "{} of the loss did not arrive"

FROZEN = {
    "q": "the hidden states take no gradient, by lax.stop_gradient or as nothing is differentiated that they depend on",
    "k": "the unembedding takes no gradient, by lax.stop_gradient or as it is not differentiated",
}

# One run of a head: its number, and which run of it that is.
Run = tuple[int, int]


@dataclass(eq=False)
class Trace:
    """What was found in the program of one function that is differentiated."""

    sites: list[Site] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)  # why heads are not recorded, or not all of them

    def add(self, reason: str) -> None:
        """Notes why a head is not recorded, or not all of it."""
        if reason not in self.reasons:
            self.reasons.append(reason)


@dataclass
class Taken:
    """What has arrived of one run."""

    site: Any
    shards: dict[str, list[Shard]] = field(default_factory=dict)
    sums: dict[Any, int] = field(default_factory=dict)  # of the unembedding's bytes, by device
    is_kept: bool = True


class Heads:
    """The heads of one step, as they arrive."""

    def __init__(self, tape: Tape, most: int) -> None:
        self.tape = tape
        self._most = most
        self._lock = threading.Lock()
        self._arrived: Counter[Any] = Counter()
        self._runs: dict[Run, Taken] = {}
        self.traces: list[Trace] = []  # of the programs that ran
        self.is_attached = False  # heads are looked for in the programs that run

    def take(self, site: Any, name: str, device: Any, shard: Callable[[], Shard]) -> None:
        """Takes a shard of a run; called from the callbacks' threads, in which nothing may raise."""
        with self.tape.guarded("tap", name, lambda reason: self.tape.leave_out(name, None, reason)):
            with self._lock:
                which = self._arrived[site, name, device]
                self._arrived[site, name, device] += 1
                run = self._runs.get((site.number, which))
                if run is None:
                    run = Taken(site, is_kept=self._has_room(site))
                    self._runs[site.number, which] = run
                others = [one for one in self._runs.values() if one is not run and one.site is site]
                is_first = not any(one.shards.get("k") for one in others)
            if not run.is_kept:
                return
            made = shard()
            with self._lock:
                if name == "k":
                    run.sums[device] = zlib.crc32(made.data)
                if name != "k" or is_first:
                    run.shards.setdefault(name, []).append(made)
                else:
                    run.shards.setdefault(name, [])

    def refuse(self, reason: str) -> None:
        """Notes why a head is not recorded."""
        trace = Trace()
        trace.add(reason)
        self.traces.append(trace)

    def _has_room(self, site: Site) -> bool:
        """Whether a further run is kept: its unembedding's gradient is as large as the unembedding."""
        count, size = len(self._runs), site.stored
        return count == 0 or 2 * size * count <= self._most

    def finish(self) -> None:
        """Records the runs and declares the head."""
        kept, reasons = self._kept()
        for index, run in enumerate(kept):
            for name, shards in run.shards.items():
                if name in ("k", "bias"):
                    continue
                for shard in shards:
                    self.tape.record_shards(Key(name, None, index, None), lambda shard=shard: shard)
        if kept:
            for name in kept[0].site.frozen:
                self.tape.leave_out(f"d{name}", None, FROZEN[name])
                reasons.append(f"d{name} is not recorded: {FROZEN[name]}")
            for name in ("k", "bias"):
                for shard in next((run.shards[name] for run in kept if run.shards.get(name)), []):
                    self.tape.record_shards(Key(name, None, None, None), lambda shard=shard: shard)
            self.tape.head(_found=sourced({**kept[0].site.options, "microbatches": len(kept)}))
        for reason in reasons:
            name = "loss" if reason in (UNKNOWN, NO_GRADIENT) else "head"
            self.tape.leave_out(name, None, reason)

    def _kept(self) -> tuple[list[Taken], list[str]]:
        """The runs that are recorded, in order, and why others are not."""
        runs = [self._runs[key] for key in sorted(self._runs)]
        reasons = list(dict.fromkeys(reason for trace in self.traces for reason in trace.reasons))
        whole = [run for run in runs if run.is_kept]
        kept: list[Taken] = []
        if whole:
            most = max(whole, key=lambda run: run.site.size)
            main = most if most.sums else whole[0]
            for run in whole:
                refused = _refused(run, main)
                if refused is None:
                    kept.append(run)
                elif refused not in reasons:
                    reasons.append(refused)
            if any(_has_targets(run) for run in kept):
                kept, reasons = [], [*reasons, TARGETS]
        if len(whole) < len(runs):
            reasons.append(LARGE.format(len(whole)))
        if not runs and not reasons:
            reasons.append(UNKNOWN if self.traces else NO_GRADIENT)
        return kept, reasons


def _refused(run: Taken, main: Taken) -> str | None:
    """Why a run is not recorded beside the main one."""
    missing = [name for name in run.site.needed if name not in run.shards]
    if missing:
        return PARTLY.format(", ".join(missing))
    if run.sums != main.sums:
        same = run.site.weight is main.site.weight
        return CHANGED if same else ANOTHER
    return None if run.site.options == main.site.options else OTHERWISE


def _has_targets(run: Taken) -> bool:
    """Whether a target is no class."""
    return any((np.frombuffer(shard.data, np.int32) == NO_CLASS).any() for shard in run.shards["labels"])


# The heads of a process are counted in the order in which they are traced.
numbers = itertools.count()

# The heads of the step that is open.
_open: list[Heads] = []
_lock = threading.Lock()
DEFAULT_BYTES = 1 << 30


def begin(tape: Tape, most: int) -> Heads:
    """The heads of a step that an attachment records."""
    with _lock:
        _open[:] = [Heads(tape, most)]
        _open[0].is_attached = True
        return _open[0]


def of_step() -> Heads | None:
    """The heads of the step that is open; None where none is."""
    tape = open_tape()
    if tape is None:
        return None
    with _lock:
        if not _open or _open[0].tape is not tape:
            _open[:] = [Heads(tape, DEFAULT_BYTES)]
        return _open[0]


def heard(site: Any, name: str, device: Any, shard: Callable[[], Shard]) -> None:
    """The sink of all sites."""
    heads = of_step()
    if heads is not None:
        heads.take(site, name, device, shard)


def finish(tape: Tape) -> None:
    """Records what was heard in a step, once all of it has arrived."""
    with _lock:
        heads = _open.pop() if _open and _open[0].tape is tape else None
    if heads is not None:
        with tape.guarded("head", ""):
            heads.finish()
