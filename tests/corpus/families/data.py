"""Faults of distribution and data: parts that were not summed, rows in the wrong place."""

from dataclasses import replace

import numpy as np

from corpus import train
from corpus.case import Case, draw_kept, plant
from corpus.families.scale import code_for, kept_for
from corpus.job import draw_job, pick
from corpus.record import names_of


def relabelled(job, change):
    """The job with other labels: what the code computes with, not what the tape is given."""
    swapped = [data | {"labels": change(data["labels"])} for data in job.microbatches]
    return replace(job, microbatches=swapped)


def on_other_data(cause, job, kept, code, used, parameters, also=(), **more):
    """A program that computes on `used` what it records as `job`."""
    names = frozenset(names_of(kept) | {"loss", "dk", "dq"})
    run = lambda used: lambda: (job, train.train(used, code, names=names))
    parameters = {"dtype": job.dtype, "ranks": job.ranks, "microbatches": job.count, "head": code.head} | parameters
    return Case(cause, [{cause}, *also], kept, run(used), run(job), parameters, **more)


@plant("label-shift")
def label_shift(rng, seed):
    """Labels that are the next token already are shifted once more, within rows or across them."""
    amount, across = pick(rng, [-2, -1, 1, 2]), bool(rng.random() < 0.5)
    job = draw_job(rng, seed, uneven=bool(rng.random() < 0.5))
    tokens = job.microbatches[0]["labels"].size // job.ranks
    length = next((n for n in (37, 29, 23, 19, 17, 13, 11, 7, 5, 3) if tokens % n == 0), tokens)
    code = code_for(rng, job)

    def shifted(labels):
        rows = labels.reshape(-1, tokens if across else length)
        return np.roll(rows, -amount, axis=-1).reshape(-1)

    parameters = {"shift": amount, "across rows": across, "row": length}
    kept = kept_for(rng, code)
    return on_other_data("label-shift", job, kept, code, relabelled(job, shifted), parameters)
