"""The driver: which cases, the ranks that train them, and the replay of each dump."""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from step_corpus import jax_job, job, table
from step_corpus.faults import FAULTS

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
# Seconds of one replay: far more than any takes, so that one that never ends is seen.
LONGEST = 300
# Cases that the same processes run before new ones are started.
TOGETHER = 24


@dataclass
class Case:
    """A fault, a draw, and its two jobs."""

    fault: str
    draw: int
    faulty: object
    fixed: object

    @property
    def name(self):
        return f"{self.fault}-{self.draw}"


def cases_of(arguments):
    """The cases that are asked for."""
    if arguments.only:
        fault, _, draw = arguments.only.removesuffix("-fixed").rpartition("-")
        wanted = [(fault, int(draw))] if fault in FAULTS and draw.isdigit() else []
    else:
        known = jax_job.PLANTED if arguments.framework == "jax" else FAULTS
        names = [name for name in FAULTS if name in known and name in (arguments.fault or known)]
        first = arguments.first
        wanted = [(name, draw) for name in names for draw in range(first, first + arguments.draws)]
    if not wanted:
        raise SystemExit(f"no such case; faults are: {', '.join(FAULTS)}")
    jobs = jax_job if arguments.framework == "jax" else job
    cases = [
        Case(fault, draw, *jobs.job_of(FAULTS[fault], arguments.part, draw, arguments.seed))
        for fault, draw in wanted
    ]
    if not arguments.again:
        return cases
    there = []
    for case in cases:
        # The job whose dumps lie there, should the ranges have changed since.
        path = Path(arguments.keep, case.name, "job.json")
        if path.exists():
            case.faulty = jobs.Job(**json.loads(path.read_text()))
            there.append(case)
    return there


def free_port():
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def train(cases, directory):
    """Trains the cases of one number of ranks; processes that fail are started again with the rest."""
    waiting = list(cases)
    while waiting:
        some, world = waiting[:TOGETHER], waiting[0].faulty.world
        for one in some:
            for name in (one.name, f"{one.name}-fixed"):
                shutil.rmtree(directory / name, ignore_errors=True)
            (directory / one.name).mkdir(parents=True)
            (directory / one.name / "job.json").write_text(json.dumps(asdict(one.faulty), indent=1))
        with tempfile.NamedTemporaryFile("w", suffix=".json") as plan:
            json.dump([[one.name, asdict(one.faulty), asdict(one.fixed)] for one in some], plan)
            plan.flush()
            program = (
                "step_corpus.jax_worker" if some[0].faulty.mesh == "jax" else "step_corpus.worker"
            )
            ranks(world, plan.name, directory, len(some), program)
        done = [one for one in some if (directory / one.name / "done").exists()]
        # The one that failed is not tried again.
        waiting = waiting[len(done) + (len(done) < len(some)) :]
        yield from some[: len(done) + 1]


