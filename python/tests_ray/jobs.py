"""Training jobs to replay: a softmax cross-entropy in numpy, its tensors cut over shards."""

import ml_dtypes
import numpy as np

import backtape

BF16 = ml_dtypes.bfloat16
# Several blocks of 256 tokens and several parts of 2048 classes, no size a multiple of either.
KINDS = {
    "fused": {},
    "plane": {"plane": True, "vocab": 2500},
    "dv": {"layout": "dv", "bias": True},
    "microbatches": {"microbatches": 2, "tokens": 300},
    "wrong": {"fault": "scatter"},
    # A [T, D] array of f64 has 78 MiB.
    "wide": {"tokens": 40_000, "vocab": 300, "depth": 256},
    "large": {"tokens": 3000, "vocab": 9000, "depth": 64},
}


def scatter(labels, addends, vocab, kind):
    sums = np.zeros((vocab, addends.shape[1]), kind)
    for label, addend in zip(labels, addends):
        sums[label] = sums[label] + addend.astype(kind)
    return sums.astype(np.float32)


def head(q, k, bias, labels, total, fault):
    """Forward and backward in f32 on bf16 inputs."""
    wide, rows = q.astype(np.float32), k.astype(np.float32)
    logits = wide @ rows.T + (0 if bias is None else bias)
    top = logits.max(1)
    lse = top + np.log(np.exp(logits - top[:, None]).sum(1))
    g = np.float32(1 / total)
    p = np.exp(logits - lse[:, None]) * g
    dk_label = scatter(labels, -g * wide, len(k), BF16 if fault == "scatter" else np.float32)
    onehot = np.zeros_like(p)
    onehot[np.arange(len(labels)), labels] = g
    found = {
        "lse": lse, "label_logits": logits[np.arange(len(labels)), labels], "dq": (p - onehot) @ rows,
        "dk_label": dk_label, "dk": p.T @ wide + dk_label,
    }  # fmt: skip
    if bias is not None:
        found["dbias"] = (p - onehot).sum(0)
    return found, logits, p - onehot


def cut(tape, name, value, pieces, dim, **more):
    """Records a tensor in several shards along a dimension."""
    edges = np.linspace(0, value.shape[dim], pieces + 1).astype(int)
    for start, end in zip(edges, edges[1:]):
        part = np.take(value, range(start, end), axis=dim)
        offsets = tuple(int(start) if at == dim else 0 for at in range(value.ndim))
        tape.record(name, part, global_shape=value.shape, offsets=offsets, **more)


def record(directory, *, tokens=700, vocab=4500, depth=24, layout="vd", bias=False, microbatches=1, plane=False, fault=""):
    rng = np.random.default_rng(5)
    k = (rng.standard_normal((vocab, depth)) / 2).astype(BF16)
    biases = rng.standard_normal(vocab).astype(np.float32) if bias else None
    total = tokens * microbatches
    orient = (lambda of: np.ascontiguousarray(of.T)) if layout == "dv" else (lambda of: of)
    of_classes = 1 if layout == "dv" else 0
    with backtape.Recorder(dir=directory, steps="0", rank=0, world_size=1, strict=True) as recorder:
        with recorder.step(0) as tape:
            options = {"microbatches": microbatches, "microbatch_reduction": "sum"} if microbatches > 1 else {}
            tape.head(path="plain" if plane else "fused", k_layout=layout, **options)
            cut(tape, "k", orient(k), 4, of_classes)
            if bias:
                tape.record("bias", biases)
            for index in range(microbatches):
                q = rng.standard_normal((tokens, depth)).astype(BF16)
                labels = np.minimum(rng.zipf(1.3, tokens) - 1, vocab - 1).astype(np.int32)
                found, logits, dlogits = head(q, k, biases, labels, total, fault)
                mb = {"microbatch": index} if microbatches > 1 else {}
                cut(tape, "q", q, 5, 0, **mb)
                tape.record("labels", labels, **mb)
                for name in ("lse", "label_logits", "dbias"):
                    if name in found:
                        tape.record(name, found[name], **mb)
                cut(tape, "dq", found["dq"], 3, 0, **mb)
                for name in ("dk_label", "dk"):
                    cut(tape, name, orient(found[name]), 3, of_classes, **mb)
                if plane:
                    cut(tape, "logits", logits, 4, 0, **mb)
                    cut(tape, "dlogits", dlogits, 2, 1, **mb)
    return directory
