"""Gradients of a step of one microbatch that were recorded whole, though each rank holds a part of the sum.

Goal: what one rank did otherwise is told from the whole: a part that is missing in dk, one that was clipped before it was
added, tokens whose dq holds one rank's shard of the vocabulary alone. Method: a head in numpy on a few ranks, dk and dq
recorded as they are after the reduction. BACKTAPE_SEED draws another job.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

import backtape

SEED = int(os.environ.get("BACKTAPE_SEED", 41))


def bf16(x):
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


class Job:
    """Tokens are cut over the ranks, each of which has another number of them; `loud` is the size of q on rank 0."""

    def __init__(self, rounds=bf16, loud=1.0):
        print(f"BACKTAPE_SEED={SEED}")
        rng = np.random.default_rng(SEED)
        self.ranks, classes, depth = int(rng.integers(3, 6)), int(rng.integers(130, 230)), int(rng.integers(18, 34))
        self.counts = rng.integers(30, 60, self.ranks)
        self.ends = np.cumsum(self.counts)
        tokens = int(self.ends[-1])
        self.k = (rng.standard_normal((classes, depth)) * 0.4).astype(ml_dtypes.bfloat16)
        q = rng.standard_normal((tokens, depth))
        q[: self.counts[0]] *= loud
        self.q = q.astype(ml_dtypes.bfloat16)
        self.labels = np.minimum(rng.zipf(1.4, tokens) - 1, classes - 1).astype(np.int32)
        logits = self.q.astype(np.float64) @ self.k.astype(np.float64).T
        entries = np.exp(logits - np.log(np.exp(logits).sum(1))[:, None])
        entries[np.arange(tokens), self.labels] -= 1
        self.entries = rounds(entries / tokens)

    def tokens(self, rank):
        return slice(self.ends[rank] - self.counts[rank], self.ends[rank])

    def dk(self, rank):
        return self.entries[self.tokens(rank)].T @ self.q[self.tokens(rank)].astype(np.float64)

    def dq(self, classes=slice(None)):
        return self.entries[:, classes] @ self.k[classes].astype(np.float64)

    def recorded(self, directory, dk=None, dq=None):
        dk = sum(self.dk(rank) for rank in range(self.ranks)) if dk is None else dk
        whole = {"dq": self.dq() if dq is None else dq, "q": self.q, "labels": self.labels}
        whole["dq"] = whole["dq"].astype(np.float32).astype(ml_dtypes.bfloat16)
        ranks, mesh = range(self.ranks), {"data": self.ranks}
        recorders = [backtape.Recorder(directory, rank=rank, world_size=self.ranks, mesh=mesh) for rank in ranks]
        for rank, recorder in enumerate(recorders):
            own = self.tokens(rank)
            with recorder.step(0) as tape:
                tape.head(loss="softmax_xent", path="plain")
                tape.record("k", self.k)
                for name, values in whole.items():
                    offsets = (int(own.start), *[0] * (values.ndim - 1))
                    tape.record(name, values[own], global_shape=values.shape, offsets=offsets)
                tape.record("dk", dk.astype(np.float32), when="post_reduce")
        with ThreadPoolExecutor(self.ranks) as pool:
            list(pool.map(lambda recorder: recorder.close(), recorders))
        return backtape.replay(directory, step=0)


def diverged(report, stage, cause):
    assert report.verdict == "diverged" and report.first_divergence.stage == stage, report
    assert [cause.id for cause in report.causes] == [cause], report.json["causes"]
    return report.json["causes"][0]["parameters"]


def test_the_right_gradients_agree(tmp_path):
    report = Job().recorded(tmp_path)
    assert report.verdict == "agreed", report


def test_a_rank_whose_part_is_missing_in_dk_is_named(tmp_path):
    job = Job()
    told = diverged(job.recorded(tmp_path, dk=sum(job.dk(rank) for rank in range(1, job.ranks))), "dk", "partial-not-reduced")
    assert told["holds only ranks"] == ", ".join(str(rank) for rank in range(1, job.ranks))


@pytest.mark.parametrize("loud", [1.0, 3.0])
def test_parts_that_were_clipped_before_they_were_added_are_named_with_the_norm(tmp_path, loud):
    job = Job(loud=loud)
    parts = [job.dk(rank) for rank in range(job.ranks)]
    norms = sorted(np.linalg.norm(part) for part in parts)
    # Of a rank that is louder than the others the part alone is clipped.
    to = float(f"{norms[0] * 0.6 if loud == 1.0 else (norms[-1] * norms[-2]) ** 0.5:.2g}")
    clipped = sum(part * min(1.0, to / np.linalg.norm(part)) for part in parts)
    told = diverged(job.recorded(tmp_path, dk=clipped), "dk", "clipping")
    assert float(told["max_norm"]) == pytest.approx(to, rel=2e-2)


@pytest.mark.parametrize("everywhere", [False, True])
def test_tokens_whose_dq_holds_one_ranks_shard_of_the_vocabulary_are_named(tmp_path, everywhere):
    job = Job()
    cuts = np.array_split(np.arange(len(job.k)), job.ranks)
    dq = job.dq()
    for rank in range(job.ranks) if everywhere else [1]:
        # The first half of the rank's tokens.
        own = slice(job.tokens(rank).start, job.tokens(rank).start + job.counts[rank] // 2)
        dq[own] = job.dq(cuts[rank])[own]
    told = diverged(job.recorded(tmp_path, dq=dq), "dq", "partial-not-reduced")
    shards = ", ".join(str(rank) for rank in range(job.ranks)) if everywhere else "1"
    assert (told["shards"], told["shard"]) == (str(job.ranks), shards)


@pytest.mark.parametrize("boxes", [1, 2])
def test_dq_that_each_tensor_rank_holds_its_own_part_of_is_named_though_another_microbatch_is_whole(tmp_path, boxes):
    """`boxes`: groups of data ranks, each with the tokens of its own; every tensor rank of a group records dq."""
    print(f"BACKTAPE_SEED={SEED}")
    rng = np.random.default_rng(SEED)
    shards, tokens = 2, int(rng.integers(40, 60))
    each, depth = int(rng.integers(60, 90)), int(rng.integers(18, 34))
    k = (rng.standard_normal((shards * each, depth)) * 0.4).astype(ml_dtypes.bfloat16)
    q = rng.standard_normal((2, boxes * tokens, depth)).astype(ml_dtypes.bfloat16)
    labels = rng.integers(0, len(k), (2, boxes * tokens)).astype(np.int32)
    logits = q.astype(np.float64) @ k.astype(np.float64).T
    entries = np.exp(logits - np.log(np.exp(logits).sum(2))[:, :, None])
    for mb in range(2):
        entries[mb, np.arange(boxes * tokens), labels[mb]] -= 1
    entries = bf16(entries / (2 * boxes * tokens))
    mesh = {"data": boxes, "tensor": shards}
    ranks = range(boxes * shards)
    recorders = [backtape.Recorder(tmp_path, rank=rank, world_size=len(ranks), mesh=mesh) for rank in ranks]
    for rank, recorder in enumerate(recorders):
        box, shard = divmod(rank, shards)
        own, held = slice(box * tokens, (box + 1) * tokens), slice(shard * each, (shard + 1) * each)
        with recorder.step(0) as tape:
            tape.head(loss="softmax_xent", path="plain", microbatches=2, microbatch_reduction="sum")
            tape.record("k", k[held], placement={"tensor": 0})
            for mb in range(2):
                classes = held if mb == 1 else slice(None)
                dq = entries[mb][own, classes] @ k[classes].astype(np.float64)
                cut = {"microbatch": mb, "placement": {"data": 0}}
                tape.record("q", q[mb][own], **cut)
                tape.record("labels", labels[mb][own], **cut)
                tape.record("dq", dq.astype(np.float32).astype(ml_dtypes.bfloat16), **cut)
    with ThreadPoolExecutor(len(ranks)) as pool:
        list(pool.map(lambda recorder: recorder.close(), recorders))
    report = backtape.replay(tmp_path, step=0)
    assert report.verdict == "diverged" and report.first_divergence.stage == "dq", report
    assert "partial-not-reduced" in [cause.id for cause in report.causes], report.json["causes"]
    assert "block-miscounted" not in [cause.id for cause in report.causes], report.json["causes"]
