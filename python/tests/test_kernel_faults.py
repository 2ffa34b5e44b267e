"""Faults of tiles and of parts, as kernels make them; sizes are drawn, no list holds them.

Goal: each is named with what it did, and the right head agrees. Method: a fused head in numpy, one thing changed in its
forward or backward. BACKTAPE_SEED draws other sizes.
"""

import os

import ml_dtypes
import numpy as np
import pytest

import backtape

SEED = int(os.environ.get("BACKTAPE_SEED", 25))


class Head:
    """Microbatches of a head in f32, with the two parts of its gradients in f64."""

    def __init__(self, microbatches=1, padding=0, **declared):
        print(f"BACKTAPE_SEED={SEED}")
        rng = np.random.default_rng(SEED)
        self.tokens, self.classes, self.depth = (int(rng.integers(*of)) for of in ((90, 140), (60, 100), (16, 26)))
        self.declared, self.softcap, self.count = declared, declared.get("softcap"), microbatches
        self.k = rng.standard_normal((self.classes + padding, self.depth)).astype(np.float32)
        draw = lambda: rng.standard_normal((self.tokens, self.depth)).astype(np.float32)
        # Few labels are frequent.
        label = lambda: np.minimum(rng.geometric(0.08, self.tokens) - 1, self.classes - 1).astype(np.int32)
        self.q, self.labels = [draw() for _ in range(microbatches)], [label() for _ in range(microbatches)]

    def logits(self, mb=0):
        """And their derivatives."""
        raw = self.q[mb].astype(np.float64) @ self.k.astype(np.float64).T
        if not self.softcap:
            return raw, np.ones_like(raw)
        tanh = np.tanh(raw / self.softcap)
        return self.softcap * tanh, 1 - tanh**2

    def lse(self, mb=0, columns=0):
        return np.log(np.exp(self.logits(mb)[0][:, : self.classes + columns]).sum(1))

    def entries(self, mb=0, lse=None, columns=0):
        """dlogits [T, V] of the softmax part and of the label's, the derivative of a softcap left out."""
        g, end = 1 / (self.tokens * self.count), self.classes + columns
        softmax, label = np.zeros((2, self.tokens, len(self.k)))
        lse = self.lse(mb) if lse is None else lse
        softmax[:, :end] = g * np.exp(self.logits(mb)[0][:, :end] - lse[:, None])
        label[np.arange(self.tokens), self.labels[mb]] = -g
        return softmax, label

    def gradients(self, softmax, label, mb=0):
        pairs = {"lse": softmax, "label": label}
        found = {f"dq_{part}": of @ self.k for part, of in pairs.items()}
        return found | {f"dk_{part}": of.T @ self.q[mb] for part, of in pairs.items()}

    def right(self, mb=0):
        return self.gradients(*(of * self.logits(mb)[1] for of in self.entries(mb)), mb)

    def recorded(self, directory, found=None, parts=False, forward=lambda mb: {}):
        """`found`: the parts of the gradients of each microbatch."""
        recorder = backtape.Recorder(directory)
        with recorder.step(0) as tape:
            said = {"loss": "softmax_xent", "path": "fused", "microbatches": self.count} | self.declared
            tape.head(**said)
            tape.record("k", self.k)
            for mb in range(self.count):
                own = (found or [self.right(mb) for mb in range(self.count)])[mb]
                whole = {name: own.pop(name, 0) + own[f"{name}_lse"] + own[f"{name}_label"] for name in ("dq", "dk")}
                values = {"q": self.q[mb], "labels": self.labels[mb]} | forward(mb)
                values |= {n: x.astype(np.float32) for n, x in (whole | (own if parts else {})).items()}
                for name, array in values.items():
                    tape.record(name, array, microbatch=mb)
        recorder.close()
        return backtape.replay(directory, step=0)


def words(report):
    return "; ".join(f"{name}: {value}" for name, value in report.json["causes"][0]["parameters"].items())


def named(report, cause, *said):
    assert [of.id for of in report.causes] == [cause], report.json["causes"]
    for part in said:
        assert part in words(report), report.json["causes"]


