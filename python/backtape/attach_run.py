"""`backtape run -- COMMAND`: runs a training command as it stands, and records a step of it.

Every Python process that the command starts finds backtape/startup first on its path, where Python's
own start-up attaches backtape once torch is imported (backtape/startup/sitecustomize.py).
"""

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

STARTUP = Path(__file__).with_name("startup")
# What is handed on to the command, which ends the job.
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: list[str]) -> int:
    """The command. Returns the exit status of the command that was run."""
    options, command = parsed(arguments)
    place = Path(options.dir)
    environment = os.environ | variables(options, os.environ)
    try:
        status = run(command, environment)
    except OSError as error:
        print(f"backtape run: {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    if not (place / "run.json").exists() and not list(place.glob("*/run.json")):
        print(
            f"backtape run: nothing was recorded in {place}: no process of the command ran a forward and a "
            "backward pass of a torch model before it ended",
            file=sys.stderr,
        )
    return status


def parsed(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and the command after `--`."""
    parser = argparse.ArgumentParser(
        prog="backtape run",
        usage="backtape run [--steps STEPS] [--dir DIR] [--sample N] -- COMMAND ...",
        description="Runs a training command as it stands, and records a step of it: of torch, on all ranks "
        "that the command starts.",
    )
    parser.add_argument("--steps", default="0", help='which steps: "0", "0,100-110" (default: 0)')
    parser.add_argument("--dir", default="dumps", help="where they are recorded (default: dumps)")
    parser.add_argument("--sample", help="elements of each parameter, as 4096; default: all")
    own, command = arguments, []
    if "--" in arguments:
        at = arguments.index("--")
        own, command = arguments[:at], arguments[at + 1 :]
    options = parser.parse_args(own)
    if not command:
        parser.error("no command: write it after --, as in: backtape run -- torchrun train.py")
    return options, command


def variables(options: argparse.Namespace, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that the command gets beside its own."""
    path = environment.get("PYTHONPATH")
    added = {
        "BACKTAPE_STEPS": options.steps,
        "BACKTAPE_DIR": os.path.abspath(options.dir),
        "PYTHONPATH": os.pathsep.join([str(STARTUP), *([path] if path else [])]),
    }
    if options.sample:
        added["BACKTAPE_SAMPLE"] = options.sample
    return added


def run(command: list[str], environment: Mapping[str, str]) -> int:
    """Runs a command to its end, handing on signals. Returns its exit status as a shell gives it."""
    process = subprocess.Popen(command, env=dict(environment))
    before = {number: signal.signal(number, lambda n, _: process.send_signal(n)) for number in SIGNALS}
    try:
        status = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return status if status >= 0 else 128 - status
