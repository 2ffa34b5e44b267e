"""Known causes in forms that jobs of other authors showed: another place, another buffer, another number.

Goal: each is named, and the right job agrees. Method: one plain head in numpy over ranks and microbatches of sequences,
with sizes and places from a seed; each test spoils what one kernel would. BACKTAPE_SEED draws another job.
"""

import os

import ml_dtypes
import numpy as np

import backtape
from named import close, named

SEED = int(os.environ.get("BACKTAPE_SEED", 29))


class Job:
    """Microbatches x ranks x sequences of tokens with weights; softmax_xent, mean over the sum of weights."""

    def __init__(self, ranks=2, microbatches=2, **options):
        print(f"BACKTAPE_SEED={SEED}")
        rng = self.rng = np.random.default_rng(SEED)
        self.ranks, self.microbatches, self.options = ranks, microbatches, options
        self.sequences, self.length = int(rng.integers(3, 6)), int(rng.integers(12, 20))
        self.depth, self.classes = int(rng.integers(16, 30)), int(rng.integers(150, 250))
        tokens = (microbatches, ranks, self.sequences * self.length)
        self.k = (rng.standard_normal((self.classes, self.depth)) * 0.6).astype(np.float32)
        self.q = rng.standard_normal((*tokens, self.depth)).astype(np.float32)
        self.labels = rng.integers(0, self.classes, tokens).astype(np.int16)
        self.weights = rng.choice([0.25, 0.5, 1.0, 2.0], tokens).astype(np.float32)
        self.names = {"logits", "lse", "loss", "dq", "dk_lse", "dk_label", "dk"}

    def logits(self, at):
        return self.q[at].astype(np.float64) @ self.k.T

    def of(self, at, labels=None, weights=None, divisor=None):
        """What a rank's kernel gives of a microbatch, in f64."""
        q, logits = self.q[at].astype(np.float64), self.logits(at)
        labels = (self.labels[at] if labels is None else labels).astype(np.int64)
        weights, rows = self.weights[at] if weights is None else weights, np.arange(labels.size)
        divisor = self.weights.astype(np.float64).sum() if divisor is None else divisor
        lse = np.log(np.exp(logits).sum(-1))
        g = (weights / divisor)[:, None]
        softmax, label = g * np.exp(logits - lse[:, None]), np.zeros_like(logits)
        label[rows, labels] = -g[:, 0]
        loss = (g[:, 0] * (lse - logits[rows, labels])).sum()
        parts = {"dk_lse": softmax.T @ q, "dk_label": label.T @ q}
        dk, dq = parts["dk_lse"] + parts["dk_label"], (softmax + label) @ self.k
        return {"logits": logits, "lse": lse, "loss": loss, "dq": dq, **parts, "dk": dk, "dlogits": softmax + label}

    def recorded(self, directory, of=None, spoilt=lambda given: None):
        """`of(at)` gives what a place computes; `spoilt` changes what all places give, by place."""
        mesh = {"data": self.ranks}
        recorders = [
            backtape.Recorder(directory, rank=rank, world_size=self.ranks, mesh=mesh) for rank in range(self.ranks)
        ]
        places = [(mb, rank) for mb in range(self.microbatches) for rank in range(self.ranks)]
        given = {at: (of or self.of)(at) for at in places}
        spoilt(given)
        total = sum(own["dk"] for own in given.values())
        for rank, recorder in enumerate(recorders):
            with recorder.step(0) as tape:
                named = {"denominator": "weights", "scope": "global", **self.options}
                tape.head(
                    loss="softmax_xent",
                    path="fused",
                    microbatches=self.microbatches,
                    microbatch_reduction="sum",
                    **named,
                )
                transposed = named.get("k_layout") == "dv"
                tape.record("k", np.ascontiguousarray(self.k.T) if transposed else self.k)
                for mb in range(self.microbatches):
                    own, at = given[mb, rank], (mb, rank)
                    shape = (self.sequences, self.length)
                    for name, x in {"q": self.q[at], "labels": self.labels[at], "weights": self.weights[at]}.items():
                        tape.record(name, x.reshape(*shape, *x.shape[1:]), microbatch=mb, placement={"data": 0})
                    for name in self.names:
                        x = np.asarray(own[name], np.float32)
                        if name in ("logits", "lse", "dq"):
                            x = x.reshape(*shape, *x.shape[1:])
                            tape.record(name, x, microbatch=mb, placement={"data": 0})
                        elif name == "loss":
                            tape.record(name, x, microbatch=mb, partial="sum")
                        else:
                            x = np.ascontiguousarray(x.T) if transposed and "flat" not in own else x
                            x = x.reshape(self.depth, self.classes) if transposed else x
                            tape.record(name, x, microbatch=mb, partial="sum", when="pre_reduce")
                if not self.names:
                    tape.record("dk", total.astype(np.float32), when="post_reduce")
        close(recorders)
        return backtape.replay(directory, step=0)

    def drawn(self):
        """A microbatch and a rank."""
        return int(self.rng.integers(self.microbatches)), int(self.rng.integers(self.ranks))


