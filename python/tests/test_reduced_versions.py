"""A reduced gradient of which each rank holds another version.

Goal: one cause says what every version holds, and no version gets a second one. Method: two data-parallel ranks and
two microbatches of a head in numpy; gradients are reduced in one microbatch, or in both. BACKTAPE_SEED draws another.
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import backtape

SEED = int(os.environ.get("BACKTAPE_SEED", 5))
RANKS = MICROBATCHES = range(2)


class Job:
    def __init__(self):
        rng = np.random.default_rng(SEED)
        self.tokens, classes, depth = (int(rng.integers(*of)) for of in ((40, 60), (30, 50), (8, 14)))
        self.k = rng.standard_normal((classes, depth)).astype(np.float32)
        draw = lambda: rng.standard_normal((self.tokens, depth)).astype(np.float32)
        self.q = {(rank, mb): draw() for rank in RANKS for mb in MICROBATCHES}
        self.labels = {at: rng.integers(0, classes, self.tokens).astype(np.int32) for at in self.q}

    def gradients(self, at):
        """dq and dk of a rank's tokens of a microbatch, of the mean over all tokens of the step."""
        logits = self.q[at] @ self.k.T
        found = np.exp(logits - np.log(np.exp(logits).sum(1))[:, None])
        found[np.arange(self.tokens), self.labels[at]] -= 1
        found /= np.float32(len(self.q) * self.tokens)
        return found @ self.k, found.T @ self.q[at]

    def recorded(self, directory, reduced, of_dq=lambda dq: dq):
        """`reduced(rank, addends)`: what a rank holds after the reduction; `of_dq`: what becomes of dq."""
        gradients = {at: self.gradients(at) for at in self.q}
        addends = {at: dk for at, (_, dk) in gradients.items()}
        recorders = [backtape.Recorder(directory, rank=rank, world_size=2, mesh={"data": 2}) for rank in RANKS]
        for rank, recorder in enumerate(recorders):
            with recorder.step(0) as tape:
                tape.head(loss="softmax_xent", reduction="mean", microbatch_reduction="sum", microbatches=2)
                tape.record("k", self.k)
                for mb in MICROBATCHES:
                    dq, dk = gradients[rank, mb]
                    parts = {"q": self.q[rank, mb], "labels": self.labels[rank, mb], "dq": of_dq(dq)}
                    for name, own in parts.items():
                        shape, start = (2 * len(own), *own.shape[1:]), (rank * len(own), *[0] * (own.ndim - 1))
                        tape.record(name, own, microbatch=mb, global_shape=shape, offsets=start)
                    tape.record("dk", dk, microbatch=mb, when="pre_reduce", partial="sum")
                tape.record("dk", reduced(rank, addends), when="post_reduce")
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda recorder: recorder.close(), recorders))
        return backtape.replay(directory, step=0)


def over_ranks(addends, mb):
    return addends[0, mb] + addends[1, mb]


@pytest.mark.parametrize("last", MICROBATCHES)
def test_a_microbatch_that_was_not_synchronised_is_the_one_cause_of_all_versions(tmp_path, last):
    """The other microbatch stays each rank's own, and counts as often as two of them: one version alone would look
    like a sum that holds one rank's data twice."""
    own = lambda rank, addends: over_ranks(addends, last) + 2 * addends[rank, 1 - last]
    report = Job().recorded(tmp_path / "run", own)
    assert report.verdict == "diverged", report
    assert [found.id for found in report.causes] == ["sync-wrong-microbatch"], f"seed {SEED}: {report}"


def test_versions_that_one_cause_explains_are_not_searched_one_by_one(tmp_path):
    """Each of many ranks may hold a version of its own: a search of each would take as many times as long. The cause
    of all is read off the versions themselves, in less than the replay takes."""
    own = lambda rank, addends: over_ranks(addends, 1) + 2 * addends[rank, 0]
    Job().recorded(tmp_path / "run", own)

    def took(causes):
        before = time.process_time()
        report = backtape.replay(tmp_path / "run", step=0, causes=causes)
        return time.process_time() - before, [found.id for found in report.causes]

    without = min(took("none")[0] for _ in range(3))
    (quick, named) = min(took("quick") for _ in range(3))
    assert named == ["sync-wrong-microbatch"]
    assert quick < 3 * without, f"seed {SEED}: {quick / without:.1f} times a replay without a search"


@pytest.mark.parametrize("end", ["first", "last"])
def test_a_piece_that_stayed_each_ranks_own_is_the_one_cause_of_all_versions(tmp_path, end):
    """A loop over whole buckets leaves the last one out."""
    job = Job()
    cut = len(job.k) // 3
    rows = slice(cut, None) if end == "last" else slice(0, cut)

    def own(rank, addends):
        total = over_ranks(addends, 0) + over_ranks(addends, 1)
        total[rows] = (addends[rank, 0] + addends[rank, 1])[rows]
        return total

    report = job.recorded(tmp_path / "run", own)
    assert report.verdict == "diverged", report
    assert [found.id for found in report.causes] == ["partial-not-reduced"], f"seed {SEED}: {report}"
    told = report.json["causes"][0]["parameters"]["where"]
    assert told == f"rows {cut if end == 'last' else 0} to {len(job.k) - 1 if end == 'last' else cut - 1}", told


def test_what_versions_do_not_explain_is_named_as_where_there_are_none(tmp_path):
    """dq is twice what it should be, whatever the ranks hold of the sum of dk."""
    twice = lambda dq: 2 * dq
    own = lambda rank, addends: over_ranks(addends, 1) + 2 * addends[rank, 0]
    same = lambda rank, addends: over_ranks(addends, 0) + over_ranks(addends, 1)
    ids = lambda report: [found.id for found in report.causes]
    alone = ids(Job().recorded(tmp_path / "alone", same, twice))
    assert alone and "unknown" not in alone, f"seed {SEED}: {alone}"
    both = ids(Job().recorded(tmp_path / "both", own, twice))
    assert both == ["sync-wrong-microbatch", *alone], f"seed {SEED}: {both}"


def test_ranks_that_hold_the_same_sum_agree(tmp_path):
    both = lambda rank, addends: over_ranks(addends, 0) + over_ranks(addends, 1)
    assert Job().recorded(tmp_path / "run", both).verdict == "agreed"
