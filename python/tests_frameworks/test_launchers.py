"""`backtape run` around the launchers of other libraries: every rank that they start is recorded, and agrees."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import backtape

JOB = str(Path(__file__).with_name("launched_job.py"))
BIN = Path(sys.executable).parent
# Two processes on the CPU: what accelerate's `--cpu` starts is one.
ACCELERATE = [
    str(BIN / "accelerate"), "launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
    "--mixed_precision", "no", "--dynamo_backend", "no", JOB, "accelerate",
]  # fmt: skip
DEEPSPEED = [str(BIN / "deepspeed"), "--num_accelerators", "2", JOB, "deepspeed"]


@pytest.mark.parametrize(
    "command", [ACCELERATE, [*DEEPSPEED, "0"], [*DEEPSPEED, "1"], [*DEEPSPEED, "2"]],
    ids=["accelerate", "zero0", "zero1", "zero2"],
)  # fmt: skip
def test_both_ranks_that_a_launcher_starts_are_recorded_and_agree(tmp_path, command):
    options = ["--steps", "0-2", "--dir", str(tmp_path / "run"), "--"]
    done = subprocess.run(
        [sys.executable, "-m", "backtape", "run", *options, *command], capture_output=True, text=True, timeout=300,
        env=os.environ | {"DS_ACCELERATOR": "cpu"},
    )  # fmt: skip
    assert_whole(done, tmp_path / "run")


@pytest.mark.parametrize("words", [["accelerate"], ["deepspeed", "1"]], ids=["accelerate", "zero1"])
def test_the_one_line_records_what_a_library_has_wrapped(tmp_path, words):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    asked = {"BACKTAPE_STEPS": "0-2", "BACKTAPE_DIR": str(tmp_path / "run"), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [*torchrun, JOB, *words, "attach"], capture_output=True, text=True, timeout=300, env=os.environ | asked
    )
    assert_whole(done, tmp_path / "run")


def assert_whole(done, directory):
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained on 2 ranks") == 2
    assert "backtape: recorded step 0, 1, 2" in done.stderr
    for step in range(3):
        report = backtape.replay(directory, step=step)
        assert report.verdict == "agreed", report
        told = {stage["name"]: stage["status"] for stage in report.json["stages"]}
        assert {told["loss"], told["dq"], told["dk"]} == {"pass"}, report
        judged = {stage["stage"]: stage["agreed"] for stage in report.json["algebra"]["stages"]}
        assert judged["reduce"] and judged["clip"] and judged["update"], report
