"""`backtape init`: files to start from, which run as they are printed."""

import subprocess
import sys

from first_jobs import assert_runs_and_agrees


def test_the_job_of_jax_runs_as_it_is_printed_and_agrees(tmp_path):
    assert_runs_and_agrees("jax", tmp_path)


def test_a_kind_of_job_that_is_not_known_is_refused_with_those_that_are():
    done = subprocess.run([sys.executable, "-m", "backtape", "init", "tf"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert "jax" in done.stderr and "lightning" in done.stderr
