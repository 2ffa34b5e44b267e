"""A step with one microbatch that some records name and others leave out.

Goal: what was recorded is judged, whichever of them has the number; nothing that is there is called "not captured".
Method: a head in numpy whose q, labels and dq have no microbatch and whose dk has, or the other way round, right and
with a fault in dk, or in dq. BACKTAPE_SEED draws another job.
"""

import os

import numpy as np
import pytest

import backtape
from named import close

SEED = int(os.environ.get("BACKTAPE_SEED", 12))


def recorded(directory, numbered, factor, ranks):
    """`numbered`: the names that are recorded with microbatch=0; `factor`: what each gradient is multiplied by."""
    rng = np.random.default_rng(SEED)
    tokens, classes, depth = (int(rng.integers(*of)) for of in ((40, 70), (60, 90), (12, 20)))
    k = rng.standard_normal((classes, depth)).astype(np.float32)
    mesh = {"data": ranks}
    recorders = [backtape.Recorder(directory, rank=r, world_size=ranks, mesh=mesh) for r in range(ranks)]
    for rank, recorder in enumerate(recorders):
        q = rng.standard_normal((tokens, depth)).astype(np.float32)
        labels = rng.integers(0, classes, tokens).astype(np.int32)
        logits = q.astype(np.float64) @ k.T
        lse = np.log(np.exp(logits).sum(-1))
        entries = np.exp(logits - lse[:, None])
        entries[np.arange(tokens), labels] -= 1
        entries /= tokens
        dq, dk = entries @ k * factor["dq"], entries.T @ q * factor["dk"]
        loss = (lse - logits[np.arange(tokens), labels]).mean()
        with recorder.step(0) as tape:
            tape.head(loss="softmax_xent", path="plain", denominator="valid", scope="rank")
            tape.record("k", k)
            held = {"q": q, "labels": labels, "dq": np.float32(dq)}
            for name, x in held.items():
                at = {"microbatch": 0} if name in numbered else {}
                tape.record(name, x, placement={"data": 0}, **at)
            at = {"microbatch": 0} if "dk" in numbered else {}
            tape.record("loss", np.float32(loss), placement={"data": "mean"})
            tape.record("dk", np.float32(dk), placement={"data": "mean"}, when="pre_reduce", **at)
    close(recorders)
    return backtape.replay(directory, step=0)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("numbered", ["dk", "q labels", "q labels dk", "dq dk", "q"])
def test_every_gradient_is_judged_whichever_record_names_the_microbatch(tmp_path, numbered, ranks):
    right, names = {"dq": 1.0, "dk": 1.0}, numbered.split()
    report = recorded(tmp_path / "right", names, right, ranks)
    assert report.verdict == "agreed", report
    judged = {stage["name"] for stage in report.json["stages"] if stage["status"] == "pass"}
    # A dk without the number is a sum, as in a step with several microbatches.
    assert "dq" in judged and judged & {"dk", "accumulate"}, judged
    for of in ("dq", "dk"):
        wrong = recorded(tmp_path / of, names, right | {of: 1.25}, ranks)
        assert wrong.verdict == "diverged", f"{of}: {wrong}"