def test_a_tail_of_tokens_that_the_softmax_part_alone_lacks_is_named(tmp_path):
    head = Head()
    right = head.right()
    softmax = head.entries()[0]
    start = head.tokens - head.tokens % 11 - 5
    right["dk_lse"] -= softmax[start:].T @ head.q[0][start:]
    report = head.recorded(tmp_path, [right])
    named(report, "block-miscounted", "in the softmax part", f"{start} to {head.tokens - 1} left out")


def test_one_tile_of_tokens_and_classes_that_was_skipped_is_named_with_both(tmp_path):
    head = Head()
    right = head.right()
    tile = np.zeros_like(head.entries()[0])
    tile[17:43, 22:41] = head.entries()[0][17:43, 22:41]
    right["dk_lse"] -= tile.T @ head.q[0]
    named(head.recorded(tmp_path, [right]), "block-miscounted", "rows 22 to 40: 17 to 42 left out")


@pytest.mark.parametrize("window, parts", [(29, False), (1000, True)])
def test_label_addends_that_overwrite_each_other_are_named_with_their_window(tmp_path, window, parts):
    head = Head()
    right, label = head.right(), head.entries()[1]
    kept = {}
    for t, of in enumerate(head.labels[0]):
        kept[(t // window, of)] = t
    lost = np.array([kept[(t // window, of)] != t for t, of in enumerate(head.labels[0])])
    right["dk_label"] -= label[lost].T @ head.q[0][lost]
    said = "the last one's alone" if parts else "within each 29 tokens"
    named(head.recorded(tmp_path, [right], parts=parts), "block-miscounted", said)


@pytest.mark.parametrize("shards", [3, 5])
def test_a_label_scatter_in_shards_that_are_added_in_f32_is_named_with_their_number(tmp_path, shards):
    head = Head()
    head.labels[0][::2] = 7
    head.declared["dtypes"] = dict.fromkeys(("logits", "p", "dlogits", "label_grad", "parts", "label_scatter"), "f32")
    right, label = head.right(), head.entries()[1]
    size = -(-head.tokens // shards)
    total = np.zeros((len(head.k), head.depth), np.float32)
    for first in range(0, head.tokens, size):
        own = np.zeros_like(total)
        for t in range(first, min(first + size, head.tokens)):
            of = head.labels[0][t]
            added = own[of] + np.float32(label[t, of]) * head.q[0][t]
            own[of] = added.astype(ml_dtypes.bfloat16).astype(np.float32)
        total += own
    right["dk_label"] = total
    named(head.recorded(tmp_path, [right]), "label-scatter-low-precision", f"shards: {shards}")


def test_a_fault_of_one_part_alone_is_named_though_the_other_part_is_right(tmp_path):
    head = Head(softcap=4.0)
    right = head.right()
    softmax, label = head.entries()
    right["dq_lse"] = softmax @ head.k
    named(head.recorded(tmp_path, [right], parts=True), "softcap-mismatch", "its derivative")


@pytest.mark.parametrize("part", ["the label's part", "the softmax part"])
def test_a_softcaps_derivative_that_one_part_lacks_is_named_with_the_part(tmp_path, part):
    head = Head(softcap=4.0)
    bend = head.logits()[1]
    softmax, label = head.entries()
    of_label = part == "the label's part"
    found = head.gradients(softmax * (bend if of_label else 1), label * (1 if of_label else bend))
    named(head.recorded(tmp_path, [found]), "softcap-mismatch", f"of: {part}")


@pytest.mark.parametrize("name", ["dq", "dk"])
def test_a_buffer_that_was_not_cleared_between_microbatches_is_named(tmp_path, name):
    head = Head(microbatches=3)
    found = [head.right(mb) for mb in range(3)]
    for mb in (1, 2):
        found[mb][name] = sum(found[of][f"{name}_{part}"] for of in range(mb) for part in ("lse", "label"))
    named(head.recorded(tmp_path, found), "accumulation-window", f"{name} of microbatch 1 holds what microbatch 0 holds")


# How many columns the backward alone counts shows in no lse: all of them, or none.
@pytest.mark.parametrize("columns, forward", [(1, True), (9, True), (9, False)])
def test_padding_that_counts_is_named_with_its_columns_and_where(tmp_path, columns, forward):
    head = Head(padding=9)
    head.declared["valid_vocab"] = head.classes
    wrong = head.lse(columns=columns)
    found = head.gradients(*head.entries(lse=wrong, columns=columns))
    lse = (wrong if forward else head.lse()).astype(np.float32)
    report = head.recorded(tmp_path, [found], forward=lambda mb: {"lse": lse})
    place = [] if forward else ["the backward alone"]
    named(report, "tail-tile-unmasked", f"columns: {columns}", *place)


def test_an_lse_in_few_bits_that_the_backward_reads_is_no_cancellation(tmp_path):
    head = Head()
    lse = head.lse().astype(ml_dtypes.bfloat16).astype(np.float32)
    found = head.gradients(*head.entries(lse=lse.astype(np.float64)))
    report = head.recorded(tmp_path, [found], forward=lambda mb: {"lse": lse})
    named(report, "lse-logits-mismatch", "the backward read", "bf16")


def test_one_wrong_number_is_explained_by_no_number_that_was_fitted_to_it(tmp_path):
    head = Head()
    loss = np.float32(head.lse().mean() * 1.0173)
    report = head.recorded(tmp_path, forward=lambda mb: {"loss": loss})
    assert [cause.id for cause in report.causes] == ["unknown"], report.json["causes"]


@pytest.mark.parametrize("tokens", [256, 300, 512, 545, 617])
def test_a_fused_head_that_takes_the_label_off_before_it_rounds_is_not_accused(tmp_path, tokens):
    """A power of two changes no digit of p, so that p - 1 rounded once looks like p rounded; other counts of tokens have
    entries of nearly -1/N that all round to one side."""
    rng = np.random.default_rng(SEED + tokens)
    bf16 = lambda x: x.astype(ml_dtypes.bfloat16)
    k, q = (bf16(rng.standard_normal((of, 48)).astype(np.float32) * 0.6) for of in (400, tokens))
    labels = rng.integers(0, 400, tokens).astype(np.int32)
    logits = q.astype(np.float32) @ k.astype(np.float32).T
    entries = np.exp(logits - np.log(np.exp(logits.astype(np.float64)).sum(1))[:, None])
    entries[np.arange(tokens), labels] -= 1
    entries = bf16(entries / tokens).astype(np.float32)
    recorder = backtape.Recorder(tmp_path)
    with recorder.step(0) as tape:
        rounded = {"input": "bf16", "dlogits": "bf16", "output": "bf16"}
        kept = dict.fromkeys(("logits", "lse", "p", "accumulate"), "f32")
        tape.head(loss="softmax_xent", path="fused", dtypes=rounded | kept)
        gradients = {"dq": bf16(entries @ k.astype(np.float32)), "dk": bf16(entries.T @ q.astype(np.float32))}
        for name, array in ({"q": q, "k": k, "labels": labels} | gradients).items():
            tape.record(name, array)
    recorder.close()
    report = backtape.replay(tmp_path, step=0)
    assert report.verdict == "agreed", report.json["causes"]


def test_p_that_is_rounded_before_one_is_taken_off_shows_in_recorded_logits(tmp_path):
    rng = np.random.default_rng(SEED)
    logits = rng.standard_normal((150, 90)).astype(np.float32) * 2
    labels = rng.integers(0, 90, 150).astype(np.int32)
    logits[np.arange(150), labels] += rng.uniform(0, 14, 150)
    logits = logits.astype(ml_dtypes.bfloat16)
    p = np.exp(logits.astype(np.float64))
    p /= p.sum(1, keepdims=True)

    def replayed(rounds, directory):
        found = p.astype(ml_dtypes.bfloat16).astype(np.float64) if rounds else p.copy()
        found[np.arange(150), labels] -= 1
        recorder = backtape.Recorder(directory)
        with recorder.step(0) as tape:
            dtypes = {"logits": "bf16", "lse": "f32", "p": "f32", "dlogits": "bf16", "output": "bf16"}
            tape.head(loss="xent_logits", path="plain", dtypes=dtypes)
            values = {"logits": logits, "labels": labels, "dlogits": (found / 150).astype(ml_dtypes.bfloat16)}
            for name, array in values.items():
                tape.record(name, array)
        recorder.close()
        return backtape.replay(directory, step=0)

    assert replayed(False, tmp_path / "right").verdict == "agreed"
    named(replayed(True, tmp_path / "rounded"), "label-prob-rounded-early", "bf16")


def test_a_cap_that_only_the_backward_has_is_fitted_though_a_right_lse_was_recorded(tmp_path):
    head = Head(softcap=4.0)
    cap = float(np.round(np.random.default_rng(SEED).uniform(2.5, 3.6), 2))
    raw = head.q[0].astype(np.float64) @ head.k.astype(np.float64).T
    tanh, lse = np.tanh(raw / cap), head.lse()
    softmax, label = np.exp(cap * tanh - lse[:, None]) / head.tokens, head.entries()[1]
    found = head.gradients(softmax * (1 - tanh**2), label * (1 - tanh**2))
    forward = {"lse": lse.astype(np.float32)}
    report = head.recorded(tmp_path, [found], forward=lambda mb: forward)
    named(report, "softcap-mismatch", f"softcap: {cap}", "declared: 4")


def test_a_temperature_that_one_gradient_has_by_its_inverse_is_named(tmp_path):
    temperature = float(np.round(np.random.default_rng(SEED).uniform(0.5, 0.8), 2))
    head, scaled = Head(temperature=temperature), Head()
    scaled.q = [(q / temperature).astype(np.float64) for q in head.q]
    # The rows of q that dk is summed from are divided already.
    right = scaled.right()
    right |= {name: right[name] / temperature for name in ("dq_lse", "dq_label")}
    right |= {name: right[name] * temperature**2 for name in ("dk_lse", "dk_label")}
    report = head.recorded(tmp_path, [right], forward=lambda mb: {"lse": scaled.lse().astype(np.float32)})
    named(report, "temperature-mismatch", "in the backward: by its inverse")


def test_bits_that_are_cut_off_are_no_factor(tmp_path):
    def cut(x):
        bits = np.asarray(x, np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
        return bits.view(np.float32).astype(ml_dtypes.bfloat16)

    head = Head()
    right = head.right()
    exact = dict.fromkeys(("input", "logits", "lse", "p", "dlogits", "label_grad", "parts", "accumulate"), "f32")
    recorder = backtape.Recorder(tmp_path)
    with recorder.step(0) as tape:
        tape.head(loss="softmax_xent", path="plain", dtypes=exact | {"output": "bf16"})
        for name, array in {"q": head.q[0], "k": head.k, "labels": head.labels[0]}.items():
            tape.record(name, array)
        for name in ("dq", "dk"):
            tape.record(name, cut(right[f"{name}_lse"] + right[f"{name}_label"]))
    recorder.close()
    report = backtape.replay(tmp_path, step=0)
    assert report.verdict == "diverged"
    assert [of.id for of in report.causes] == ["unknown"], report.json["causes"]


def test_the_labels_part_of_ignored_tokens_at_a_clamped_class_is_named(tmp_path):
    head = Head(ignore_label=-100)
    ignored = np.arange(3, head.tokens, 7)
    counted = head.tokens - len(ignored)
    softmax, _ = head.entries()
    head.labels[0][ignored] = -100
    softmax, label = softmax * head.tokens / counted, np.zeros_like(softmax)
    softmax[ignored] = 0
    label[np.arange(head.tokens), np.maximum(head.labels[0], 0)] = -1 / counted
    report = head.recorded(tmp_path, [head.gradients(softmax, label)])
    named(report, "int-target-out-of-range", "the label's part alone, at class 0 in their place")


def test_a_z_loss_that_the_backward_divides_by_the_microbatches_once_more_is_named(tmp_path):
    head = Head(microbatches=4, z_loss=0.01)
    found = []
    for mb in range(4):
        softmax, label = head.entries(mb)
        found.append(head.gradients(softmax * (1 + 2 * 0.01 / 4 * head.lse(mb))[:, None], label, mb))
    report = head.recorded(tmp_path, found)
    named(report, "zloss-mismatch", "λ of the gradient: 0.0025")


def test_the_right_heads_agree(tmp_path):
    for name, head in {"plain": Head(), "capped": Head(softcap=4.0), "three": Head(microbatches=3)}.items():
        report = head.recorded(tmp_path / name, parts=name == "plain")
        assert report.verdict == "agreed", report.json["causes"]
