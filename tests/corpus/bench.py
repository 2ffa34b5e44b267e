"""The driver: which cases, one process that computes them and one that replays."""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import numpy as np  # noqa: E402

import backtape  # noqa: E402

from corpus import families, oracle  # noqa: E402
from corpus.case import PLANTS, Case  # noqa: E402
from corpus.unseen.plants import UNSEEN, RANGES  # noqa: E402
from corpus.record import record  # noqa: E402

ROOT = Path(__file__).parents[2]
# A clean job has no fault to be without, and so no twin.
ALONE = {"clean-options", "clean-shown-dlogits", "kahan-red-herring", "clean"}
# Where cases are drawn from: programs in JAX, and programs in numpy in either set of ranges.
PARTS = ("jax", *RANGES)
# Seconds of one replay: far more than any takes, so that one that never ends is seen.
LONGEST = 900


@dataclass
class Planned:
    """A case by name: a cause, a draw, and whether it is the fixed twin."""

    cause: str
    draw: int
    fixed: bool
    seed: int
    part: str = "jax"

    @property
    def name(self):
        return f"{self.cause}-{self.draw}" + ("-fixed" if self.fixed else "")


@dataclass
class Outcome:
    """What the replay said of a case, beside what is right."""

    case: str
    cause: str
    kind: str
    fixed: bool
    seed: int
    accept: list[list[str]]
    stages: list[str]
    standing: str  # of the effect: clear, weak, below, identical
    parameters: dict
    effect: dict
    unknown_too: bool = False
    verdict: str = ""
    first: str | None = None
    said: list[dict] = field(default_factory=list)
    reason: str = ""
    warned: list[str] = field(default_factory=list)  # stages that pass for want of a declaration
    generate_s: float = 0.0
    replay_s: float = 0.0


def draw(planned: Planned) -> Case:
    """The case, from its name and seed alone."""
    words = [planned.seed, planned.draw, zlib.crc32(planned.cause.encode())]
    rng = np.random.default_rng(words)
    if planned.part in RANGES:
        return UNSEEN[planned.cause](rng, RANGES[planned.part])
    return PLANTS[planned.cause](rng, planned.seed)


def causes_of(part):
    return UNSEEN if part in RANGES else PLANTS


class Bench:
    """`command`: the words that start `replay`."""

    def __init__(self, command, directory, keep, again=False):
        self.command, self.directory, self.keep, self.again = command, Path(directory), keep, again
        self.twins = {}

    def generate(self, planned):
        """Computes and records one case; its outcome so far, and where its dump lies."""
        start, path = time.monotonic(), self.directory / planned.name
        if self.again and (path / "oracle.json").exists():
            return Outcome(**json.loads((path / "oracle.json").read_text())), path
        shutil.rmtree(path, ignore_errors=True)  # of a run that was interrupted
        key = planned.cause, planned.draw
        known = self.twins.pop(key, None)
        if known is None:
            known = self.computed(draw(planned))
            self.twins = {key: known}
        case, runs, found = known
        if runs is None:
            with backtape.Recorder(path, strict=True) as recorder, recorder.step(0) as tape:
                case.faulty(tape)
        else:
            job, captured = runs[planned.fixed]
            record(job, captured, case.kept, path)
        plain = {n: str(v) if isinstance(v, type) else v for n, v in case.parameters.items()}
        first = sorted(oracle.first_stages(found) if case.stages is None else case.stages)
        outcome = Outcome(
            planned.name, planned.cause, case.kind, planned.fixed, planned.seed,
            [sorted(ids) for ids in case.accept], first, oracle.standing(found), plain,
            {n: asdict(e) for n, e in found.items()}, case.unknown_too,
        )  # fmt: skip
        outcome.generate_s = time.monotonic() - start
        (path / "oracle.json").write_text(json.dumps(asdict(outcome), indent=1, default=float))
        return outcome, path

    def computed(self, case):
        """The case, its two runs, and what the fault changes; a clean case has one run."""
        if case.kind == "clean" and case.cause == "clean-options":
            return case, None, {}
        runs = {True: case.fixed(), False: case.faulty()}
        (job, fixed), (_, faulty) = runs[True], runs[False]
        if case.kind in ("clean", "checks"):
            return case, runs, {}
        found = oracle.effects(job, faulty, fixed, case.kept)
        if case.loose and oracle.near(found):
            found = oracle.under(found, oracle.effects(job, case.loose()[1], fixed, case.kept))
        return case, runs, found

    def judge(self, outcome, path):
        """Replays a dump and adds what was said; the dump goes unless it is to be kept."""
        start, report = time.monotonic(), path.with_suffix(".json")
        done = subprocess.run(
            [*self.command, "--quiet", "--threads", "1", "--dump", path, "--json", report],
            capture_output=True, text=True, timeout=LONGEST,
        )  # fmt: skip
        outcome.replay_s = time.monotonic() - start
        if report.exists():
            said = json.loads(report.read_text())
            first = said["first_divergence"]
            outcome.verdict, outcome.first = said["verdict"], first and first["stage"]
            outcome.said = said["causes"]
            outcome.warned = [s["name"] for s in said["stages"] if s["status"] == "warn"]
            failed = [s for s in said["stages"] if s["name"] == outcome.first]
            outcome.reason = failed[0]["reason"] if failed else "; ".join(map(str, said["findings"]))
        else:
            outcome.verdict, outcome.reason = f"exit {done.returncode}", done.stderr.strip()[-300:]
        if self.keep:
            (path / "report.txt").write_text(done.stdout)
            report.rename(path / "report.json") if report.exists() else None
        else:
            shutil.rmtree(path)
            report.unlink(missing_ok=True)
        return outcome