def test_the_right_job_agrees_with_labels_of_sixteen_bits(tmp_path):
    for name, options in (("vd", {}), ("dv", {"k_layout": "dv"})):
        report = Job(**options).recorded(tmp_path / name)
        assert report.verdict == "agreed", report


def test_labels_that_are_shifted_in_some_sequences_of_one_rank_are_named_with_the_sequences(tmp_path):
    job = Job()
    job.names = {"lse", "dq", "dk"}
    place = job.drawn()
    some = sorted(int(n) for n in job.rng.choice(job.sequences, 2, replace=False))

    def of(at):
        labels, weights = (x[at].reshape(job.sequences, job.length).copy() for x in (job.labels, job.weights))
        if at == place:
            labels[some, :-1] = labels[some, 1:]
        return job.of(at, labels.reshape(-1), weights.reshape(-1))

    told = named(job.recorded(tmp_path, of), "label-shift")
    runs = f"{some[0]} to {some[1]}" if some[1] == some[0] + 1 else f"{some[0]}, {some[1]}"
    assert told["only in"] == f"sequences {runs} (counted from 0) in microbatch {place[0]} of rank {place[1]}"


def test_logits_of_some_tokens_that_hold_their_gradient_are_named_with_the_tokens(tmp_path):
    job = Job(ranks=1)
    job.names = {"logits", "lse", "loss", "dq", "dk"}
    mb, _ = job.drawn()
    first, last = (int(n) for n in (job.length // 2, job.length // 2 + job.length))

    def spoilt(given):
        given[mb, 0]["logits"][first : last + 1] = given[mb, 0]["dlogits"][first : last + 1]

    told = named(job.recorded(tmp_path, spoilt=spoilt), "buffer-overwritten")
    assert told["only in"].startswith(f"tokens {first} to {last} (counted from 0)"), told


def test_weights_that_one_ranks_backward_leaves_out_are_named_though_only_the_reduced_dk_was_recorded(tmp_path):
    job = Job(ranks=3)
    job.names = set()
    _, rank = job.drawn()

    def of(at):
        return job.of(at, weights=np.ones_like(job.weights[at]) if at[1] == rank else None)

    assert named(job.recorded(tmp_path, of), "cotangent-dropped")["only in"] == f"rank {rank}"


def test_a_count_of_the_tokens_with_a_weight_is_named_where_their_sum_was_declared(tmp_path):
    job = Job(scope={"ranks": "one", "microbatches": "one"})
    job.names = {"lse", "dq", "dk"}
    job.weights[job.rng.random(job.weights.shape) < 0.2] = 0.0
    _, rank = job.drawn()

    def of(at):
        weights = job.weights[at].astype(np.float64)
        return job.of(at, divisor=(weights > 0).sum() if at[1] == rank else weights.sum())

    told = named(job.recorded(tmp_path, of), "valid-count")
    assert "weight above 0" in str(told), told


def test_a_gradient_that_is_written_flat_into_the_transposed_shape_is_named(tmp_path):
    job = Job(k_layout="dv")
    job.names = {"lse", "dq", "dk"}
    mb, _ = job.drawn()

    def spoilt(given):
        for rank in range(job.ranks):
            given[mb, rank]["flat"] = True

    assert "written flat" in named(job.recorded(tmp_path, spoilt=spoilt), "stride-ignored")


def test_rows_that_hold_another_microbatchs_gradient_are_named(tmp_path):
    job = Job(ranks=1, microbatches=3)

    def spoilt(given):
        for mb in range(1, job.microbatches):
            rows = np.ones(job.classes, bool)
            rows[np.unique(job.labels[mb, 0])] = False
            given[mb, 0]["dk_label"][rows] = given[mb - 1, 0]["dk_label"][rows]
            given[mb, 0]["dk"] = given[mb, 0]["dk_lse"] + given[mb, 0]["dk_label"]

    assert "hold those of microbatch" in named(job.recorded(tmp_path, spoilt=spoilt), "uninitialised-output")["rows"]


def test_a_largest_logit_in_bf16_is_named_in_the_loss_of_one_rank(tmp_path):
    job = Job()
    place = job.drawn()

    def few_bits(x):
        return x.astype(ml_dtypes.bfloat16).astype(np.float64)

    def spoilt(given):
        own, at = given[place], place
        largest = own["logits"].max(-1)
        label = own["logits"][np.arange(largest.size), job.labels[at].astype(np.int64)]
        nll = own["lse"] - largest + few_bits(largest) - few_bits(label)
        own["loss"] = (job.weights[at] * nll).sum() / job.weights.astype(np.float64).sum()

    told = named(job.recorded(tmp_path, spoilt=spoilt), "lse-cancellation")
    assert told["rounded"] == "the largest logit and the label's, before they are subtracted"
