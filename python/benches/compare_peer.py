"""A peer of `make bench-compare`: compares pairs of arrays when told to.

    python compare_peer.py numpy | mindstudio-probe

Reads one line for each pair of arrays (file, offset, dtype and elements of either side), then
`ready`; answers `ready`, or why it cannot; then each `go` with the seconds of one comparison.
"""

import os
import sys
import time

import ml_dtypes
import numpy as np


def ordered(bits: np.ndarray) -> np.ndarray:
    """Sign and magnitude as integers in the order of the numbers; -0 is +0."""
    magnitude = np.iinfo(bits.dtype).max
    return np.where(bits < 0, -(bits & magnitude), bits)


# Peers log to standard output: answers get a descriptor of their own.
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)


def by_numpy(a: np.ndarray, b: np.ndarray, bits: type) -> tuple:
    """Largest absolute and relative difference, cosine, histogram of ULP distances."""
    distance = ordered(a.view(bits)).astype(np.int64)
    distance -= ordered(b.view(bits))
    ulps = np.bincount(np.minimum(np.abs(distance), 64))
    a, b = a.astype(np.float32, copy=False), b.astype(np.float32, copy=False)
    apart = np.abs(a - b)
    size = np.abs(b)
    relative = np.divide(apart, size, out=np.zeros_like(apart), where=size != 0)
    a, b = a.ravel(), b.ravel()
    cosine = np.dot(a, b) / np.sqrt(np.dot(a, a) * np.dot(b, b))
    return apart.max(), relative.max(), cosine, ulps


def main(peer: str) -> None:
    pairs = []
    for line in sys.stdin:
        words = line.split()
        if words == ["ready"]:
            break
        sides = []
        for file, offset, dtype, elements in (words[:4], words[4:]):
            kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
            sides.append(np.memmap(file, kind, "r", int(offset), (int(elements),)))
        pairs.append(sides)
    if peer == "mindstudio-probe":
        try:
            from msprobe.core.compare.npy_compare import compare_ops_apply
        except Exception as error:  # whatever keeps it from starting is the answer
            print(f"{type(error).__name__}: {error}", file=ANSWERS, flush=True)
            return
    print("ready", file=ANSWERS, flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        try:
            compare(peer, pairs)
        except Exception as error:  # a peer that fails on this data is named, not timed
            print(f"failed: {type(error).__name__}: {error}".replace("\n", " "), file=ANSWERS, flush=True)
            return
        print(time.perf_counter() - start, file=ANSWERS, flush=True)


def compare(peer: str, pairs: list) -> None:
    if peer == "mindstudio-probe":
        from msprobe.core.compare.npy_compare import compare_ops_apply
    for a, b in pairs:
        if peer == "numpy":
            by_numpy(a, b, np.int16 if a.itemsize == 2 else np.int32)
        else:
            # It takes what it loads to f32 itself; bf16 it does not know.
            compare_ops_apply(a.astype(np.float32), b.astype(np.float32), False, "")


main(sys.argv[1])
