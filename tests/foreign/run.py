"""Replays the loss heads of public training codes, and prints what the replay says of each.

    python tests/foreign/run.py --sources DIR                 # every case, two draws each
    python tests/foreign/run.py --sources DIR --only maxtext-tiled-broken --keep /tmp/case
    python tests/foreign/run.py --sources DIR --publish       # and writes docs/foreign-heads.md

The repositories are got from outside (tests/foreign/sources.py says how they lie below DIR); none of
their code is here. The Python that runs this needs backtape, jax and torch; a case whose imports or
source are missing is a row that says so. `replay` is $REPLAY, or the one that backtape installed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path[:] = [str(Path(__file__).parents[1]), *(p for p in sys.path if p != str(Path(__file__).parent))]

import foreign.jax_heads  # noqa: E402, F401
import foreign.torch_heads  # noqa: E402, F401
from foreign.case import CASES  # noqa: E402
from foreign.sources import NoSource, extract  # noqa: E402
from foreign.table import page, summary  # noqa: E402

TESTS = Path(__file__).parents[1]
LIMIT = 300


@dataclass
class Answer:
    """What the replay said of one draw of one case."""

    case: object
    seed: int
    dtype: str
    verdict: str
    stage: str = ""
    causes: tuple = ()
    note: str = ""

    @property
    def judged(self):
        return self.verdict in ("agreed", "diverged", "misdeclared")

    @property
    def detected(self):
        return self.judged and (self.verdict != "agreed") == self.case.faulty

    @property
    def placed(self):
        return self.detected and (not self.case.faulty or self.stage in self.case.stages)

    @property
    def named(self):
        """The cause is right: alone or among those that are tied."""
        return self.placed and (not self.case.faulty or bool(set(self.causes) & set(self.case.causes)))

    @property
    def wrong(self):
        """A cause was named, and it is not what happened."""
        return bool(self.causes) and self.causes != ("unknown",) and not self.named


def one(case, seed, dtype, sources, keep):
    with tempfile.TemporaryDirectory() as scratch:
        root, dump = Path(scratch, "source"), Path(keep or scratch, f"{case.id}-{seed}-{dtype}")
        try:
            extract(sources, case.repository, case.commit, root)
        except NoSource as why:
            return Answer(case, seed, dtype, "not run", note=str(why))
        shutil.rmtree(dump, ignore_errors=True)
        environment = os.environ | {"PYTHONPATH": str(TESTS), "JAX_PLATFORMS": "cpu", "TRITON_INTERPRET": "1"}
        record = [sys.executable, "-m", "foreign.record", case.id, root, dump, str(seed), dtype]
        ran = subprocess.run(record, env=environment, capture_output=True, text=True, timeout=LIMIT, cwd=scratch)
        if ran.returncode != 0:
            return Answer(case, seed, dtype, "not run", note=ran.stderr.strip().splitlines()[-1][:200])
        return replayed(case, seed, dtype, dump, Path(scratch, "report.json"))


def replayed(case, seed, dtype, dump, out):
    replay = os.environ.get("REPLAY", Path(sys.executable).with_name("replay"))
    command = [replay, "--dump", dump, "--step", "0", "--json", out, "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    if not out.exists():
        return Answer(case, seed, dtype, "no verdict", note=done.stderr.strip()[:200])
    report = json.loads(out.read_text())
    first = report["first_divergence"] or {}
    causes = tuple(cause["id"] for cause in report["causes"])
    return Answer(case, seed, dtype, report["verdict"], first.get("stage", ""), causes)


def main(arguments):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sources", type=Path, required=True)
    parser.add_argument("--only", help="cases whose id has this in it")
    parser.add_argument("--draws", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", help="a folder that keeps the dumps")
    parser.add_argument("--publish", action="store_true")
    asked = parser.parse_args(arguments)
    answers = []
    for case in CASES.values():
        if asked.only and asked.only not in case.id:
            continue
        for number in range(asked.draws):
            dtype = case.dtypes[number % len(case.dtypes)]
            answer = one(case, asked.seed + number, dtype, asked.sources, asked.keep)
            answers.append(answer)
            said = f"{answer.verdict:11} {answer.stage:9} {', '.join(answer.causes)} {answer.note}"
            print(f"{'ok' if answer.named else '--'} {case.id:26} seed {answer.seed} {dtype:4} {said}", flush=True)
    print(summary(answers))
    if asked.publish:
        (TESTS.parent / "docs" / "foreign-heads.md").write_text(page(answers, asked))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
