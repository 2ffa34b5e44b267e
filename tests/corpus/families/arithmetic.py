"""Faults of precision: what was rounded or summed in less than its author believed."""

from dataclasses import replace

from corpus import train
from corpus.case import draw_kept, plant, switched
from corpus.families.scale import code_for, kept_for
from corpus.heads import Code
from corpus.job import DTYPES, draw_job, pick
from corpus.record import names_of
from corpus.train import Step


def changed(cause, job, kept, right, **code):
    """The same program with another precision at some point."""
    more = {name: code.pop(name) for name in ("also", "loose") if name in code}
    return switched(cause, job, kept, (right, Step()), (replace(right, **code), Step()), **more)


@plant("label-scatter-low-precision")
def label_scatter(rng, seed):
    """The rows of k are gathered in bf16, so the transpose of the gather sums in bf16."""
    tile = pick(rng, [96, 128, 200])
    job = draw_job(
        rng, seed, large=True, path="fused", tile=tile, dtype="bf16", microbatches=pick(rng, [1, 2])
    )
    return changed("label-scatter-low-precision", job, draw_kept(rng), Code(head="fused", tile=tile), gather="bf16")


@plant("label-scatter-partitioned")
def label_scatter_partitioned(rng, seed):
    """The same fault in one program that XLA itself cuts over four devices: what it does to the
    scatter is the compiler's business, and may hide the fault altogether."""
    job = draw_job(rng, seed, large=True, path="fused", dtype="bf16", ranks=1, microbatches=1)
    right = Code(head="fused", devices=pick(rng, [2, 4]))
    case = changed("label-scatter-low-precision", job, draw_kept(rng), right, gather="bf16")
    case.cause = "label-scatter-partitioned"
    return case


@plant("chunk-accumulator-low-precision")
def chunk_accumulator(rng, seed):
    """dk summed over token chunks in the parameter's dtype."""
    chunk, large = pick(rng, [8, 16, 32]), bool(rng.random() < 0.7)
    job = draw_job(
        rng, seed, path="chunked", chunk=chunk, large=large, dtype=pick(rng, ["bf16", "bf16", "f16"]),
        microbatches=pick(rng, [1, 2]),
    )  # fmt: skip
    right, kept = Code(head="chunked", chunk=chunk), draw_kept(rng, parts=False)
    return changed("chunk-accumulator-low-precision", job, kept, right, chunk_sum=job.dtype)


@plant("microbatch-accumulator-low-precision")
def microbatch_accumulator(rng, seed):
    """The gradient buffer over microbatches has the parameters' dtype."""
    count = pick(rng, [3, 6, 12, 24, 24])
    job = draw_job(rng, seed, dtype=pick(rng, ["bf16", "bf16", "f16"]), microbatches=count, ranks=pick(rng, [1, 2]))
    # Each microbatch's gradient in f32, as a fused weight gradient is, or in the parameter's dtype.
    out = "f32" if rng.random() < 0.5 else None
    code = replace(code_for(rng, job, pick(rng, ["kernel", "chunked"])), out=out)
    kept, cause = kept_for(rng, code), "microbatch-accumulator-low-precision"

    def unrounded():
        """A right job whose tape only holds rounded addends of an f32 sum, stored in their dtype."""
        names = frozenset(names_of(kept) | {"loss", "dk", "dq"})
        held, exact = (train.train(job, c, names=names) for c in (code, replace(code, out="f32")))
        narrow = lambda x: x.astype(DTYPES[job.dtype])
        held.accumulated, held.reduced = [narrow(x) for x in exact.accumulated], narrow(exact.reduced)
        return job, held

    wrong = Step(sum_dtype=job.dtype)
    return switched(cause, job, kept, (code, Step()), (code, wrong), loose=unrounded)


@plant("tile-add-low-precision")
def tile_add(rng, seed):
    """Every tile adds its part of dq and dk to a buffer in the inputs' dtype."""
    tile = pick(rng, [8, 16, 32])
    job = draw_job(
        rng, seed, path="fused", tile=tile, dtype=pick(rng, ["bf16", "bf16", "f16"]), microbatches=1,
        large=bool(rng.random() < 0.5), confident=0.1,
    )  # fmt: skip
    code = Code(head="fused", tile=tile, chunk=pick(rng, [8, 16]))
    return changed("tile-add-low-precision", job, draw_kept(rng), code, tile_sum=job.dtype)


