"""Faults that are a rounding too many and no more, most of them smaller than what undeclared dtypes allow.

Goal: each is reproduced and so named, and the right head agrees. Method: a head in numpy that rounds as eager code
does, with sizes and cuts from a seed. BACKTAPE_SEED draws another job.
"""

import os

import ml_dtypes
import numpy as np
import pytest

import backtape

SEED = int(os.environ.get("BACKTAPE_SEED", 31))
HALF = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}


def rounded(x, dtype):
    return np.asarray(x, np.float32).astype(HALF[dtype]).astype(np.float32)


class Head:
    """One microbatch whose tensors are all of one format of 16 bits."""

    def __init__(self, dtype, sure=0.6):
        rng = np.random.default_rng(SEED)
        self.dtype = dtype
        tokens, classes, depth = (int(rng.integers(*of)) for of in ((30, 50), (60, 90), (12, 20)))
        self.tokens = 4 * tokens
        self.k = rng.standard_normal((classes, depth)).astype(HALF[dtype])
        self.labels = rng.integers(0, classes, self.tokens).astype(np.int32)
        # Half of the tokens are sure of their label.
        towards = self.k[self.labels].astype(np.float32) * rng.choice([0.0, sure], (self.tokens, 1))
        self.q = (rng.standard_normal((self.tokens, depth)) * 0.3 + towards).astype(HALF[dtype])

    def entries(self, p=None):
        """dlogits [T, V]; `p`: what p, and p - 1 again, are rounded to."""
        logits = self.q.astype(np.float32) @ self.k.astype(np.float32).T
        lse = np.log(np.exp(logits).sum(1, dtype=np.float32))
        found = np.exp(logits - lse[:, None])
        found = rounded(found, p) if p else found
        found[np.arange(self.tokens), self.labels] -= 1
        found = rounded(found, p) if p else found
        return rounded(found * np.float32(1 / self.tokens), self.dtype)

    def replayed(self, directory, entries, dk=None, **dtypes):
        k, q = self.k.astype(np.float32), self.q.astype(np.float32)
        gradients = {"dq": entries @ k, "dk": entries.T @ q if dk is None else dk(entries, q)}
        recorder = backtape.Recorder(directory)
        with recorder.step(0) as tape:
            tape.head(loss="softmax_xent", reduction="mean", path="chunked" if dk else "plain", dtypes=dtypes)
            arrays = {"k": self.k, "q": self.q, "labels": self.labels}
            for name, array in (arrays | {n: of.astype(HALF[self.dtype]) for n, of in gradients.items()}).items():
                tape.record(name, array)
        recorder.close()
        return backtape.replay(directory, step=0)


def summed(parts, part=None):
    """A running sum in bf16; `part`: what each part is rounded to before."""
    total = np.float32(0)
    for one in parts:
        total = rounded(total + (rounded(one, part) if part else one), "bf16")
    return total


def in_shards(entries, q):
    """Four shards, each with its sum over chunks of five tokens, and the sum of those."""
    shards = np.array_split(np.arange(len(q)), 4)
    products = [[entries[of[at : at + 5]].T @ q[of[at : at + 5]] for at in range(0, len(of), 5)] for of in shards]
    return summed([summed(all, "bf16") for all in products])


def from_the_end(entries, q):
    """Chunks of eleven tokens, the last one first, their products in f32."""
    return summed([entries[at : at + 11].T @ q[at : at + 11] for at in range(0, len(q), 11)][::-1])


CUTS = {
    in_shards: {"chunk": "5 tokens", "shards": "4", "order": "ascending", "a chunk's part rounded to": "bf16"},
    from_the_end: {"chunk": "11 tokens", "order": "descending", "a chunk's part rounded to": "f32"},
}


@pytest.mark.parametrize("dk", CUTS)
def test_the_cut_of_a_sum_in_few_bits_is_found_though_undeclared_roundings_may_be_as_large(tmp_path, dk):
    head = Head("bf16")
    report = head.replayed(tmp_path / "run", head.entries(), dk, logits="f32")
    assert [found.id for found in report.causes] == ["chunk-accumulator-low-precision"], f"seed {SEED}: {report}"
    parameters = report.json["causes"][0]["parameters"]
    assert CUTS[dk].items() <= parameters.items(), parameters


@pytest.mark.parametrize("dtype", HALF)
def test_p_less_1_that_is_rounded_again_is_told_from_p_that_is_rounded_once(tmp_path, dtype):
    head = Head(dtype)
    report = head.replayed(tmp_path / "run", head.entries(p=dtype), logits="f32", p="f32")
    assert [found.id for found in report.causes] == ["label-prob-rounded-early"], f"seed {SEED}: {report}"
    assert report.json["causes"][0]["parameters"].get("p - 1 rounded to") == dtype, report.causes


def test_an_entry_that_is_stored_and_read_back_before_the_label_is_taken_off_is_named(tmp_path):
    """As kernels do that write the softmax part over the logits, and come back for the label's entry."""
    head = Head("bf16")
    logits = head.q.astype(np.float64) @ head.k.astype(np.float64).T
    lse = np.log(np.exp(logits).sum(1))
    of_label, g = (np.arange(head.tokens), head.labels), np.float32(1 / head.tokens)
    entries = rounded(np.exp(logits - lse[:, None]) * g, "bf16")
    entries[of_label] = rounded(entries[of_label] - g, "bf16")
    loss = (lse - logits[of_label]).mean()
    dtypes = {"logits": "f32", "lse": "f32", "p": "f32", "parts": "f32", "label_grad": "f32", "dlogits": "bf16"}
    recorder = backtape.Recorder(tmp_path)
    with recorder.step(0) as tape:
        tape.head(loss="xent_logits", path="plain", denominator="all", dtypes=dtypes)
        given = {"logits": logits.astype(np.float32), "labels": head.labels, "loss": np.float32(loss)}
        for name, x in (given | {"dlogits": entries.astype(ml_dtypes.bfloat16)}).items():
            tape.record(name, x)
    recorder.close()
    report = backtape.replay(tmp_path, step=0)
    assert [found.id for found in report.causes] == ["label-prob-rounded-early"], f"seed {SEED}: {report}"
    assert report.json["causes"][0]["parameters"] == {"g p rounded to": "bf16"}, report.json["causes"]


def test_p_in_few_bits_is_a_fault_where_it_was_declared_in_f32_however_small_its_error_is(tmp_path):
    head = Head("f16", sure=0.2)
    entries = head.entries(p="f16")
    report = head.replayed(tmp_path / "declared", entries, logits="f32", p="f32")
    assert [found.id for found in report.causes] == ["label-prob-rounded-early"], f"seed {SEED}: {report}"
    # Where nothing is said of p, that is a rounding as good as any.
    assert head.replayed(tmp_path / "open", entries, logits="f32").verdict == "agreed"


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("chunked", [False, True])
def test_the_right_head_agrees(tmp_path, dtype, chunked):
    def in_f32(entries, q):
        return sum(entries[at : at + 11].T @ q[at : at + 11] for at in range(0, len(q), 11))

    head = Head(dtype)
    report = head.replayed(tmp_path / "run", head.entries(), in_f32 if chunked else None, logits="f32", p="f32")
    assert report.verdict == "agreed", f"seed {SEED}: {report}"
