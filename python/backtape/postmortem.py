"""After the job: a dump's tensors as numpy arrays, and the replay."""

import json
import os
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np

from backtape import _native
from backtape.reading import tensor_of
from backtape.variants import Function, call


class Step:
    """One step of a run, open for reading."""

    def __init__(self, native: _native.StepDump) -> None:
        self._native = native

    @property
    def committed(self) -> bool:
        """True when the coordinator committed the step."""
        return self._native.committed

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest as plain data."""
        return json.loads(self._native.manifest())

    def keys(self) -> list[tuple[str, int | None, str | None]]:
        """Name, microbatch and moment of every tensor."""
        return self._native.keys()

    def tensor(
        self,
        name: str,
        microbatch: int | None = None,
        *,
        when: str | None = None,
        rank: int | None = None,
    ) -> np.ndarray:
        """The global tensor in its own dtype; with `rank`, that rank's addend.

        Only bytes that hash as the training process hashed them come out.
        Raises KeyError for a tensor that is not there, RuntimeError with what is missing for one
        that cannot be put together.
        """
        return tensor_of(self._native, name, microbatch, when, rank)


class Run:
    """A run, or a store with one run in it."""

    def __init__(
        self, path: str | os.PathLike[str], run: str | None = None, attempt: int | None = None
    ) -> None:
        self._where = (os.fspath(path), run, attempt)

    def step(self, step: int | None = None) -> Step:
        """A step; may be left out when only one was dumped."""
        return Step(_native.StepDump(*self._where, step))


class Report:
    """What was found: the fields of the schema as attributes, `json` as plain data, str() as text.

    Of a replay it is backtape.report/1, of checks backtape.checks/1, of a
    trajectory backtape.trajectory/1.
    """

    def __init__(self, text: str, data: str) -> None:
        self._text = text
        self.json = json.loads(data)
        fields = json.loads(data, object_hook=lambda fields: SimpleNamespace(**fields))
        self.__dict__.update(fields.__dict__)

    def __str__(self) -> str:
        return self._text


def open(path: str | os.PathLike[str], run: str | None = None, attempt: int | None = None) -> Run:
    """Opens a dump. Which step is asked of the run: `backtape.open(dir).step(0)`."""
    return Run(path, run, attempt)


def replay(
    path: str | os.PathLike[str],
    *,
    step: int | None = None,
    compare: list[str] | None = None,
    against: str | os.PathLike[str] | None = None,
    run: str | None = None,
    attempt: int | None = None,
    variants: Mapping[str, Function] | None = None,
    report: str | os.PathLike[str] | None = None,
) -> Report:
    """Replays the loss head of a step; the report's `verdict` is agreed, diverged or incomplete.

    compare: roles to compare, with every stage that leads to them; all by default.
    against: another run of the same step.
    variants: functions of your own for stages of the head, by name (see backtape.variants): each is
        compared with the reference (is it right?) and with what was captured (is it what the job
        did?), and takes part in the search for the cause. Not together with against.
    report: a file that becomes the report as one HTML page, with drawings.
    Raises RuntimeError with one sentence where no verdict can be given at all.
    """
    other = None if against is None else os.fspath(against)
    page = None if report is None else os.fspath(report)
    if variants:
        if other is not None:
            raise ValueError("variants are tried on one run: leave against= out")
        given = call((os.fspath(path), run, attempt), step, variants)
        data, text = _native.replay_varied(os.fspath(path), given, run, attempt, step, compare, page)
        return Report(text, data)
    data, text = _native.replay(os.fspath(path), run, attempt, step, compare, other, page)
    return Report(text, data)


def checks(
    path: str | os.PathLike[str],
    step: int | None = None,
    *,
    run: str | None = None,
    attempt: int | None = None,
) -> Report:
    """Checks a dump without a replay; the report's `verdict` is passed, failed or incomplete.

    step: all dumped steps by default, compared with each other.
    Raises RuntimeError with one sentence where the dump cannot be opened.
    """
    data, text = _native.checks(os.fspath(path), run, attempt, step)
    return Report(text, data)


def trajectory(
    path: str | os.PathLike[str],
    *,
    run: str | None = None,
    attempt: int | None = None,
    vocabulary: int | None = None,
    local: list[str] | None = None,
    shared: list[str] | None = None,
) -> Report:
    """Judges the scalars of a run; the report's `verdict` is clear, flagged or incomplete.

    vocabulary: classes of the head, where neither a scalar nor a dumped step says.
    local, shared: scalars that are each rank's own, or that all ranks must agree on.
    Raises RuntimeError with one sentence where no scalars were recorded.
    """
    data, text = _native.trajectory(os.fspath(path), run, attempt, vocabulary, local, shared)
    return Report(text, data)


def main() -> None:
    """The command `replay`."""
    sys.exit(_native.replay_main(["replay", *sys.argv[1:]]))
