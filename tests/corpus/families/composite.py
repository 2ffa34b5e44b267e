"""Two faults at once: both are the right answer."""

from dataclasses import replace

from corpus.case import plant, switched
from corpus.families.scale import kept_for
from corpus.heads import Code
from corpus.job import draw_job, pick
from corpus.train import Step

# The ids; what the job needs; how it is written; the first fault's and the second's change of it.
PAIRS = [
    (("label-scatter-low-precision", "rank-mean-vs-sum"), {"dtype": "bf16", "large": True, "ranks": 2}, "fused", {"gather": "bf16"}, {"rank_scale": "pmean"}),
    (("label-scatter-low-precision", "tail-tile-unmasked"), {"dtype": "bf16", "large": True, "padded": False, "spread": 1.0}, "fused", {"gather": "bf16", "masks_tail": False}, {}),
    (("zloss-mismatch", "accumulation-window"), {"options": {"z_loss": 1e-2}, "microbatches": 3}, "kernel", {"backward_zloss": 0.0}, {"window": "last"}),
    (("softcap-mismatch", "microbatch-mean-of-means"), {"options": {"softcap": 8.0, "cotangent": 1.0}, "microbatches": 3, "spread": 3.0}, "plain", {"backward_softcap": False}, {"mean_of_means": "loss"}),
    (("bias-twice", "zloss-mismatch"), {"options": {"z_loss": 1e-2}, "bias": True}, "kernel", {"bias_times": 2.0, "backward_zloss": 0.0}, {}),
    (("chunk-accumulator-low-precision", "clipping"), {"dtype": "bf16", "large": True, "microbatches": 1}, "chunked", {"chunk_sum": "bf16"}, {"clip": 0.6}),
    (("temperature-mismatch", "label-scatter-low-precision"), {"dtype": "bf16", "large": True, "options": {"temperature": 1.5}, "microbatches": 1}, "fused", {"temperature": 1.6, "gather": "bf16"}, {}),
    (("gemm-low-precision", "rank-mean-vs-sum"), {"dtype": "f32", "ranks": 2}, "kernel", {"gemm_backward": "bf16"}, {"rank_scale": "pmean"}),
    (("smoothing-mismatch", "cotangent-dropped"), {"options": {"label_smoothing": 0.1, "cotangent": 3.0}}, "kernel", {"backward_smoothing": False, "cotangent": "dq"}, {}),
    (("valid-count", "accumulation-window"), {"options": {"ignore_label": -100, "denominator": "valid"}, "weights": False, "microbatches": 3}, "plain", {}, {"denominator": "all", "window": "not the first"}),
]  # fmt: skip


@plant("composite")
def composite(rng, seed):
    """A pair of faults in one job."""
    ids, job, head, code, step = pick(rng, PAIRS)
    job = draw_job(rng, seed, **job)
    job.declared["path"] = {"kernel": "plain"}.get(head, head)
    right = Code(head=head, tile=pick(rng, [96, 128]), chunk=pick(rng, [16, 50]) if head == "chunked" else 64)
    kept = kept_for(rng, right)
    wrong = replace(right, **code), Step(**step)
    return switched(ids, job, kept, (right, Step()), wrong, kind="composite")
