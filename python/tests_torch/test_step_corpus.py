"""Some draws of the corpus of faults that are planted in the step (tests/step_corpus): each is detected,
at its stage and with its cause, and its twin without the fault agrees. All of it: make bench-step-causes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "tests" / "step_corpus" / "run.py"
REPLAY = Path(sys.executable).with_name("replay")

FAULTS = [
    "reduce-sum-for-mean",
    "clip-twice",
    "eps-inside-sqrt",
    "norm-counts-copies",
    "divide-old-shard",
    "bucket-stale",
    "clip-before-unscale",
    "norm-low-precision",
    "state-swapped",
    "tied-updated-twice",
    "sharded-norm-inside-update",
    "inf-skipped-on-some-ranks",
    "param-not-in-optimizer",
]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_and_its_twin_agrees(fault, tmp_path):
    command = [sys.executable, PROGRAM, "--fault", fault, "--draws", "1", "--keep", tmp_path]
    done = subprocess.run(
        command, env=os.environ | {"REPLAY": str(REPLAY)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
