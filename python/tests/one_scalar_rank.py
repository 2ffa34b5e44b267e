"""One rank of a job that records scalars alone, run by test_scalars.py.

    python one_scalar_rank.py RANK WORLD DIRECTORY STEPS end|kill
"""

import os
import signal
import sys
import time
from pathlib import Path

import backtape

rank, world = int(sys.argv[1]), int(sys.argv[2])
directory, steps, ending = Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5]


def meet(name):
    """Waits until all ranks are here: rank 0 carries the coordinator."""
    (directory / f"{name}-{rank}").touch()
    while len(list(directory.glob(f"{name}-*"))) < world:
        time.sleep(0.005)


os.environ |= {"BACKTAPE_SCALARS": "1", "BACKTAPE_DIR": str(directory / "run")}
recorder = backtape.Recorder.from_env(rank=rank, world_size=world, strict=True)
while recorder._native.summary().attempt is None:
    time.sleep(0.005)
meet("joined")
for step in range(steps):
    # 2 leaves at step 30; the loss is each rank's own.
    norm = 1.5 if rank == 2 and step >= 30 else 1.0 + step / 100
    recorder.scalars(step, loss=5.0 - step / 50 + rank / 1000, grad_norm=norm, learning_rate=1e-3)
    with recorder.step(step) as tape:
        assert not tape.active
if ending == "kill":
    written = directory / "run" / "scalars" / f"rank-{rank:05}.jsonl"
    while not written.exists() or written.read_bytes().count(b"\n") < steps + 1:
        time.sleep(0.005)
    os.kill(os.getpid(), signal.SIGKILL)
summary = recorder.close()
assert summary.scalar_rows == steps and not summary.faults, summary
