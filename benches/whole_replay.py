"""A whole replay of one large microbatch beside its floor: the three f64 products that no exact reference can do without.

Prints ratios, never times. `make bench-replay`; sizes and rounds by T, D, V, REPEATS. The job is a head in bf16 whose
gradients are computed in f32 and stored in bf16, so that the replay has both policies to emulate and nothing to search.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time

import ml_dtypes
import numpy as np

import backtape

REPEATS = int(os.environ.get("REPEATS", "3"))
T, D, V = (int(os.environ.get(name, usual)) for name, usual in [("T", 4096), ("D", 2048), ("V", 65536)])
WANTED = 1.6
# Side of the square f64 product that the rate is taken from, and columns of a block of logits.
SIDE, BLOCK = 2048, 4096


def bf16(x):
    return x.astype(ml_dtypes.bfloat16)


def recorded(directory):
    """Records the head and its gradients; logits exist a block of columns at a time."""
    random = np.random.default_rng(0)
    q = bf16(random.standard_normal((T, D), np.float32) * 0.2)
    k = bf16(random.standard_normal((V, D), np.float32) * 0.2)
    labels = random.integers(0, V, T).astype(np.int32)
    wide = q.astype(np.float32)
    blocks = [slice(at, min(at + BLOCK, V)) for at in range(0, V, BLOCK)]
    logits = lambda columns: wide @ k[columns].astype(np.float32).T
    lse = np.logaddexp.reduce([np.logaddexp.reduce(logits(of), axis=1) for of in blocks], axis=0)
    dq, dk = np.zeros((T, D), np.float32), np.empty((V, D), ml_dtypes.bfloat16)
    for of in blocks:
        entries = np.exp(logits(of) - lse[:, None])
        own = np.flatnonzero((labels >= of.start) & (labels < of.stop))
        entries[own, labels[own] - of.start] -= 1
        entries /= np.float32(T)
        dq += entries @ k[of].astype(np.float32)
        dk[of] = bf16(entries.T @ wide)
    recorder = backtape.Recorder(directory)
    with recorder.step(0) as tape:
        tape.head(loss="softmax_xent", reduction="mean", path="plain", dtypes={"logits": "f32", "dlogits": "f32"})
        for name, array in {"q": q, "k": k, "labels": labels, "dq": bf16(dq), "dk": dk}.items():
            tape.record(name, array)
    recorder.close()


def timed(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main():
    program = os.environ.get("REPLAY", "target/release/replay")
    square = np.random.default_rng(1).standard_normal((SIDE, SIDE))
    with tempfile.TemporaryDirectory(prefix="backtape-replay-") as directory:
        recorded(directory)
        said = []

        def replay():
            command = [program, "--dump", directory, "--step", "0", "--causes", "none"]
            done = subprocess.run(command, capture_output=True, text=True)
            said.append(done.stdout.strip().splitlines()[-1])
            if done.returncode != 0:
                sys.exit(f"the replay does not agree, exit code {done.returncode}: {done.stdout[-2000:]}{done.stderr}")

        ratios = []
        for _ in range(REPEATS):
            # The rate before and after: what else the machine does falls on both.
            before = statistics.median(timed(lambda: square @ square) for _ in range(5))
            took = timed(replay)
            after = statistics.median(timed(lambda: square @ square) for _ in range(5))
            rate = 2 * SIDE**3 / statistics.mean([before, after])
            ratios.append(took / (3 * 2 * T * V * D / rate))
    print(f"whole replay: T={T} D={D} V={V} from a bf16 dump, {os.cpu_count()} cores, {REPEATS} rounds: {said[0]}")
    print(
        f"  {statistics.median(ratios):.2f} x the time of its three f64 products at numpy's rate in the same run"
        f" (wanted {WANTED} at most; rounds {', '.join(f'{of:.2f}' for of in ratios)})"
    )


if __name__ == "__main__":
    main()
