"""Faults whose parameters are solved for from what was captured: no list holds the sizes drawn here.

Goal: each is named with what it did, and the right head agrees. Method: a head in numpy with sizes, bounds and
factors from a seed, one thing changed in its backward. BACKTAPE_SEED draws another job.
"""

import os

import ml_dtypes
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

    def recorded(self, directory, fault=lambda head, mb, gradients: gradients, reduced=None, **declared):
        recorder = backtape.Recorder(directory)
        with recorder.step(0) as tape:
            said = {"loss": "softmax_xent", "reduction": "mean", "denominator": "weights", "microbatches": 2} | declared
            tape.head(**said)
            tape.record("k", self.k)
            gradients = []
            for mb, data in enumerate(self.microbatches):
                gradients.append({n: x.astype(np.float32) for n, x in fault(self, mb, self.gradients(mb)).items()})
                for name, array in (data | gradients[-1]).items():
                    tape.record(name, array, microbatch=mb)
            if reduced:
                tape.record("dk", reduced([of["dk"] for of in gradients]), when="post_reduce")
        recorder.close()
        return backtape.replay(directory, step=0)


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
    # It begins and ends where no equal shard does: one of those is a cause of its own.
    last = head.classes - 4
    return head.gradients(mb, lse=head.lse(mb, slice(5, last + 1))), f"that of classes 5 to {last} alone"


def lse_of_another(head, mb, right):
    return head.gradients(mb, lse=head.lse(max(0, mb - 1))), "microbatch 1 reads that of microbatch 0"


def labels_one_off(head, mb, right):
    labels = head.microbatches[mb]["labels"]
    return head.gradients(mb, labels=np.where(labels >= 30, labels - 1, labels)), "-1 for "


def shifted_inside_runs(head, mb, right):
    """What context-parallel ranks do that shift their own part: its last token takes its first id."""
    labels = head.microbatches[mb]["labels"].copy()
    ids = np.concatenate([[head.classes - 1], labels[:-1]])
    labels[8::9] = ids[0::9][: len(labels[8::9])]
    return head.gradients(mb, labels=labels), "runs of 9 tokens"


def loss_weight(head, mb, right):
    return head.gradients(mb, factor=0.83), "0.83"


FAULTS = {
    "block-miscounted": (chunk_left_out, tile_left_out, rows_twice, last_of_label),
    "part-missing": (label_part_left_out, decay_added),
    "token-weights": (weights_twice, number_of_its_own),
    "other-lse": (lse_of_a_tile, lse_of_another),
    "other-labels": (labels_one_off,),
    "label-shift": (shifted_inside_runs,),
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


def ids(report):
    return [found.id for found in report.causes]


def test_operands_of_few_bits_are_named_whatever_the_path_is_called(tmp_path):
    def narrow(x):
        return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)

    def products(head, mb, right):
        entries, q = narrow(head.entries(mb)), narrow(head.microbatches[mb]["q"])
        return {"dq": entries @ narrow(head.k), "dk": entries.T @ q}

    for path in ("plain", "fused"):
        report = Head(SEED).recorded(tmp_path / path, products, path=path)
        assert ids(report) == ["gemm-low-precision"], (path, report.causes)
        assert report.json["causes"][0]["parameters"]["operands rounded to"] == "bf16"


def test_addends_that_are_rounded_on_their_way_into_a_sum_are_named(tmp_path):
    def compressed(addends):
        return sum(of.astype(ml_dtypes.bfloat16).astype(np.float32) for of in addends)

    report = Head(SEED).recorded(tmp_path / "run", reduced=compressed, microbatch_reduction="sum")
    assert ids(report) == ["microbatch-accumulator-low-precision"], report.causes
    assert report.json["causes"][0]["parameters"]["addends rounded to"] == "bf16"
    assert Head(SEED).recorded(tmp_path / "right", reduced=sum, microbatch_reduction="sum").verdict == "agreed"


def test_microbatches_that_are_clipped_before_they_are_added_are_named(tmp_path):
    def clipped(addends):
        most = 0.7 * min(np.linalg.norm(x) for x in addends)
        return sum(x * np.float32(most / np.linalg.norm(x)) for x in addends)

    report = Head(SEED).recorded(tmp_path, reduced=clipped, microbatch_reduction="sum")
    assert ids(report) == ["clipping"], report.causes
    assert "each microbatch's part" in report.json["causes"][0]["parameters"]["clipped"]


