"""A step whose body raised is half a step: the job goes on, and no command calls it whole."""

import subprocess
import sys

import numpy as np
import pytest

import backtape


class Stopped(Exception):
    """What the job itself raises."""


def head(seed):
    """What one microbatch of a right head records."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(6, 4)).astype(np.float32), rng.normal(size=(7, 4)).astype(np.float32)
    labels = rng.integers(0, 7, 6).astype(np.int32)
    logits = q.astype(np.float64) @ k.astype(np.float64).T
    lse = np.log(np.exp(logits).sum(1))
    entries = np.exp(logits - lse[:, None])
    entries[np.arange(6), labels] -= 1
    gradients = {"dq": entries @ k / 12, "dk": entries.T @ q / 12}
    return {"q": q, "k": k, "labels": labels, **{name: of.astype(np.float32) for name, of in gradients.items()}}


def test_a_step_whose_body_raised_is_partial_and_has_no_verdict(tmp_path):
    recorder = backtape.Recorder(tmp_path / "run")
    with pytest.raises(Stopped), recorder.step(0) as tape:
        tape.head(loss="softmax_xent", reduction="mean", microbatches=2)
        for name, array in head(0).items():
            tape.record(name, array, microbatch=0)
        raise Stopped
    summary = recorder.close()
    assert (summary.steps_committed, summary.steps_partial) == ([], [0]), str(summary)
    report = backtape.replay(tmp_path / "run", step=0)
    assert report.verdict == "incomplete"
    assert any("Stopped" in reason.what for reason in report.reasons), report.reasons
    assert backtape.checks(tmp_path / "run", step=0).verdict == "incomplete"


RANK = """
import sys, numpy as np, backtape
directory, rank = sys.argv[1], int(sys.argv[2])
recorder = backtape.Recorder(directory, rank=rank, world_size=2)
try:
    with recorder.step(0) as tape:
        tape.record("x", np.full(3, rank, np.float32), global_shape=[6], offsets=[3 * rank])
        if rank == 1:
            raise ValueError("out of data")
except ValueError:
    pass
summary = recorder.close()
print(summary.steps_committed, summary.steps_partial, summary.omissions)
"""


def test_the_summary_of_every_rank_calls_a_step_partial_that_one_rank_ended_early(tmp_path):
    command = [sys.executable, "-c", RANK, str(tmp_path / "run")]
    ranks = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    said = [process.communicate(timeout=120)[0] for process in ranks]
    for rank, words in enumerate(said):
        assert words.startswith("[] [0] "), f"rank {rank}: {words}"
        assert "ValueError" in words, f"rank {rank}: {words}"
