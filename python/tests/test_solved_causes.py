"""Faults whose parameters are solved for from what was captured: no list holds the sizes drawn here.

Goal: each is named with what it did, and the right head agrees. Method: a head in numpy with sizes, bounds and
factors from a seed, one thing changed in its backward. BACKTAPE_SEED draws another job.
"""

import os

import numpy as np
import pytest

import backtape

SEED = int(os.environ.get("BACKTAPE_SEED", 24))


class Head:
    """Two microbatches of a head in f32, and its backward in pieces that a fault can change."""

    def __init__(self, seed):
        rng = self.rng = np.random.default_rng(seed)
        self.tokens, self.classes, self.depth = (int(rng.integers(*of)) for of in ((70, 130), (50, 90), (14, 30)))
        self.k = rng.standard_normal((self.classes, self.depth)).astype(np.float32)
        self.microbatches = [self.drawn() for _ in range(2)]

    def drawn(self):
        q = self.rng.standard_normal((self.tokens, self.depth)).astype(np.float32) * 0.5
        labels = self.rng.integers(0, self.classes, self.tokens).astype(np.int32)
        return {"q": q, "labels": labels, "weights": self.rng.uniform(0.2, 2.0, self.tokens).astype(np.float32)}

    def lse(self, mb, classes=slice(None)):
        logits = self.microbatches[mb]["q"].astype(np.float64) @ self.k[classes].astype(np.float64).T
        return np.log(np.exp(logits).sum(1))

    def entries(self, mb, labels=None, lse=None, factor=1.0, label=1.0):
        """dlogits [T, V]: `label` is how often the label's part is in it."""
        data = self.microbatches[mb]
        logits = data["q"].astype(np.float64) @ self.k.astype(np.float64).T
        found = np.exp(logits - (self.lse(mb) if lse is None else lse)[:, None])
        found[np.arange(self.tokens), data["labels"] if labels is None else labels] -= label
        total = sum(one["weights"].sum(dtype=np.float64) for one in self.microbatches)
        return found * (data["weights"].astype(np.float64) * factor / total)[:, None]

    def gradients(self, mb, **changes):
        entries = self.entries(mb, **changes)
        return {"dq": entries @ self.k, "dk": entries.T @ self.microbatches[mb]["q"]}

    def recorded(self, path, fault=lambda head, mb, gradients: gradients):
        recorder = backtape.Recorder(path)
        with recorder.step(0) as tape:
            tape.head(loss="softmax_xent", path="plain", reduction="mean", denominator="weights", microbatches=2)
            tape.record("k", self.k)
            for mb, data in enumerate(self.microbatches):
                for name, array in (data | fault(self, mb, self.gradients(mb))).items():
                    tape.record(name, np.asarray(array, array.dtype if name in data else np.float32), microbatch=mb)
        recorder.close()
        return backtape.replay(path, step=0)


def chunk_left_out(head, mb, right):
    start = head.tokens - head.tokens % 13 - 13
    right["dk"] = right["dk"] - head.entries(mb)[start:].T @ head.microbatches[mb]["q"][start:]
    return right, f"{start} to {head.tokens - 1} left out"


def tile_left_out(head, mb, right):
    start = head.classes - 11
    right["dq"] = right["dq"] - head.entries(mb)[:, start:] @ head.k[start:]
    return right, f"{start} to {head.classes - 1} left out"


def rows_twice(head, mb, right):
    right["dk"][7:16] *= 2
    return right, "7 to 15 twice"


def last_of_label(head, mb, right):
    labels, q = head.microbatches[mb]["labels"], head.microbatches[mb]["q"]
    entries = head.entries(mb) - head.entries(mb, label=0.0)
    for t, label in enumerate(labels):
        if label in labels[t + 1 :]:
            right["dk"][label] -= entries[t, label] * q[t]
    return right, "of tokens of one label the last one's alone is there"


def label_part_left_out(head, mb, right):
    return head.gradients(mb, label=0.0), "left out"


def decay_added(head, mb, right):
    right["dk"] = right["dk"] + 0.0625 * head.k
    return right, "0.0625 times k"


def weights_twice(head, mb, right):
    return head.gradients(mb, factor=head.microbatches[mb]["weights"]), "with the square of its weight"


def number_of_its_own(head, mb, right):
    factor = 1 + 0.5 * np.sin(np.arange(head.tokens) * 1.7 + mb)
    return head.gradients(mb, factor=factor), "with a number of its own that the dump does not explain"


def lse_of_a_tile(head, mb, right):
    start = head.classes - 17
    return head.gradients(mb, lse=head.lse(mb, slice(start, None))), f"that of classes {start} to {head.classes - 1} alone"


def lse_of_another(head, mb, right):
    return head.gradients(mb, lse=head.lse(max(0, mb - 1))), "that of the microbatch 1 before"


def labels_one_off(head, mb, right):
    labels = head.microbatches[mb]["labels"]
    return head.gradients(mb, labels=np.where(labels >= 30, labels - 1, labels)), "-1 for "


def loss_weight(head, mb, right):
    return head.gradients(mb, factor=0.83), "0.83"


FAULTS = {
    "block-miscounted": (chunk_left_out, tile_left_out, rows_twice, last_of_label),
    "part-missing": (label_part_left_out, decay_added),
    "token-weights": (weights_twice, number_of_its_own),
    "other-lse": (lse_of_a_tile, lse_of_another),
    "other-labels": (labels_one_off,),
    "upstream-factor": (loss_weight,),
}


@pytest.mark.parametrize("named, fault", [(cause, fault) for cause, all in FAULTS.items() for fault in all])
def test_a_fault_that_is_solved_for_is_named_with_what_it_did(tmp_path, named, fault):
    words = []

    def changed(head, mb, right):
        found, said = fault(head, mb, right)
        words.append(said)
        return found

    report = Head(SEED).recorded(tmp_path / "run", changed)
    assert [found.id for found in report.causes] == [named], f"seed {SEED}: {report.causes}"
    parameters = report.json["causes"][0]["parameters"]
    assert any(words[0] in said for said in parameters.values()), (words, parameters)


def test_the_right_head_agrees_and_says_how_small_a_fault_it_would_have_shown(tmp_path):
    report = Head(SEED).recorded(tmp_path / "run")
    assert report.verdict == "agreed", report.reasons
    dk = next(stage for stage in report.stages if stage.name == "dk")
    assert 0 < dk.seen_from.factor < 1e-4 and 0 < dk.seen_from.noise < 1e-4, dk


def test_noise_is_none_of_them(tmp_path):
    def noisy(head, mb, right):
        return {name: of * head.rng.normal(1, 0.03, of.shape) for name, of in right.items()}

    report = Head(SEED).recorded(tmp_path / "run", noisy)
    assert [found.id for found in report.causes] == ["unknown"], report.causes
