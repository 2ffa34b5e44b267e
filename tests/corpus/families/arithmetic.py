"""Faults of precision: what was rounded or summed in less than its author believed."""

from corpus.case import draw_kept, plant, switched
from corpus.heads import Code
from corpus.job import draw_job, pick
from corpus.train import Step


@plant("label-scatter-low-precision")
def label_scatter(rng, seed):
    """The rows of k are gathered in bf16, so the transpose of the gather sums in bf16."""
    tile = pick(rng, [96, 128, 200])
    job = draw_job(
        rng, seed, large=True, path="fused", tile=tile, dtype=pick(rng, ["bf16", "bf16", "f32"]),
        microbatches=pick(rng, [1, 2]),
    )
    right = Code(head="fused", tile=tile)
    wrong = Code(head="fused", tile=tile, gather="bf16" if job.dtype != "f16" else "f16")
    # Of f32 rows a gather in bf16 also rounds what is gathered: the label's logit and dq.
    return switched("label-scatter-low-precision", job, draw_kept(rng), (right, Step()), (wrong, Step()))


@plant("chunk-accumulator-low-precision")
def chunk_accumulator(rng, seed):
    """dk summed over token chunks in the parameter's dtype."""
    chunk = pick(rng, [16, 32, 48, 100])
    job = draw_job(rng, seed, path="chunked", chunk=chunk, dtype=pick(rng, ["bf16", "bf16", "f16"]))
    right = Code(head="chunked", chunk=chunk)
    wrong = Code(head="chunked", chunk=chunk, chunk_sum=job.dtype)
    kept = draw_kept(rng, parts=False)
    return switched("chunk-accumulator-low-precision", job, kept, (right, Step()), (wrong, Step()))
