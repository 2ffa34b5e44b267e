"""Faults of a step whose gradients were recorded with their parts.

Goal: a gradient whose parts were recorded is judged as their sum, and agrees where the fault is in every part; its cause
is named all the same. Method: a head in numpy that records dq_lse, dq_label, dk_lse, dk_label or dlogits beside dq and
dk. BACKTAPE_SEED draws another job.
"""

import os

import numpy as np
import pytest

import backtape
from named import close, named

SEED = int(os.environ.get("BACKTAPE_SEED", 9))


class Job:
    def __init__(self):
        self.rng = rng = np.random.default_rng(SEED)
        self.tokens, self.classes, depth = (int(rng.integers(*of)) for of in ((60, 90), (120, 180), (12, 20)))
        self.q = rng.standard_normal((self.tokens, depth)).astype(np.float32)
        self.k = rng.standard_normal((self.classes, depth)).astype(np.float32)
        self.labels = rng.integers(0, self.classes, self.tokens).astype(np.int32)
        self.weights = rng.choice([0.3, 0.5, 1.0, 2.0], self.tokens).astype(np.float32)

    def recorded(self, directory, beside, g):
        """`beside`: "parts" or "dlogits"; `g`: what the backward multiplies each token by."""
        logits = self.q.astype(np.float64) @ self.k.T
        lse = np.log(np.exp(logits).sum(-1))
        at = (np.arange(self.tokens), self.labels)
        loss = (self.weights * (lse - logits[at])).sum() / self.weights.sum()
        dense = np.exp(logits - lse[:, None]) * g[:, None]
        of_label = np.zeros_like(dense)
        of_label[at] = -g
        parts = {"dq_lse": dense @ self.k, "dq_label": of_label @ self.k}
        parts |= {"dk_lse": dense.T @ self.q, "dk_label": of_label.T @ self.q}
        whole = {"dq": parts["dq_lse"] + parts["dq_label"], "dk": parts["dk_lse"] + parts["dk_label"]}
        whole |= parts if beside == "parts" else {"dlogits": dense + of_label}
        recorder = backtape.Recorder(directory)
        with recorder.step(0) as tape:
            tape.head(loss="softmax_xent", path="fused" if beside == "parts" else "plain", denominator="weights")
            tape.record("k", self.k)
            given = {"q": self.q, "labels": self.labels, "weights": self.weights, "loss": np.float32(loss)}
            for name, x in (given | {name: np.float32(x) for name, x in whole.items()}).items():
                tape.record(name, x, microbatch=0)
        close([recorder])
        return backtape.replay(directory, step=0)


@pytest.mark.parametrize("beside", ["parts", "dlogits"])
def test_weights_that_the_backward_takes_twice_are_named_though_dq_is_the_sum_of_its_parts(tmp_path, beside):
    job = Job()
    g = job.weights.astype(np.float64) / job.weights.sum()
    right = job.recorded(tmp_path / "right", beside, g)
    assert right.verdict == "agreed", right
    wrong = job.recorded(tmp_path / "wrong", beside, g * job.weights)
    assert {stage["name"]: stage["status"] for stage in wrong.json["stages"]}["dq"] == "pass", wrong
    told = named(wrong, "token-weights")
    assert told["each token counts"] == "with the square of its weight", told
