"""P1: a durable dump of 64 x 16 MiB in bf16, with hash and committed manifest.

    make bench-durable          # seven rounds, every side once a round, in another order each time

Ours is the recorder with the coordinator inside rank 0, from `recorder.step` until `recorder.close()`
has returned with the commit: hash, fingerprint, shard file, journal and manifest are durable then. Of
torch tensors it makes copies, as they may change; jax arrays are held. Peers write the same tensors,
and what they do not sync themselves is synced here, files and directories. The floor is O_DIRECT in
aligned writes of 16 MiB. Before each side the disk is settled (disk.py), so no page of it is cached.
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
import ml_dtypes
import numpy as np
import orbax.checkpoint as orbax
import safetensors.torch
import tensorstore
import torch
import torch.distributed.checkpoint as dcp

import backtape
import backtape.torch
from disk import CACHE, Floor, fsync, fsync_tree, ratios, settle

warnings.filterwarnings("ignore")
ROUNDS = int(os.environ.get("ROUNDS", 7))
TENSORS, ELEMENTS = 64, 8 << 20
GIB = TENSORS * ELEMENTS * 2 / 2**30
TARGETS = {"safetensors": 1.3, "torch.save": 2.0, "DCP": 2.3, "Orbax": 5.0}


def recorded(here, arrays, **options):
    """Seconds from the step's begin to the answer of close, and those of the constructor before."""
    begin = time.perf_counter()
    recorder = backtape.Recorder(dir=here, steps="0", strict=True, queue_bytes=2 << 30, **options)
    made = time.perf_counter()
    with recorder.step(0) as tape:
        for name, array in arrays.items():
            tape.record(name, array)
    taped = time.perf_counter()
    summary = recorder.close()
    end = time.perf_counter()
    assert summary.steps_committed == [0] and not summary.omissions and not summary.faults, summary
    assert (here / "step-00000000" / "manifest.json").is_file()
    if os.environ.get("VERBOSE"):
        print(f"    made {made - begin:.4f}  record {taped - made:.4f}  close {end - taped:.4f}", file=sys.stderr)
    return end - made


def timed(write):
    """A side that is durable when `write` returns, which gets a new directory."""

    def side(here):
        here.mkdir()
        begin = time.perf_counter()
        write(here)
        return time.perf_counter() - begin

    return side


def sides(tensors, arrays):
    """Every side by name: a function of a directory that returns its seconds."""
    bits = {name: tensor.view(torch.uint16).numpy() for name, tensor in tensors.items()}
    checkpointer = orbax.Checkpointer(orbax.StandardCheckpointHandler())

    def one_file(save):
        def write(here):
            save(tensors, here / "tensors")
            fsync(here / "tensors")
            fsync(here)

        return timed(write)

    def with_dcp(here):
        dcp.save(tensors, checkpoint_id=here / "dcp")
        fsync_tree(here / "dcp")

    def with_numpy(here):
        for name, values in bits.items():
            np.save(here / name, values)
            fsync(here / f"{name}.npy")
        fsync(here)

    def with_tensorstore(here):
        writes = []
        for name, values in bits.items():
            kept = {"driver": "file", "path": str(here / name)}
            spec = {"driver": "zarr3", "kvstore": kept, "create": True}
            of = {"dtype": tensorstore.bfloat16, "shape": values.shape}
            store = tensorstore.open(spec, **of)
            writes.append(store.result().write(values.view(ml_dtypes.bfloat16)))
        for written in writes:
            written.result()
        fsync_tree(here)

    def with_orbax(here):
        checkpointer.save((here / "orbax").resolve(), args=orbax.args.StandardSave(arrays))
        fsync_tree(here / "orbax")

    return {
        "ours, jax": lambda here: recorded(here, arrays, place_proof=False),
        "ours, jax with proof of place": lambda here: recorded(here, arrays),
        "ours, torch": lambda here: recorded(here, tensors),
        "safetensors": one_file(safetensors.torch.save_file),
        "torch.save": one_file(torch.save),
        "DCP": timed(with_dcp),
        "np.save": timed(with_numpy),
        "tensorstore": timed(with_tensorstore),
        "Orbax": timed(with_orbax),
        "floor": Floor(TENSORS * ELEMENTS * 2 // (16 << 20)),
    }


def main():
    torch.manual_seed(0)
    tensors = {f"x{i}": torch.randn(ELEMENTS).bfloat16() for i in range(TENSORS)}
    arrays = {name: jnp.asarray(tensor.float().numpy(), jnp.bfloat16) for name, tensor in tensors.items()}
    jax.block_until_ready(arrays)
    root = Path(tempfile.mkdtemp(prefix="backtape-bench-", dir=os.environ.get("DIR")))
    every, rows = sides(tensors, arrays), []
    names = [name for name in every if not os.environ.get("ONLY") or name in os.environ["ONLY"].split(";")]
    try:
        for number in range(ROUNDS + 1):
            row = {}
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                here = root / "here"
                settle()
                row[name] = every[name](here)
                shutil.rmtree(here)
            if number:  # The first round makes and warms what each side keeps.
                rows.append(row)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(f"P1: {len(rows)} rounds of {TENSORS} x {ELEMENTS * 2 >> 20} MiB in bf16, {os.cpu_count()} cores; "
          f"before each side {CACHE}")  # fmt: skip
    for name in names:
        seconds = statistics.median(row[name] for row in rows)
        print(f"  {name:30} {seconds:7.3f} s  {GIB / seconds:6.2f} GiB/s")
    for ours in (name for name in names if name.startswith("ours")):
        print(f"  {ours}; medians of ratios within a round (least, most)")
        for name in names:
            if name == "floor":
                median, least, most = ratios(rows, name, ours)
                print(f"    of the floor        {median:5.2f}   ({least:.2f}, {most:.2f})   target 0.85")
            elif not name.startswith("ours"):
                median, least, most = ratios(rows, name, ours)
                target = f"   target {TARGETS[name]}" if name in TARGETS else ""
                print(f"    over {name:14} {median:5.2f}x  ({least:.2f}, {most:.2f}){target}")


if __name__ == "__main__":
    sys.exit(main())
