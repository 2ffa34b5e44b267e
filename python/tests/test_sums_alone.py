"""dk that was recorded once, at the end: summed over microbatches and ranks, without the addends of the sum.

Goal: such a dk is judged, and not passed over: what a clean job of any arithmetic records agrees, and a microbatch that
is in the sum twice or not at all, or ranks that were averaged where their sum was meant, diverge at the reduction.
Method: three microbatches on four ranks of a head in numpy, of which only q, labels and the reduced dk are recorded.
BACKTAPE_SEED draws another job.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

import backtape

SEED = int(os.environ.get("BACKTAPE_SEED", 31))
RANKS, MICROBATCHES = 4, 3


def exact(x):
    return np.asarray(x, np.float64)


def f32(x):
    return np.asarray(x, np.float32).astype(np.float64)


def bf16(x):
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


class Job:
    """`entries` and `addend` round what a rank computes of a microbatch; `scope` says what its mean is over."""

    def __init__(self, entries=f32, addend=f32, scope="global", empty=None, **declared):
        print(f"BACKTAPE_SEED={SEED}")
        rng = np.random.default_rng(SEED)
        classes, self.depth = int(rng.integers(150, 260)), int(rng.integers(17, 33))
        self.counts = rng.integers(20, 50, (MICROBATCHES, RANKS))
        if scope == "rank":
            self.counts[:] = self.counts[0, 0]
        if empty is not None:
            self.counts[empty] = 0
        self.k = (rng.standard_normal((classes, self.depth)) * 0.5).astype(ml_dtypes.bfloat16)
        self.q = [[rng.standard_normal((n, self.depth)).astype(ml_dtypes.bfloat16) for n in row] for row in self.counts]
        self.labels = [[np.minimum(rng.zipf(1.4, n) - 1, classes - 1).astype(np.int32) for n in row] for row in self.counts]
        self.rounds, self.scope = (entries, addend), scope
        self.declared = {"scope": scope, **declared}

    def addend(self, mb, rank):
        q, k, labels = self.q[mb][rank].astype(np.float64), self.k.astype(np.float64), self.labels[mb][rank]
        logits = q @ k.T
        entries = np.exp(logits - np.log(np.exp(logits).sum(1))[:, None])
        entries[np.arange(len(labels)), labels] -= 1
        entries /= len(labels) if self.scope == "rank" else self.counts.sum()
        return self.rounds[1](self.rounds[0](entries).T @ q)

    def recorded(self, directory, weight=lambda mb, rank: 1.0, factor=1.0, stored=np.float32, clip=None, local=()):
        """`weight` is how often the sum holds an addend, `clip` the norm that each rank's part is brought to before it is
        added; the ranks in `local` record their own sums, too."""
        parts = [sum(weight(mb, r) * self.addend(mb, r) for mb in range(MICROBATCHES)) for r in range(RANKS)]
        if clip is not None:
            parts = [part * min(1.0, clip / np.linalg.norm(part)) for part in parts]
        total = sum(parts) * factor
        mesh = {"data": RANKS}
        recorders = [backtape.Recorder(directory, rank=rank, world_size=RANKS, mesh=mesh) for rank in range(RANKS)]
        for rank, recorder in enumerate(recorders):
            with recorder.step(0) as tape:
                head = {"loss": "softmax_xent", "path": "plain", "microbatches": MICROBATCHES} | self.declared
                tape.head(microbatch_reduction="sum", **head)
                tape.record("k", self.k)
                for mb in range(MICROBATCHES):
                    first = int(self.counts[mb, :rank].sum())
                    for name, own in {"q": self.q[mb][rank], "labels": self.labels[mb][rank]}.items():
                        if not len(own):
                            continue
                        shape = (int(self.counts[mb].sum()), *own.shape[1:])
                        offsets = (first, *[0] * (own.ndim - 1))
                        tape.record(name, own, microbatch=mb, global_shape=shape, offsets=offsets)
                if rank in local:
                    tape.record("dk", parts[rank].astype(stored), when="pre_reduce", partial="sum")
                tape.record("dk", total.astype(stored), when="post_reduce")
        with ThreadPoolExecutor(RANKS) as pool:
            list(pool.map(lambda recorder: recorder.close(), recorders))
        return backtape.replay(directory, step=0)


FULL = {name: "f32" for name in ("logits", "p", "dlogits", "label_grad", "parts", "accumulate", "reduce", "output")}
CLEAN = {
    "everything in f32": (Job(), {}),
    "declared in f32": (Job(dtypes=FULL), {}),
    "entries in bf16": (Job(entries=bf16), {}),
    "addends in bf16": (Job(entries=bf16, addend=bf16), {}),
    "addends in bf16, all else declared in f32": (Job(addend=bf16, dtypes=FULL | {"output": "bf16"}), {}),
    "all in bf16": (Job(entries=bf16, addend=bf16), {"stored": ml_dtypes.bfloat16}),
    "a mean of each rank's means": (Job(scope="rank"), {"factor": 1 / RANKS}),
    "a sum of each rank's means": (Job(scope="rank"), {}),
    "a mean over ranks of losses times their number": (Job(cotangent=float(RANKS)), {}),
}


@pytest.mark.parametrize("name", CLEAN)
def test_a_right_sum_without_addends_agrees(tmp_path, name):
    job, found = CLEAN[name]
    report = job.recorded(tmp_path, **found)
    assert report.verdict == "agreed", f"{name}: {report}"
    [reduce] = [one for one in report.json["stages"] if one["name"] == "reduce"]
    assert reduce["status"] == "pass", name
    norm = report.json["grad_norm"]
    assert norm["dk_reference"] == pytest.approx(norm["dk_captured"], rel=1e-2), "judged as a mean, told as a mean"


@pytest.mark.parametrize("rounds", [f32, bf16])
@pytest.mark.parametrize("times", [0.0, 2.0])
def test_a_microbatch_that_is_in_it_twice_or_not_at_all_is_named(tmp_path, times, rounds):
    job = Job(entries=rounds, addend=rounds)
    report = job.recorded(tmp_path, weight=lambda mb, rank: times if mb == 1 else 1.0)
    assert report.verdict == "diverged" and report.first_divergence.stage == "reduce"
    assert report.causes[0].id == "accumulation-window", report
    assert report.json["causes"][0]["parameters"]["weights of the microbatches"] == f"1, {times:.0f}, 1"


def test_ranks_that_were_averaged_where_their_sum_was_meant_are_named(tmp_path):
    report = Job(entries=bf16).recorded(tmp_path, factor=1 / RANKS)
    assert report.verdict == "diverged" and report.first_divergence.stage == "reduce"
    assert report.causes[0].id == "rank-mean-vs-sum", report


def parameters(report):
    return report.json["causes"][0]["parameters"]


def test_one_rank_that_is_missing_in_the_sum_is_named(tmp_path):
    report = Job(entries=bf16, addend=bf16).recorded(tmp_path, weight=lambda mb, rank: float(rank != 2))
    assert report.verdict == "diverged" and report.first_divergence.stage == "reduce"
    assert report.causes[0].id == "partial-not-reduced", report
    assert parameters(report)["holds only ranks"] == "0, 1, 3"


@pytest.mark.parametrize("clip", [0.05, 0.1])
def test_ranks_that_clip_their_own_part_before_it_is_added_are_named_with_the_norm(tmp_path, clip):
    report = Job().recorded(tmp_path, clip=clip)
    assert report.verdict == "diverged" and report.first_divergence.stage == "reduce"
    assert report.causes[0].id == "clipping", report
    assert float(parameters(report)["max_norm"]) == pytest.approx(clip, rel=1e-2)


@pytest.mark.parametrize("rounds", [f32, bf16])
def test_a_sum_of_each_rank_agrees_also_where_one_has_no_tokens_in_a_microbatch(tmp_path, rounds):
    job = Job(entries=rounds, addend=rounds, empty=(2, 1))
    report = job.recorded(tmp_path, local=range(RANKS))
    assert report.verdict == "agreed", report
    [stage] = [one for one in report.json["stages"] if one["name"] == "accumulate"]
    assert stage["status"] == "pass"


@pytest.mark.parametrize("rounds", [f32, bf16])
@pytest.mark.parametrize("empty", [None, (2, 1)])
def test_a_microbatch_that_one_ranks_own_sum_lacks_is_named_with_the_rank(tmp_path, empty, rounds):
    job = Job(entries=rounds, addend=rounds, empty=empty)
    report = job.recorded(tmp_path, weight=lambda mb, rank: float((mb, rank) != (0, 1)), local=range(RANKS))
    assert report.verdict == "diverged" and report.first_divergence.stage == "accumulate", report
    [stage] = [one for one in report.json["stages"] if one["name"] == "accumulate"]
    assert (stage["rank"], stage["failing"]) == (1, [[None, 1]]), stage
    assert report.causes[0].id in ("dropped-batch", "accumulation-window"), report
    assert parameters(report)["rank"] == "1"


def test_a_sum_that_is_not_judged_leaves_the_norm_its_reference(tmp_path):
    """With tied embeddings the sum holds the lookup's part: no verdict on it, but the norms are told."""
    report = Job(tied_embedding=True).recorded(tmp_path)
    [reduce] = [one for one in report.json["stages"] if one["name"] == "reduce"]
    norm = report.json["grad_norm"]
    assert reduce["status"] == "skip"
    assert norm["dk_reference"] == pytest.approx(norm["dk_captured"], rel=1e-5)


