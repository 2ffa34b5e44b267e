"""Runs the lines that are asked for, one after the other, and prints each as it is done.

    make bench-gpu                                   # all of it; on a machine with an NVIDIA GPU
    python -m gpu --lines loss --only CCE,Liger      # with python/benches in PYTHONPATH

Without a GPU it says so in one sentence and exits with 0. A peer that fails is a row; a line of ours
that fails as a whole makes the exit code 1.
"""

import argparse
import dataclasses
import gc
import json
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

NO_GPU = "no GPU: nothing measured"
LINES = ("loss", "reference", "staging", "step", "loading", "replay")
REFERENCE = tuple("cargo bench --quiet --locked -p backtape-replayer --bench device --".split())


@dataclass(frozen=True)
class Plan:
    """What is run, from the command line."""

    lines: tuple[str, ...]
    shape: tuple[int, int, int]
    rounds: int
    seed: int
    megabytes: int
    only: tuple[str, ...]
    xla_python: str | None
    reference: tuple[str, ...]
    reference_rounds: int
    directory: str | None
    json: str | None

    def wanted(self, name: str) -> bool:
        """Whether a contender of the loss head was asked for."""
        return not self.only or any(part.lower() in name.lower() for part in self.only)


def parts(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return number


def chosen_lines(text: str) -> tuple[str, ...]:
    chosen = parts(text)
    unknown = [name for name in chosen if name not in LINES]
    if unknown or not chosen:
        raise argparse.ArgumentTypeError(f"lines are {', '.join(LINES)}; not {', '.join(unknown) or 'none'}")
    return chosen


def command(text: str) -> tuple[str, ...]:
    return tuple(shlex.split(text))


def three_sizes(text: str) -> tuple[int, int, int]:
    sizes = [positive(part) for part in parts(text)]
    if len(sizes) != 3:
        raise argparse.ArgumentTypeError("a shape is T,V,D, as 8192,256000,2304")
    return sizes[0], sizes[1], sizes[2]


def plan(arguments: Sequence[str]) -> Plan:
    """The command line, checked."""
    parser = argparse.ArgumentParser(prog="gpu", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--lines", type=chosen_lines, default=LINES, help=f"of {','.join(LINES)}")
    add("--shape", type=three_sizes, default=(8192, 256_000, 2304), help="T,V,D of the loss head")
    add("--rounds", type=positive, default=7)
    add("--seed", type=int, default=20261123)
    add("--megabytes", type=positive, default=1024, help="that are recorded and loaded")
    add("--only", type=parts, default=(), help="contenders of the loss head, by parts of their names")
    add("--xla-python", help="the Python of an environment with jax for CUDA")
    add("--reference", type=command, default=REFERENCE, help="what prints the lines of the f64 reference")
    add("--reference-rounds", type=positive, default=7, help="fewer for a card that is slow in f64")
    add("--directory", help="where the dump that is loaded is written; a temporary folder if not said")
    add("--json", help="a file for the same as JSON, with the times of every round")
    return Plan(**vars(parser.parse_args(arguments)))


def missing_gpu(driver: Path = Path("/dev/nvidiactl")) -> tuple[str, int] | None:
    """Why nothing can be measured, and the exit code: 0 on a machine without a GPU, 1 where there is
    a driver and torch does not see its card."""
    code = 1 if driver.exists() else 0
    sentence = f"the GPU is not seen, nothing measured, though {driver} is there" if code else NO_GPU
    try:
        import torch
    except ImportError as error:
        return f"{sentence}: {error}", code
    if torch.cuda.is_available():
        return None
    return f"{sentence}: torch {torch.__version__} finds no CUDA device", code


def run(todo: Plan, say: Callable[[str], None]) -> int:
    """Every line; one that fails as a whole is told, and the next is run. How many failed."""
    import torch

    from . import card

    warnings.filterwarnings("ignore")  # Of peers, whose numbers are checked.
    torch.set_float32_matmul_precision("highest")  # Products of the references, not in TF32.
    say(card.about())
    found, outcomes, failed = card.Ceilings(), {}, 0
    texts: dict[str, Callable[[], list[str]]] = {"ceilings": lambda: measured_ceilings(todo, found)}
    for name in todo.lines:
        texts[name] = partial(SAID[name], todo, found, outcomes)
    told_of = {}
    for name, text in texts.items():
        lines, whole = told(name, text)
        failed += not whole
        told_of[name] = lines
        for line in ["", *lines]:
            say(line)
        # The next line may be another process.
        gc.collect()
        torch.cuda.empty_cache()
    if todo.json is not None:
        write(Path(todo.json), card.about(), told_of, vars(found), outcomes)
    return failed


def write(
    path: Path, about: str, lines: dict[str, list[str]], ceilings: dict[str, Any], outcomes: dict[str, Any]
) -> None:
    """What was printed, and the milliseconds of each round behind it."""
    rounds = {name: dataclasses.asdict(outcome) for name, outcome in outcomes.items()}
    found = {"card": about, "ceilings": ceilings, "lines": lines, "outcomes": rounds}
    path.write_text(json.dumps(found, indent=1) + "\n")


def told(name: str, text: Callable[[], list[str]]) -> tuple[list[str], bool]:
    """The text of one line, or why there is none, and whether there is one."""
    from .timing import reason_of

    try:
        return text(), True
    except Exception as error:  # A fault of one line leaves the others.
        return [f"{name}: not measured: {reason_of(error)}"], False


def measured_ceilings(todo: Plan, found: Any) -> list[str]:
    """What the card reaches, which the lines behind have their shares of."""
    from . import card

    vars(found).update(vars(card.ceilings(todo.rounds)))
    return card.lines(found)


def loss(todo: Plan, ceilings: Any, outcomes: dict[str, Any]) -> list[str]:
    from . import crossentropy
    from .head import Shape

    shape = Shape(*todo.shape)
    measured = crossentropy.measure(shape, todo.seed, todo.rounds, todo.wanted, todo.xla_python)
    outcomes.update(measured)
    return crossentropy.report(shape, measured, ceilings)


def reference(todo: Plan, ceilings: Any, outcomes: dict[str, Any]) -> list[str]:
    from .reference import lines, measure

    found = measure(todo.reference_rounds, todo.seed, todo.shape, todo.reference)
    return lines(found, outcomes)


def staging(todo: Plan, ceilings: Any, outcomes: dict[str, Any]) -> list[str]:
    from .capture import lines

    return lines(todo.megabytes << 20, todo.rounds, ceilings, todo.xla_python)


def loading(todo: Plan, ceilings: Any, outcomes: dict[str, Any]) -> list[str]:
    from .loading import lines

    return lines(todo.megabytes << 20, todo.rounds, ceilings, todo.directory)


def step(todo: Plan, ceilings: Any, outcomes: dict[str, Any]) -> list[str]:
    from .training import lines

    return lines(todo.rounds, outcomes)


def replay(todo: Plan, ceilings: Any, outcomes: dict[str, Any]) -> list[str]:
    from .head import Shape
    from .replaying import lines

    return lines(Shape(*todo.shape), min(3, todo.rounds), todo.seed, outcomes)


SAID = {
    "loss": loss, "reference": reference, "staging": staging,
    "step": step, "loading": loading, "replay": replay,
}  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    todo = plan(arguments)
    missing = missing_gpu()
    if missing is not None:
        print(missing[0])
        return missing[1]
    return 1 if run(todo, lambda line: print(line, flush=True)) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
