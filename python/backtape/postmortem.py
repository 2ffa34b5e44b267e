"""What is done after the job: a dump is opened, replayed and checked, and its scalars are
judged."""

import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path

from backtape import _native
from backtape.report import Report, shows_itself
from backtape.run import Run, Step
from backtape.typing import Place
from backtape.variants import Function, call

__all__ = ["Report", "Run", "Step", "checks", "open", "replay", "trajectory"]


def open(path: Place, run: str | None = None, attempt: int | None = None) -> Run:
    """Opens a dump. Which step is asked of the run: `backtape.open(dir).step(0)`.

    path: the directory or URL of a run, or of a store.
    run: which, where a store holds several.
    attempt: which launch of the run, where several hold the step.

    Nothing is read before a step is asked for.
    """
    return Run(path, run, attempt)


def replay(
    path: Place,
    *,
    step: int | None = None,
    compare: list[str] | None = None,
    against: Place | None = None,
    map: Place | Mapping[str, str] | Sequence[str] | None = None,
    run: str | None = None,
    attempt: int | None = None,
    variants: Mapping[str, Function] | None = None,
    report: str | os.PathLike[str] | None = None,
    device: str | None = None,
    causes: str = "quick",
) -> Report:
    """Replays the loss head of a step; the report's `verdict` is agreed, diverged,
    misdeclared, incomplete or differs.

    compare: roles to compare, with every stage that leads to them, and "step" for what became of
        the gradients after the backward; all by default.
    against: another run of the same step.
    map: which parameters of the two runs are the same where their names differ (docs/step.md): a file of
        lines `THIS RUN = OTHER RUN`, a list of such lines, or a dict {this run: other run}, as
        {"model.*": "*", "qkv.weight": "cat(q.weight, k.weight, v.weight; dim 0)"}.
    variants: functions of your own for stages of the head, by name (see backtape.variants): each is
        compared with the reference (is it right?) and with what was captured (is it what the job
        did?), and takes part in the search for the cause. Not together with against.
    report: a file that becomes the report as one HTML page, with drawings (docs/report.md).
    device: what computes the f64 reference and the emulated policies: "cpu", the default, or
        "cuda", "cuda:1", "cuda:0,1", "cuda:all" (docs/device.md). Where it cannot be used the CPU
        does it, and a RuntimeWarning and the report say why.
    causes: how closely the causes of a divergence are looked for: "none", "quick" (at most twice
        the work of the replay itself) or "thorough" (fifty times). The report's `not_checked` names
        what was not tried.

    Raises RuntimeError with one sentence where no verdict can be given at all, ValueError for
    compare=, map=, device= or causes= that cannot be read, variants= together with against=, or map=
    without against=.
    """
    if map is not None and against is None:
        raise ValueError("map= says which parameters of two runs are the same: give the other run by against=")
    where = os.fspath(path)
    other = None if against is None else os.fspath(against)
    page = None if report is None else os.fspath(report)
    draws = shows_itself()
    if variants:
        if other is not None:
            raise ValueError("variants are tried on one run: leave against= out")
        given = call((where, run, attempt), step, variants)
        found = _native.replay_varied(where, given, run, attempt, step, compare, page, draws, device, causes)
    else:
        found = _native.replay(where, run, attempt, step, compare, other, _lines(map), page, draws, device, causes)
    made = Report(found)
    if why := (made.json.get("device") or {}).get("fallback"):
        warnings.warn(f"{why}; the CPU computed the reference in its place", RuntimeWarning, stacklevel=2)
    return made


def _lines(of: Place | Mapping[str, str] | Sequence[str] | None) -> str | None:
    """The text of a mapping."""
    if of is None:
        return None
    if isinstance(of, (str, os.PathLike)):
        try:
            return Path(of).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"map={os.fspath(of)!r} cannot be read: name a text file ({error})") from error
    lines = [f"{ours} = {theirs}" for ours, theirs in of.items()] if isinstance(of, Mapping) else list(of)
    # Errors name the number of a line, which is that of the entry.
    if wrong := [line for line in lines if not isinstance(line, str) or len(line.splitlines()) > 1]:
        raise ValueError(f"map= has {wrong[0]!r}: each entry is one line THIS RUN = OTHER RUN")
    return "\n".join(lines)


def checks(
    path: Place,
    step: int | None = None,
    *,
    run: str | None = None,
    attempt: int | None = None,
) -> Report:
    """Checks a dump without a replay; the report's `verdict` is passed, failed or incomplete.

    step: all dumped steps by default, compared with each other.
    Raises RuntimeError with one sentence where the dump cannot be opened.
    """
    return Report(_native.checks(os.fspath(path), run, attempt, step))


def trajectory(
    path: Place,
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
    return Report(_native.trajectory(os.fspath(path), run, attempt, vocabulary, local, shared))
