"""A job by its numbers: which model, mesh, optimizer and precision, and which fault it has.

Every number is drawn from one of two sets of ranges that have none in common: `develop`, on which
tolerances and rules may be tuned, and `held-out`, which is only reported. The held-out set also has
model code of its own (held_models.py).
"""

import dataclasses
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np

RANGES: dict[str, dict[str, Any]] = {
    "develop": {
        "models": ["mlp", "transformer", "tied", "experts"],
        "widths": [8, 12, 16, 24],
        "vocabularies": [13, 24, 37],
        "depths": [1, 2],
        "rows": [3, 4, 6],
        "lengths": [5, 8],
        "microbatches": [1, 2, 4],
        "steps": [0, 1, 4],
        "lr": (-3.0, -1.5),
        "sgd_lr": (-2.0, -0.5),
        "beta1": [0.9, 0.85],
        "beta2": [0.999, 0.95],
        "eps": [1e-8, 1e-6],
        "decay": [0.01, 0.1],
        "momentum": [0.9, 0.5],
        "limits": (0.2, 0.6),
        "scales": [1024.0, 65536.0],
        "factors": [1.03, 0.873, 0.62],
        "drifts": [1e-3, 1e-2],
    },
    "held-out": {
        "models": ["gated", "recurrent", "convolution", "routed"],
        "widths": [10, 14, 20, 32],
        "vocabularies": [17, 29, 41],
        "depths": [1, 3],
        "rows": [2, 5, 7],
        "lengths": [6, 7, 11],
        "microbatches": [1, 3, 5],
        "steps": [2, 3, 6],
        "lr": (-3.6, -1.2),
        "sgd_lr": (-2.6, -0.2),
        "beta1": [0.8, 0.95],
        "beta2": [0.98, 0.99, 0.9995],
        "eps": [1e-7, 1e-5],
        "decay": [0.03, 0.2],
        "momentum": [0.8, 0.95],
        "limits": (0.1, 0.7),
        "scales": [256.0, 16384.0],
        "factors": [0.97, 1.21, 0.7],
        "drifts": [3e-3, 3e-2],
    },
}

MESHES = ["plain", "ddp", "hand", "fsdp2", "hsdp", "grid", "tp", "ep"]
# What a mesh takes: numbers of ranks, and precisions.
WORLDS = {
    "plain": [1],
    "ddp": [2, 4],
    "hand": [2, 4],
    "fsdp2": [2, 4],
    "hsdp": [4],
    "grid": [4],
    "tp": [2, 4],
    "ep": [4],
}
PRECISIONS = {
    "plain": ["f32", "bf16", "master"],
    "ddp": ["f32", "bf16", "master"],
    "hand": ["f32", "bf16", "master"],
    "fsdp2": ["f32", "bf16"],
    "hsdp": ["f32"],
    "grid": ["f32"],
    "tp": ["f32"],
    "ep": ["f32"],
}
# Gradients that are in no wrapper's care are reduced by code of the job.
BY_HAND = {"hand", "grid", "ep", "tp"}


@dataclass
class Job:
    """All that decides what a job computes. `fault` is None in the fixed twin."""

    part: str
    seed: int
    fault: str | None
    mesh: str
    world: int
    model: str
    width: int
    vocabulary: int
    depth: int
    rows: int
    length: int
    microbatches: int
    each: bool  # every microbatch is reduced by itself, or all in one communication
    buffer: bool  # gradients are added in a buffer of the job, as Megatron's main_grad
    operation: str  # of a reduction by hand
    precision: str
    rule: str  # SGD, Adam, AdamW; Lamb where a fault is of it
    own: bool  # the optimizer is the job's code
    way: str  # single, foreach or fused
    lr: float
    warmup: bool
    betas: tuple[float, float]
    eps: float
    decay: float
    excluded: bool  # norms and biases are a group that does not decay
    momentum: float
    nesterov: bool
    clip: str  # none, norm, inf, value
    own_clip: bool  # the norm is computed and applied by the job's code
    limit: float  # of the norm: a share of what it is
    scale: float  # 0: no loss scale
    step: int
    always: bool  # the fault acts in all steps, or in the recorded one only
    scope: str  # which parameters it concerns
    variant: int
    factor: float
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def told(self) -> dict[str, Any]:
        """What differs from the plainest job, for people."""
        optimizer = (
            f"{'own ' if self.own else ''}{self.rule} {'' if self.own else self.way}".strip()
        )
        clip = f"{'own ' if self.own_clip else ''}{self.clip}"
        return {
            "mesh": f"{self.mesh} {self.world}",
            "model": self.model,
            "precision": self.precision,
            "microbatches": self.microbatches,
            "optimizer": optimizer,
            "clip": clip,
            "step": self.step,
            "scale": self.scale,
            "scope": self.scope,
            "variant": self.variant,
        }


