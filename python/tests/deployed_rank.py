"""One rank of a job that deploy/ starts, run by test_deploy.py and test_slurm.py.

    python deployed_rank.py record|fail RANK|fail-alone RANK|wait

It waits for a file `go`, where the mode has somebody decide when, in the directory that it runs in.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import backtape


def secrets_that_others_see():
    """Command lines on this machine that hold the token of the run."""
    token = (Path(os.environ["BACKTAPE_CREDENTIALS"]) / "token").read_text().split()[-1]
    lines = []
    for place in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            lines.append(place.read_bytes())
        except OSError:
            continue
    return sum(token.encode() in line for line in lines)


def told_to_go():
    deadline = time.monotonic() + 120
    while not Path("go").exists():
        assert time.monotonic() < deadline, "nobody said go"
        time.sleep(0.02)


mode = sys.argv[1]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
print("up", flush=True)
if mode == "record":
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "NNODES", "MASTER_ADDR", "JAX_PROCESS_ID")
    print(*(f"{name}={os.environ.get(name)}" for name in names), flush=True)
    if "BACKTAPE_CREDENTIALS" in os.environ:
        print("secrets on command lines:", secrets_that_others_see(), flush=True)
    if Path("wait-for-go").exists():
        told_to_go()
    whole = np.arange(world * 4 * 8, dtype=np.float32).reshape(world * 4, 8)
    part = whole[4 * rank : 4 * rank + 4]
    without = "WITHOUT_RECORD" in os.environ  # it is killed: not waited for long
    waits = {"join_deadline_s": 2.0, "step_deadline_s": 2.0} if without else {}
    with backtape.Recorder.from_env(strict=not without, **waits) as recorder:
        for step in range(2):
            with recorder.step(step) as tape:
                tape.record("q", part + step, microbatch=0, global_shape=whole.shape, offsets=(4 * rank, 0))
    print("a line that no newline ends", end="", flush=True)
elif mode in ("fail", "fail-alone"):
    # A child in a session of its own, as launchers and loaders of data have them; it outlives TERM.
    own = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    if mode == "fail":
        subprocess.Popen([sys.executable, "-c", own], start_new_session=True)
    if rank == int(sys.argv[2]):
        told_to_go()
        sys.exit(7)
    time.sleep(600)
elif mode == "wait":
    signal.signal(signal.SIGTERM, lambda *_: print("TERM", flush=True) or sys.exit(0))
    time.sleep(600)
