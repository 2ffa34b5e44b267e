"""`backtape init`: files to start from, which run as they are printed."""

import subprocess
import sys

from first_jobs import assert_runs_and_agrees


def test_the_job_of_jax_runs_as_it_is_printed_and_agrees(tmp_path):
    assert_runs_and_agrees("jax", tmp_path)


def init(*arguments):
    command = [sys.executable, "-m", "backtape", "init", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_help_is_no_kind_of_job():
    for arguments in (["--help"], ["torch", "-h"]):
        done = init(*arguments)
        assert (done.returncode, done.stderr) == (0, "") and "backtape init KIND" in done.stdout


def test_a_kind_of_job_that_is_not_known_is_refused_with_those_that_are():
    done = init("tf")
    assert (done.returncode, done.stdout) == (2, "")
    assert "jax" in done.stderr and "lightning" in done.stderr
