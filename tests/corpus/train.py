"""One optimizer step around a head: ranks under shard_map, microbatches in a loop, one reduction.

`Step` says how that is written; its defaults are right. What comes out (`Captured`) is what the
job's tape can see: values of the head for each microbatch, each rank's addends of dk, their sums.
"""

from dataclasses import dataclass, field, replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from corpus import launches
from corpus.heads import HEADS, NARROW, Code

SUMMED = {"dk", "dk_lse", "dk_label", "dbias"}  # over tokens: each rank has its addend


@dataclass(frozen=True)
class Step:
    """How microbatches and ranks come together."""

    mean_of_means: str | None = None  # "loss" or "end": where a microbatch's own mean is divided
    count_scale: str | None = None  # "undivided" or "twice"
    rank_scale: str | None = None  # "pmean": the addends' mean is taken; "loss": W in the loss
    denominator: str | None = None  # another count of tokens: "all", "valid"
    denominator_in: str = "both"  # forward too, or only the backward
    sum_dtype: str = "f32"  # over microbatches
    window: str | None = None  # which microbatches reach the sum
    clip: float | None = None  # share of the norm that is left
    clip_at: str = "reduced"
    guarded: bool = True  # a microbatch without tokens divides by 1, not by 0


@dataclass
class Captured:
    """What a tape can see of a step. Arrays are numpy; addends are one for each rank."""

    forward: list[dict[str, np.ndarray]]  # of each microbatch: loss, lse, label_logits, dq...
    addends: list[dict[str, list[np.ndarray]]]  # of each microbatch: dk, parts, dbias
    accumulated: list[np.ndarray] = field(default_factory=list)  # dk over microbatches, each rank
    reduced: np.ndarray | None = None  # dk over microbatches and ranks
    replicas: list[np.ndarray] | None = None  # reduced as each rank holds it, where they differ
    grad_norm: float | None = None


@lru_cache
def mesh_of(ranks):
    return Mesh(np.array(jax.devices()[:ranks]), ("data",))


@lru_cache(maxsize=256)
def compiled(head, ranks, options, code, names):
    """The head on every rank's own tokens: tokens cut, addends stacked [ranks * V, D]."""
    run = lambda q, k, bias, labels, weights, n: {
        name: value
        for name, value in HEADS[head](q, k, bias, labels, weights, n, options, code).items()
        if name in names
    }
    if ranks == 1:
        return jax.jit(run)
    token, whole = P("data"), P()

    def one_rank(q, k, bias, labels, weights, n):
        found = run(q, k, bias, labels, weights, n[0])
        return {name: value[None] if value.ndim == 0 else value for name, value in found.items()}

    mapped = jax.shard_map(
        one_rank, mesh=mesh_of(ranks), in_specs=(token, whole, whole, token, token, token),
        out_specs=token, check_vma=False,
    )  # fmt: skip
    return jax.jit(mapped)


NAMES = frozenset({"lse", "label_logits", "loss", "dq", "dk", "dbias"})
PARTS = frozenset({"dq_lse", "dq_label", "dk_lse", "dk_label"})
PLANE = frozenset({"logits", "dlogits"})


def run_head(job, code, data, weights, denominators, names=NAMES):
    """(values over all tokens, addends of each rank) of one microbatch."""
    if code.head == "launches":
        return launches.run(job, code, data, weights, denominators)
    head = compiled(code.head, job.ranks, job.options, code, names)
    labels = data["labels"]
    if job.options.ignore_label is not None:
        labels = np.where(labels == job.options.ignore_label, 0, labels)
    counts, q = np.asarray(denominators, np.float32), data["q"]
    if code.devices > 1:
        q, labels, weights = (cut(x, code.devices) for x in (q, labels, weights))
    found = head(q, job.k, job.bias, labels, weights, counts[0] if job.ranks == 1 else counts)
    found = {name: np.asarray(value) for name, value in found.items()}
    if code.devices > 1:
        found |= {n: x[: len(data["q"])] for n, x in found.items() if n not in SUMMED | {"loss"}}
    addends = {name: np.split(found.pop(name), job.ranks) for name in SUMMED & found.keys()}
    found["loss"] = np.float32(found["loss"].sum(dtype=np.float32))
    return found, addends


