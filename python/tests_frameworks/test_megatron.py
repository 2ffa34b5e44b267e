"""Jobs of Megatron-LM on two ranks: its optimizers are recorded by the one call, judged, and told by stage and cause."""

from pathlib import Path

import pytest
from processes import free_port, run_ranks
from test_step_of_strangers import Told

import backtape

PROGRAM = Path(__file__).with_name("megatron_ranks.py")
WORLD = 2
# The format, and what more is set; and what is told. A fault that is planted in a class stays there, so that each of
# these has ranks of its own.
RIGHT = {
    "bf16-shared": Told(words="param 28 0 0"),
    "bf16": Told(words="clip 28 0 0"),
    "f32-shared": Told(words="clip 28 0 0"),
    "f32-average": Told(words="state 28 0 0"),
    "fp16-shared": Told(words="unscale 28 0 0"),
    "bf16-shared-tokens": Told(words="reduce 28 0 0"),
    "bf16-shared-tensor": Told(words="norm 1 0 0"),
    "bf16-tensor": Told(words="norm 1 0 0"),
    "bf16-shared-tensor-gated": Told(words="norm 1 0 0"),
    "f32-shared-tensor-gated-sampled": Told(words="clip 28 0 0"),
    "bf16-shared-sampled": Told(words="norm 1 0 0"),
    "f32-shared-stages": Told(words="reduce 1 0 0"),
    "bf16+not-divided": Told("diverged", "reduce", "reduce-sum-for-mean"),
    "bf16-shared+not-cleared": Told("diverged", "accumulate", "not-cleared"),
    "bf16-shared+not-brought-back": Told("diverged", "param", "master-stale"),
}
WRONG = {
    "bf16-shared+norm-of-a-part": Told("diverged", "norm", "norm-local-not-global"),
    "bf16-shared-tensor+copies-counted": Told("diverged", "norm", "norm-counts-copies"),
    "f32-shared+not-clipped": Told("diverged", "clip", "clip-recorded-not-applied"),
}


# Jobs as they stand: the loss head, and the first stage of it that is wrong.
ATTACHED = {
    "f32-attached": None,
    "f32-tensor-attached": None,
    "f32-tensor-sequence-attached": None,
    "f32-stages-attached": None,
    "bf16-shared-tensor-fused-attached": None,
}
ATTACHED_WRONG = {"f32-tensor-attached+head-scaled": "dk", "f32-tensor-attached+loss-divided": "loss"}

# The same weights, whole on each rank and split over both.
SPLIT = ("f32-gated-first", "f32-tensor-gated-first")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The directory of what the ranks recorded."""
    directory = tmp_path_factory.mktemp("megatron")
    run_ranks(PROGRAM, WORLD, free_port(), directory, *RIGHT, *SPLIT, *ATTACHED)
    for scenario in (*WRONG, *ATTACHED_WRONG):
        run_ranks(PROGRAM, WORLD, free_port(), directory, scenario)
    return directory


@pytest.mark.parametrize("scenario, told", (RIGHT | WRONG).items())
def test_what_an_optimizer_of_megatron_does_is_told(recorded, scenario, told):
    told.is_told_by(backtape.replay(recorded / scenario, step=1, compare=["step"]))


def test_parts_of_tensor_parallel_ranks_lie_where_they_do_in_the_whole_parameter(recorded):
    whole, split = (recorded / name for name in SPLIT)
    report = backtape.replay(whole, step=0, against=split, compare=["step"])
    assert "before 28 0 0" in " ".join(str(report).split()), str(report)


@pytest.mark.parametrize("scenario, first", (ATTACHED | ATTACHED_WRONG).items())
def test_the_head_of_a_job_that_is_attached_is_judged(recorded, scenario, first):
    report = backtape.replay(recorded / scenario, step=1)
    told = {stage["name"]: stage["status"] for stage in report.json["stages"]}
    if first is None:
        assert report.verdict == "agreed", str(report)
        assert {told["loss"], told["dq"], told["dk"]} == {"pass"}, str(report)
    else:
        assert report.verdict == "diverged" and report.first_divergence.stage == first, str(report)