def plan(arguments):
    """The cases that are asked for, a fault and its twin one after the other."""
    known = causes_of(arguments.part)
    causes = [c for c in known if not arguments.cause or c in arguments.cause]
    if unknown := set(arguments.cause or ()) - known.keys():
        raise SystemExit(f"no program for {', '.join(sorted(unknown))}; there is one for: {', '.join(known)}")
    if arguments.only:
        name = arguments.only.removesuffix("-fixed")
        cause, _, number = name.rpartition("-")
        if cause not in known or not number.isdigit():
            raise SystemExit(f"no case {arguments.only}: names are CAUSE-NUMBER or CAUSE-NUMBER-fixed")
        return [Planned(cause, int(number), arguments.only.endswith("-fixed"), arguments.seed, arguments.part)]
    both = (True,) if arguments.twins == "only" else (False,) if arguments.twins == "no" else (False, True)
    return [
        Planned(cause, number, fixed, arguments.seed, arguments.part)
        for cause in causes for number in range(arguments.draws) for fixed in both
        if not (fixed and cause in ALONE)
    ]  # fmt: skip


def binary():
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    found = Path(os.environ.get("REPLAY", target / "release" / "replay"))
    if not found.exists():
        raise SystemExit(f"no {found}: cargo build --release -p backtape-replayer, or set REPLAY")
    return found


def arguments_of(argv):
    parser = argparse.ArgumentParser(description="The confusion table of the planted-fault corpus.")
    parser.add_argument("--cause", action="append", help="only this one; may be repeated")
    parser.add_argument("--part", choices=PARTS, default="jax", help="which programs, in which ranges")
    parser.add_argument("--seed", type=int, default=20261121)
    parser.add_argument("--draws", type=int, default=8, help="of every cause")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="replays at a time, of one thread each")
    parser.add_argument("--only", metavar="CASE", help="one case, by its name in the table")
    parser.add_argument("--twins", choices=("both", "only", "no"), default="both")
    parser.add_argument("--keep", metavar="DIR", help="keep the dumps, reports and oracles here")
    parser.add_argument("--again", action="store_true", help="judge the dumps that --keep DIR holds already")
    parser.add_argument("--json", metavar="FILE", help="append every outcome, one object a line, as it comes")
    parser.add_argument("--resume", action="store_true", help="take what --json FILE already holds as it is")
    parser.add_argument("--publish", action="store_true", help="write the part's table in docs")
    return parser.parse_args(argv)


def held(arguments):
    """The outcomes of an interrupted run of this seed."""
    if not arguments.resume or not arguments.json or not Path(arguments.json).exists():
        return []
    lines = map(json.loads, Path(arguments.json).read_text().splitlines())
    return [Outcome(**one) for one in lines if one["seed"] == arguments.seed]


def judged(bench, cases, jobs):
    """Every case's outcome in turn, generated and replayed side by side."""
    with ThreadPoolExecutor(jobs) as pool:
        waiting = []
        for planned in cases:
            waiting.append(pool.submit(bench.judge, *bench.generate(planned)))
            while len(waiting) > jobs + 1:
                yield waiting.pop(0).result()
        for one in waiting:
            yield one.result()


def outcomes(arguments, known):
    """The outcomes of the cases that are not known yet."""
    cases, directory = [one for one in plan(arguments) if one.name not in known], arguments.keep or tempfile.mkdtemp(prefix="backtape-corpus-")
    bench = Bench([binary()], directory, bool(arguments.keep), arguments.again)
    try:
        yield from judged(bench, cases, arguments.jobs)
    finally:
        if not arguments.keep:
            shutil.rmtree(directory, ignore_errors=True)


def main(argv):
    from corpus import table

    arguments = arguments_of(argv)
    found = held(arguments)
    for outcome in outcomes(arguments, {one.case for one in found}):
        found.append(outcome)
        if arguments.json:
            with open(arguments.json, "a") as lines:
                lines.write(json.dumps(asdict(outcome), default=float) + "\n")
        print(table.line(outcome), file=sys.stderr, flush=True)
    print(table.text(found))
    if arguments.publish:
        (ROOT / "docs" / table.PLACES[arguments.part]).write_text(table.markdown(found, arguments))
    return table.exit_code(found)


assert families