def cut(x, devices):
    """An array over several devices along its first dimension, filled up with tokens of weight 0."""
    fill = ((0, -x.shape[0] % devices),) + ((0, 0),) * (x.ndim - 1)
    return jax.device_put(np.pad(x, fill), NamedSharding(mesh_of(devices), P("data")))


def token_weights(job, mb):
    return job.counted(mb).astype(np.float32)


def counted(job, step, mb):
    """What each rank divides its loss by."""
    o = job.options
    if step.denominator:
        job = replace(job, options=replace(o, denominator=step.denominator))
    if step.mean_of_means:
        own = job.number(mb) * (job.count if step.mean_of_means == "loss" else 1)
    else:
        own = job.denominator(mb)
    if step.guarded and own == 0:
        own = 1.0
    if step.rank_scale == "loss":
        own *= job.ranks
    if step.count_scale == "twice":
        own *= job.count
    return [own] * job.ranks


def forward_backward(job, code, step, names=NAMES):
    """Every microbatch through the head."""
    forward, addends = [], []
    for mb, data in enumerate(job.microbatches):
        weights = token_weights(job, mb)
        found, sums = run_head(job, code, data, weights, counted(job, step, mb), names)
        if step.denominator and step.denominator_in == "backward":
            right = run_head(job, code, data, weights, counted(job, Step(), mb), names)[0]
            found["loss"] = right["loss"]
        forward.append(found)
        addends.append(sums)
    return forward, addends


@lru_cache
def reducer(ranks, how):
    collective = {"sum": jax.lax.psum, "mean": jax.lax.pmean}[how]
    return jax.jit(
        jax.shard_map(
            lambda x: collective(x[0], "data"), mesh=mesh_of(ranks), in_specs=P("data"),
            out_specs=P(), check_vma=False,
        )  # fmt: skip
    )


def accumulate(job, step, own):
    """One rank's sum of `own` [M][V, D] over microbatches, as the loop has it."""
    kept = window(step.window, own)
    total = jnp.zeros(own[0].shape, NARROW[step.sum_dtype])
    for addend in kept:
        total = (total + jnp.asarray(addend).astype(total.dtype)).astype(total.dtype)
    divided = step.mean_of_means == "end" or (
        job.options.microbatch_reduction == "mean" and step.count_scale != "undivided"
    )
    return np.asarray(total / job.count if divided else total)


def window(which, own):
    if which is None:
        return own
    if which == "doubled":  # The running sum is added to itself before the next one.
        grown = [own[0]]
        for addend in own[1:]:
            grown = [*grown, *grown, addend]
        return grown
    return {"last": own[-1:], "first": own[:1], "not the first": own[1:], "not the last": own[:-1]}[which]


def train(job, code=Code(), step=Step(), names=NAMES, change=None):
    """The whole step; `change(forward, addends)` is what the program does to them on the way."""
    forward, addends = forward_backward(job, code, step, names)
    if change is not None:
        change(forward, addends)
    if step.clip and step.clip_at == "microbatch":
        shrink = lambda x: (x.astype(np.float32) * np.float32(step.clip)).astype(x.dtype)
        for found, sums in zip(forward, addends):
            found |= {name: shrink(found[name]) for name in found if name.startswith("dq")}
            sums |= {name: [shrink(x) for x in each] for name, each in sums.items()}
    return together(job, step, forward, addends)


def together(job, step, forward, addends):
    """Sums over microbatches and ranks."""
    ranks = range(job.ranks)
    accumulated = [accumulate(job, step, [mb["dk"][rank] for mb in addends]) for rank in ranks]
    reduced = accumulated[0]
    if job.ranks > 1:
        how = "mean" if step.rank_scale == "pmean" else "sum"
        reduced = np.asarray(reducer(job.ranks, how)(np.stack(accumulated)))
    norm = float(np.linalg.norm(reduced.astype(np.float64)))
    if step.clip and step.clip_at == "reduced":
        reduced = (reduced.astype(np.float32) * np.float32(step.clip)).astype(reduced.dtype)
    return Captured(forward, addends, accumulated, reduced, grad_norm=norm)