def test_what_explains_one_gradient_is_named_beside_what_is_not_known(tmp_path):
    def both(head, mb, right):
        found, _ = chunk_left_out(head, mb, right)
        return found | {"dq": found["dq"] * head.rng.normal(1, 0.03, found["dq"].shape)}

    assert ids(Head(SEED).recorded(tmp_path / "run", both)) == ["block-miscounted", "unknown"]


def test_one_factor_of_dq_alone_is_no_weight_of_tokens(tmp_path):
    def shrunk(head, mb, right):
        return right | {"dq": 0.4 * right["dq"]}

    report = Head(SEED).recorded(tmp_path, shrunk)
    assert "token-weights" not in ids(report), report.causes


def test_numbers_for_every_token_explain_nothing_where_the_other_gradient_contradicts_them(tmp_path):
    def apart(head, mb, right):
        own, _ = number_of_its_own(head, mb, right)
        return {"dq": own["dq"], "dk": right["dk"] * head.rng.normal(1, 0.03, right["dk"].shape)}

    assert ids(Head(SEED).recorded(tmp_path / "run", apart)) == ["unknown"]


def test_blocks_of_any_size_that_were_read_elsewhere_are_found_from_dq_alone(tmp_path):
    def elsewhere(head, mb, right):
        at = np.arange(head.classes)
        rows = np.minimum(at // 7 * 49 + at % 7, head.classes - 1)
        data, k = head.microbatches[mb], head.k
        head.k = k[rows]
        entries = head.entries(mb)
        found = {"dq": entries @ head.k, "dk": entries.T @ data["q"]}
        head.k = k
        return found

    report = Head(SEED).recorded(tmp_path / "run", elsewhere)
    assert ids(report) == ["block-index-times-block"], report.causes
    assert report.json["causes"][0]["parameters"]["block"] == "7"


def test_a_declaration_that_only_allows_more_is_no_explanation(tmp_path):
    """dk in f32 is off by what bf16 entries would be off by, and not by their own roundings."""
    def noisy(head, mb, right):
        return right | {"dk": right["dk"] * head.rng.normal(1, 1e-3, right["dk"].shape)}

    report = Head(SEED).recorded(tmp_path / "run", noisy)
    assert (report.verdict, ids(report)) == ("diverged", ["unknown"]), report.causes
    assert "other_declaration" not in report.json, report.other_declaration


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


def overwritten(kind, entries, p, data):
    """What is in the memory of the logits by the time they are recorded."""
    less_1 = p.copy()
    less_1[np.arange(len(p)), data["labels"]] -= 1
    counts = (data["weights"] != 0)[:, None]
    kinds = {"scaled": entries * 64, "less 1": less_1, "less 1, counted": less_1 * counts, "no part of it": p**2 + 0.1}
    return kinds[kind]


@pytest.mark.parametrize("kind, words", [
    ("scaled", "their gradient, times 64"), ("less 1", "p less 1 at the label"), ("less 1, counted", "p less 1 at the label"),
    ("no part of it", "something else"),
])  # fmt: skip
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_logits_that_were_written_over_before_they_were_recorded_are_named(tmp_path, kind, words, dtype):
    head = Head(SEED)
    for data in head.microbatches:
        data["weights"][-9:] = 0
        data["q"] = data["q"].astype(dtype).astype(np.float32)
    head.k = head.k.astype(dtype).astype(np.float32)
    recorder = backtape.Recorder(tmp_path / "run")
    with recorder.step(0) as tape:
        tape.head(loss="softmax_xent", reduction="mean", denominator="weights", microbatches=2, path="plain")
        tape.record("k", head.k.astype(dtype))
        for mb, data in enumerate(head.microbatches):
            logits = data["q"].astype(np.float64) @ head.k.astype(np.float64).T
            p = np.exp(logits - head.lse(mb)[:, None])
            held = head.gradients(mb) | {"q": data["q"], "logits": overwritten(kind, head.entries(mb), p, data)}
            for name, array in held.items():
                tape.record(name, array.astype(dtype), microbatch=mb)
            for name in ("labels", "weights"):
                tape.record(name, data[name], microbatch=mb)
    recorder.close()
    report = backtape.replay(tmp_path / "run", step=0)
    assert ids(report) == ["buffer-overwritten"], f"seed {SEED}: {report}"
    assert report.json["causes"][0]["parameters"]["holds"].startswith(words), report.causes
