"""From a real training job on four ranks to a verdict, as a user walks it."""

import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import backtape

ASKED = ["dq", "dk", "label_logits"]


@pytest.fixture(scope="module")
def report(dumps):
    """The replay of the run with the defect, beside the fixed one."""
    return backtape.replay(dumps / "new", step=0, compare=ASKED, against=dumps / "old")


def test_the_bf16_label_gather_is_placed_in_the_label_part_of_dk_and_named(report):
    assert (report.verdict, report.first_divergence.stage) == ("diverged", "dk_label"), str(report)
    assert [cause.id for cause in report.causes] == ["label-scatter-low-precision"], str(report)


def test_the_fixed_job_agrees(dumps):
    report = backtape.replay(dumps / "old", step=0, compare=ASKED)
    assert report.verdict == "agreed", str(report)


def test_the_two_runs_hold_equal_inputs(report):
    inputs = [d for d in report.against.differences if d.stage in ("q", "k", "labels", "weights")]
    assert inputs and all(d.unequal == 0 for d in inputs)


def test_the_checks_find_no_fault_with_a_real_job_and_name_what_they_looked_at(dumps):
    report = backtape.checks(dumps / "old")
    assert report.verdict == "passed", str(report)
    assert not [found for found in report.findings if found.severity != "note"], str(report)
    looked = {check.check for check in report.checks if check.looked_at > 0}
    assert {"batches", "labels", "nonfinite", "poison", "zeros", "replicas"} <= looked, str(report)


def test_a_reassembled_tensor_is_numpy_in_the_dtype_of_the_job(dumps):
    step = backtape.open(dumps / "old").step(0)
    dq = step.tensor("dq", microbatch=1)
    assert step.committed and dq.dtype == ml_dtypes.bfloat16 and dq.ndim == 2
    parts = [step.tensor("dk", microbatch=0, rank=rank).astype(np.float32) for rank in range(4)]
    assert all(part.shape == step.tensor("k").shape for part in parts)
    with pytest.raises(KeyError, match="dq of microbatch 7"):
        step.tensor("dq", microbatch=7)


def test_the_command_line_ends_with_the_same_verdict(dumps):
    replay = Path(sys.executable).with_name("replay")
    arguments = [replay, "--dump", dumps / "new", "--step", "0", "--compare", ",".join(ASKED)]
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 1 and "DIVERGED at dk_label" in ended.stdout, ended.stdout + ended.stderr
    verified = subprocess.run([replay, "verify", "--dump", dumps / "old"], timeout=300)
    assert verified.returncode == 0
