"""Products that narrow what they take: tensors in f32, operands in TF32 or in bf16, as accelerators multiply by default.

Goal: such a job, declared by `input` as docs/dtypes.md says, agrees, though its dlogits are declared in f32, because the
backward's products narrow them too; what narrows more than declared diverges. Method: a head in numpy whose operands are
rounded before each product. BACKTAPE_SEED draws another job.
"""

import os

import ml_dtypes
import numpy as np
import pytest

import backtape

SEED = int(os.environ.get("BACKTAPE_SEED", 51))
FULL = {name: "f32" for name in ("logits", "lse", "p", "dlogits", "label_grad", "parts", "accumulate", "output")}


def tf32(x):
    """To nearest, ties to even: 10 bits of the mantissa stay."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & 0xFFFFE000).astype(np.uint32).view(np.float32).astype(np.float64)


def bf16(x):
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)


def replayed(directory, narrow, declared):
    print(f"BACKTAPE_SEED={SEED}")
    rng = np.random.default_rng(SEED)
    tokens, classes, depth = (int(rng.integers(*of)) for of in ((120, 200), (150, 250), (40, 90)))
    q, k = (rng.standard_normal((n, depth)).astype(np.float32) * 0.3 for n in (tokens, classes))
    labels = np.minimum(rng.zipf(1.3, tokens) - 1, classes - 1).astype(np.int32)
    logits = narrow(q) @ narrow(k).T
    entries = np.exp(logits - np.log(np.exp(logits).sum(1))[:, None])
    entries[np.arange(tokens), labels] -= 1
    entries = narrow(entries / tokens)
    recorder = backtape.Recorder(directory)
    with recorder.step(0) as tape:
        tape.head(loss="softmax_xent", path="plain", dtypes=FULL | {"input": declared})
        for name, values in {"q": q, "k": k, "dq": entries @ narrow(k), "dk": entries.T @ narrow(q)}.items():
            tape.record(name, values.astype(np.float32))
        tape.record("labels", labels)
    recorder.close()
    return backtape.replay(directory, step=0)


@pytest.mark.parametrize(("narrow", "declared"), [(tf32, "tf32"), (bf16, "bf16")])
def test_a_job_whose_products_narrow_all_that_they_take_agrees(tmp_path, narrow, declared):
    report = replayed(tmp_path, narrow, declared)
    assert report.verdict == "agreed", report


def test_products_that_narrow_more_than_declared_are_found(tmp_path):
    report = replayed(tmp_path, bf16, "tf32")
    assert report.verdict in ("diverged", "misdeclared"), report
