"""Runs what `backtape init` prints, as somebody would who has never used backtape. Shared by the tests of all
environments: each runs the kinds of job that are installed there."""

import os
import subprocess
import sys

import backtape


def assert_runs_and_agrees(kind, directory):
    """The file that is printed for a kind of job records its step 0, all of which agrees."""
    printed = subprocess.run(
        [sys.executable, "-m", "backtape", "init", kind], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert len(printed.splitlines()) <= 12
    (directory / "train.py").write_text(printed)
    # What the file itself says is to be set; the others set nothing.
    asked = {"BACKTAPE_STEPS": "0", "BACKTAPE_DIR": "dumps"} if "BACKTAPE_STEPS" in printed else {}
    done = subprocess.run(
        [sys.executable, "train.py"], capture_output=True, text=True, timeout=300, cwd=directory, env=os.environ | asked
    )
    assert done.returncode == 0, done.stderr
    report = backtape.replay(directory / "dumps", step=0)
    assert report.verdict == "agreed", report
    told = {stage["name"]: stage["status"] for stage in report.json["stages"]}
    assert {told["loss"], told["dq"], told["dk"]} == {"pass"}, report
    judged = {stage["stage"]: stage["agreed"] for stage in report.json["algebra"]["stages"]}
    assert judged["update"], report
