"""A case: one draw of one fault, its fixed twin, and what answers are right."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from corpus import train
from corpus.heads import Code
from corpus.job import Job
from corpus.record import Kept, draw_kept, names_of
from corpus.train import Captured, Step

# What is run: the job as it is recorded, and what its tape holds.
Run = Callable[[], tuple[Job, Captured]]


@dataclass
class Case:
    """`accept`: sets of ids, each of which is a right answer; the empty set is "no cause"."""

    cause: str
    accept: list[set[str]]
    kept: Kept
    faulty: Run
    fixed: Run
    parameters: dict = field(default_factory=dict)
    # "cause", "composite", "unknown", "clean", or "checks": a fault of the data alone, under
    # which the head's arithmetic is right: what a replay says of it its checks have seen.
    kind: str = "cause"
    # Where the fault may show first; None: what the two runs' tapes say (oracle.py).
    stages: set[str] | None = None
    # "unknown" is as good an answer: no catalogue entry describes just this.
    unknown_too: bool = False
    # The fixed program as coarse as the head's declaration leaves room for.
    loose: Run | None = None


# cause -> function(rng, seed) -> Case. Filled by the families, in the order of the catalogue.
PLANTS: dict[str, Callable[[np.random.Generator, int], Case]] = {}


def plant(cause):
    """Registers the program of a cause."""

    def keep(draw):
        assert cause not in PLANTS, cause
        PLANTS[cause] = draw
        return draw

    return keep


def switched(
    cause, job, kept, right=(Code(), Step()), wrong=(Code(), Step()), also=(), **more
):  # fmt: skip
    """A fault that is one change of the program, under the same job. `cause`: an id, or several
    of a composite fault."""
    names = frozenset(names_of(kept) | {"loss", "dk", "dq"})
    run = lambda how: lambda: (job, train.train(job, *how, names=names))
    ids = {cause} if isinstance(cause, str) else set(cause)
    cause = cause if isinstance(cause, str) else "composite"
    accept = [ids, *map(set, also)]
    coarser = loose(job, right[0])
    if coarser != right[0]:
        more.setdefault("loose", run((coarser, right[1])))
    parameters = {"dtype": job.dtype, "ranks": job.ranks, "microbatches": job.count, **describe(right, wrong)}
    parameters |= more.pop("parameters", {})
    parameters |= {"faults": " + ".join(sorted(ids))} if len(ids) > 1 else {}
    return Case(cause, accept, kept, run(wrong), run(right), parameters, **more)


def loose(job, code):
    """What the head does not declare may be rounded to the inputs' dtype: logits, p, and dlogits."""
    coarser = {}
    if "p" not in job.declared["dtypes"]:
        coarser["early_p"] = job.dtype
    if "logits" not in job.declared["dtypes"]:
        coarser |= {"forward_logits": job.dtype, "backward_logits": job.dtype}
    if "dlogits" not in job.declared["dtypes"] and code.head == "kernel":
        coarser["shown_dlogits"] = job.dtype
    return code if job.dtype == "f32" else replace(code, **coarser)


def describe(right, wrong):
    """What the fault changed, by name."""
    changed = {}
    for a, b in zip(right, wrong):
        changed |= {n: getattr(b, n) for n in vars(b) if getattr(a, n) != getattr(b, n)}
    return {"head": right[0].head} | changed


__all__ = ["PLANTS", "Case", "Kept", "draw_kept", "plant", "switched"]
