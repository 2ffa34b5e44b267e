"""Some of the public threads that are rebuilt as jobs (tests/step_threads): the replay says of each what its
thread says, and the twin without the fault agrees. All of them: make bench-step-threads."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "tests" / "step_threads" / "run.py"
REPLAY = Path(sys.executable).with_name("replay")

# A buffer that is added to itself, a norm that loses the sinks of a rank, a weight that is not summed, and an
# optimizer that is judged by a formula which the job declares.
THREADS = ["megatron_6660", "megatron_7452_8", "megatron_7452_11", "pytorch_optimizer_308"]


@pytest.mark.parametrize("thread", THREADS)
def test_the_replay_says_of_a_rebuilt_job_what_its_thread_says(thread):
    done = subprocess.run(
        [sys.executable, PROGRAM, "--only", thread],
        env={"REPLAY": str(REPLAY)} | os.environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(thread)]
    for judged in ("detected=yes", "stage=yes", "group=yes", "cause=right", "twin=yes"):
        assert judged in line, line
