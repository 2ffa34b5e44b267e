"""Gradients of several ranks that the job's own code treats before they are brought together, or brings together where
nobody sees it."""

from pathlib import Path

import pytest
from processes import free_port, run_ranks
from test_step_of_strangers import Told

import backtape

PROGRAM = Path(__file__).with_name("late_reductions.py")
ALL = ("0.weight", "0.bias", "2.weight", "2.bias")
WEIGHTS = ("0.weight", "2.weight")
OWN_NORM = "each gradient was clipped to 0.010"
CARRIED = "it holds microbatch 0 and the gradient that was there before the step: microbatch 1 is left out"
TOLD = {
    "right": Told(),
    "inside": Told(words="it was reduced within the optimizer's step"),
    "not at all": Told("diverged", "reduce", "not-reduced-over-axis", ALL),
    "smaller each time": Told("diverged", "reduce", "clip-twice", ALL, "is made smaller with each microbatch"),
    "clipped by hand first": Told("diverged", "reduce", "norm-local-not-global", ALL, OWN_NORM),
    "clipped first": Told("diverged", "reduce", "norm-local-not-global", ALL, "look at the order"),
    "norm for the log first": Told("incomplete", words="recorded as reduced before ranks brought it together"),
    "fsdp2": Told(),
    "fsdp2 reduced after the first pass": Told("diverged", "reduce", "accumulate-window", ALL, CARRIED),
    "exchanged": Told("diverged", "reduce", "update-from-other-gradient", WEIGHTS, "the gradient of another parameter"),
}


@pytest.mark.parametrize("scenario", TOLD)
def test_what_became_of_gradients_before_or_after_their_reduction_is_told(ranks, scenario):
    report = backtape.replay(ranks / scenario.replace(" ", "-"), step=1, compare=["step"])
    TOLD[scenario].is_told_by(report)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The directory of what two ranks recorded; all scenarios run one after the other."""
    directory = tmp_path_factory.mktemp("ranks")
    run_ranks(PROGRAM, 2, free_port(), directory, *TOLD)
    return directory
