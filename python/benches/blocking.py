"""P4: how long the training thread is held up by a snapshot of 64 x 16 MiB in bf16.

    make bench-blocking          # torch and jax on CPU, interleaved, seven rounds

torch: `tape.record` of every tensor, beside DCP's `async_save` (the part that blocks; its upload is
waited for outside the clock) and a plain copy into memory that was written before, which is the floor:
a tensor can change, so it must be copied. jax: `tape.record` beside Orbax's AsyncCheckpointer (the part
that blocks); an array that cannot change is only held. Files go to one directory on one disk and are dropped between rounds. Prints medians of
ratios, each within a round, and the median of the jax call, for which the target is absolute.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as orbax
import torch
import torch.distributed.checkpoint as dcp

import backtape
import backtape.torch

warnings.filterwarnings("ignore")
ROUNDS = int(os.environ.get("ROUNDS", 7))
TENSORS, ELEMENTS = 64, 8 << 20


def recorded(directory, tensors):
    """Seconds that recording them takes of this thread, the tape's end included.

    Step 0 is there so that the recorder has found its coordinator, as it has in a job long before;
    and what is recorded is durable when this returns, so that one round does not slow the next.
    """
    options = {"steps": "0,1", "strict": True, "queue_bytes": 2 << 30, "place_proof": False}
    recorder = backtape.Recorder(dir=directory, **options)
    with recorder.step(0) as tape:
        tape.record("first", np.zeros(1))
    until = time.monotonic() + 30
    while not list(Path(directory).glob("**/manifest*.json")):
        assert time.monotonic() < until, "step 0 was not committed within 30 s"
        time.sleep(0.01)
    begin = time.perf_counter()
    with recorder.step(1) as tape:
        for name, tensor in tensors.items():
            tape.record(name, tensor)
    taken = time.perf_counter() - begin
    summary = recorder.close()
    assert not summary.omissions and not summary.faults, summary
    return taken


def main():
    tensors = {f"x{i}": torch.randn(ELEMENTS).bfloat16() for i in range(TENSORS)}
    arrays = {name: jnp.asarray(tensor.float().numpy(), jnp.bfloat16) for name, tensor in tensors.items()}
    into = {name: torch.empty_like(tensor).fill_(1) for name, tensor in tensors.items()}
    root = Path(tempfile.mkdtemp(prefix="backtape-bench-"))
    rows = []
    checkpointer = orbax.AsyncCheckpointer(orbax.StandardCheckpointHandler())
    try:
        for number in range(ROUNDS + 1):
            here = root / str(number)
            begin = time.perf_counter()
            for name, tensor in tensors.items():
                into[name].copy_(tensor)
            copy = time.perf_counter() - begin

            of_torch = recorded(here / "torch", tensors)

            begin = time.perf_counter()
            saving = dcp.async_save(tensors, checkpoint_id=here / "dcp")
            of_dcp = time.perf_counter() - begin
            saving.result()

            of_jax = recorded(here / "jax", arrays)

            begin = time.perf_counter()
            checkpointer.save((here / "orbax").resolve(), args=orbax.args.StandardSave(arrays))
            of_orbax = time.perf_counter() - begin
            checkpointer.wait_until_finished()
            shutil.rmtree(here)
            if number:  # The first round faults the memory of all three in.
                rows.append((copy, of_torch, of_dcp, of_jax, of_orbax))
    finally:
        shutil.rmtree(root, ignore_errors=True)
    median = lambda of: statistics.median(map(of, rows))
    print(f"{len(rows)} rounds of {TENSORS} x {ELEMENTS * 2 >> 20} MiB; medians of ratios within a round")
    print(f"torch record over DCP async_save   {median(lambda r: r[1] / r[2]):.2f}x   target 0.5x")
    print(f"torch record over a warm copy      {median(lambda r: r[1] / r[0]):.2f}x   target 1.15x")
    print(f"jax record over a warm copy        {median(lambda r: r[3] / r[0]):.4f}x")
    print(f"jax record over Orbax async        {median(lambda r: r[3] / r[4]):.4f}x")
    print(f"jax record                         {1e3 * median(lambda r: r[3]):.1f} ms   target 5 ms")


if __name__ == "__main__":
    sys.exit(main())
