"""Tokens of some sequences, or of one rank in one microbatch, that are not those that were recorded in their places.

Goal: the order that some sequences alone are in, and the microbatch that one rank alone has read again, are named; where
dq's rows are those of no token at all nothing is. Method: a head in numpy on ranks that cut the sequences, with sizes,
sequences, rank and microbatch from a seed. BACKTAPE_SEED draws another job.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import backtape

SEED = int(os.environ.get("BACKTAPE_SEED", 53))


class Job:
    """Microbatches of sequences [B, S] in f32; each rank holds a part of every sequence."""

    def __init__(self):
        print(f"BACKTAPE_SEED={SEED}")
        rng = self.rng = np.random.default_rng(SEED)
        self.ranks, self.microbatches, self.sequences = (int(n) for n in rng.integers(3, 5, 3))
        self.part, self.depth, self.classes = (int(rng.integers(*of)) for of in ((10, 20), (14, 30), (150, 250)))
        self.length = self.ranks * self.part
        self.k = (rng.standard_normal((self.classes, self.depth)) * 0.4).astype(np.float32)
        tokens = (self.microbatches, self.sequences, self.length)
        self.q = rng.standard_normal((*tokens, self.depth)).astype(np.float32)
        self.labels = rng.integers(0, self.classes, tokens).astype(np.int32)
        logits = self.q.astype(np.float64) @ self.k.astype(np.float64).T
        self.lse = np.log(np.exp(logits).sum(-1))
        entries = np.exp(logits - self.lse[..., None])
        np.put_along_axis(entries, self.labels[..., None], np.take_along_axis(entries, self.labels[..., None], -1) - 1, -1)
        self.entries = entries / self.labels.size
        self.dq = self.entries @ self.k

    def cut(self, rank):
        return slice(rank * self.part, (rank + 1) * self.part)

    def of(self, rank, mb):
        """What a rank's kernel gives of a microbatch: its tokens, and its part of dk."""
        own = (mb, slice(None), self.cut(rank))
        dk = np.einsum("bsv,bsd->vd", self.entries[own], self.q[own])
        return {"lse": self.lse[own], "dq": self.dq[own], "dk": dk}

    def recorded(self, directory, read=lambda rank, mb: mb):
        """`read` gives the microbatch whose data a rank's kernel really reads."""
        recorders = [
            backtape.Recorder(directory, rank=rank, world_size=self.ranks, mesh={"seq": self.ranks})
            for rank in range(self.ranks)
        ]
        for rank, recorder in enumerate(recorders):
            with recorder.step(0) as tape:
                tape.head(loss="softmax_xent", path="fused", microbatches=self.microbatches, microbatch_reduction="sum")
                tape.record("k", self.k)
                for mb in range(self.microbatches):
                    own = (mb, slice(None), self.cut(rank))
                    given = self.of(rank, read(rank, mb))
                    for name, x in {"q": self.q[own], "labels": self.labels[own], **given}.items():
                        x = x.astype(np.int32 if name == "labels" else np.float32)
                        place = {"partial": "sum", "when": "pre_reduce"} if name == "dk" else {"placement": {"seq": 1}}
                        tape.record(name, x, microbatch=mb, **place)
        with ThreadPoolExecutor(self.ranks) as pool:
            list(pool.map(lambda recorder: recorder.close(), recorders))
        return backtape.replay(directory, step=0)


def named(report, cause):
    assert report.verdict == "diverged", report
    assert [found.id for found in report.causes] == [cause], report.json["causes"]
    return report.json["causes"][0]["parameters"]


def test_the_right_job_agrees(tmp_path):
    report = Job().recorded(tmp_path)
    assert report.verdict == "agreed", report


def test_an_order_that_one_sequence_alone_is_left_in_is_named_though_each_rank_holds_a_part_of_it(tmp_path):
    job = Job()
    of = int(job.rng.integers(job.sequences))
    job.dq[:, of] = job.dq[:, of, ::-1].copy()
    told = named(job.recorded(tmp_path), "token-order")
    assert told["order"] == "reversed in each sequence"
    places = [f"microbatch {mb}, 1 of {job.sequences} (counted from 0: {of})" for mb in range(job.microbatches)]
    assert told["only in"] == "; ".join(places)


def test_a_sequence_in_an_order_that_has_no_name_is_matched_row_by_row(tmp_path):
    job = Job()
    of = int(job.rng.integers(job.sequences))
    job.dq[:, of] = job.dq[:, of, job.rng.permutation(job.length)].copy()
    assert named(job.recorded(tmp_path), "token-order")["order"] == "one that is known only row by row"


def test_rows_of_no_token_are_no_order(tmp_path):
    job = Job()
    of = int(job.rng.integers(job.sequences))
    job.dq[:, of] = job.dq[:, of, ::-1] + 0.1 * np.abs(job.dq).mean() * job.rng.standard_normal(job.dq[:, of].shape)
    assert "token-order" not in [found.id for found in job.recorded(tmp_path).causes]


def test_a_microbatch_that_one_rank_alone_has_read_again_is_named_with_the_rank(tmp_path):
    job = Job()
    rank, last = int(job.rng.integers(job.ranks)), job.microbatches - 1
    told = named(job.recorded(tmp_path, lambda of, mb: 0 if (of, mb) == (rank, last) else mb), "duplicate-batch")
    assert told["tokens"] == f"rank {rank} in microbatch {last} has those of microbatch 0"
