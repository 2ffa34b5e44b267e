"""How jobs divide their loss, and what each declares: the table of docs/heads.md.

Goal: a job that divides as a row of the table says, and declares what the row says, agrees on every stage: dq, dk
of each microbatch, its sum over microbatches and ranks, and the loss. With the declaration of another row it does
not. Method: two microbatches on four ranks with unequal numbers of tokens, a head in numpy, rounded to f32.
BACKTAPE_SEED draws another job.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import backtape

SEED = int(os.environ.get("BACKTAPE_SEED", 71))
HEADS = Path(__file__).parents[2] / "docs" / "heads.md"
RANKS, MICROBATCHES, VOCAB, WIDTH = 4, 2, 60, 12
SCALE = 1024.0


class Row:
    """A way to divide, and who does so.

    `divides(counts, microbatch, rank)`: what the sum of a rank's token losses of a microbatch is divided by before its
    backward; `times`: what it is multiplied by besides; `after`: what the sum of the microbatches' gradients is
    divided by at last. `reduces`: whether ranks are added (`sum`) or averaged (`mean`).
    """

    def __init__(self, job, who, divides, reduces, times=1, after=1, **declares):
        self.job, self.divides, self.reduces = f"{job} ({who})" if who else job, divides, reduces
        self.times, self.after, self.declares = times, after, declares

    def written(self):
        """As the table has it, for any numbers of ranks W, microbatches M and any loss scale S."""
        words = {1 / MICROBATCHES: "1 / M", float(RANKS): "W", SCALE: "S"}
        of = lambda x: words.get(x, repr(x)) if isinstance(x, float) else repr(x)
        said = [f"{name}={of(x)}".replace("'", '"') for name, x in self.declares.items()]
        return f'| {self.job} | `{", ".join(said)}` | `{{"data": "{self.reduces}"}}` |'


ROWS = [
    Row(
        "Each rank's `cross_entropy` mean, divided by the M microbatches before `backward`; DDP or FSDP averages",
        "nanoGPT, accelerate",
        lambda n, mb, r: n[mb, r], "mean", times=1 / MICROBATCHES,
        scope="rank", microbatch_reduction="sum", cotangent=1 / MICROBATCHES,
    ),
    Row(
        "The same without that division; the sum of the microbatches' gradients is divided by M afterwards",
        None,
        lambda n, mb, r: n[mb, r], "mean", after=MICROBATCHES,
        scope="rank", microbatch_reduction="mean",
    ),
    Row(
        "The rank's tokens of all microbatches of the step; DDP averages",
        "Trainer with `average_tokens_across_devices=False`",
        lambda n, mb, r: n[:, r].sum(), "mean",
        scope={"ranks": "one"}, microbatch_reduction="sum",
    ),
    Row(
        "All tokens of the step, the loss multiplied by the W ranks because DDP averages",
        "Trainer with `average_tokens_across_devices=True`",
        lambda n, mb, r: n.sum(), "mean", times=RANKS,
        scope="global", microbatch_reduction="sum", cotangent=float(RANKS),
    ),
    Row(
        "All tokens of the step; gradients are added over ranks",
        "torchtitan, a `jit` over the whole batch",
        lambda n, mb, r: n.sum(), "sum",
        scope="global", microbatch_reduction="sum",
    ),
    Row(
        "All ranks' tokens of one microbatch; gradients are added over ranks and averaged over microbatches",
        "`optax.MultiSteps`",
        lambda n, mb, r: n[mb].sum(), "sum", after=MICROBATCHES,
        scope="microbatch", microbatch_reduction="mean",
    ),
    Row(
        "As the row of all tokens, under a loss scale S; gradients are recorded before they are unscaled",
        "`torch.amp.GradScaler`",
        lambda n, mb, r: n.sum(), "sum", times=SCALE,
        scope="global", microbatch_reduction="sum", cotangent=SCALE,
    ),
]  # fmt: skip


class Job:
    def __init__(self):
        print(f"BACKTAPE_SEED={SEED}")
        rng = np.random.default_rng(SEED)
        counts = rng.permuted(np.arange(9, 9 + 3 * MICROBATCHES * RANKS, 3))
        self.counts = counts.reshape(MICROBATCHES, RANKS)
        places = list(np.ndindex(MICROBATCHES, RANKS))
        self.k = rng.standard_normal((VOCAB, WIDTH)).astype(np.float32)
        self.q = {at: rng.standard_normal((self.counts[at], WIDTH)).astype(np.float32) for at in places}
        self.labels = {at: rng.integers(0, VOCAB, self.counts[at]).astype(np.int32) for at in places}

    def of(self, at, factor):
        """The loss of a rank's tokens of a microbatch times `factor`, and its dq and dk."""
        q, k, labels = self.q[at].astype(np.float64), self.k.astype(np.float64), self.labels[at]
        logits = q @ k.T
        lse, own = np.log(np.exp(logits).sum(1)), np.arange(len(labels))
        entries = np.exp(logits - lse[:, None])
        entries[own, labels] -= 1
        entries *= factor
        return factor * (lse - logits[own, labels]).sum(), entries @ k, entries.T @ q

    def recorded(self, directory, row, declares):
        found = {at: self.of(at, row.times / row.divides(self.counts, *at)) for at in self.q}
        total = sum(dk for _, _, dk in found.values()) / row.after / (RANKS if row.reduces == "mean" else 1)
        mesh = {"data": RANKS}
        world = {"world_size": RANKS, "mesh": mesh, "strict": True}
        recorders = [backtape.Recorder(directory, rank=rank, **world) for rank in range(RANKS)]
        parts, addends = {"data": 0}, {"data": row.reduces}
        # The loss without what it is multiplied by for the backward alone: not the ranks, which an average takes back.
        alone = 1 if row.times == RANKS else row.times

        def record(rank):
            with recorders[rank].step(0) as tape:
                tape.head(path="plain", microbatches=MICROBATCHES, **declares)
                tape.record("k", self.k, placement={})
                for mb in range(MICROBATCHES):
                    at, (loss, dq, dk) = (mb, rank), found[mb, rank]
                    of_tokens = {"q": self.q[at], "labels": self.labels[at], "dq": dq.astype(np.float32)}
                    for name, array in of_tokens.items():
                        tape.record(name, array, microbatch=mb, placement=parts)
                    of_rank = {"microbatch": mb, "placement": addends}
                    tape.record("loss", np.float32(loss / alone), **of_rank)
                    tape.record("dk", dk.astype(np.float32), when="pre_reduce", **of_rank)
                tape.record("dk", total.astype(np.float32), placement={}, when="post_reduce")
            recorders[rank].close()

        with ThreadPoolExecutor(RANKS) as pool:
            list(pool.map(record, range(RANKS)))
        return backtape.replay(directory, step=0)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.job[:40])
def test_a_job_that_declares_what_its_row_says_agrees_on_every_stage(tmp_path, row):
    report = Job().recorded(tmp_path / "run", row, row.declares)
    assert report.verdict == "agreed", report
    passed = {stage["name"] for stage in report.json["stages"] if stage["status"] == "pass"}
    assert {"loss", "dq", "dk", "reduce"} <= passed, report


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.job[:40])
def test_with_the_declaration_of_another_row_it_does_not(tmp_path, row):
    for at, other in enumerate(of for of in ROWS if of is not row):
        report = Job().recorded(tmp_path / str(at), row, other.declares)
        assert report.verdict != "agreed", (other.job, report)


def test_the_docs_have_this_table():
    lines = HEADS.read_text().splitlines()
    start = lines.index("| What a rank's loss is divided by | Declare | dk of ranks, `placement=` |")
    assert lines[start + 2 : start + 2 + len(ROWS)] == [row.written() for row in ROWS]
