"""Programs beside this one: a contender in jax, whose libraries of CUDA are not torch's, and the
reference in Rust. They are asked and answer in JSON, one object a line."""

import contextlib
import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .timing import Turn, Unmeasured

# A first answer may take a compilation of minutes.
PATIENCE_S = 900


def search_path() -> dict[str, str]:
    """Where another Python finds these programs, and what this one was told to find."""
    folders = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, folders))}


class Child:
    """A program that answers each line of its input with one of its output."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str] = {}) -> None:
        self.name = name
        self.errors = tempfile.TemporaryFile("w+")
        pipe = subprocess.PIPE
        try:
            self.process = subprocess.Popen(
                command, stdin=pipe, stdout=pipe, stderr=self.errors, text=True,
                env=os.environ | dict(environment),
            )  # fmt: skip
        except OSError as error:
            raise Unmeasured(f"{name} does not start: {error}") from error

    def ask(self, **question: Any) -> dict[str, Any]:
        """Its answer; Unmeasured with its own words where it has none, or says that it failed."""
        timer = threading.Timer(PATIENCE_S, self.process.kill)
        timer.start()
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
            answer = answered(self.process.stdout)
        except OSError:
            answer = None
        finally:
            timer.cancel()
        if answer is None:
            raise Unmeasured(f"{self.name} ended without an answer: {self.last_words()}")
        if "error" in answer:
            raise Unmeasured(f"{self.name}: {answer['error']}")
        return answer

    def last_words(self) -> str:
        """The last line that it wrote to stderr."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10)
        self.errors.seek(0)
        lines = [line.strip() for line in self.errors if line.strip()]
        return lines[-1] if lines else f"it said nothing (exit code {self.process.poll()})"

    def turn(self) -> Turn:
        """A contender's turn: it runs once unmeasured, then once by the clock."""
        answer = self.ask(do="run")
        return Turn(answer["milliseconds"], answer.get("peak_bytes"))

    def close(self) -> None:
        """Ends it: its input ends."""
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()
        self.errors.close()


def answered(lines: Iterable[str]) -> dict[str, Any] | None:
    """The next line that is an object: libraries print to stdout too."""
    for line in lines:
        found = parsed(line)
        if found is not None:
            return found
    return None


def parsed(line: str) -> dict[str, Any] | None:
    """A line of JSON, where it is an object."""
    with contextlib.suppress(ValueError):
        found = json.loads(line)
        return found if isinstance(found, dict) else None
    return None


def objects(text: str) -> list[dict[str, Any]]:
    """The objects among the lines of an output."""
    return [found for line in text.splitlines() if (found := parsed(line)) is not None]
