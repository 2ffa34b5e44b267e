"""Floors of large problems: the policies are emulated for some rows, which stand for all."""

import ml_dtypes
import numpy as np
import pytest

import backtape

TOKENS, DEPTH, VOCAB = 1024, 512, 2048


def bf16(x):
    return np.asarray(x, np.float32).astype(ml_dtypes.bfloat16)


def recorded(directory, seed, rounds):
    """A plain head whose tokens' weights differ by thousands, and whose labels are those of a text."""
    random = np.random.default_rng(seed)
    q, k = (bf16(random.standard_normal((n, DEPTH)) * 0.3) for n in (TOKENS, VOCAB))
    labels = np.minimum(random.zipf(1.3, TOKENS) - 1, VOCAB - 1).astype(np.int32)
    weights = np.exp(random.uniform(-4, 4, TOKENS)).astype(np.float32)
    a, b = q.astype(np.float32), k.astype(np.float32)
    logits = a @ b.T
    lse = np.logaddexp.reduce(logits, axis=1)
    entries = np.exp(logits - lse[:, None])
    entries[np.arange(TOKENS), labels] -= 1
    entries *= (weights / weights.sum(dtype=np.float32))[:, None]
    entries = rounds(entries).astype(np.float32)
    with backtape.Recorder(directory) as recorder, recorder.step(0) as tape:
        tape.head(
            loss="softmax_xent",
            reduction="mean",
            path="plain",
            denominator="weights",
            dtypes={"logits": "f32", "p": "f32"},
        )
        found = {"q": q, "k": k, "labels": labels, "weights": weights}
        for name, array in (found | {"dq": bf16(entries @ b), "dk": bf16(entries.T @ a)}).items():
            tape.record(name, array)


@pytest.mark.parametrize("rounds", [np.asarray, bf16], ids=["f32", "bf16"])
def test_the_floor_of_a_sample_is_the_error_that_a_job_of_that_policy_has(tmp_path, rounds):
    seed = int(np.random.default_rng().integers(1 << 30))
    print(f"seed {seed}")
    recorded(tmp_path, seed, rounds)
    report = backtape.replay(tmp_path, step=0, causes="none")
    assert report.verdict == "agreed"
    stages = {one["name"]: one for one in report.json["stages"]}
    for name in ("dq", "dk"):
        worst = stages[name]
        assert worst["floor_source"] == "sampled"
        if rounds is bf16:
            assert worst["best_member"] == "dlogits rounded"
            assert 0.9 < worst["ratio"] < 1.1, f"{name}: {worst['ratio']}"
        else:
            assert worst["best_member"] == "nothing rounded before the output"
            assert worst["ratio"] < 1.0, f"{name}: {worst['ratio']}"
