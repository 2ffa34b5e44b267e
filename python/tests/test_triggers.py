"""Selection and triggers, from the environment to the dump."""

import json
import tracemalloc
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import reading
from processes import run_ranks

import backtape
from backtape.watch import MAX_PENDING, Readings

PROGRAM = Path(__file__).with_name("watched_rank.py")
WORLD, WRONG = 4, 12


@pytest.mark.parametrize("words", [(), ("late",)], ids=["found", "late"])
def test_a_nan_loss_on_rank_2_puts_the_step_that_went_wrong_on_disk_for_all_ranks(tmp_path, words):
    """`late`: rank 0, which carries the coordinator, once left when all that had joined by then did."""
    run_ranks(PROGRAM, WORLD, tmp_path, *words, BACKTAPE_RING="8", BACKTAPE_STRICT="1")
    manifest = reading.manifest(tmp_path / "run", WRONG)
    assert manifest["trigger"]["rank"] == 2 and manifest["trigger"]["seen"] == WRONG
    assert manifest["trigger"]["reason"] == "the loss is NaN" and manifest["trigger"]["ring"]
    assert manifest["omissions"] == []
    held = [shard for file in manifest["files"] for shard in file["shards"]]
    assert {shard["tensor"] for shard in held} == {"q"}, "activations have no role in the head"
    assert {shard["rank"] for shard in held} == {0, 1, 2, 3}
    whole = backtape.open(tmp_path / "run").step(WRONG).tensor("q", microbatch=0)
    assert whole[:, 0].tolist() == [WRONG * 10 + rank for rank in range(WORLD) for _ in range(2)]


def test_the_environment_chooses_tensors_ranks_microbatches_and_sizes(monkeypatch, tmp_path):
    for name, value in {
        "STEPS": "0", "TENSORS": "q,d*,!*_label", "MICROBATCHES": "1", "MAX_TENSOR_BYTES": "1KiB",
        "DIR": str(tmp_path / "run"), "STRICT": "1",
    }.items():  # fmt: skip
        monkeypatch.setenv(f"BACKTAPE_{name}", value)
    with backtape.Recorder.from_env() as recorder, recorder.step(0) as tape:
        for microbatch in range(3):
            tape.record("q", np.ones(3), microbatch=microbatch)
        for name in ("k", "dq", "dq_label"):
            tape.record(name, np.ones(3))
        tape.record("dlogits", np.ones(1000))
    manifest = reading.manifest(tmp_path / "run")
    held = [shard for file in manifest["files"] for shard in file["shards"]]
    assert {(shard["tensor"], shard["microbatch"]) for shard in held} == {("q", 1), ("dq", None)}
    (omission,) = manifest["omissions"]
    assert omission["tensor"] == "dlogits" and "max_tensor_bytes, 1KiB" in omission["reason"]
    (selection,) = manifest["selections"]
    assert selection["ranks"] == "0" and selection["selection"]["tensors"] == "q,d*,!*_label"


def test_a_rank_that_is_not_selected_commits_its_empty_part(monkeypatch, tmp_path):
    monkeypatch.setenv("BACKTAPE_RANKS", "1-3")
    monkeypatch.setenv("BACKTAPE_STEPS", "0-1")
    recorder = backtape.Recorder.from_env(dir=tmp_path / "run", rank=0, world_size=1, strict=True)
    for step in range(3):
        with recorder.step(step) as tape:
            assert not tape.active
    assert recorder.close().steps_committed == [0, 1]
    assert reading.manifest(tmp_path / "run", 1)["files"] == []


@pytest.mark.parametrize(
    "option, value",
    [("tensors", "a**b"), ("ranks", "3-1"), ("max_step_bytes", "much"), ("ring", -1), ("ring", 10**6),
     ("trigger_grad_norm", float("nan")), ("ring_bytes", "1.5GiB")],
)  # fmt: skip
def test_an_option_that_cannot_be_read_is_one_sentence(tmp_path, option, value):
    with pytest.raises(backtape.RecorderError):
        backtape.Recorder(dir=tmp_path / "run", strict=True, **{option: value})
    assert not backtape.Recorder(dir=tmp_path / "run", **{option: value}).active


def test_a_recorder_that_only_waits_is_active_and_selects_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("BACKTAPE_WATCH", "1")
    monkeypatch.setenv("BACKTAPE_DIR", str(tmp_path / "run"))
    with backtape.Recorder.from_env() as recorder:
        assert recorder.active and not recorder.wants(0)
        recorder.watch(0, loss=1.0)
    monkeypatch.setenv("BACKTAPE_WATCH", "0")
    assert not backtape.Recorder.from_env().active


class Computed:
    """A number that a device still computes."""

    def __init__(self, value):
        self.value, self.there, self.read = value, False, 0

    def is_ready(self):
        return self.there

    def __array__(self, dtype=None, copy=None):
        assert self.there, "it was waited for"
        self.read += 1
        return np.asarray(self.value, dtype)


def test_what_a_device_still_computes_is_read_by_a_later_call_in_order():
    readings, late = Readings(), Computed(3.0)
    readings.add(1, late, 1)
    readings.add(2, jnp.float32(4.0), np.float32(2.0))
    assert list(readings.ready()) == []
    late.there = True
    readings.add(3, None, None)
    assert list(readings.ready()) == [(1, 3.0, 1.0), (2, 4.0, 2.0), (3, None, None)]
    assert late.read == 1 and list(readings.ready()) == []


def test_numbers_that_are_none_are_refused_once_and_numbers_that_wait_are_bounded():
    readings = Readings()
    readings.add(0, np.ones(3), None)
    with pytest.raises(ValueError, match="no number"):
        list(readings.ready())
    assert list(readings.ready()) == []
    for step in range(100):
        readings.add(step, Computed(1.0), None)
    assert len(readings._pending) == MAX_PENDING


def test_the_ring_gives_the_buffers_of_its_dropped_steps_back(tmp_path):
    """Goal: what left the ring leaves the memory. Method: numpy tells tracemalloc what it holds."""
    size, ring = 8 << 20, 2
    recorder = backtape.Recorder(dir=tmp_path / "run", steps="none", ring=ring, strict=True)
    tracemalloc.start()
    try:
        for step in range(10):
            with recorder.step(step) as tape:
                tape.record("q", np.zeros(size, np.uint8), microbatch=0)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert ring * size <= held < (ring + 2) * size
    assert recorder.close().ring_dropped == 0
    assert not list((tmp_path / "run").glob("step-*"))


def test_the_reason_and_the_selection_are_in_the_report(tmp_path):
    recorder = backtape.Recorder(dir=tmp_path / "run", tensors="q,k,labels,lse", strict=True)
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(8, 4)), rng.normal(size=(16, 4))
    labels = rng.integers(0, 16, 8)
    logits = q @ k.T
    lse = np.log(np.exp(logits).sum(1))
    with recorder, recorder.step(0) as tape:
        tape.head(loss="softmax_xent", path="plain")
        for name, array in {"q": q, "k": k, "labels": labels, "lse": lse, "dq": q}.items():
            tape.record(name, array)
    report = backtape.replay(tmp_path / "run", step=0)
    said = {item["what"]: item["why"] for item in json.loads(json.dumps(report.json))["not_checked"]}
    assert any("not recorded: selection (tensors q,k,labels,lse)" in why for why in said.values()), said
    assert "selection" in str(report)
