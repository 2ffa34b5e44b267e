"""P2: 20,000 tensors of 4 to 64 KiB in one step, durable.

    make bench-small            # seven rounds, every side once a round, in another order each time

Ours: recorded, hashed, in one file, with committed manifest (durable.py says from when to when).
safetensors: all in one file, then fsync. np.save, mindstudio-probe and tensorstore make a file or
more of each tensor: those sides write the first tensors alone, by the share of their bytes, and their
time is multiplied, which favours them (a directory that grows gets slower).
"""

import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import safetensors.torch
import tensorstore
import torch

import backtape
import backtape.torch
from disk import CACHE, fsync, fsync_tree, ratios, settle

warnings.filterwarnings("ignore")
ROUNDS = int(os.environ.get("ROUNDS", 7))
TENSORS = int(os.environ.get("TENSORS", 20_000))
SOME = TENSORS // 40
SEED = 7
TARGETS = {"safetensors, fsync": 1.0, "np.save, fsync each": 20.0, "np.save (not durable)": 20.0,
           "mindstudio-probe tensor (not durable)": 20.0}  # fmt: skip


def recorded(here, tensors):
    """Seconds from the step's begin to the answer of close."""
    recorder = backtape.Recorder(dir=here, steps="0", strict=True, queue_bytes=2 << 30)
    begin = time.perf_counter()
    with recorder.step(0) as tape:
        for name, tensor in tensors.items():
            tape.record(name, tensor)
    taped = time.perf_counter()
    summary = recorder.close()
    end = time.perf_counter()
    assert summary.steps_committed == [0] and not summary.omissions and not summary.faults, summary
    assert summary.shards == len(tensors)
    if os.environ.get("VERBOSE"):
        print(f"    record {taped - begin:.4f}  close {end - taped:.4f}", file=sys.stderr)
    return end - begin


def with_safetensors(here, tensors):
    here.mkdir()
    begin = time.perf_counter()
    safetensors.torch.save_file(tensors, here / "tensors")
    fsync(here / "tensors")
    fsync(here)
    return time.perf_counter() - begin


def with_numpy(here, tensors, synced):
    here.mkdir()
    begin = time.perf_counter()
    for name, tensor in tensors.items():
        np.save(here / name, tensor.numpy())
        if synced:
            fsync(here / f"{name}.npy")
    if synced:
        fsync(here)
    return time.perf_counter() - begin


def with_tensorstore(here, tensors):
    here.mkdir()
    begin = time.perf_counter()
    writes = []
    for name, tensor in tensors.items():
        spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": str(here / name)}, "create": True}
        store = tensorstore.open(spec, dtype=tensorstore.float32, shape=tensor.shape)
        writes.append(store.result().write(tensor.numpy()))
    for written in writes:
        written.result()
    fsync_tree(here)
    return time.perf_counter() - begin


class Msprobe:
    """mindstudio-probe's debugger, whose `save` dumps a tensor by name. It patches torch, so it has
    a process of its own, which times itself."""

    def __init__(self):
        pipe = subprocess.PIPE
        command = [sys.executable, __file__, "msprobe"]
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        self.said("ready")

    def __call__(self, here):
        print(here, file=self.process.stdin, flush=True)
        return float(self.said("took"))

    def said(self, word):
        """What it says after this word; its own log comes on the same pipe."""
        for line in self.process.stdout:
            if line.startswith(word):
                return line.removeprefix(word)
        raise RuntimeError("mindstudio-probe ended")


