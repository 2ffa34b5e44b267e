"""Jobs under tensor parallelism as they stand: heads whose vocabulary two ranks share."""

import subprocess
import sys
from pathlib import Path

import pytest
from test_attach import stages

import backtape

JOB = Path(__file__).with_name("attach_tensor_ranks.py")
RUN = [sys.executable, "-m", "backtape", "run", "--steps", "1", "--dir"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def replayed(directory, *words):
    command = [*RUN, str(directory), "--", *TORCHRUN, str(JOB), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return backtape.replay(directory, step=1)


@pytest.mark.parametrize("kind", ["shared", "gathered"])
def test_a_head_of_which_ranks_share_the_vocabulary_agrees_and_a_fault_in_it_is_told(tmp_path, kind):
    report = replayed(tmp_path / "right", kind)
    assert report.verdict == "agreed", report
    told = stages(report)
    assert {told["loss"], told["dq"], told["dk"]} == {"pass"}, report

    report = replayed(tmp_path / "wrong", kind, "logits")
    told = stages(report)
    assert report.verdict == "diverged", report
    assert (told["loss"], told["dq"], told["dk"]) == ("pass", "fail", "fail"), report


def test_a_head_that_says_nothing_of_how_ranks_share_its_tokens_is_named(tmp_path):
    report = replayed(tmp_path, "whole")
    said = " ".join(str(report).split())
    assert report.verdict == "incomplete" and "the ranks share tokens by tensor parallelism" in said, said
