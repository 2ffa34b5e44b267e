"""What docs/step-causes.md says was printed is what is printed: some of its causes, trained and replayed anew."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "docs/step_causes.py"
REPLAY = Path(sys.executable).with_name("replay")

# One of each way in which causes are found: a sum, a norm, a rule, copies. Those of one number of ranks
# run together.
SOME = [
    ["accumulate-doubles", "data-parallel-copies-drift"],
    ["wrong-group", "norm-counts-copies"],
    ["norm-misses-group", "eps-inside-sqrt"],
]


@pytest.mark.parametrize("causes", SOME, ids="+".join)
def test_the_screen_of_a_cause_is_the_one_of_the_page(causes, tmp_path):
    command = [sys.executable, PROGRAM, "--check", "--keep", tmp_path, *causes]
    environment = {"REPLAY": str(REPLAY)} | os.environ
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 causes are named" in done.stdout