@plant("label-prob-rounded-early")
def early_probability(rng, seed):
    """p is narrowed before 1 is taken off it: confident tokens lose their gradient."""
    # Half of the authors say that p is f32.
    dtypes = {"logits": "f32"} | ({"p": "f32"} if rng.random() < 0.5 else {})
    job = draw_job(rng, seed, dtype=pick(rng, ["bf16", "bf16", "f16"]), confident=0.7, dtypes=dtypes)
    code = code_for(rng, job, "kernel")
    kept = kept_for(rng, code, dlogits=bool(rng.random() < 0.4))
    return changed("label-prob-rounded-early", job, kept, code, early_p=job.dtype)


@plant("lse-logits-mismatch")
def lse_mismatch(rng, seed):
    """Forward and backward see logits, or their log-sum-exp, of different precision."""
    how = pick(rng, ["kept_lse", "kept_lse", "backward_logits", "forward_logits"])
    dtypes = {"logits": "f32", "lse": "f32"} | ({"p": "f32"} if rng.random() < 0.5 else {})
    job = draw_job(rng, seed, dtype=pick(rng, ["bf16", "bf16", "f16"]), dtypes=dtypes, spread=3.0)
    code = code_for(rng, job, pick(rng, ["kernel", "fused"]))
    also = [{"gemm-low-precision"}] if how == "forward_logits" else []
    return changed("lse-logits-mismatch", job, kept_for(rng, code), code, also=also, **{how: job.dtype})


@plant("lse-cancellation")
def cancellation(rng, seed):
    """The loss is the difference of two large numbers in bf16; the gradients are right."""
    job = draw_job(rng, seed, dtype=pick(rng, ["bf16", "bf16", "f32"]), spread=3.0, confident=0.7)
    code = code_for(rng, job, "kernel")
    kept = kept_for(rng, code, loss=True)
    return changed("lse-cancellation", job, kept, code, loss_in="f16" if job.dtype == "f16" else "bf16")


@plant("gemm-low-precision")
def gemm(rng, seed):
    """f32 declared, and the matrix unit takes bf16 or tf32: in all products or the backward's."""
    where, to = pick(rng, ["gemm", "gemm", "gemm_backward"]), pick(rng, ["bf16", "tf32"])
    dtypes = {"input": "f32", "logits": "f32"} if rng.random() < 0.5 else {}
    job = draw_job(rng, seed, dtype="f32", dtypes=dtypes)
    code = code_for(rng, job, "kernel" if where == "gemm_backward" else pick(rng, ["kernel", "chunked"]))
    return changed("gemm-low-precision", job, kept_for(rng, code), code, **{where: to})


@plant("gradient-filter")
def gradient_filter(rng, seed):
    """Blocks of dlogits in which nothing reaches a threshold are skipped, undeclared."""
    least, tile = pick(rng, [2.0**-12, 2.0**-9, 2.0**-7, 2.0**-7]), pick(rng, [4, 8, 16])
    job = draw_job(rng, seed, confident=0.8, spread=pick(rng, [2.0, 4.0]))
    code = replace(code_for(rng, job, "kernel"), tile=tile)
    return changed("gradient-filter", job, kept_for(rng, code), code, filter=least)


@plant("underflow")
def underflow(rng, seed):
    """dlogits in f16 without a scaled loss: most of them are 0."""
    job = draw_job(
        rng, seed, dtype="f16", options={"cotangent": pick(rng, [1.0, 0.1, 0.02])},
        dtypes={"dlogits": "f32", "output": "f32", "logits": "f32"} | ({"p": "f32"} if rng.random() < 0.5 else {}),
    )  # fmt: skip
    code = replace(code_for(rng, job, "kernel"), dlogits="f32", out="f32")
    kept = kept_for(rng, code, dlogits=bool(rng.random() < 0.3))
    return changed("underflow", job, kept, code, dlogits="f16")
