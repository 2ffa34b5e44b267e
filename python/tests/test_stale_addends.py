"""Where ranks cut the vocabulary, each has an addend of dq, and the label's term is in one of them alone: for equal
hidden states the others are equal from microbatch to microbatch, and no rest of a buffer."""

import numpy as np
import pytest

import backtape

TOKENS, WIDTH, CLASSES = 12, 16, 40


@pytest.mark.parametrize("states, found", [("equal", []), ("other", ["uninitialised-output"])])
def test_equal_addends_of_equal_hidden_states_are_no_stale_buffer(tmp_path, states, found):
    random = np.random.default_rng(0)
    normal = lambda *shape: random.standard_normal(shape).astype(np.float32)
    q, dq = normal(TOKENS, WIDTH), normal(TOKENS, WIDTH)
    with backtape.Recorder(tmp_path, steps="0", rank=0, world_size=1, strict=True) as recorder, recorder.step(0) as tape:
        tape.head(microbatches=2)
        tape.record("k", normal(CLASSES, WIDTH))
        for microbatch in range(2):
            tape.record("q", q if states == "equal" else normal(TOKENS, WIDTH), microbatch=microbatch)
            tape.record("labels", np.arange(TOKENS) + TOKENS * microbatch, microbatch=microbatch)
            tape.record("dq", dq, microbatch=microbatch, partial="sum", when="pre_reduce")
    report = backtape.replay(tmp_path, step=0)
    checks = [finding for finding in report.json["checks"]["findings"] if finding["check"] == "buffers"]
    assert [finding["cause"] for finding in checks] == found, report
