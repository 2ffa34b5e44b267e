"""Scripts of `replay export --repro`, made of random heads and run without backtape."""

import os
import re
import subprocess
import sys
from pathlib import Path

import jax
from test_head_options import Run, choose, compute, draw_case

# As many heads as it takes for every loss and every gradient to be in one of them.
CASES = int(os.environ.get("BACKTAPE_CASES", 30))
# Unit roundoff 1.1e-16 over sums of at most 90 terms; what is captured is in f64 too.
EXACT = 1e-11
RUNNER = """
import runpy, sys
for path in sys.argv[1:]:
    print("#", path)
    runpy.run_path(path, run_name="__main__")
"""


def dumped(path, seed, cases=CASES):
    """A run of random heads in f64, one step for each."""
    run = Run(path, seed, cases)
    with jax.enable_x64(True):
        for index in range(cases):
            case, rng = draw_case(seed, index)
            run.add(case, compute(case), choose(rng, case), rng)
    run.recorder.close()
    return [case for case, _ in run.held]


def exported(dump, step, case, framework, target):
    """Makes the script of the last microbatch; the program's answer."""
    last = len(case.microbatches) - 1
    command = [Path(sys.executable).with_name("replay"), "export", "--dump", dump]
    command += ["--step", str(step), "--repro", target, "--framework", framework]
    command += ["--microbatch", str(last)] if last else []
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def errors(scripts):
    """What each script printed: by tensor, the error of the job's and of its own."""
    command = [sys.executable, "-c", RUNNER, *scripts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 + 10 * len(scripts))
    assert done.returncode == 0, done.stderr
    for said in done.stdout.split("# ")[1:]:
        path, *lines = said.splitlines()
        rows = [re.fullmatch(r"(\w+) +(\S+) +(\S+)", line) for line in lines]
        found = {row[1]: (float(row[2]), float(row[3])) for row in rows if row and row[1] != "loss"}
        yield path, found


def judge(tmp_path, seed, framework):
    """Asserts that every script finds what the job captured, down to rounding in f64."""
    cases = dumped(tmp_path / "run", seed)
    scripts, seen = [], set()
    for step, case in enumerate(cases):
        target = tmp_path / f"repro-{step}"
        made = exported(tmp_path / "run", step, case, framework, target)
        assert made.returncode == 0, (seed, case, made.stderr)
        scripts.append(target / "repro.py")
    for (path, found), case in zip(errors(scripts), cases, strict=True):
        seen |= set(found)
        wrong = {name: pair for name, pair in found.items() if not max(pair) < EXACT}
        assert not wrong, f"seed {seed}, {path}: {wrong}\n{case}"
    assert {"lse", "label_logits", "dq", "dk", "dbias", "dlogits", "dlogprobs"} <= seen, seen
