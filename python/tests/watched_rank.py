"""One rank of a job whose loss becomes NaN on rank 2, run by test_triggers.py.

    python watched_rank.py RANK WORLD DIRECTORY [late]

`late`: the job is over before any rank but the first finds the coordinator.
"""

import sys
import time
from pathlib import Path

import numpy as np

import backtape

rank, world = map(int, sys.argv[1:3])
directory = Path(sys.argv[3])
late = sys.argv[4:] == ["late"]
WRONG = 12

# The same directory by another name, which is made when the job is over.
store = directory / "found-late" if late and rank else directory
recorder = backtape.Recorder.from_env(dir=store / "run", rank=rank, world_size=world)
assert recorder.active


def together(step):
    """Every rank waits for every other, as a collective would make it."""
    (directory / f"at-{step}-{rank}").touch()
    end = time.monotonic() + 120
    while not all((directory / f"at-{step}-{other}").exists() for other in range(world)):
        assert time.monotonic() < end, "another rank is gone"
        time.sleep(0.002)


for step in range(20):
    together(step)
    with recorder.step(step) as tape:
        assert tape.active, "the ring keeps every step"
        tape.head(loss="softmax_xent", path="plain")
        hidden = np.full((2, 4), step * 10 + rank, np.float32)
        tape.record("q", hidden, microbatch=0, global_shape=(2 * world, 4), offsets=(2 * rank, 0))
        tape.record("activations", hidden)
    loss = np.float32("nan") if rank == 2 and step >= WRONG else np.float32(2.5)
    recorder.watch(step, loss=loss, grad_norm=1.0)
    if step == WRONG + 1:
        break  # As a job does that checks its loss.

if late:
    together("end")
    if rank == 1:
        (directory / "found-late").symlink_to(directory)
summary = recorder.close()
assert summary.faults == [], summary.faults
assert WRONG in summary.steps_committed, str(summary)
