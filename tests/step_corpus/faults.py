"""The faults: in which jobs each can be, where it may show first, and which cause is right.

`stages` are those of which the report may name one as the first. A sum over microbatches that no
communication follows by itself is recorded only as part of what follows it, so such a fault may show
at either; where a loss scale, a norm or clipping lies between, the stage after shows what was done
to a gradient by code that runs there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from step_corpus.job import BY_HAND, Job

Change = Callable[[Job, Any, dict[str, Any]], None]


@dataclass(frozen=True)
class Fault:
    """One kind of fault. `fits`: whether a job has room for it; `change`: what it asks of a job."""

    name: str
    stages: tuple[str, ...]
    fits_job: Callable[[Job], bool]
    change: Change | None = None
    scopes: tuple[str, ...] = ("all",)
    causes: tuple[str, ...] = ()
    # The fault may act in all steps, not in the recorded one alone.
    lasting: bool = True
    # What the first entry must say that captured / right is, of a job; None: it is no one number.
    factor: Callable[[Job], float | None] | None = None

    @property
    def accepted(self) -> tuple[str, ...]:
        return self.causes or (self.name,)

    def fits(self, job: Job) -> bool:
        if job.mesh == "ep" and job.precision != "f32":
            return False
        return self.fits_job(job)

    def prepare(self, job: Job, rng: Any, ranges: dict[str, Any]) -> None:
        """Makes of any job one that the fault can be in, as far as that goes without another draw."""
        job.scope = self.scopes[int(rng.integers(len(self.scopes)))]
        job.always = self.lasting and bool(rng.random() < 0.3)
        if self.change is not None:
            self.change(job, rng, ranges)


FAULTS: dict[str, Fault] = {}


def fault(name, stages, fits, change=None, **more):
    """Registers a fault."""
    stages = (stages,) if isinstance(stages, str) else tuple(stages)
    FAULTS[name] = Fault(name, stages, fits, change, **more)


def several(job):
    return job.microbatches > 1


def summed_in_sight(job):
    """Several microbatches whose sum lies in `.grad`, where code of the job can get at it. FSDP keeps what
    it has not reduced yet to itself."""
    return several(job) and (job.each or job.mesh not in ("fsdp2", "hsdp"))


def own_optimizer(job, rng, ranges):
    job.own = True


def adaptive(job):
    return job.rule != "SGD"


def own_clip(job, rng, ranges):
    job.clip, job.own_clip = ("inf" if rng.random() < 0.25 else "norm"), True


def clipping(job, rng, ranges):
    if not clipped(job):
        job.clip = "norm"
        # torch takes no norm of a mixture of DTensors and others.
        job.own_clip = job.mesh in ("tp", "ep")


def clipped(job):
    return job.clip in ("norm", "inf")


def window(job, rng, ranges):
    """Which microbatches are lost: those before one, or in a buffer of the job any one."""
    job.facts["cut"] = None if job.buffer else int(rng.integers(1, max(job.microbatches, 2)))
    job.facts["lost"] = int(rng.integers(max(job.microbatches, 1)))


def buffered(job, rng, ranges):
    job.buffer = job.mesh in ("plain", "hand", "grid")


def of_sum(job, rng, ranges):
    job.operation = "sum"


def of_mean(job, rng, ranges):
    job.operation = "mean"


def copies(job, rng, ranges):
    job.facts["copies"] = job.world if job.mesh not in ("grid", "ep") else 2


def scaled(job, rng, ranges):
    job.scale = ranges["scales"][int(rng.integers(len(ranges["scales"])))]


def scaled_lr(job, rng, ranges):
    job.own = True
    job.facts["lr_factor"] = job.world if job.world > 1 else 1 / max(job.microbatches, 2)


def drifting(job, rng, ranges):
    job.facts["drift"] = "main rank" if rng.random() < 0.5 else "start"
    job.factor = float(ranges["drifts"][int(rng.integers(len(ranges["drifts"])))])
    job.always = job.facts["drift"] == "start"


def decaying(job, rng, ranges):
    job.own, job.decay = True, max(ranges["decay"])


def excluding(job, rng, ranges):
    decaying(job, rng, ranges)
    job.excluded = True


def by_hand(job):
    return job.mesh in BY_HAND and (job.mesh, job.world) != ("tp", 2)


def by_scaler(job):
    return job.mesh in ("plain", "ddp", "hand")


def along(job):
    """The ranks of one communication."""
    return job.world if job.mesh == "hand" else 2


def distinct(job):
    """Whether the number of microbatches is none of the numbers of ranks, as a factor of it could then
    be of either."""
    return job.microbatches not in (job.world, 2) or job.world == 1


def eager(job, rng, ranges):
    """Each microbatch is reduced by itself and added to a buffer of the job."""
    job.buffer = job.mesh in ("hand", "grid")
    job.operation, job.facts["eager"] = "mean", True


def clipping_scaled(job, rng, ranges):
    clipping(job, rng, ranges)
    scaled(job, rng, ranges)


def lamb(job, rng, ranges):
    job.own, job.rule = True, "Lamb"


SOME = ("all", "all", "norms", "matrices", "embedding", "inner")

fault(
    "not-cleared",
    ("accumulate", "reduce"),
    lambda j: j.step > 0 and j.mesh not in ("tp",),
    scopes=SOME,
    lasting=False,
)
fault("accumulate-window", ("accumulate", "reduce"), summed_in_sight, window, scopes=SOME)
fault("accumulate-doubles", ("accumulate", "reduce"), summed_in_sight, buffered, scopes=SOME)
fault(
    "accumulate-low-precision",
    ("accumulate", "reduce"),
    lambda j: several(j) and j.buffer and j.precision == "f32",
    buffered,
)
fault(
    "divide-old-shard",
    "reduce",
    lambda j: several(j) and j.mesh in ("hand", "grid") and j.buffer,
    eager,
    scopes=SOME,
)
fault(
    "bucket-stale",
    ("accumulate", "reduce"),
    lambda j: j.step > 0 and j.mesh != "tp",
    scopes=SOME,
    lasting=False,
)
# Under a wrapper the gradient is reduced when the job's code sees it.
fault(
    "microbatch-scale",
    ("accumulate", "reduce"),
    lambda j: several(j) and distinct(j),
    # All of them divided by that number may be the job's own. A part of them may be multiplied by something else: two
    # readings are told, and the cause is open.
    scopes=SOME[2:],
    causes=("microbatch-scale", "unknown"),
    factor=lambda j: j.microbatches if j.variant % 2 else 1 / j.microbatches,
)

fault(
    "reduce-sum-for-mean",
    "reduce",
    lambda j: by_hand(j) and distinct(j),
    of_mean,
    scopes=SOME,
    factor=along,
)
fault(
    "reduce-mean-for-sum",
    "reduce",
    lambda j: by_hand(j) and distinct(j),
    of_sum,
    scopes=SOME,
    factor=lambda j: 1 / along(j),
)
fault(
    "reduced-mean-twice",
    "reduce",
    lambda j: (
        j.world > 1
        and distinct(j)
        and j.mesh != "tp"
        and j.operation == "mean"
        and (j.mesh, j.scope) != ("ep", "all")
    ),
    copies,
    scopes=SOME,
    factor=lambda j: 1 / j.facts["copies"],
)
fault(
    "not-reduced-over-axis",
    "reduce",
    lambda j: j.mesh in ("ddp", "hand", "ep"),
    scopes=("norms", "biases", "embedding", "inner"),
)
# The mean over ranks that have the same data is what is not reduced at all.
fault(
    "wrong-group",
    "reduce",
    lambda j: (j.mesh == "grid" and j.scope != "experts") or (j.mesh, j.scope) == ("ep", "experts"),
    scopes=("all", "experts", "inner"),
    causes=("wrong-group", "not-reduced-over-axis"),
)
fault("rank-left-out", "reduce", lambda j: j.mesh == "hand", scopes=SOME)
fault(
    "gradient-scaled",
    "reduce",
    lambda j: j.world > 1 and (j.mesh, j.world) != ("tp", 2),
    # All of them times one number would be the job's own.
    scopes=SOME[2:],
    factor=lambda j: j.factor,
)
fault("ranks-weighted", "reduce", lambda j: j.mesh == "hand")

fault("loss-scale-left-in", "unscale", by_scaler, scaled, scopes=SOME, factor=lambda j: j.scale)
fault(
    "loss-scale-taken-out-twice",
    "unscale",
    by_scaler,
    scaled,
    scopes=SOME,
    factor=lambda j: 1 / j.scale,
)

fault(
    "clip-before-unscale",
    "unscale",
    lambda j: by_scaler(j) and clipped(j),
    clipping_scaled,
)

fault("norm-local-not-global", "norm", lambda j: j.mesh in ("fsdp2", "hsdp", "tp", "ep"), own_clip)
fault(
    "norm-counts-copies",
    "norm",
    lambda j: j.mesh in ("hsdp", "tp", "ep") and j.clip == "norm",
    own_clip,
)
fault(
    "norm-misses-group",
    "norm",
    lambda j: j.clip == "norm",
    own_clip,
    scopes=("norms", "embedding", "inner", "biases"),
)
fault("norm-low-precision", "norm", lambda j: clipped(j) and j.precision == "f32", own_clip)
fault("clip-recorded-not-applied", "clip", clipped, own_clip)
fault("clip-twice", "clip", clipped, clipping)

fault("bias-correction-missing", "update", adaptive, own_optimizer, scopes=SOME)
fault("bias-correction-twice", "update", adaptive, own_optimizer, scopes=SOME)
fault("eps-inside-sqrt", "update", adaptive, own_optimizer)
fault(
    "decay-coupled",
    ("state", "update"),
    adaptive,
    decaying,
    scopes=("all", "matrices"),
    causes=("decay-coupled", "decay-decoupled"),
)
fault("decay-on-excluded", ("update", "state"), lambda j: True, excluding, scopes=("excluded",))
fault(
    "lr-scaled",
    "update",
    lambda j: not (j.variant % 2 and j.warmup and j.step == 0),
    scaled_lr,
    scopes=SOME,
    factor=lambda j: None if j.variant % 2 and j.warmup else j.facts["lr_factor"],
    causes=("lr-scaled", "lr-scaled-by-world", "lr-stale"),
)
fault(
    "step-counter",
    "state",
    lambda j: adaptive(j) and (several(j) or j.variant % 2 == 0),
    own_optimizer,
    causes=("step-counter", "step-counter-lost", "step-counter-per-microbatch"),
)
fault(
    "state-reset",
    "state",
    lambda j: j.step > 0 and (adaptive(j) or j.momentum > 0),
    own_optimizer,
    scopes=SOME,
    lasting=False,
)
fault(
    "state-swapped",
    "state",
    lambda j: j.step > 0 and (adaptive(j) or j.momentum > 0),
    own_optimizer,
    scopes=("all", "norms", "biases", "inner"),
    lasting=False,
)
fault(
    "tied-updated-twice",
    ("state", "update"),
    lambda j: j.model in ("tied", "recurrent"),
    own_optimizer,
    scopes=("embedding",),
    lasting=False,
)
fault(
    "sharded-norm-inside-update",
    "update",
    lambda j: j.mesh in ("fsdp2", "hsdp"),
    lamb,
    scopes=("all", "matrices", "inner"),
    lasting=False,
)
fault(
    "inf-skipped-on-some-ranks",
    "update",
    lambda j: by_scaler(j) and j.world > 1,
    scaled,
    lasting=False,
    factor=lambda j: 0.0,
)
fault(
    "param-not-in-optimizer",
    "update",
    lambda j: j.mesh in ("plain", "hand", "grid") and j.precision != "master" and not j.scale,
    scopes=("norms", "biases", "embedding", "inner"),
    factor=lambda j: 0.0,
)
fault("update-is-no-op", "update", lambda j: True, own_optimizer, scopes=SOME, factor=lambda j: 0.0)
fault(
    "update-from-other-gradient",
    ("state", "update"),
    lambda j: j.clip != "none",
    own_optimizer,
    scopes=SOME,
)
fault("update-ascends", "update", lambda j: True, own_optimizer, scopes=SOME)
fault(
    "master-stale",
    "param",
    lambda j: j.precision == "master",
    own_optimizer,
    scopes=SOME,
    lasting=False,
)
fault(
    "data-parallel-copies-drift",
    "param",
    lambda j: j.mesh == "hand" or (j.mesh == "ddp" and j.facts["drift"] == "main rank"),
    drifting,
    scopes=SOME,
    lasting=False,
)
