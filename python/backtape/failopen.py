"""Fail-open: what goes wrong in backtape goes to the log and not to the job.

Every public call runs inside `Faults.guard`. Without strict mode an exception becomes an omission
in the dump and a line in the log, one for each kind; in strict mode it is raised as
`RecorderError`.
"""

import logging
import socket
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from backtape._native import PanicException, RecorderError

log = logging.getLogger("backtape")

# What is kept from the job. A panic in Rust is a BaseException, which `except Exception` does not
# catch.
CAUGHT = (Exception, PanicException)


class Guard(AbstractContextManager[None]):
    """What `Faults.guard` gives: a class, as a step enters hundreds of them, and one made of a generator
    takes several times as long."""

    __slots__ = ("_faults", "_call")

    def __init__(self, faults: "Faults", *call: Any) -> None:
        self._faults, self._call = faults, call

    def __enter__(self) -> None:
        return None

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool:
        if not isinstance(error, CAUGHT):
            return False
        self._faults.caught(error, *self._call)
        return True


class Faults:
    """Logs, counts or raises what went wrong on this rank."""

    def __init__(self, strict: bool, rank: int | None = None, host: str | None = None) -> None:
        self.strict = strict
        self.counts: Counter[tuple[str, str]] = Counter()
        rank_text = "?" if rank is None else rank
        self.prefix = f"[backtape][H{host or socket.gethostname()}][R{rank_text}]"

    def guard(
        self,
        what: str,
        subject: object = "",
        omit: Callable[[str], None] | None = None,
        counted: tuple[type[BaseException], ...] = (),
    ) -> "Guard":
        """Keeps exceptions of the body from the job; raises RecorderError in strict mode.

        `what` and `subject` name the call in the log line. `omit(reason)` puts the failure into
        the dump, unless it is one of `counted`, which the recorder has put there itself.
        """
        return Guard(self, what, subject, omit, counted)

    def caught(
        self,
        error: BaseException,
        what: str,
        subject: object,
        omit: Callable[[str], None] | None,
        counted: tuple[type[BaseException], ...],
    ) -> None:
        """Does with an exception what `guard` does; for calls so frequent that a context manager for
        each would cost too much."""
        reason = describe(error)
        if omit is not None and not isinstance(error, counted):
            self._omit(omit, reason)
        if not self.strict:
            self.tell(what, subject, error, reason)
        elif isinstance(error, RecorderError):
            raise error
        else:
            raise RecorderError(f"{call_of(what, subject)}: {reason}") from error

    def _omit(self, omit: Callable[[str], None], reason: str) -> None:
        try:
            omit(reason)
        except CAUGHT as error:
            self.tell("omit", "", error, describe(error))

    def tell(self, what: str, subject: object, error: BaseException, reason: str) -> None:
        """Logs the first fault of a kind, counts the others. Never raises."""
        kind = (what, type(error).__name__)
        self.counts[kind] += 1
        if self.counts[kind] == 1:
            call = call_of(what, subject)
            self.say(logging.WARNING, "%s failed and the job goes on: %s", call, reason)

    def say(self, level: int, message: str, *values: object) -> None:
        """One log line with this rank's prefix. A logging handler of the job that raises is the
        job's affair elsewhere, not here."""
        try:
            log.log(level, "%s " + message, self.prefix, *values)
        except CAUGHT:
            pass

    def repeated(self) -> str | None:
        """One line on what was counted but not logged."""
        more = [f"{what}: {n - 1} more {name}" for (what, name), n in self.counts.items() if n > 1]
        return ", ".join(more) or None


def call_of(what: str, subject: object) -> str:
    """How a call is named in the log: `record dq`, `head`."""
    return f"{what} {text_of(subject)}".rstrip()


def describe(error: BaseException) -> str:
    """What an exception says, on one line, with its type unless it is backtape's own."""
    text = text_of(error)
    return text if isinstance(error, RecorderError) else f"{type(error).__name__}: {text}"


def text_of(value: object) -> str:
    """Any object on one line, also one that cannot be printed."""
    try:
        return " ".join(str(value).split())[:500]
    except CAUGHT:
        return f"(a {type(value).__name__})"
