"""The commands that the wheel brings: `replay`, `coordinator` and `backtape`.

    backtape run [--steps 0] [--dir dumps] -- COMMAND ...
    backtape init jax|torch|hf|lightning
    backtape doctor [--store DIR|URL] [--coordinator HOST:PORT] [--json]
    backtape replay ...         # as the command replay
    backtape coordinator ...    # as the command coordinator
    backtape version
"""

import signal
import sys
from pathlib import Path
from typing import NoReturn

from backtape import _native, attach_run, cuda_wheels, doctor, engine_ray

USAGE = """\
usage: backtape run -- ...       runs a training command as it stands, and records a step of it
       backtape init KIND        prints a short job that records itself, as a file to start from: KIND is
                                 jax, torch, hf (the Trainer of transformers) or lightning
       backtape doctor           what works on this machine
       backtape replay ...       the command replay: backtape replay --help
       backtape coordinator ...  the command coordinator: backtape coordinator --help
       backtape version
"""

# The files that `backtape init` prints, by kind of job.
FIRST_JOBS = {path.stem: path for path in sorted(Path(__file__).with_name("first_jobs").glob("*.py"))}


def replay() -> NoReturn:
    """The command `replay`."""
    _replay(["replay", *sys.argv[1:]])


def coordinator() -> NoReturn:
    """The command `coordinator`."""
    _default_signals()
    sys.exit(_native.coordinator_main(["coordinator", *sys.argv[1:]]))


def main() -> NoReturn:
    """The command `backtape`."""
    match sys.argv[1:]:
        case ["run", *rest]:
            sys.exit(attach_run.main(rest))
        case ["init", *rest]:
            sys.exit(_init(rest))
        case ["doctor", *rest]:
            sys.exit(doctor.main(rest))
        case ["replay", *rest]:
            _replay(["backtape replay", *rest])
        case ["coordinator", *rest]:
            _default_signals()
            sys.exit(_native.coordinator_main(["backtape coordinator", *rest]))
        case ["version" | "--version" | "-V"]:
            print(f"backtape {_native.__version__} build {_native.__build__}")
            sys.exit(0)
        case ["help" | "--help" | "-h"]:
            print(USAGE, end="")
            sys.exit(0)
        case _:
            print(USAGE, end="", file=sys.stderr)
            sys.exit(2)


def _init(kinds: list[str]) -> int:
    """Prints the file of a kind of job. Returns the exit status."""
    if any(kind in ("--help", "-h") for kind in kinds):
        print(USAGE, end="")
        return 0
    if len(kinds) != 1 or kinds[0] not in FIRST_JOBS:
        print(f"backtape init: say which kind of job: {', '.join(FIRST_JOBS)}", file=sys.stderr)
        return 2
    print(FIRST_JOBS[kinds[0]].read_text(), end="")
    return 0


def _replay(arguments: list[str]) -> NoReturn:
    _default_signals()
    if any(argument.startswith("--device") for argument in arguments):
        cuda_wheels.preload()
    sys.exit(_native.replay_main(arguments, engine_ray.connect))


def _default_signals() -> None:
    """Lets Ctrl-C end the process. The commands run in Rust, where the interpreter's own handler
    would only set a flag that is looked at after the command has ended."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
