"""What some ranks of a mesh did otherwise than the head declares: counts over one axis alone, labels shifted on one rank.

Goal: the cause is named with the ranks. Method: a head in numpy on data=2 x fsdp=2 ranks, two microbatches, ignored labels,
a mesh that the recorder is told. BACKTAPE_SEED draws another job.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import backtape

SEED = int(os.environ.get("BACKTAPE_SEED", 52))
IGNORED = -100
DATA, FSDP, MICROBATCHES = 2, 2, 2


class Job:
    """Each rank holds other tokens, and each of them another share that is ignored."""

    def __init__(self):
        print(f"BACKTAPE_SEED={SEED}")
        rng = np.random.default_rng(SEED)
        ranks = DATA * FSDP
        self.batch, self.length = int(rng.integers(2, 4)), int(rng.integers(18, 30))
        self.classes, self.depth = int(rng.integers(150, 260)), int(rng.integers(14, 26))
        shape = (ranks, MICROBATCHES, self.batch, self.length)
        self.k = rng.standard_normal((self.classes, self.depth)).astype(np.float32)
        self.q = (rng.standard_normal((*shape, self.depth)) * 0.5).astype(np.float32)
        ids = rng.integers(0, self.classes, shape).astype(np.int32)
        kept = rng.random(shape) < np.linspace(0.5, 0.95, ranks)[:, None, None, None]
        self.ids = np.where(kept, ids, IGNORED).astype(np.int32)

    def shifted(self, by):
        """The label of each position of a sequence, `by` ids further on."""
        labels = np.full_like(self.ids, IGNORED)
        labels[..., :-by] = self.ids[..., by:]
        return labels

    def recorded(self, directory, divisor=None, labels=None):
        """The run; `divisor` says what a rank divides by, `labels` [R, M, B, S] what each token's loss takes."""
        total = (self.shifted(1) >= 0).sum()
        divisor = divisor or (lambda rank: total)
        labels = self.shifted(1) if labels is None else labels
        mesh = {"data": DATA, "fsdp": FSDP}
        recorders = [
            backtape.Recorder(directory, rank=rank, world_size=DATA * FSDP, mesh=mesh) for rank in range(DATA * FSDP)
        ]
        for rank, recorder in enumerate(recorders):
            with recorder.step(0) as tape:
                tape.head(
                    loss="softmax_xent", ignore_label=IGNORED, labels_shifted=False, microbatches=MICROBATCHES
                )
                tape.record("k", self.k)
                for mb in range(MICROBATCHES):
                    self.record(tape, rank, mb, labels[rank, mb], divisor(rank))
        with ThreadPoolExecutor(DATA * FSDP) as pool:
            list(pool.map(lambda recorder: recorder.close(), recorders))
        return backtape.replay(directory, step=0)

    def record(self, tape, rank, mb, labels, divisor):
        q, k = self.q[rank, mb].reshape(-1, self.depth).astype(np.float64), self.k.astype(np.float64)
        logits = q @ k.T
        lse = np.log(np.exp(logits).sum(1))
        tokens, counts = np.flatnonzero(labels.ravel() >= 0), labels.ravel() >= 0
        entries = np.exp(logits - lse[:, None])
        entries[tokens, labels.ravel()[tokens]] -= 1
        entries *= (counts / divisor)[:, None]
        loss = (lse[tokens] - logits[tokens, labels.ravel()[tokens]]).sum() / divisor
        cut = {"placement": {"data": 0, "fsdp": 0}, "microbatch": mb}
        tape.record("q", self.q[rank, mb], **cut)
        tape.record("labels", self.ids[rank, mb], **cut)
        tape.record("dq", (entries @ k).astype(np.float32).reshape(self.q[rank, mb].shape), **cut)
        tape.record("loss", np.float32(loss), microbatch=mb, partial="sum")
        tape.record("dk", (entries.T @ q).astype(np.float32), microbatch=mb, partial="sum", when="pre_reduce")


def named(report, cause):
    assert [found.id for found in report.causes] == [cause], report
    return report.json["causes"][0]["parameters"]


def test_the_right_job_agrees(tmp_path):
    assert Job().recorded(tmp_path).verdict == "agreed"


def test_a_count_over_the_ranks_of_one_axis_is_named_with_the_axis(tmp_path):
    job = Job()
    counts = (job.shifted(1) >= 0).sum((1, 2, 3)).reshape(DATA, FSDP).sum(1)
    report = job.recorded(tmp_path, divisor=lambda rank: DATA * counts[rank // FSDP])
    found = named(report, "microbatch-mean-of-means")
    assert found["counted over"] == "ranks along fsdp, all microbatches" and found["means averaged"] == "2", found


def test_a_count_of_each_rank_over_all_its_microbatches_is_named(tmp_path):
    job = Job()
    counts = (job.shifted(1) >= 0).sum((1, 2, 3))
    report = job.recorded(tmp_path, divisor=lambda rank: DATA * FSDP * counts[rank])
    found = named(report, "microbatch-mean-of-means")
    assert found["counted over"] == "each rank, all microbatches" and found["means averaged"] == "4", found


def test_labels_that_one_rank_shifts_twice_in_one_microbatch_are_named_with_the_place(tmp_path):
    job = Job()
    labels = job.shifted(1)
    labels[2, 1] = job.shifted(2)[2, 1]
    found = named(job.recorded(tmp_path, labels=labels), "label-shift")
    assert found["shift"] == "1" and found["only in"] == "microbatch 1 of rank 2", found
