"""One rank of a job with dynamic padding: every rank's microbatch is as long as its longest sequence.

ragged_rank.py RANK WORLD DIRECTORY SCOPE

SCOPE is "own" where a rank divides by its own tokens over all microbatches of the step, as Hugging
Face's Trainer does with `average_tokens_across_devices=False`, and "global" where by all tokens.
The head is plain numpy in f64, rounded to f32 where it is recorded.
"""

import sys

import numpy as np

import backtape

rank, world, directory, scope = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
MICROBATCHES, BATCH, WIDTH, VOCAB = 2, 2, 8, 23
k = np.random.default_rng(0).normal(size=(VOCAB, WIDTH)).astype(np.float32)


def drawn(of, microbatch):
    """q [B, S, D] and labels [B, S] of a rank's microbatch; -100 is padding."""
    random = np.random.default_rng([7, of, microbatch])
    length = 3 + 2 * of + 3 * microbatch
    labels = random.integers(0, VOCAB, (BATCH, length))
    labels[0, length - 1 - of % 2 :] = -100
    return random.normal(size=(BATCH, length, WIDTH)).astype(np.float32), labels


def valid(of):
    return sum(int((drawn(of, mb)[1] >= 0).sum()) for mb in range(MICROBATCHES))


count = valid(rank) if scope == "own" else sum(map(valid, range(world)))
placed = {"data": 0}
with backtape.Recorder(directory, rank=rank, world_size=world, mesh={"data": world}, strict=True) as recorder:
    with recorder.step(0) as tape:
        tape.head(
            path="plain",
            microbatches=MICROBATCHES,
            microbatch_reduction="sum",
            ignore_label=-100,
            scope={"ranks": "one"} if scope == "own" else "global",
            dtypes={"logits": "f32", "p": "f32", "dlogits": "f32"},
        )
        for mb in range(MICROBATCHES):
            q, labels = drawn(rank, mb)
            z = q.astype(np.float64) @ k.astype(np.float64).T
            lse = np.log(np.exp(z - z.max(-1, keepdims=True)).sum(-1)) + z.max(-1)
            counts = labels >= 0
            dlogits = np.exp(z - lse[..., None])
            rows, columns = np.nonzero(counts)
            dlogits[rows, columns, labels[rows, columns]] -= 1
            dlogits *= counts[..., None] / count
            dq = dlogits @ k
            dk = np.einsum("bsv,bsd->vd", dlogits, q.astype(np.float64))
            for name, array in ("q", q), ("labels", labels), ("lse", lse.astype(np.float32)):
                tape.record(name, array, microbatch=mb, placement=placed)
            tape.record("dq", dq.astype(np.float32), microbatch=mb, placement=placed)
            tape.record("k", k, microbatch=mb, placement={"data": "replicate"})
            tape.record("dk", dk.astype(np.float32), microbatch=mb, placement={"data": "sum"}, when="pre_reduce")
