"""Gradients that code of the job's own multiplies after the last backward pass: one number for all of them is the job's
own, and what is wrong in it, or beside it, is told."""

from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from processes import free_port, run_ranks
from test_step_of_strangers import Told

import backtape
import backtape.torch

PROGRAM = Path(__file__).with_name("own_scaling_ranks.py")
# Of the 28 tokens of each rank 22 and 14 are not ignored.
RIGHT = Told(words="multiplied the gradients by 0.05556: 2 ranks / the 36 tokens of the step")
NO_RANKS = Told(words="1 / the 36 tokens of the step; the weights of all tokens are 0.5000 together, and 1 in their mean")
OWN_TOKENS = Told("diverged", "reduce", "tokens-miscounted", None, "each rank divides it by the number of its own tokens")
APART = Told("diverged", "reduce", "gradient-scaled", None, "multiplied it by 0.05000, and by 0.05556 on rank 0")
TOLD = {
    "ddp": RIGHT,
    "fsdp2": RIGHT,
    "ddp no ranks": NO_RANKS,
    "fsdp2 own tokens": OWN_TOKENS,
    "ddp own tokens": OWN_TOKENS,
    "fsdp2 apart": APART,
    "ddp apart": APART,
    "fsdp2 one is left": Told("diverged", "reduce", "gradient-scaled", ("inner.weight",), "did not multiply it"),
    "ddp twice": Told("diverged", "reduce", "reduce-sum-for-mean", None, "captured = 2.0000000 x"),
    "ddp bucket": Told("diverged", "reduce"),
}


@pytest.mark.parametrize("scenario", TOLD)
def test_what_ranks_divide_their_gradients_by_in_the_end_is_told(ranks, scenario):
    report = backtape.replay(ranks / scenario.replace(" ", "-"), step=1, compare=["step"])
    TOLD[scenario].is_told_by(report)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The directory of what two ranks recorded; all scenarios run one after the other."""
    directory = tmp_path_factory.mktemp("ranks")
    run_ranks(PROGRAM, 2, free_port(), directory, *TOLD)
    return directory
