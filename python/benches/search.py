"""What the search for causes costs beside the replay: processor time with and without it.

    python python/benches/search.py [DUMP ...]

Without dumps: three odd heads that are made here (a vocabulary whose padding was not declared,
noise that no cause explains, chunks summed in bf16), and the dumps of `make demo` where they lie.
"""

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

import backtape

ROOT = Path(__file__).parents[2]
REPLAY = os.environ.get("REPLAY", str(ROOT / "target" / "release" / "replay"))
HEADS = {"forgotten valid_vocab": (512, 1000, 128), "noise": (256, 256, 32), "bf16 chunks": (1024, 2048, 64)}


def head(kind, rng):
    """What a job with this head would record."""
    bf16, f32 = ml_dtypes.bfloat16, np.float32
    tokens, vocab, width = HEADS[kind]
    valid = vocab - 100 if kind == "forgotten valid_vocab" else vocab
    q = rng.standard_normal((tokens, width)).astype(bf16)
    k = (rng.standard_normal((vocab, width)) * 0.3).astype(bf16)
    labels = np.minimum(rng.zipf(1.3, tokens) - 1, valid - 1).astype(np.int32)
    logits = q.astype(np.float64) @ k.astype(np.float64).T
    logits[:, valid:] = -np.inf
    largest = logits.max(1, keepdims=True)
    lse = (largest + np.log(np.exp(logits - largest).sum(1, keepdims=True)))[:, 0]
    entries = np.exp(logits - lse[:, None]) / tokens
    entries[np.arange(tokens), labels] -= 1 / tokens
    entries = entries.astype(f32) if kind == "noise" else entries.astype(f32).astype(bf16).astype(f32)
    dq, dk = entries @ k.astype(f32), entries.T @ q.astype(f32)
    if kind == "noise":
        dk *= (1 + 0.03 * rng.standard_normal(dk.shape)).astype(f32)
    if kind == "bf16 chunks":
        dk = np.zeros_like(k)
        for at in range(0, tokens, 128):
            part = entries[at : at + 128].T @ q[at : at + 128].astype(f32)
            dk = (dk.astype(f32) + part).astype(bf16)
    label = logits[np.arange(tokens), labels]
    scalars = {"lse": lse.astype(f32), "label_logits": label.astype(f32), "loss": f32((lse - label).mean())}
    return {"q": q, "k": k, "labels": labels, **scalars, "dq": dq.astype(bf16), "dk": dk.astype(bf16)}


def record(kind, where):
    """The dump of a head."""
    recorder = backtape.Recorder(dir=str(where), steps="0", rank=0, world_size=1)
    with recorder.step(0) as tape:
        tape.head(loss="softmax_xent", reduction="mean", path="plain")
        for name, array in head(kind, np.random.default_rng(7)).items():
            tape.record(name, np.asarray(array), microbatch=0)
    recorder.close()
    return where


def seconds(dump, causes):
    """Processor seconds of a replay."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [REPLAY, "--dump", str(dump), "--step", "0", "--quiet", "--causes", causes], capture_output=True, check=False
    )
    if done.returncode not in (0, 1):
        sys.exit(done.stderr.decode())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(dumps):
    """Prints a line a dump."""
    with tempfile.TemporaryDirectory() as scratch:
        named = {Path(dump).name: Path(dump) for dump in dumps}
        if not named:
            named = {kind: record(kind, Path(scratch) / kind.replace(" ", "-")) for kind in HEADS}
            named |= {f"demo {one.name}": one for one in sorted((ROOT / "demo").glob("*")) if one.is_dir()}
        print(f"{'dump':<24}{'replay':>9}{'search':>9}{'ratio':>7}")
        for name, dump in named.items():
            alone = min(seconds(dump, "none") for _ in range(2))
            search = max(seconds(dump, "quick") - alone, 0.0)
            print(f"{name:<24}{alone:>7.2f} s{search:>7.2f} s{search / alone:>7.2f}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
