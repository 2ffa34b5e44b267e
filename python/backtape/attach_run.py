"""`backtape run -- COMMAND`: runs a training command as it stands, and records a step of it.

Every Python process that the command starts finds backtape/startup first on its path, where Python's
own start-up attaches backtape once torch is imported (backtape/startup/sitecustomize.py).
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from backtape import _native
from backtape.settings import Settings

STARTUP = Path(__file__).with_name("startup")
# What is handed on to the command: what ends a job, and what launchers tell it by.
HANDED_ON = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGCONT", "SIGINT", "SIGQUIT", "SIGHUP")
# What a terminal sends to the command by itself, as it is of the same group.
FROM_TERMINAL = ("SIGINT", "SIGQUIT", "SIGHUP")
# The steps that are recorded where nobody says which.
FIRST = "0"


def main(arguments: list[str]) -> int:
    """The command. Returns the exit status of the command that was run."""
    options, command = parsed(arguments)
    environment = os.environ | variables(options, os.environ)
    place = environment["BACKTAPE_DIR"]
    if "://" not in place:
        try:
            os.makedirs(place, exist_ok=True)
        except OSError as error:
            print(f"backtape run: --dir {place}: {error.strerror}", file=sys.stderr)
            return 2
    before = recorded(place)
    try:
        status = run(command, environment)
    except OSError as error:
        print(f"backtape run: {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    if "://" not in place and recorded(place) == before:
        print(
            f"backtape run: nothing was recorded in {place}: lines of backtape above say why; without any, no "
            "process of the command ran a backward pass of a torch model",
            file=sys.stderr,
        )
    return status


def recorded(place: str) -> set[Path]:
    """The runs and attempts in a directory."""
    return {*Path(place).glob("run.json"), *Path(place).glob("*/run.json")}


def parsed(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the command after `--`."""
    parser = argparse.ArgumentParser(
        prog="backtape run",
        usage="backtape run [--steps STEPS] [--dir DIR] [--sample N] -- COMMAND ...",
        description="Runs a training command as it stands, and records a step of it: of torch, on all ranks "
        "that the command starts.",
    )
    parser.add_argument(
        "--steps", help='which steps: "0", "0,100-110", "every:1000" (default: BACKTAPE_STEPS, or 0)'
    )
    parser.add_argument(
        "--dir", help="where they are recorded (default: BACKTAPE_DIR, or dumps)"
    )
    parser.add_argument(
        "--sample", type=sampled, help="elements of each parameter, as 4096, or a share, as 0.01; default: all"
    )
    own, command = arguments, []
    if "--" in arguments:
        at = arguments.index("--")
        own, command = arguments[:at], arguments[at + 1 :]
    options = parser.parse_args(own)
    if not command:
        parser.error("no command: write it after --, as in: backtape run -- torchrun train.py")
    steps, named = options.steps, "--steps"
    if steps is None:
        steps, named = os.environ.get("BACKTAPE_STEPS") or FIRST, "BACKTAPE_STEPS"
    if reason := unreadable(steps):
        parser.error(f"{named}: {reason}")
    return options, command


def unreadable(steps: str) -> str | None:
    """Why no recorder can read these steps; None where one can. A recorder itself is asked: it is started and
    closed in a directory of its own."""
    with tempfile.TemporaryDirectory() as directory:
        try:
            _native.Recorder(Settings(directory, steps, 0, 1)).close()
        except ValueError as error:
            return str(error).removeprefix("steps: ")
        except _native.RecorderError:
            pass  # It has read them: what else is wrong here, the job's own recorder says.
    return None


def variables(options: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that the command gets beside its own."""
    path = environment.get("PYTHONPATH")
    place = options.dir or environment.get("BACKTAPE_DIR") or "dumps"
    added = {
        "BACKTAPE_STEPS": options.steps or environment.get("BACKTAPE_STEPS") or FIRST,
        "BACKTAPE_DIR": place if "://" in place else os.path.abspath(place),
        "PYTHONPATH": os.pathsep.join([str(STARTUP), *([path] if path else [])]),
    }
    if options.sample:
        added["BACKTAPE_SAMPLE"] = options.sample
    return added


def sampled(word: str) -> str:
    """A sample as it is written. Raises ValueError for what is none."""
    float(word) if "." in word else int(word)
    return word


def run(command: list[str], environment: Mapping[str, str]) -> int:
    """Runs a command to its end, handing on signals. Returns its exit status as a shell gives it."""
    started: list[subprocess.Popen[bytes]] = []

    def hand_on(number: int, _: Any) -> None:
        if started and not (signal.Signals(number).name in FROM_TERMINAL and is_in_foreground()):
            started[0].send_signal(number)

    numbers = [getattr(signal, name) for name in HANDED_ON if hasattr(signal, name)]
    before = {number: signal.signal(number, hand_on) for number in numbers}
    try:
        started.append(subprocess.Popen(command, env=dict(environment)))
        status = started[0].wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status


def is_in_foreground() -> bool:
    """Whether a terminal sends its signals to this process, and to the command with it."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False
