"""Runs of jobs: each run is a mesh whose steps are jobs, recorded and replayed."""

import argparse
import collections
import json
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

# Jobs that are steps of one run, so share its mesh and its recorders.
TOGETHER = 16
# How often a job whose numbers are not finite is drawn again.
ATTEMPTS = 40


@dataclass
class Outcome:
    """What the replay said of one job."""

    index: int
    mesh: str
    verdict: str = ""
    agreed: int = 0
    diverged: int = 0
    unchecked: int = 0
    stages: dict = field(default_factory=dict)  # by name: agreed, diverged, unchecked
    why: dict = field(default_factory=dict)  # reasons of what is unchecked, by stage and reason
    alarms: list = field(default_factory=list)
    details: str = ""

    @property
    def is_alarm(self):
        return self.verdict in ("diverged", "misdeclared", "differs")


def replayed(directory, index):
    """The report of a step, as plain data: by the binary $REPLAY, or in this process."""
    if binary := os.environ.get("REPLAY"):
        with tempfile.NamedTemporaryFile(suffix=".json") as report:
            command = [binary, "--dump", directory, "--step", index, "--compare", "step", "--json", report.name]
            done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
            text = Path(report.name).read_text()
        if not text:
            raise RuntimeError(f"no report: {done.stdout}{done.stderr}")
        return json.loads(text), done.stdout
    import backtape

    report = backtape.replay(directory, step=index, compare=["step"])
    return report.json | {"verdict": report.verdict}, str(report)


def judge(directory, index, outcome):
    """Replays a step and fills in what came of it."""
    report, text = replayed(directory, index)
    outcome.verdict = report["verdict"]
    algebra = report.get("algebra")
    if algebra is None:
        outcome.details = text
        return
    for stage in algebra["stages"]:
        counts = [stage[name] for name in ("agreed", "diverged", "unchecked")]
        outcome.stages[stage["stage"]] = counts
        outcome.agreed += counts[0]
        outcome.diverged += counts[1]
        outcome.unchecked += counts[2]
    for left in algebra["unchecked"]:
        outcome.why[f"{left['stage']}: {left['why']}"] = 1
    for group in algebra["diverged"]:
        cause = (group["reading"] or {}).get("cause")
        outcome.alarms.append([group["stage"], group["what"], cause, group["reason"], group["worst"]])
    if outcome.is_alarm or algebra["faults"] or outcome.verdict == "incomplete":
        outcome.details = text


def run_of(seed, first, last, keep, framework):
    """The outcomes of the jobs `first` to `last` of one run."""
    if framework == "jax":
        from step_campaign import jax_jobs as jobs
    else:
        from step_campaign import torch_jobs as jobs
    number = first // TOGETHER
    directory = Path(keep or tempfile.mkdtemp(prefix="backtape-campaign-")) / f"run-{number}"
    shutil.rmtree(directory, ignore_errors=True)
    try:
        described = jobs.record(seed, number, range(first, last + 1), directory, ATTEMPTS)
        outcomes = []
        for at, index in enumerate(range(first, last + 1)):
            outcome = Outcome(index, described[at])
            try:
                judge(directory, at, outcome)
            except Exception:
                outcome.verdict, outcome.details = "error", traceback.format_exc()
            outcomes.append(asdict(outcome))
        return outcomes
    except Exception:
        details = traceback.format_exc()
        return [asdict(Outcome(first, "", "error", details=details))]
    finally:
        if not keep:
            shutil.rmtree(directory.parent, ignore_errors=True)


def runs(first, count):
    """The first and the last job of each run."""
    last = first + count - 1
    while first <= last:
        end = min(last, first - first % TOGETHER + TOGETHER - 1)
        yield first, end
        first = end + 1


def outcomes_of(arguments):
    """Every outcome, run by run."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(arguments.jobs, mp_context=context) as pool:
        waiting = [
            pool.submit(run_of, arguments.seed, first, last, arguments.keep, arguments.framework)
            for first, last in runs(arguments.first, arguments.runs)
        ]
        for one in as_completed(waiting):
            yield from (Outcome(**plain) for plain in one.result())


class Table:
    """What the campaign has seen so far."""

    def __init__(self):
        self.jobs = self.alarms = self.errors = self.blind = 0
        self.stages = collections.defaultdict(lambda: np.zeros(3, int))
        self.why = collections.Counter()

    def add(self, outcome):
        self.jobs += 1
        self.alarms += outcome.is_alarm
        self.errors += outcome.verdict == "error"
        self.blind += not outcome.agreed + outcome.diverged
        for stage, counts in outcome.stages.items():
            self.stages[stage] += np.array(counts)
        self.why.update(outcome.why.keys())

    def judged(self):
        """How many stages were judged, and how many were not."""
        total = sum(self.stages.values(), np.zeros(3, int))
        return total[0] + total[1], total[2]

    def text(self):
        order = ("accumulate", "reduce", "unscale", "norm", "clip", "state", "update", "param")
        lines = [f"{'stage':12}{'pass':>10}{'FAIL':>8}{'unchecked':>11}"]
        total = sum(self.stages.values(), np.zeros(3, int))
        for stage in (*filter(self.stages.__contains__, order), "all"):
            counts = total if stage == "all" else self.stages[stage]
            lines.append(f"{stage:12}{counts[0]:>10,}{counts[1]:>8,}{counts[2]:>11,}")
        judged, unchecked = self.judged()
        share = judged / max(judged + unchecked, 1)
        lines.append(
            f"{self.jobs:,} clean jobs: {self.alarms} alarms, {self.errors} errors; {share:.1%} of stages "
            f"judged, {self.blind} jobs without any"
        )
        return "\n".join(lines)


def main(argv):
    parser = argparse.ArgumentParser(description="Clean jobs, whose steps must raise no alarm.")
    parser.add_argument("--runs", type=int, default=1000, help="how many jobs")
    parser.add_argument("--first", type=int, default=0, help="the first job")
    parser.add_argument("--seed", type=int, default=20261130)
    parser.add_argument("--framework", choices=("torch", "jax"), default="torch")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--keep", metavar="DIR", help="keep the dumps here")
    parser.add_argument("--json", metavar="FILE", help="append every outcome, one object a line")
    parser.add_argument("--why", action="store_true", help="print why stages were not judged")
    arguments = parser.parse_args(argv)
    table, started = Table(), time.monotonic()
    print(f"seed {arguments.seed}, jobs {arguments.first} to {arguments.first + arguments.runs - 1}", flush=True)
    for outcome in outcomes_of(arguments):
        table.add(outcome)
        if outcome.is_alarm or outcome.verdict == "error":
            print(f"job {outcome.index} ({outcome.mesh}): {outcome.verdict} {outcome.alarms}", flush=True)
            print(outcome.details, flush=True)
        if arguments.json:
            with open(arguments.json, "a") as lines:
                lines.write(json.dumps(asdict(outcome)) + "\n")
    print(table.text())
    if arguments.why:
        print(*(f"{count:>8} {why}" for why, count in table.why.most_common(40)), sep="\n")
    print(f"{time.monotonic() - started:.0f} s", file=sys.stderr)
    return 1 if table.alarms or table.errors else 0
