"""Records a job's step as a careful author would: what he believes, and what his code holds.

Every rank has a recorder of its own, here in one process.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

import backtape

OF_TOKENS = ("q", "labels", "weights", "cotangent", "lse", "label_logits", "logits", "dlogits", "dq", "dq_lse", "dq_label")
# The order in which a report goes through the stages.
STAGES = (
    "q", "k", "labels", "weights", "bias", "logits", "lse", "label_logits", "loss", "dlogits",
    "dq_lse", "dq_label", "dq", "dk_lse", "dk_label", "dk", "dbias", "accumulate", "reduce",
)  # fmt: skip


@dataclass(frozen=True)
class Kept:
    """What is recorded of a job, beside its inputs and dq and dk."""

    lse: bool = True
    label_logits: bool = True
    loss: bool = True
    parts: bool = False
    logits: bool = False
    dlogits: bool = False
    accumulated: bool = False
    reduced: bool = True
    grad_norm: bool = True


def draw_kept(rng, **fixed):
    """Most authors record most of it."""
    chances = {
        "lse": 0.5, "label_logits": 0.85, "loss": 0.85, "parts": 0.3, "logits": 0.0, "dlogits": 0.0,
        "accumulated": 0.4, "reduced": 1.0, "grad_norm": 0.7,
    }  # fmt: skip
    return Kept(**({name: bool(rng.random() < chance) for name, chance in chances.items()} | fixed))


def names_of(kept):
    """The values of the head that the tape wants."""
    names = {"dq", "dk", "dbias"} | {n for n in ("lse", "label_logits", "loss") if getattr(kept, n)}
    names |= {"dq_lse", "dq_label", "dk_lse", "dk_label"} if kept.parts else set()
    return names | {n for n in ("logits", "dlogits") if getattr(kept, n)}


def record(job, captured, kept, directory):
    """Writes the dump of one step; returns nothing before it is committed."""
    world = job.ranks * job.tensor
    options = {"world_size": world, "strict": True}
    if world > 1:
        options["mesh"] = {"tensor" if job.tensor > 1 else "data": world}
    recorders = [backtape.Recorder(directory, rank=rank, **options) for rank in range(world)]
    for rank, recorder in enumerate(recorders):
        with recorder.step(0) as tape:
            write = write_tensor_rank if job.tensor > 1 else write_rank
            write(tape, rank, job, captured, kept)
    with ThreadPoolExecutor(world) as pool:
        summaries = list(pool.map(lambda recorder: recorder.close(), recorders))
    for summary in summaries:
        if summary.steps_partial or summary.omissions or summary.faults:
            raise RuntimeError(f"the dump is not whole: {summary}")


def write_tensor_rank(tape, rank, job, captured, kept):
    """A rank that holds all tokens and a part of the vocabulary: rank 0 records what is of tokens."""
    tape.head(**job.head())
    own = job.vocab // job.tensor
    box = {"global_shape": job.k.shape, "offsets": (rank * own, 0)}
    rows, wanted = slice(rank * own, (rank + 1) * own), names_of(kept)
    tape.record("k", job.k[rows], **box)
    for mb, data in enumerate(job.microbatches):
        if rank == 0:
            held = data | {n: x for n, x in captured.forward[mb].items() if n in wanted}
            for name, array in held.items():
                tape.record(name, array, microbatch=mb)
        tape.record("dk", captured.addends[mb]["dk"][0][rows], microbatch=mb, when="pre_reduce", **box)
    if kept.reduced:
        tape.record("dk", captured.reduced[rows], when="post_reduce", **box)


def write_rank(tape, rank, job, captured, kept):
    tape.head(**job.head())
    tape.record("k", job.k)
    if job.bias is not None:
        tape.record("bias", job.bias)
    wanted, rows = names_of(kept), job.rows(rank)
    for mb, data in enumerate(job.microbatches):
        held = data | {n: x for n, x in captured.forward[mb].items() if n in wanted}
        for name, array in held.items():
            if name in OF_TOKENS:
                write_tokens(tape, name, array, rows, mb, job)
            else:
                tape.record(name, array, microbatch=mb)
        for name, array in (job.extra[mb] if job.extra else {}).items():
            write_tokens(tape, name, array, rows, mb, job)
        how = {"partial": "sum"} if job.ranks > 1 else {}
        for name, each in captured.addends[mb].items():
            if name in wanted:
                tape.record(name, each[rank], microbatch=mb, when="pre_reduce", **how)
    write_sums(tape, rank, job, captured, kept)


def write_tokens(tape, name, array, rows, mb, job):
    """A rank's own tokens, as rows of sequences where the job has them."""
    own = array[rows]
    if job.ranks == 1 and job.sequence is None:
        return tape.record(name, array, microbatch=mb)
    lead, start = (array.shape[0],), (rows.start,)
    if job.sequence is not None:
        lead = (array.shape[0] // job.sequence, job.sequence)
        own = own.reshape(-1, job.sequence, *array.shape[1:])
        start = (rows.start // job.sequence, 0)
    shape, rest = (*lead, *array.shape[1:]), (0,) * (array.ndim - 1)
    return tape.record(name, own, microbatch=mb, global_shape=shape, offsets=(*start, *rest))


def write_sums(tape, rank, job, captured, kept):
    if kept.accumulated and captured.accumulated:
        how = {"partial": "sum"} if job.ranks > 1 else {}
        tape.record("dk", captured.accumulated[rank], when="pre_reduce", **how)
    if kept.reduced and captured.reduced is not None:
        own = captured.reduced if captured.replicas is None else captured.replicas[rank]
        tape.record("dk", own, when="post_reduce")
    if kept.grad_norm and captured.grad_norm is not None:
        tape.record("grad_norm", np.float32(captured.grad_norm))
