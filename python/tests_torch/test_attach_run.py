"""`backtape run -- torchrun ...`: jobs of several processes in which no line is changed."""

import subprocess
import sys
from pathlib import Path

import pytest

import backtape

JOB = Path(__file__).with_name("attach_ranks.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def launched(*words, ranks=True, options=None):
    """Runs the job, under `backtape run` where there are options for it."""
    job = [*(TORCHRUN if ranks else [sys.executable]), str(JOB), *map(str, words)]
    before = [] if options is None else [sys.executable, "-m", "backtape", "run", *options, "--"]
    return subprocess.run([*before, *job], capture_output=True, text=True, timeout=120)


def parameters(done):
    lines = [line for line in done.stdout.splitlines() if line.startswith("parameters")]
    assert len(lines) == 2, done.stderr
    return sorted(lines)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2", "fsdp2-bf16"])
def test_a_right_job_of_two_ranks_agrees_and_a_wrong_gradient_is_told(tmp_path, wrapper):
    done = launched(wrapper, 2, options=["--steps", "1", "--dir", str(tmp_path / "right")])
    assert done.returncode == 0, done.stderr
    assert f"Next: replay --dump {tmp_path / 'right'} --step 1" in done.stderr
    report = backtape.replay(tmp_path / "right", step=1)
    assert report.verdict == "agreed", report
    told = {stage["name"]: stage["status"] for stage in report.json["stages"]}
    assert {told["loss"], told["dq"], told["dk"]} == {"pass"}, report
    judged = {stage["stage"]: stage["agreed"] for stage in report.json["algebra"]["stages"]}
    assert judged["reduce"] and judged["clip"] and judged["update"], report

    launched(wrapper, 2, "gradient", options=["--steps", "1", "--dir", str(tmp_path / "wrong")])
    report = backtape.replay(tmp_path / "wrong", step=1)
    assert report.verdict == "diverged", report
    told = {stage["name"]: stage["status"] for stage in report.json["stages"]}
    assert (told["loss"], told["dq"], told["dk"]) == ("pass", "fail", "fail"), report


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_no_bit_of_a_job_changes_over_200_steps(tmp_path, wrapper):
    plain = launched(wrapper, 200)
    recorded = launched(wrapper, 200, options=["--steps", "0,50-52,120", "--dir", str(tmp_path)])
    assert parameters(recorded) == parameters(plain)
    assert len(list(tmp_path.glob("step-*/manifest.json"))) == 5


def test_a_job_that_fails_within_its_step_fails_as_it_would_alone(tmp_path):
    done = launched("alone", 2, "step", ranks=False, options=["--dir", str(tmp_path)])
    assert done.returncode == 1
    assert "RuntimeError: the job's own fault" in done.stderr
    report = backtape.replay(tmp_path, step=0)
    assert report.verdict == "incomplete", report
    assert "RuntimeError" in str(report)


def test_a_command_that_is_no_torch_job_runs_and_is_told(tmp_path):
    command = [sys.executable, "-m", "backtape", "run", "--dir", str(tmp_path / "none"), "--"]
    done = subprocess.run([*command, sys.executable, "-c", "print(1); exit(7)"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (7, "1\n")
    assert "nothing was recorded" in done.stderr
    done = subprocess.run([*command, "no-such-command"], capture_output=True, text=True)
    assert done.returncode == 127 and "no-such-command" in done.stderr
