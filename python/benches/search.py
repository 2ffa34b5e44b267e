"""What the search for causes costs beside the replay: processor time with and without it.

    python python/benches/search.py [DUMP ...]

Three odd heads that are made here (a vocabulary whose padding was not declared, noise that no
cause explains, chunks summed in bf16), the dumps of `make demo` where they lie, one draw of each
cause of the held-out corpus, and the dumps that are given: those of public heads are what
`tests/foreign/run.py --sources DIR --keep DIR` leaves.

A search may do twice the work of the replay, or about four seconds' of one core where that is
more. `used` is its time over the larger of the two.
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
FLOOR = 4.0  # seconds of a core that a search may always take: docs/causes.md
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
    if done.returncode not in (0, 1, 3):
        sys.exit(done.stderr.decode())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def corpus(where):
    """A dump of each fault of the held-out corpus, one draw."""
    run = [sys.executable, ROOT / "tests" / "corpus" / "run.py", "--part", "held-out", "--draws", "1", "--keep", where]
    subprocess.run(run, env=os.environ | {"REPLAY": REPLAY}, check=True, stdout=subprocess.DEVNULL)
    return sorted(one.parent for one in Path(where).glob("*/run.json"))


def measured(name, dump):
    """Prints what one dump took; its replay and its search."""
    alone = min(seconds(dump, "none") for _ in range(2))
    search = max(seconds(dump, "quick") - alone, 0.0)
    used = search / max(2 * alone, FLOOR)
    print(f"{name:<44}{alone:>7.2f} s{search:>7.2f} s{search / alone:>7.2f}{used:>7.2f}", flush=True)
    return alone, search, used


def main(dumps):
    """Prints a line a dump, and what all took together."""
    with tempfile.TemporaryDirectory() as scratch:
        named = {kind: record(kind, Path(scratch) / kind.replace(" ", "-")) for kind in HEADS}
        named |= {f"demo {one.name}": one for one in sorted((ROOT / "demo").glob("*")) if one.is_dir()}
        named |= {f"held-out {one.name}": one for one in corpus(Path(scratch) / "corpus")}
        named |= {f"given {Path(dump).name}": Path(dump) for dump in dumps}
        print(f"{'dump':<44}{'replay':>9}{'search':>9}{'ratio':>7}{'used':>7}")
        took = [measured(name, dump) for name, dump in named.items()]
    alone, search, used = zip(*took)
    largest = [max((s / a for a, s in zip(alone, search) if 2 * a >= FLOOR), default=0.0), max(used)]
    print(
        f"{len(took)} dumps: replays {sum(alone):.1f} s, searches {sum(search):.1f} s; largest ratio of a replay "
        f"of {FLOOR / 2:.0f} s and more {largest[0]:.2f}; largest share used of what a search may take {largest[1]:.2f}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
