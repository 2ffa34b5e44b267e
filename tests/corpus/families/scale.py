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


@plant("rank-mean-vs-sum")
def rank_mean(rng, seed):
    """The addends' mean over ranks where their sum is meant, or each rank's loss over W too."""
    how = pick(rng, ["pmean", "pmean", "loss"])
    job = draw_job(rng, seed, ranks=pick(rng, [2, 3, 4]))
    code, step = code_for(rng, job), Step(rank_scale=how)
    also = [{"microbatch-count-scale"}] if job.count == job.ranks else []
    return switched("rank-mean-vs-sum", job, kept_for(rng, code), (code, Step()), (code, step), also)


@plant("valid-count")
def valid_count(rng, seed):
    """The mean is over all tokens, padding included; in the loss too, or in the backward only."""
    options = {"ignore_label": pick(rng, [-100, -1]), "denominator": "valid"}
    job = draw_job(rng, seed, weights=False, options=options)
    code = code_for(rng, job)
    step = Step(denominator="all", denominator_in=pick(rng, ["both", "backward"]))
    return switched("valid-count", job, kept_for(rng, code), (code, Step()), (code, step))


@plant("cotangent-dropped")
def cotangent_dropped(rng, seed):
    """The backward leaves out what multiplies the loss: of one gradient or of both."""
    how = pick(rng, ["dq", "dk", "none", "weights"])
    job = draw_job(rng, seed, weights="mixed", options={"cotangent": pick(rng, [0.5, 1.75, 3.0])})
    code = code_for(rng, job, "kernel")
    wrong = replace(code, token_weights=False) if how == "weights" else replace(code, cotangent=how)
    return switched("cotangent-dropped", job, kept_for(rng, code), (code, Step()), (wrong, Step()))


@plant("accumulation-window")
def accumulation_window(rng, seed):
    """Not every microbatch reaches the sum, or the sum is added to itself."""
    which = pick(rng, ["last", "first", "not the first", "not the last", "doubled"])
    job = draw_job(rng, seed, microbatches=pick(rng, [3, 4, 5]))
    code = code_for(rng, job)
    also = [{"dropped-batch"}] if which.startswith("not") else []
    step = Step(window=which)
    return switched("accumulation-window", job, kept_for(rng, code), (code, Step()), (code, step), also)


@plant("smoothing-mismatch")
def smoothing(rng, seed):
    """Label smoothing in the loss and not in the gradient, or by the other formula."""
    options = {"label_smoothing": pick(rng, [0.05, 0.1, 0.2]), "smoothing_formula": pick(rng, ["uniform", "megatron"])}
    how = pick(rng, ["backward", "backward", "formula"])
    job = draw_job(rng, seed, options=options, dtype="f32" if how == "formula" and rng.random() < 0.6 else None)
    code = code_for(rng, job, "kernel" if how == "backward" else pick(rng, ["plain", "kernel", "chunked"]))
    other = {"uniform": "megatron", "megatron": "uniform"}[options["smoothing_formula"]]
    wrong = replace(code, backward_smoothing=False) if how == "backward" else replace(code, smoothing_formula=other)
    return switched("smoothing-mismatch", job, kept_for(rng, code), (code, Step()), (wrong, Step()))


@plant("temperature-mismatch")
def temperature(rng, seed):
    """The temperature's factor is missing in the backward, or another one is used."""
    declared = pick(rng, [0.7, 1.5, 2.0])
    how = pick(rng, ["backward", "other", "none"])
    job = draw_job(rng, seed, options={"temperature": declared})
    code = code_for(rng, job, "kernel" if how == "backward" else None)
    changed = {"backward": {"backward_temperature": False}, "other": {"temperature": declared * 1.1}, "none": {"temperature": 1.0}}
    wrong = replace(code, **changed[how])
    return switched("temperature-mismatch", job, kept_for(rng, code), (code, Step()), (wrong, Step()))


@plant("bias-twice")
def bias_twice(rng, seed):
    """The logits come with the bias, and it is added again."""
    job = draw_job(rng, seed, bias=True)
    code = code_for(rng, job)
    wrong = replace(code, bias_times=2.0)
    return switched("bias-twice", job, kept_for(rng, code), (code, Step()), (wrong, Step()))


@plant("all-ignored")
def all_ignored(rng, seed):
    """A microbatch without a token that counts: its mean is 0 / 0."""
    options = {"scope": "microbatch", "microbatch_reduction": "mean"}
    job = draw_job(rng, seed, microbatches=pick(rng, [2, 3]), options=options)
    job.microbatches[int(rng.integers(job.count))]["weights"][:] = 0
    code = code_for(rng, job)
    step = Step(guarded=False)
    also = [{"nan-origin"}, {"all-ignored", "nan-origin"}]
    # Of labels that all are ignored the replay's checks tell; else it shows where the mean is used.
    stages = {"labels", "loss", "dlogits", "dq"}
    return switched("all-ignored", job, kept_for(rng, code), (code, Step()), (code, step), also, stages=stages)


@plant("clipping")
def clipping(rng, seed):
    """The gradients that are recorded have been clipped to a norm."""
    where = pick(rng, ["reduced", "reduced", "microbatch"])
    job = draw_job(rng, seed)
    code, step = code_for(rng, job), Step(clip=float(rng.uniform(0.2, 0.9)), clip_at=where)
    case = switched("clipping", job, kept_for(rng, code), (code, Step()), (code, step))
    if where == "microbatch":
        # Every gradient has the factor, dq too, which no clip of parameters touches: it came from upstream.
        case.accept = [{"clipping"}, {"upstream-factor"}]
    return case