def ranks(world, plan, directory, count, program, python=sys.executable):
    """Runs all ranks to their end."""
    paths = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("BACKTAPE_")
    }
    environment |= {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    port = free_port()
    running = [
        subprocess.Popen(
            [python, "-m", program, *map(str, (rank, world, port, plan, directory))],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    try:
        for one in running:
            one.communicate(timeout=120 + 60 * count)
    except subprocess.TimeoutExpired:
        pass
    finally:
        for one in running:
            one.kill()
            one.wait()


def judge(binary, directory, case, fixed, keep):
    """Replays one dump: what the report says, as plain data."""
    folder = directory / (f"{case.name}-fixed" if fixed else case.name)
    outcome = table.Outcome(case.name, case.fault, fixed, case.faulty.told)
    if (factor := FAULTS[case.fault].factor) is not None:
        outcome.expected = factor(case.faulty)
    broken = sorted((directory / case.name).glob("failed-*.txt"))
    if not (directory / case.name / "done").exists():
        last = [path.read_text().strip().splitlines()[-1] for path in broken] or [
            "the ranks did not end"
        ]
        outcome.verdict, outcome.reason = (
            "not run",
            next((one for one in last if "closed" not in one), last[0])[:300],
        )
        return outcome
    table.add_effects(outcome, directory / case.name)
    replayed(binary, folder, case.faulty.step, outcome)
    if not keep:
        shutil.rmtree(folder / "dump")
    return outcome


def replayed(binary, folder, step, outcome):
    """Replays the dump in a folder and has the outcome read what the replay writes beside it."""
    report = folder / "report.json"
    report.unlink(missing_ok=True)
    command = [
        binary,
        "--dump",
        folder / "dump",
        "--step",
        str(step),
        "--compare",
        "step",
        "--json",
        report,
    ]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST)
    except subprocess.TimeoutExpired:
        outcome.verdict, outcome.reason = "no end", f"the replay took more than {LONGEST} s"
        return
    (folder / "report.txt").write_text(done.stdout + done.stderr)
    outcome.read(done, report)


def binary_of():
    target = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"))
    binary = Path(os.environ.get("REPLAY", target / "release" / "replay"))
    if not binary.exists():
        raise SystemExit(f"no {binary}: cargo build --release -p backtape-replayer, or set REPLAY")
    return binary


def outcomes_of(arguments, directory):
    """Every outcome, as it comes. Replays run beside the training."""
    binary, cases = binary_of(), cases_of(arguments)
    with ThreadPoolExecutor(arguments.jobs) as pool:
        waiting = []
        for world in sorted({case.faulty.world for case in cases}):
            of_world = [case for case in cases if case.faulty.world == world]
            for case in of_world if arguments.again else train(of_world, directory):
                for fixed in (False, True):
                    waiting.append(
                        pool.submit(judge, binary, directory, case, fixed, bool(arguments.keep))
                    )
                while waiting and waiting[0].done():
                    yield waiting.pop(0).result()
        for one in waiting:
            yield one.result()


def main(argv):
    parser = argparse.ArgumentParser(description="The table of the faults of a step.")
    parser.add_argument("--part", choices=job.RANGES, default="develop")
    parser.add_argument("--framework", choices=("torch", "jax"), default="torch")
    parser.add_argument("--draws", type=int, default=8, help="of every fault")
    parser.add_argument("--first", type=int, default=0, help="the first draw")
    parser.add_argument("--seed", type=int, default=20261129)
    parser.add_argument("--fault", action="append", help="only this one; may be repeated")
    parser.add_argument("--only", metavar="CASE", help="one case, by its name")
    parser.add_argument("--keep", metavar="DIR", help="keep dumps and reports here")
    parser.add_argument("--again", action="store_true", help="judge what --keep DIR holds already")
    parser.add_argument("--jobs", type=int, default=2, help="replays at a time")
    parser.add_argument("--json", metavar="FILE", help="append every outcome, one object a line")
    parser.add_argument(
        "--train-only", action="store_true", help="train and keep the dumps, replay nothing"
    )
    arguments = parser.parse_args(argv)
    if arguments.again and not arguments.keep:
        parser.error("--again judges the dumps in a folder: say --keep DIR too")
    directory = Path(arguments.keep or tempfile.mkdtemp(prefix="backtape-step-corpus-")).resolve()
    try:
        if arguments.train_only:
            return trained(arguments, directory)
        outcomes = []
        for outcome in outcomes_of(arguments, directory):
            outcomes.append(outcome)
            print(table.line(outcome), flush=True)
            if arguments.json:
                with open(arguments.json, "a") as lines:
                    lines.write(json.dumps(asdict(outcome)) + "\n")
        print(table.text(outcomes, arguments))
        return table.exit_code(outcomes)
    finally:
        if not arguments.keep:
            shutil.rmtree(directory, ignore_errors=True)


def trained(arguments, directory):
    """Trains the cases and says which could not be."""
    cases, failed = cases_of(arguments), 0
    for world in sorted({case.faulty.world for case in cases}):
        for case in train([case for case in cases if case.faulty.world == world], directory):
            done = (directory / case.name / "done").exists()
            failed += not done
            print(f"{'trained' if done else 'FAILED '} {case.name}", flush=True)
    return 1 if failed else 0
