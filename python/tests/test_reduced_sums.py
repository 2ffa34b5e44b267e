"""Reductions of dk over ranks in any order and in pieces.

Goal: a sum in few bits is seen and named with its order, whether or not its bound would let it pass; a piece that holds
other addends is named with its rows; sums in enough bits agree. Method: dk of four ranks of a head in numpy, stored in
bf16, reduced in numpy. BACKTAPE_SEED draws another job.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

import backtape

SEED = int(os.environ.get("BACKTAPE_SEED", 25))
RANKS = 4
DTYPES = {name: "f32" for name in ("logits", "lse", "p", "dlogits", "label_grad", "parts", "accumulate", "reduce")}


def bf16(x):
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)


def cut_off(x):
    return (np.asarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


class Job:
    def __init__(self):
        print(f"BACKTAPE_SEED={SEED}")
        rng = np.random.default_rng(SEED)
        self.tokens, classes, depth = (int(rng.integers(*of)) for of in ((50, 80), (90, 140), (18, 30)))
        self.k = rng.standard_normal((classes, depth)).astype(ml_dtypes.bfloat16)
        self.q = [rng.standard_normal((self.tokens, depth)).astype(ml_dtypes.bfloat16) for _ in range(RANKS)]
        self.labels = [rng.integers(0, classes, self.tokens).astype(np.int32) for _ in range(RANKS)]

    def dk(self, rank):
        q, k = self.q[rank].astype(np.float64), self.k.astype(np.float64)
        entries = np.exp(q @ k.T - np.log(np.exp(q @ k.T).sum(1))[:, None])
        entries[np.arange(self.tokens), self.labels[rank]] -= 1
        return entries.T @ q / (RANKS * self.tokens)

    def recorded(self, directory, reduced, stored=ml_dtypes.bfloat16):
        """`reduced(addends in f32)` is what all ranks hold after the reduction."""
        addends = [self.dk(rank).astype(np.float32).astype(ml_dtypes.bfloat16) for rank in range(RANKS)]
        total = reduced([x.astype(np.float32) for x in addends]).astype(stored)
        recorders = [backtape.Recorder(directory, rank=r, world_size=RANKS, mesh={"data": RANKS}) for r in range(RANKS)]
        for rank, recorder in enumerate(recorders):
            with recorder.step(0) as tape:
                tape.head(loss="softmax_xent", path="fused", dtypes=DTYPES | {"output": "bf16"})
                tape.record("k", self.k)
                for name, own in {"q": self.q[rank], "labels": self.labels[rank]}.items():
                    shape, start = (RANKS * len(own), *own.shape[1:]), (rank * len(own), *[0] * (own.ndim - 1))
                    tape.record(name, own, microbatch=0, global_shape=shape, offsets=start)
                tape.record("dk", addends[rank], microbatch=0, when="pre_reduce", partial="sum")
                tape.record("dk", total, when="post_reduce")
        with ThreadPoolExecutor(RANKS) as pool:
            list(pool.map(lambda recorder: recorder.close(), recorders))
        return backtape.replay(directory, step=0)


def one_after_the_other(addends, rounded=bf16):
    total = np.zeros_like(addends[0])
    for addend in addends:
        total = rounded(total + addend)
    return total


def ring(addends):
    flat = [x.reshape(-1) for x in addends]
    pieces = np.array_split(np.arange(flat[0].size), RANKS)
    parts = [
        one_after_the_other([flat[(piece + i) % RANKS][at] for i in range(RANKS)]) for piece, at in enumerate(pieces)
    ]
    return np.concatenate(parts).reshape(addends[0].shape)


def halves(addends):
    return bf16(bf16(addends[0] + addends[2]) + bf16(addends[1] + addends[3]))


def neighbours(addends):
    return bf16(bf16(addends[0] + addends[1]) + bf16(addends[2] + addends[3]))


def truncated(addends):
    return one_after_the_other(addends, cut_off)


IN_FEW_BITS = {
    ring: "a ring of 4 pieces",
    halves: "each with the one half of them further on",
    neighbours: "each with its neighbour",
    truncated: "the bits beyond cut off",
}


def words(report):
    return "; ".join(f"{name}: {value}" for name, value in report.json["causes"][0]["parameters"].items())


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("reduced", IN_FEW_BITS)
def test_a_sum_in_few_bits_is_named_with_its_order(tmp_path, reduced, stored):
    report = Job().recorded(tmp_path, reduced, stored)
    assert report.verdict == "diverged", report.json["causes"]
    assert [cause.id for cause in report.causes] == ["microbatch-accumulator-low-precision"], report.json["causes"]
    assert IN_FEW_BITS[reduced] in words(report), report.json["causes"]
    assert "bf16" in words(report), report.json["causes"]


@pytest.mark.parametrize("stored", [np.float32, ml_dtypes.bfloat16])
def test_a_sum_in_enough_bits_agrees_however_it_is_stored(tmp_path, stored):
    report = Job().recorded(tmp_path, lambda addends: sum(addends[1:], addends[0]), stored)
    assert report.verdict == "agreed", report.json["causes"]


def test_a_sum_of_what_was_rounded_only_to_be_recorded_agrees(tmp_path):
    job = Job()
    report = job.recorded(tmp_path, lambda _: sum(job.dk(rank) for rank in range(RANKS)).astype(np.float32))
    assert report.verdict == "agreed", report.json["causes"]


def bucket(change):
    def reduced(addends):
        total = sum(addends[1:], addends[0])
        total[31:58] = change(total, addends)[31:58]
        return total

    return reduced


PIECES = {
    "partial-not-reduced": (bucket(lambda total, addends: addends[2]), "rank 2"),
    "rank-mean-vs-sum": (bucket(lambda total, addends: total / RANKS), "1/W"),
    "partial-not-reduced ": (bucket(lambda total, addends: total * RANKS), "4 times"),
}


@pytest.mark.parametrize("named", PIECES)
def test_a_piece_that_holds_other_addends_is_named_with_its_rows(tmp_path, named):
    reduced, holds = PIECES[named]
    report = Job().recorded(tmp_path, reduced, np.float32)
    assert [cause.id for cause in report.causes] == [named.strip()], report.json["causes"]
    assert "rows 31 to 57" in words(report), report.json["causes"]
    assert holds in words(report), report.json["causes"]


def test_each_ranks_own_clip_is_told_from_the_sum(tmp_path):
    job = Job()
    most = 0.9 * min(float(np.linalg.norm(job.dk(rank))) for rank in range(RANKS))
    clipped = lambda addends: sum(x * np.float32(most / np.linalg.norm(x)) for x in addends)
    report = job.recorded(tmp_path, clipped, np.float32)
    assert [cause.id for cause in report.causes] == ["clipping"], report.json["causes"]
    assert "each rank's part" in words(report), report.json["causes"]


def test_a_multiple_of_k_is_told_from_the_sum(tmp_path):
    job = Job()
    decayed = lambda addends: sum(addends) + np.float32(0.002) * job.k.astype(np.float32)
    report = job.recorded(tmp_path, decayed, np.float32)
    assert [cause.id for cause in report.causes] == ["part-missing"], report.json["causes"]
    assert "0.002 times k" in words(report), report.json["causes"]
