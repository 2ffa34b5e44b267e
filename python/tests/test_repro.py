"""`replay export --repro`: one microbatch as a script in JAX that runs by itself.

Goal: what the script differentiates is the head that was declared. Method: random heads whose
gradients come from heads.py, in f64: the script must find the same, for every option.
"""

import os
from types import SimpleNamespace

import numpy as np
from repros import errors, exported, judge

import backtape

SEED = int(os.environ.get("BACKTAPE_SEED", 20261123))


def test_a_script_of_any_head_finds_the_gradients_that_were_captured(tmp_path):
    judge(tmp_path, SEED, "jax")


def test_a_script_shows_which_gradient_is_wrong(tmp_path):
    rng = np.random.default_rng(SEED)
    q, k = (rng.standard_normal(shape).astype(np.float32) for shape in ((24, 6), (11, 6)))
    labels = rng.integers(0, 11, 24).astype(np.int32)
    z = q @ k.T
    p = np.exp(z - z.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    p[np.arange(24), labels] -= 1
    with backtape.Recorder(tmp_path / "run", steps="0", strict=True) as recorder:
        with recorder.step(0) as tape:
            tape.head(loss="softmax_xent")
            for name, array in {"q": q, "k": k, "labels": labels}.items():
                tape.record(name, array)
            tape.record("dq", p @ k / 24)
            tape.record("dk", 0.9 * p.T @ q / 24)
    one = SimpleNamespace(microbatches=[{}])
    made = exported(tmp_path / "run", 0, one, "jax", tmp_path / "repro")
    assert made.returncode == 0, made.stderr
    ((_, found),) = errors([tmp_path / "repro" / "repro.py"])
    assert found["dq"][0] < 1e-6 and abs(found["dk"][0] - 0.1) < 1e-5, found
    assert found["dk"][1] < 1e-6, "the script's own gradient is right"
    again = exported(tmp_path / "run", 0, one, "jax", tmp_path / "repro")
    assert again.returncode == 2 and "is there already" in again.stderr
