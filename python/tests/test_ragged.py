"""Ranks with unequal numbers of tokens, which know their own alone: one tensor in the replay."""

from pathlib import Path

import numpy as np
import pytest
from processes import run_ranks

import backtape

PROGRAM = Path(__file__).with_name("ragged_rank.py")


@pytest.mark.parametrize("scope", ["own", "global"])
def test_ranks_that_pad_to_their_own_longest_sequence_are_judged(tmp_path, scope):
    run_ranks(PROGRAM, 3, tmp_path / "run", scope)
    report = backtape.replay(tmp_path / "run").json
    assert report["verdict"] == "agreed", report["first_divergence"]
    judged = {stage["name"] for stage in report["stages"] if stage["status"] == "pass"}
    assert {"lse", "dq", "dk"} <= judged
    assert any("ragged" in item["why"] for item in report["not_checked"])
    step = backtape.open(tmp_path / "run").step(0)
    # Rank 0 has 2 sequences of 3 tokens, rank 1 of 5, rank 2 of 7.
    labels = step.tensor("labels", microbatch=0)
    assert labels.shape == (2 * (3 + 5 + 7),)
    assert np.array_equal(np.flatnonzero(labels < 0), [2, 9, 10, 22])
