"""`backtape run -- torchrun ...`: jobs of several processes in which no line is changed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from first_jobs import assert_runs_and_agrees

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


@pytest.mark.parametrize("wrapper", ["ddp", "ddp-outputs", "fsdp2", "fsdp2-bf16"])
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


def test_a_job_with_a_start_up_of_its_own_that_looks_for_torch_first_is_attached(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import importlib.util\nimportlib.util.find_spec('torch')\nOWN = 1\n")
    script = (
        "import sitecustomize, importlib.util, sys; importlib.util.find_spec('torch'); import torch, builtins\n"
        "m = torch.nn.Linear(3, 2); o = torch.optim.SGD(m.parameters(), 0.1); m(torch.ones(1, 3)).sum().backward(); o.step()\n"
    )
    command = [sys.executable, "-m", "backtape", "run", "--dir", str(tmp_path / "run"), "--", sys.executable, "-c", script]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0 and "recorded step 0" in done.stderr, done.stderr
    assert "Error in sitecustomize" not in done.stderr


@pytest.mark.parametrize("words", [["--sample", "lots"], ["--steps", "first"], ["--steps", ""], ["--nothing"], []])
def test_what_cannot_be_run_is_refused_before_the_job_starts(tmp_path, words):
    command = [sys.executable, "-m", "backtape", "run", "--dir", str(tmp_path / "run"), *words]
    done = subprocess.run([*command, *(["--", "true"] if words else [])], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "backtape run: error" in done.stderr
    (tmp_path / "file").write_text("")
    command = [sys.executable, "-m", "backtape", "run", "--dir", str(tmp_path / "file" / "run"), "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "Not a directory" in done.stderr


def test_a_command_that_is_no_torch_job_runs_and_is_told(tmp_path):
    command = [sys.executable, "-m", "backtape", "run", "--dir", str(tmp_path / "none"), "--"]
    done = subprocess.run([*command, sys.executable, "-c", "print(1); exit(7)"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (7, "1\n")
    assert "nothing was recorded" in done.stderr
    done = subprocess.run([*command, "no-such-command"], capture_output=True, text=True)
    assert done.returncode == 127 and "no-such-command" in done.stderr


def test_the_job_that_backtape_init_prints_for_torch_agrees(tmp_path):
    assert_runs_and_agrees("torch", tmp_path)