def generator(part: str, fault: str, draw: int, seed: int) -> np.random.Generator:
    """The random numbers of one draw of one fault."""
    return np.random.default_rng(
        [seed, draw, zlib.crc32(fault.encode()), zlib.crc32(part.encode())]
    )


def draw_job(rng: np.random.Generator, part: str) -> Job:
    """Any job of a part, without a fault."""
    ranges = RANGES[part]
    pick = lambda values: values[int(rng.integers(len(values)))]
    chance = lambda share: bool(rng.random() < share)
    mesh = pick(MESHES)
    rule = pick(["SGD", "Adam", "AdamW", "AdamW"])
    precision = pick(PRECISIONS[mesh])
    own = precision == "master" or chance(0.3)
    # torch's optimizers of many tensors at a time take no mixture of DTensors and others.
    way = "single" if mesh in ("tp", "ep") else pick(["single", "foreach", "fused"])
    if way == "fused" and rule == "SGD" and mesh in ("fsdp2", "hsdp"):
        way = "foreach"  # torch has no fused SGD of DTensors
    microbatches = pick(ranges["microbatches"])
    momentum = pick([0.0, *ranges["momentum"]])
    clip = pick(["none", "norm", "norm", "inf", "value"])
    return Job(
        part=part,
        seed=int(rng.integers(1 << 30)),
        fault=None,
        mesh=mesh,
        world=pick(WORLDS[mesh]),
        model="sharded-experts"
        if mesh == "ep"
        else "parallel"
        if mesh == "tp"
        else pick(ranges["models"]),
        width=pick(ranges["widths"]),
        vocabulary=pick(ranges["vocabularies"]),
        depth=pick(ranges["depths"]),
        rows=pick(ranges["rows"]),
        length=pick(ranges["lengths"]),
        microbatches=microbatches,
        each=chance(0.4),
        buffer=mesh in ("plain", "hand", "grid") and chance(0.3),
        operation=pick(["mean", "mean", "sum"]),
        precision=precision,
        rule=rule,
        own=own,
        way=way,
        lr=float(10 ** rng.uniform(*ranges["sgd_lr" if rule == "SGD" else "lr"])),
        warmup=chance(0.4),
        betas=(pick(ranges["beta1"]), pick(ranges["beta2"])),
        eps=pick(ranges["eps"]),
        decay=pick([0.0, *ranges["decay"]]),
        excluded=chance(0.5),
        momentum=momentum,
        nesterov=momentum > 0 and chance(0.5),
        clip=clip,
        own_clip=clip in ("norm", "inf") and (mesh in ("tp", "ep") or chance(0.3)),
        limit=float(rng.uniform(*ranges["limits"])),
        scale=pick([0.0, 0.0, *ranges["scales"]]) if mesh in ("plain", "ddp", "hand") else 0.0,
        step=pick(ranges["steps"]),
        always=False,
        scope="all",
        variant=int(rng.integers(12)),
        factor=pick(ranges["factors"]),
    )


def job_of(fault: Any, part: str, draw: int, seed: int) -> tuple[Job, Job]:
    """The job with the fault, and its twin without. Jobs that the fault cannot be planted in are drawn
    again."""
    rng = generator(part, fault.name, draw, seed)
    for _ in range(10_000):
        job = draw_job(rng, part)
        fault.prepare(job, rng, RANGES[part])
        if fault.fits(job):
            return dataclasses.replace(job, fault=fault.name), job
    raise ValueError(f"no job of the part {part} has room for the fault {fault.name}")
