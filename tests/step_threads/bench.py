"""The driver: trains the jobs of each number of ranks, replays every dump, and prints the table."""

import argparse
import json
import shutil
import sys
import tempfile
from itertools import groupby
from pathlib import Path

from step_corpus.bench import ROOT, binary_of, ranks, replayed
from step_threads import table
from step_threads.threads import ELSEWHERE, THREADS


def train(threads, directory, python):
    """Trains jobs of one framework and number of ranks; those after one that fails are started again."""
    waiting = list(threads)
    for thread in waiting:
        for name in (thread.case, f"{thread.case}-fixed"):
            shutil.rmtree(directory / name, ignore_errors=True)
    while waiting:
        first = waiting[0]
        with tempfile.NamedTemporaryFile("w", suffix=".json") as plan:
            cases = [thread.case for thread in waiting]
            json.dump({"framework": first.framework, "cases": cases}, plan)
            plan.flush()
            ranks(first.world, plan.name, directory, len(cases), "step_threads.worker", python)
        failed = [at for at, thread in enumerate(waiting) if not is_done(directory, thread)]
        # The first of them is not tried again.
        waiting = waiting[failed[0] + 1 :] if failed else []


def is_done(directory, thread):
    return all((directory / name / "done").exists() for name in (thread.case, f"{thread.case}-fixed"))


def judge(binary, directory, thread):
    """What the replay says of a job, and of its twin."""
    told = []
    for fixed in (False, True):
        folder = directory / (f"{thread.case}-fixed" if fixed else thread.case)
        answer = table.Answer(thread.case, thread.case, fixed, {})
        if (folder / "done").exists():
            replayed(binary, folder, thread.step, answer)
            answer.look(folder / "dump", thread.step)
        else:
            reasons = [path.read_text().strip().splitlines()[-1] for path in folder.glob("failed-*")]
            answer.verdict, answer.reason = "not run", (reasons or ["the ranks did not end"])[0]
        told.append(answer)
    return table.Row(thread, *told)


def rows_of(arguments, directory):
    """Every row, as it comes."""
    binary = binary_of()
    chosen = [one for one in THREADS if arguments.only in (None, one.case)]
    if not chosen:
        raise SystemExit(f"no such thread; there are {', '.join(one.case for one in THREADS)}")
    key = lambda one: (one.framework, one.world)
    for (framework, _), some in groupby(sorted(chosen, key=key), key):
        some = list(some)
        if not arguments.again:
            python = arguments.jax if framework == "jax" else sys.executable
            train(some, directory, python)
        yield from (judge(binary, directory, thread) for thread in some)


def main(argv):
    parser = argparse.ArgumentParser(description="What the replay says of public threads.")
    parser.add_argument("--only", metavar="THREAD", help="one of them, by its name")
    parser.add_argument("--keep", metavar="DIR", help="keep dumps and reports here")
    parser.add_argument("--again", action="store_true", help="judge what --keep DIR holds already")
    parser.add_argument("--jax", metavar="PYTHON", default=sys.executable, help="with jax")
    parser.add_argument("--publish", action="store_true", help="write docs/step-threads.md")
    arguments = parser.parse_args(argv)
    if arguments.again and not arguments.keep:
        parser.error("--again judges the dumps in a folder: say --keep DIR too")
    directory = Path(arguments.keep or tempfile.mkdtemp(prefix="backtape-step-threads-")).resolve()
    try:
        rows = []
        for row in rows_of(arguments, directory):
            print(table.line(row), flush=True)
            rows.append(row)
        rows.sort(key=lambda row: THREADS.index(row.thread))
        print(table.summary(rows))
        if arguments.publish:
            (ROOT / "docs" / "step-threads.md").write_text(table.page(rows, ELSEWHERE))
        return table.exit_code(rows)
    finally:
        if not arguments.keep:
            shutil.rmtree(directory, ignore_errors=True)
