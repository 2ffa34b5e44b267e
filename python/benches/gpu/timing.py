"""Rounds in which every contender runs once, and the device's own clock."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .table import Outcome

# Of a message that goes on for pages only the begin is printed.
LONGEST_REASON = 240


class Unmeasured(Exception):
    """Why a contender is not measured, one sentence."""


def reason_of(error: BaseException) -> str:
    """An error as one line; its type where its text says nothing."""
    if isinstance(error, Unmeasured):
        return str(error)
    text = " ".join(str(error).split()) or "no reason given"
    text = text if len(text) <= LONGEST_REASON else f"{text[:LONGEST_REASON]}..."
    return f"{type(error).__name__}: {text}"


@dataclass
class Turn:
    """What a contender's turn took: by the clock, and at its peak beyond what was held before."""

    milliseconds: float
    peak_bytes: int | None = None


Contender = Callable[[], Turn]


def orders(names: list[str], rounds: int) -> Iterator[list[str]]:
    """The order of each round, each begun by another: who comes first may find the card cooler."""
    for number in range(rounds):
        first = number % len(names) if names else 0
        yield names[first:] + names[:first]


def interleaved(contenders: Mapping[str, Contender], rounds: int) -> dict[str, Outcome]:
    """Runs all in turn, one round that is not counted and then `rounds` of them.

    One that fails is out, with its reason: half of its rounds would be no sample.
    """
    outcomes = {name: Outcome() for name in contenders}
    for number, order in enumerate(orders(list(contenders), rounds + 1)):
        for name in order:
            outcome = outcomes[name]
            if outcome.reason is not None:
                continue
            try:
                turn = contenders[name]()
            except Exception as error:
                outcome.reason, outcome.milliseconds = reason_of(error), []
                continue
            if number:
                outcome.milliseconds.append(turn.milliseconds)
                outcome.peak_bytes = most(outcome.peak_bytes, turn.peak_bytes)
    return outcomes


def most(one: int | None, other: int | None) -> int | None:
    """The larger of two counts that may not be known."""
    return max((count for count in (one, other) if count is not None), default=None)


def between_events(run: Callable[[], Any]) -> float:
    """Milliseconds from an event before `run` to one behind it, in torch's current stream.

    What `run` launches into other streams counts where this stream waits for it.
    """
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    kept = run()  # Giving its memory back is no part of it.
    end.record()
    end.synchronize()
    del kept
    return begin.elapsed_time(end)


def on_device(run: Callable[[], Any], counted: bool = True) -> Contender:
    """A contender in torch: once unmeasured, as memory was given back since its last turn, then
    once by the clock. What it returned is dropped, and the memory goes back, as the next contender
    may be another process. `counted` is off for one that takes memory past torch's allocator."""

    def turn() -> Turn:
        import torch

        try:
            run()
            torch.cuda.synchronize()
            held = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            milliseconds = between_events(run)
            peak = torch.cuda.max_memory_allocated() - held
            return Turn(milliseconds, peak if counted else None)
        finally:
            torch.cuda.empty_cache()

    return turn
