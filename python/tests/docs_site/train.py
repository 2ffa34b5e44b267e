"""A training job as the docs mean it by `python train.py`: a language model's loss head in numpy.

Two steps of two microbatches (or MICROBATCHES) on one rank, recorded as BACKTAPE_* say. BACKTAPE_TEST_LIVE names a
file: the job then goes on until it is there. FAULT=label-gather gathers k's rows in bf16, so that
their transpose adds dk up in bf16.
"""

import os
import time
from pathlib import Path

import ml_dtypes
import numpy as np

import backtape

T, D, V = 256, 16, 320
MICROBATCHES = int(os.environ.get("MICROBATCHES", 2))
BF16 = ml_dtypes.bfloat16
LIVE = os.environ.get("BACKTAPE_TEST_LIVE")
FAULT = os.environ.get("FAULT")


def batch(step, index):
    """q [T, D] and labels [T]; a few labels are frequent, as in text."""
    rng = np.random.default_rng((7, step, index))
    q = rng.standard_normal((T, D)).astype(BF16)
    labels = np.minimum(rng.zipf(1.3, T) - 1, V - 1).astype(np.int32)
    return q, labels


def head(q, k, labels, total):
    """Softmax cross-entropy, forward and backward, in f32 on bf16 inputs."""
    wide, rows = q.astype(np.float32), k.astype(np.float32)
    logits = wide @ rows.T
    top = logits.max(1)
    lse = top + np.log(np.exp(logits - top[:, None]).sum(1))
    p = np.exp(logits - lse[:, None]) / np.float32(total)
    g = np.float32(1 / total)
    dk_label = scatter(labels, -g * wide)
    return {
        "lse": lse, "label_logits": logits[np.arange(T), labels],
        "dq": (p @ rows - g * rows[labels]).astype(BF16), "dk_label": dk_label, "dk": p.T @ wide + dk_label,
    }  # fmt: skip


def scatter(labels, addends):
    """Adds each token's row to that of its label."""
    kind = BF16 if FAULT == "label-gather" else np.float32
    sums = np.zeros((V, D), kind)
    for label, addend in zip(labels, addends):
        sums[label] = sums[label] + addend.astype(kind)
    return sums.astype(np.float32)


def main():
    k = (np.random.default_rng(11).standard_normal((V, D)) / 2).astype(BF16)
    total = T * MICROBATCHES
    with backtape.Recorder.from_env(scalars=True, heartbeat_s=0.05) as recorder:
        step = 0
        while step < 2 or (LIVE and not Path(LIVE).exists()):
            with recorder.step(step) as tape:
                parts = [batch(step, index) for index in range(MICROBATCHES)]
                made = [head(q, k, labels, total) for q, labels in parts]
                norm = float(np.sqrt((sum(part["dk"] for part in made) ** 2).sum()))
                loss = float(sum((part["lse"] - part["label_logits"]).sum() for part in made) / total)
                if tape.active:
                    tape.head(path="fused", microbatches=MICROBATCHES, microbatch_reduction="sum")
                    tape.record("k", k)
                    tape.record("grad_norm", np.float32(norm))
                    for index, ((q, labels), part) in enumerate(zip(parts, made)):
                        for name, value in {"q": q, "labels": labels, **part}.items():
                            tape.record(name, value, microbatch=index if MICROBATCHES > 1 else None)
            recorder.scalars(step, loss=loss, grad_norm=norm)
            recorder.watch(step, loss=loss, grad_norm=norm)
            if step < 2:
                print(f"step {step} loss={loss:.8f} grad_norm={norm:.8f}", flush=True)
            step += 1
            if LIVE:
                time.sleep(0.02)


main()
