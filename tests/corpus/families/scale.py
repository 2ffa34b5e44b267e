"""Faults of scale: the right direction, the wrong length; and options that only one side has."""

from dataclasses import replace

from corpus.case import draw_kept, plant, switched
from corpus.heads import Code
from corpus.job import draw_job, pick
from corpus.train import Step


def code_for(rng, job, head=None):
    """A right program for a job, its path declared."""
    head = head or pick(rng, ["plain", "kernel", "fused", "chunked"])
    code = Code(head=head, tile=pick(rng, [96, 128]), chunk=pick(rng, [50, 64]))
    job.declared["path"] = {"kernel": "plain"}.get(head, head)
    return code


def kept_for(rng, code, **fixed):
    return draw_kept(rng, **({} if code.head == "fused" else {"parts": False}), **fixed)


@plant("microbatch-mean-of-means")
def mean_of_means(rng, seed):
    """Each microbatch divides by its own tokens, and the mean of the means is taken."""
    job = draw_job(rng, seed, microbatches=pick(rng, [2, 3, 4]), options={"cotangent": 1.0})
    code, where = code_for(rng, job), pick(rng, ["loss", "loss", "end"])
    step = Step(mean_of_means=where)
    # Divided at the end, the sum over microbatches is the other half of the same fault.
    also = [{"microbatch-mean-of-means", "microbatch-count-scale"}] if where == "end" else []
    return switched("microbatch-mean-of-means", job, kept_for(rng, code), (code, Step()), (code, step), also)


@plant("microbatch-count-scale")
def count_scale(rng, seed):
    """The number of microbatches is forgotten in the sum, or divided by once more."""
    how = pick(rng, ["undivided", "twice"])
    scope = {"scope": "microbatch", "microbatch_reduction": "mean"}
    job = draw_job(rng, seed, microbatches=pick(rng, [2, 3, 4]), options=scope)
    code = code_for(rng, job)
    also = [{"rank-mean-vs-sum"}] if job.count == job.ranks else []
    step = Step(count_scale=how)
    return switched("microbatch-count-scale", job, kept_for(rng, code), (code, Step()), (code, step), also)


@plant("softcap-mismatch")
def softcap(rng, seed):
    """The cap's derivative is missing, or forward and backward have another cap than declared."""
    cap = pick(rng, [5.0, 8.0, 15.0, 30.0])
    how = pick(rng, ["derivative", "derivative", "other", "none"])
    job = draw_job(rng, seed, options={"softcap": cap}, confident=0.5, spread=3.0)
    code = code_for(rng, job)
    changed = {"derivative": {"backward_softcap": False}, "other": {"softcap": cap * 2}, "none": {"softcap": 0.0}}
    wrong = replace(code, **changed[how])
    return switched("softcap-mismatch", job, kept_for(rng, code), (code, Step()), (wrong, Step()))


@plant("zloss-mismatch")
def zloss(rng, seed):
    """z-loss in the loss and not in the gradient, half of it, or with another factor."""
    factor = pick(rng, [1e-4, 1e-3, 1e-2])
    how = pick(rng, ["dropped", "half", "other"])
    job = draw_job(rng, seed, options={"z_loss": factor})
    code = code_for(rng, job)
    changed = {"dropped": {"backward_zloss": 0.0}, "half": {"backward_zloss": 0.5}, "other": {"zloss": factor * 10}}
    wrong = replace(code, **changed[how])
    return switched("zloss-mismatch", job, kept_for(rng, code), (code, Step()), (wrong, Step()))