def msprobe():
    """The process of `Msprobe`: a directory comes in, seconds for its share of the tensors go out."""
    from msprobe.pytorch import PrecisionDebugger

    tensors = some_of(made())
    with tempfile.TemporaryDirectory(prefix="backtape-bench-", dir=os.environ.get("DIR")) as root:
        # It lives once a process and so writes to one place.
        root, out = Path(root), Path(root) / "msprobe"
        config = {"task": "tensor", "dump_path": str(out), "rank": [], "step": [], "level": "debug",
                  "tensor": {"scope": [], "list": [], "data_mode": ["all"]}}  # fmt: skip
        (root / "msprobe.json").write_text(json.dumps(config))
        debugger = PrecisionDebugger(config_path=str(root / "msprobe.json"))
        print("ready", flush=True)
        for here in sys.stdin:
            Path(here.strip()).mkdir()
            begin = time.perf_counter()
            for name, tensor in tensors.items():
                debugger.save(tensor, name, save_backward=False)
            debugger.step()
            took = time.perf_counter() - begin
            dumped = sum(1 for path in out.rglob("*") if path.suffix in (".pt", ".npy"))
            assert dumped == len(tensors), f"mindstudio-probe wrote {dumped} of {len(tensors)} tensors"
            shutil.rmtree(out)
            out.mkdir(mode=0o750)
            print("took", took, flush=True)


def made():
    """The tensors, by the seed alone."""
    draw = random.Random(SEED)
    torch.manual_seed(SEED)
    return {f"layers.{i}.weight": torch.randn(draw.randrange(1024, 16 * 1024 + 1)) for i in range(TENSORS)}


def some_of(tensors):
    return dict(list(tensors.items())[:SOME])


def main():
    if sys.argv[1:] == ["msprobe"]:
        return msprobe()
    tensors = made()
    some = some_of(tensors)
    total = sum(tensor.nbytes for tensor in tensors.values())
    share = total / sum(tensor.nbytes for tensor in some.values())
    root = Path(tempfile.mkdtemp(prefix="backtape-bench-", dir=os.environ.get("DIR")))
    sides = {
        "ours": lambda here: recorded(here, tensors),
        "safetensors, fsync": lambda here: with_safetensors(here, tensors),
        "np.save, fsync each": lambda here: share * with_numpy(here, some, True),
        "np.save (not durable)": lambda here: share * with_numpy(here, some, False),
        "tensorstore, fsync each": lambda here: share * with_tensorstore(here, some),
    }
    try:
        of_msprobe = Msprobe()
        sides["mindstudio-probe tensor (not durable)"] = lambda here: share * of_msprobe(here)
    except RuntimeError as error:
        print(f"LEFT OUT: {error}: is it installed?")
    names, rows = list(sides), []
    if os.environ.get("ONLY"):
        names = [name for name in names if name in os.environ["ONLY"].split(";")]
    try:
        for number in range(ROUNDS + 1):
            row = {}
            turn = number % len(names)
            for name in names[turn:] + names[:turn]:
                here = root / "here"
                settle()
                row[name] = sides[name](here)
                shutil.rmtree(here)
            if os.environ.get("VERBOSE"):
                print({name: round(seconds, 3) for name, seconds in row.items()}, file=sys.stderr, flush=True)
            if number:  # The first round makes and warms what each side keeps.
                rows.append(row)
    except KeyboardInterrupt:
        print("ENDED EARLY: fewer rounds than asked for")
    finally:
        shutil.rmtree(root, ignore_errors=True)
    print(f"P2: {len(rows)} rounds of {TENSORS} tensors in f32, {total / 2**20:.0f} MiB, seed {SEED}, "
          f"{os.cpu_count()} cores; {SOME} of them where each is a file; "
          f"before each side {CACHE}")  # fmt: skip
    for name in names:
        seconds = statistics.median(row[name] for row in rows)
        print(f"  {name:40} {seconds:8.3f} s  {1e6 * seconds / TENSORS:8.1f} us a tensor")
    for name in names[1:]:
        median, least, most = ratios(rows, name, "ours")
        target = f"   target {TARGETS[name]}" if name in TARGETS else ""
        print(f"  ours over {name:40} {median:7.2f}x  ({least:.2f}, {most:.2f}){target}")


if __name__ == "__main__":
    sys.exit(main())
