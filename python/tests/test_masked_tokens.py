"""The last token of a sequence, which weights mask, with a label that nobody looks at.

Goal: what a job looks up there is no divergence, and hides none: the same of another token is one, and labels that are
wrong at the ends of runs are named though the last of each sequence is masked. Method: a head in numpy whose last token
of each sequence has weight 0. BACKTAPE_SEED draws another job.
"""

import os

import numpy as np
from named import named

import backtape

SEED = int(os.environ.get("BACKTAPE_SEED", 6))


def recorded(directory, run=None, masked=0, counted=0):
    """`run`: the length of the runs whose last token takes the run's first id for its label; `masked`, `counted`: how
    many label logits of such tokens are of another class."""
    rng = np.random.default_rng(SEED)
    rows, half, classes, depth = (int(rng.integers(*of)) for of in ((5, 8), (9, 14), (150, 220), (16, 28)))
    length, where = 2 * half, np.arange(rows * 2 * half)
    ids = rng.integers(0, classes, (rows, length))
    labels = np.roll(ids, -1, 1)
    labels[:, -1] = 0
    weights = np.ones((rows, length), np.float32)
    weights[:, -1] = 0
    taken = labels.copy()
    if run:
        taken[:, half - 1] = ids[:, 0]
        taken[:, -1] = ids[:, half]
    q = rng.standard_normal((rows * length, depth)).astype(np.float32)
    k = (rng.standard_normal((classes, depth)) * 0.4).astype(np.float32)
    logits = q.astype(np.float64) @ k.T
    lse = np.log(np.exp(logits).sum(-1))
    looked = taken.reshape(-1).copy()
    ends = where[length - 1 :: length]
    for tokens, count in ((ends, masked), (ends - 2, counted)):
        looked[tokens[:count]] = (looked[tokens[:count]] + 7) % classes
    entries = np.exp(logits - lse[:, None])
    entries[where, taken.reshape(-1)] -= 1
    entries *= weights.reshape(-1, 1) / weights.sum()
    own = logits[where, looked]
    recorder = backtape.Recorder(directory, rank=0, world_size=1, mesh={"data": 1})
    with recorder.step(0) as tape:
        tape.head(loss="softmax_xent", path="plain", denominator="weights")
        for name, x in {"q": q, "label_logits": own, "lse": lse, "logprobs": own - lse, "dq": entries @ k}.items():
            tape.record(name, x.astype(np.float32).reshape(rows, length, *x.shape[1:]))
        tape.record("labels", labels.astype(np.int32))
        tape.record("weights", weights)
        tape.record("k", k)
        tape.record("dk", (entries.T @ q).astype(np.float32))
    recorder.close()
    return backtape.replay(directory, step=0), half


def test_a_label_logit_of_a_last_token_without_weight_is_not_judged(tmp_path):
    report, _ = recorded(tmp_path, masked=4)
    assert report.verdict == "agreed", report


def test_a_label_logit_of_a_token_that_counts_is(tmp_path):
    report, _ = recorded(tmp_path, counted=3)
    assert report.first_divergence.stage == "label_logits", report


def test_labels_that_stay_inside_each_part_of_a_sequence_are_named_though_the_last_is_masked(tmp_path):
    report, _ = recorded(tmp_path, run=True)
    named(report, "label-shift")
