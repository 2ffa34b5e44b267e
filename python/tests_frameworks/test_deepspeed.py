"""Jobs of DeepSpeed on two ranks: its optimizers are recorded by the one call, judged, and told by stage and cause."""

from pathlib import Path

import pytest
from processes import free_port, run_ranks
from test_step_of_strangers import Told

import backtape

PROGRAM = Path(__file__).with_name("deepspeed_ranks.py")
WORLD = 2
# The stage of ZeRO, the format, and what more is set; and what is told.
SCENARIOS = {
    "zero0-f32-clipped": Told(words="clip 6 0 0"),
    "zero1-f32": Told(words="param 6 0 0"),
    "zero1-bf16-clipped": Told(words="clip 6 0 0"),
    "zero1-bf16-wide-clipped": Told(words="clip 6 0 0"),
    "zero2-bf16-clipped": Told(words="param 6 0 0"),
    "zero2-bf16-clipped-engine": Told(words="param 6 0 0"),
    "zero2-bf16-clipped-inner": Told(words="param 6 0 0"),
    "zero2-fp16-clipped": Told(words="clip 6 0 0"),
    "zero2-fp16": Told(words="unscale 6 0 0"),
    "zero3-bf16-clipped": Told(words="param 6 0 0"),
    "zero3-fp16": Told(words="unscale 6 0 0"),
    "zero2-fp16-clipped-sampled": Told(words="clip 6 0 0"),
    "zero3-bf16-clipped-sampled": Told(words="norm 1 0 0"),
    "zero2-bf16+not-averaged": Told("diverged", "reduce", "reduce-sum-for-mean"),
    "zero2-bf16-clipped+norm-of-a-part": Told("diverged", "norm", "norm-local-not-global"),
    "zero2-fp16-clipped+not-unscaled": Told("diverged", "clip", "loss-scale-left-in"),
    "zero3-bf16+not-brought-back": Told("diverged", "param", "master-stale"),
    "zero2-fp16-infinite": Told(words="DeepSpeedZeroOptimizer left the optimizer's step out"),
}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The directory of what the ranks recorded; all scenarios run one after the other."""
    directory = tmp_path_factory.mktemp("deepspeed")
    run_ranks(PROGRAM, WORLD, free_port(), directory, *SCENARIOS)
    return directory


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_what_an_optimizer_of_deepspeed_does_is_told(recorded, scenario):
    report = backtape.replay(recorded / scenario, step=1, compare=["step"])
    SCENARIOS[scenario].is_told_by(report)
