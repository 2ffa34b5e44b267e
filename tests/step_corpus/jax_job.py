"""Jobs in jax by their numbers: one process, one or several devices, optax, and which fault.

The ranges are those of job.py, as far as a number is there; the model is jax_trainer.py's.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from step_corpus.job import RANGES, generator

# Faults that a job in jax has a place for.
PLANTED = (
    "accumulate-window",
    "accumulate-doubles",
    "accumulate-low-precision",
    "microbatch-scale",
    "reduce-sum-for-mean",
    "reduce-mean-for-sum",
    "reduced-mean-twice",
    "rank-left-out",
    "gradient-scaled",
    "ranks-weighted",
    "loss-scale-left-in",
    "loss-scale-taken-out-twice",
    "norm-misses-group",
    "norm-low-precision",
    "clip-recorded-not-applied",
    "clip-twice",
    "bias-correction-missing",
    "bias-correction-twice",
    "eps-inside-sqrt",
    "decay-coupled",
    "decay-on-excluded",
    "lr-scaled",
    "step-counter",
    "state-reset",
    "update-is-no-op",
    "update-from-other-gradient",
    "update-ascends",
)
OF_ACCUMULATION = {
    "accumulate-window",
    "accumulate-doubles",
    "accumulate-low-precision",
    "microbatch-scale",
}
OF_REDUCTION = {
    "reduce-sum-for-mean",
    "reduce-mean-for-sum",
    "reduced-mean-twice",
    "rank-left-out",
    "gradient-scaled",
    "ranks-weighted",
}
OF_CLIPPING = {
    "norm-low-precision",
    "norm-misses-group",
    "clip-recorded-not-applied",
    "clip-twice",
    "update-from-other-gradient",
}
OF_ADAM = {
    "bias-correction-missing",
    "bias-correction-twice",
    "eps-inside-sqrt",
    "decay-coupled",
    "step-counter",
}
SCOPES = ("all", "all", "biases", "kernels", "embedding")
WHOLE = {
    "accumulate-low-precision",
    "ranks-weighted",
    "norm-low-precision",
    "clip-recorded-not-applied",
    "clip-twice",
    "eps-inside-sqrt",
    "decay-coupled",
    "step-counter",
    "update-ascends",
    "lr-scaled",
    "state-reset",
    "bias-correction-missing",
    "bias-correction-twice",
}


@dataclass
class Job:
    """All that decides what a job computes. `fault` is None in the fixed twin."""

    part: str
    seed: int
    fault: str | None
    devices: int
    gated: bool
    width: int
    vocabulary: int
    depth: int
    rows: int
    microbatches: int
    accumulates: bool  # the sum over microbatches is handed to backtape too
    operation: str
    rule: str
    lr: float
    betas: tuple[float, float]
    eps: float
    decay: float
    masked: bool
    momentum: float
    nesterov: bool
    clip: bool
    limit: float
    scale: float
    step: int
    scope: str
    variant: int
    factor: float
    world: int = 1
    precision: str = "f32"
    mesh: str = "jax"
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def told(self) -> dict[str, Any]:
        """What differs from the plainest job, for people."""
        return {
            "mesh": f"jax {self.devices} devices",
            "precision": self.precision,
            "microbatches": self.microbatches,
            "optimizer": f"optax {self.rule}",
            "clip": self.clip,
            "step": self.step,
            "scale": self.scale,
            "scope": self.scope,
            "variant": self.variant,
            "accumulated": self.accumulates,
        }


def draw_job(rng: np.random.Generator, part: str, fault: str) -> Job:
    """A job that this fault may be planted in."""
    ranges = RANGES[part]
    pick = lambda values: values[int(rng.integers(len(values)))]
    chance = lambda share: bool(rng.random() < share)
    rule = pick(["sgd", "adam", "adamw"])
    momentum = pick([0.0, *ranges["momentum"]])
    several = fault in OF_REDUCTION
    job = Job(
        part=part,
        seed=int(rng.integers(1 << 30)),
        fault=None,
        devices=pick([2, 4] if several else [1, 2, 4]),
        gated=part == "held-out",
        width=pick(ranges["widths"]),
        vocabulary=pick(ranges["vocabularies"]),
        depth=pick(ranges["depths"]),
        rows=2 * pick(ranges["rows"]),
        microbatches=pick(ranges["microbatches"]),
        accumulates=chance(0.5),
        operation=pick(["mean", "sum"]),
        rule=rule,
        lr=float(10 ** rng.uniform(*ranges["sgd_lr" if rule == "sgd" else "lr"])),
        betas=(pick(ranges["beta1"]), pick(ranges["beta2"])),
        eps=pick(ranges["eps"]),
        decay=pick([0.0, *ranges["decay"]]),
        masked=chance(0.4),
        momentum=momentum,
        nesterov=momentum > 0 and chance(0.5),
        clip=fault in OF_CLIPPING or chance(0.5),
        limit=float(rng.uniform(*ranges["limits"])),
        scale=pick(ranges["scales"])
        if "loss-scale" in fault
        else pick([0.0, 0.0, *ranges["scales"]]),
        step=pick(ranges["steps"]),
        scope="all" if fault in WHOLE else pick(SCOPES),
        variant=int(rng.integers(12)),
        factor=pick(ranges["factors"]),
    )
    change(job, fault, rng, ranges)
    return job


def change(job: Job, fault: str, rng: np.random.Generator, ranges: dict[str, Any]) -> None:
    """What a fault asks of a job."""
    job.facts = {
        "copies": job.devices,
        "lost": int(rng.integers(job.microbatches)),
        "lr_factor": 1.0,
    }
    if fault == "reduce-sum-for-mean" or fault == "reduced-mean-twice":
        job.operation = "mean"
    if fault == "reduce-mean-for-sum":
        job.operation = "sum"
    if fault in ("decay-coupled", "decay-on-excluded"):
        job.decay, job.rule = max(ranges["decay"]), "adamw"
        job.masked = fault == "decay-on-excluded"
    if fault == "decay-on-excluded":
        job.scope = "biases"
    if fault == "lr-scaled":
        job.facts["lr_factor"] = float(
            job.devices if job.devices > 1 else 1 / max(job.microbatches, 2)
        )
    if fault == "norm-misses-group":
        job.scope = ("biases", "kernels", "embedding")[job.variant % 3]


def fits(job: Job, fault: str) -> bool:
    """Whether the job has room for the fault, and the fault one meaning."""
    if fault in OF_ACCUMULATION and job.microbatches == 1:
        return False
    if fault in OF_ADAM and job.rule == "sgd":
        return False
    if fault == "state-reset" and (job.step == 0 or (job.rule == "sgd" and job.momentum == 0)):
        return False
    if fault == "step-counter" and job.microbatches == 1 and job.variant % 2:
        return False
    factors = {
        "reduce-sum-for-mean",
        "reduce-mean-for-sum",
        "reduced-mean-twice",
        "microbatch-scale",
    }
    return fault not in factors or job.microbatches != job.devices


def job_of(fault: Any, part: str, draw: int, seed: int) -> tuple[Job, Job]:
    """The job with the fault, and its twin without."""
    rng = generator(part, f"jax {fault.name}", draw, seed)
    while True:
        job = draw_job(rng, part, fault.name)
        if fits(job, fault.name):
            return dataclasses.replace(job, fault=fault.name), job
