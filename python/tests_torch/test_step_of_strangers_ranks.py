"""The same of several ranks over gloo: gradients that are brought together wrongly, by the job's code or by DDP."""

from pathlib import Path

import pytest
from processes import free_port, run_ranks
from test_step_of_strangers import Told
from test_step_of_strangers_weights import PASSES, STEP

import backtape

PROGRAM = Path(__file__).with_name("strangers_ranks.py")
NAMES = ("inner.weight", "inner.bias", "outer.weight", "outer.bias")
AGAIN_BY_RANKS = "what was summed over data before is summed over it again with each microbatch"
# Two ranks that are summed again give what a doubled buffer gives, so that both are named. No sum is proved by the
# one element of the last parameter.
EITHER = Told("diverged", "reduce", "unknown", NAMES[:3], AGAIN_BY_RANKS + ", or a rank adds that sum to itself")
WITH_THE_FIRST = Told(
    "diverged", "reduce", "not-reduced-over-axis", words="which was not reduced; microbatch 0 was"
)
# What is told of each scenario, by how many ranks there are.
RANKS = {
    2: {
        "right": Told(),
        "again": EITHER,
        "again-mean": EITHER,
        "first": WITH_THE_FIRST,
        "sum": Told("diverged", "reduce", "reduce-sum-for-mean", NAMES, factor=2.0),
        "undeclared": Told("incomplete", words="summed and divided by was not judged"),
        "shares": Told(words="param 4 0 0"),
        "shares-lost": Told("diverged", "param", "data-parallel-copies-drift", words="copies differed before the step already"),
        "parts": Told(words="other parameters of one name"),
        "near": Told("incomplete", words="under each name before the step are correlated (by 0.99"),
        "rates": Told("diverged", "param", "data-parallel-copies-drift", words="ranks 0 and 1 declare another lr for "),
        "held": Told("diverged", "reduce", "not-cleared", words="the optimizer of some rank holds each of them"),
        "divisors": Told("incomplete", words="inner.* (2 parameters) divided by 4.000, outer.*"),
        "one-divisor": Told(),
        "sam": Told(),
        "sam-several": Told(words="accumulate 4 0 0"),
        "sam-kept": PASSES,
        "sam-left": STEP,
        "fsdp1": Told(),
        "fsdp2": Told(),
        "fsdp2-left": STEP,
        "task": Told(words="accumulate 4 0 0"),
        "task-first": WITH_THE_FIRST,
    },
    3: {
        "again": Told("diverged", "reduce", "reduced-twice", NAMES[:3], AGAIN_BY_RANKS),
        "again-mean": Told("diverged", "reduce", "reduced-twice", NAMES[:3], AGAIN_BY_RANKS),
    },
}


@pytest.mark.parametrize(
    "world, scenario", [(world, scenario) for world, all_of in RANKS.items() for scenario in all_of]
)
def test_what_several_ranks_do_is_told(ranks, world, scenario):
    report = backtape.replay(ranks(world) / scenario, step=1, compare=["step"])
    RANKS[world][scenario].is_told_by(report)
    if scenario == "sum":  # the parameter of one element is told with the others
        assert [one["stage"] for one in report.json["algebra"]["diverged"]] == ["reduce"], str(report)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The directory of what so many ranks recorded; all scenarios run one after the other."""
    done = {}

    def directory_of(world):
        if world not in done:
            done[world] = tmp_path_factory.mktemp(f"ranks-{world}")
            run_ranks(PROGRAM, world, free_port(), done[world], *RANKS[world])
        return done[world]

    return directory_of