def test_a_rank_that_recorded_no_sum_is_named_and_the_others_are_judged(tmp_path):
    report = Job().recorded(tmp_path, local=[0, 1, 3])
    [stage] = [one for one in report.json["stages"] if one["name"] == "accumulate"]
    assert report.verdict == "agreed" and stage["status"] == "pass" and stage["comparisons"] == 3
    assert any("rank 2" in one["why"] for one in report.json["not_checked"]), report.json["not_checked"]


def test_entries_in_bf16_that_all_tokens_of_a_class_round_alike_are_no_divergence_of_their_sum(tmp_path):
    """p is nearly the same for all tokens of a class that is no label, so its roundings are one error of the class's row
    and not independent: more of it is left in the sum than of as many independent ones."""
    rng = np.random.default_rng(SEED)
    mesh, classes, depth = {"data": RANKS}, int(rng.integers(400, 700)), int(rng.integers(30, 50))
    counts = rng.integers(50, 150, (2, RANKS))
    k = (rng.standard_normal((classes, depth)) * 0.35).astype(ml_dtypes.bfloat16)
    recorders = [backtape.Recorder(tmp_path, rank=rank, world_size=RANKS, mesh=mesh) for rank in range(RANKS)]
    for rank, recorder in enumerate(recorders):
        with recorder.step(0) as tape:
            dtypes = FULL | {"input": "bf16", "dlogits": "bf16", "lse": "f32"}
            tape.head(
                loss="softmax_xent",
                path="plain",
                denominator="all",
                microbatches=2,
                microbatch_reduction="sum",
                dtypes=dtypes,
            )
            tape.record("k", k)
            total = np.zeros((classes, depth), np.float32)
            for mb, tokens in enumerate(counts[:, rank]):
                q = rng.standard_normal((tokens, depth)).astype(ml_dtypes.bfloat16)
                labels = rng.integers(0, classes, tokens).astype(np.int32)
                logits = q.astype(np.float32) @ k.astype(np.float32).T
                largest = logits.max(1, keepdims=True)
                entries = np.exp(logits - largest - np.log(np.exp(logits - largest).sum(1, keepdims=True)))
                entries[np.arange(tokens), labels] -= 1
                entries = bf16(entries / np.float32(counts.sum())).astype(np.float32)
                total += entries.T @ q.astype(np.float32)
                for name, x in {"q": q, "labels": labels, "dq": entries @ k.astype(np.float32)}.items():
                    tape.record(name, x, microbatch=mb, placement={"data": 0})
            tape.record("dk", total, when="pre_reduce", partial="sum")
    with ThreadPoolExecutor(RANKS) as pool:
        list(pool.map(lambda recorder: recorder.close(), recorders))
    report = backtape.replay(tmp_path, step=0)
    assert report.verdict == "agreed", report
