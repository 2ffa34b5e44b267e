"""What a job is: its mesh, its parameters, formats, reductions, clipping and optimizers, all drawn."""

from dataclasses import dataclass, field

import numpy as np
import torch

from step_campaign import rules, sums, values
from step_campaign.layout import Mesh, Whole, run_of, slice_of
from step_campaign.draws import chance, pick

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


@dataclass
class Formats:
    """In which format each stage is."""

    working: torch.dtype  # the parameter that forward and backward take
    gradient: torch.dtype  # of one microbatch
    accumulator: torch.dtype
    reduced: torch.dtype
    updated: torch.dtype  # the parameter that the optimizer updates
    has_master: bool = False


@dataclass
class Parameter:
    """A parameter, how its gradient is reduced and where its values lie."""

    name: str
    shape: tuple
    kind: str  # of its gradient's values
    scale: float
    state: str = "trained"  # or "frozen", or "idle": no gradient reaches it
    same_as: str | None = None
    # One for each communication: axis, the mesh's axes that it goes along, operation, divisor.
    reduce: list = field(default_factory=list)
    gradient_cut: tuple | None = None  # mesh axis and dimension
    value_cut: tuple | None = None  # mesh axis and dimension, or axis and None for a flat run
    transposed: bool = False
    place: tuple = (0, 0)  # optimizer and group
    skips: float = 0.0  # how often a microbatch gives it no gradient

    def box(self, cut, mesh, rank):
        """What a rank holds of a tensor that is cut so."""
        if cut is None:
            return Whole()
        axis, dimension = cut
        parts, index = mesh.sizes[axis], mesh.places[rank][axis]
        if dimension is None:
            return run_of(self.shape, parts, index)
        return slice_of(self.shape, dimension, parts, index)

    @property
    def summed(self):
        """The mesh axes along which gradients are addends."""
        return [axis for _, axes, _, _ in self.reduce for axis in axes]


@dataclass
class Job:
    """A step that is right."""

    mesh: Mesh
    formats: Formats
    parameters: list
    microbatches: int
    sent: torch.dtype
    order: str
    division: str
    each_reduced: bool  # each microbatch is reduced by itself
    has_accumulated: bool
    stale_zeros: bool
    loss_scale: float | None
    overflows: bool
    clip: dict
    optimizers: list  # of (rule, settings of each group)
    warm_steps: int
    late_steps: int
    by_placement: bool


def meshes(draw):
    """The mesh of a run and what it is for."""
    few = lambda *sizes: int(pick(draw, sizes))  # noqa: E731
    kind = pick(draw, ["alone", "captured", "data", "data", "tensor", "fsdp", "hsdp", "expert", "zero"])
    sizes = {
        "alone": lambda: {},
        "captured": lambda: {},
        "data": lambda: {"data": few(2, 3, 4, 5, 6, 8, 12, 16)},
        "tensor": lambda: {"data": few(1, 2, 3, 4), "tensor": few(2, 3, 4)},
        "fsdp": lambda: {"shard": few(2, 3, 4, 7, 8)},
        "hsdp": lambda: {"replicate": few(2, 3, 4), "shard": few(2, 3, 4)},
        "expert": lambda: {"expert_data": few(1, 2, 3, 4), "expert": few(2, 4)},
        "zero": lambda: {"data": few(2, 3, 4, 8)},
    }[kind]()
    return kind, Mesh(sizes)


def formats(draw, kind):
    """Formats that go together in some framework."""
    low = pick(draw, [BF16, BF16, F16])
    which = pick(draw, ["full", "full", "full", "low", "master", "master", "mixed", "double"])
    if which == "double":
        return Formats(F64, F64, F64, F64, F64)
    if which == "low":
        return Formats(low, low, pick(draw, [low, low, F32]), low, low)
    if which == "master":
        accumulator = pick(draw, [low, F32, F32])
        return Formats(low, low, accumulator, pick(draw, [accumulator, low]), F32, True)
    if which == "mixed" and kind in ("fsdp", "hsdp"):
        return Formats(F32, low, pick(draw, [low, F32]), F32, F32)
    return Formats(F32, F32, pick(draw, [F32] * 8 + [BF16, F16]), F32, F32)


def shape_of(draw):
    sizes = lambda most: int(draw.integers(1, most + 1))  # noqa: E731
    kind = pick(draw, ["row", "row", "matrix", "matrix", "matrix", "matrix", "kernel", "number", "one", "none", "thin"])
    return {
        "row": lambda: (sizes(300),),
        "matrix": lambda: (sizes(40), sizes(40)),
        "kernel": lambda: (sizes(8), sizes(6), sizes(3), sizes(3)),
        "number": lambda: (),
        "one": lambda: (1,) * sizes(3),
        "none": lambda: pick(draw, [(0,), (0, 4)]),
        "thin": lambda: pick(draw, [(1, sizes(200)), (sizes(200), 1)]),
    }[kind]()


def place(draw, kind, mesh, parameter):
    """How the gradient is reduced, and what is cut."""
    op = lambda: pick(draw, ["mean", "mean", "sum"])  # noqa: E731
    dimensions = len(parameter.shape) if 0 not in parameter.shape else 0
    if kind in ("data", "zero"):
        parameter.reduce = [("data", ["data"], op(), None)]
        if kind == "zero":
            parameter.value_cut = ("data", None) if dimensions else None
    elif kind == "tensor":
        parameter.reduce = [("data", ["data"], op(), None)]
        way = pick(draw, ["cut", "cut", "same", "addends"])
        if way == "cut" and dimensions:
            cut = ("tensor", int(draw.integers(dimensions)))
            parameter.gradient_cut = parameter.value_cut = cut
        elif way == "addends":
            parameter.reduce.insert(0, ("tensor", ["tensor"], "sum", None))
    elif kind in ("fsdp", "hsdp"):
        parameter.reduce = [("shard", ["shard"], "mean", None)]
        if kind == "hsdp":
            parameter.reduce.append(("replicate", ["replicate"], "mean", None))
        if dimensions:
            parameter.value_cut = ("shard", pick(draw, [0, 0, None]))
    elif kind == "expert":
        place_expert(draw, mesh, parameter, op())


def place_expert(draw, mesh, parameter, op):
    """Experts lie on the ranks of an expert group; all else is on every rank."""
    if len(parameter.shape) == 3:
        parameter.gradient_cut = parameter.value_cut = ("expert", 0)
        divisor = float(mesh.world) if chance(draw, 0.5) else None
        op = "sum" if divisor else op
        parameter.reduce = [("expert_data", ["expert_data"], op, divisor)]
        parameter.skips = pick(draw, [0.0, 0.3])
    elif chance(draw, 0.5):
        parameter.reduce = [("world", ["expert_data", "expert"], op, None)]
    else:
        parameter.reduce = [("expert_data", ["expert_data"], op, None), ("expert", ["expert"], op, None)]


# How parameters are called.
NAMES = (
    "layers.{}.weight", "layers.{}.bias", "norm.{}.scale", "blocks.{}.attention.wq", "head{}",
)  # fmt: skip


def parameters(draw, kind, mesh, own, groups):
    """The parameters of a job."""
    made = []
    low, high = values.DECADES[values.name_of(own.gradient)]
    common = draw.uniform(low, high)
    for index in range(int(draw.integers(1, 9))):
        name = pick(draw, NAMES)
        shape = shape_of(draw)
        if kind == "expert" and chance(draw, 0.4):
            experts = mesh.sizes["expert"] * int(draw.integers(1, 3))
            shape = (experts, int(draw.integers(1, 9)), int(draw.integers(1, 9)))
        # Parameters of a model have gradients of like sizes, or of sizes that nobody expects.
        decade = common + draw.normal() if chance(draw, 0.8) else draw.uniform(low, high)
        scale = float(10 ** np.clip(decade, low, high))
        parameter = Parameter(name.format(index), shape, values.kind_of(draw), scale)
        parameter.state = pick(draw, ["trained"] * 18 + ["frozen", "idle"])
        if made and chance(draw, 0.04):
            parameter.same_as = made[0].name if made[0].same_as is None else None
        parameter.place = pick(draw, groups)
        parameter.transposed = len(shape) == 2 and chance(draw, 0.1)
        place(draw, kind, mesh, parameter)
        made.append(parameter)
    return made


def sent(draw, own):
    """What a reduction sends. Nobody sends numbers of bf16 as f16, in which small ones vanish."""
    if own.accumulator == F64:
        return F64
    others = [F32, BF16] if BF16 in (own.gradient, own.accumulator) else [F32, BF16, F16]
    return pick(draw, [own.accumulator] * 5 + others)


def clipping(draw):
    """How gradients are clipped, if they are."""
    way = pick(draw, ["none", "none", "norm", "norm", "norm", "norm", "value", "groups", "measured"])
    return {
        "way": way,
        "kind": pick(draw, [2.0] * 6 + [1.0, 3.0, float("inf")]),
        "bound": pick(draw, [float(10 ** draw.uniform(-3, 0)), 10.0, 0.3, 1.0, 0.0, float("inf")]),
        "norm": pick(draw, ["torch", "torch", "f32", "host"]),
        "applied": pick(draw, ["torch", "torch", "host", "divided"]),
    }


def job_of(seed, index, attempt, kind, mesh):
    """The job of this index; `attempt` counts those before it that gave no numbers."""
    draw = np.random.default_rng([seed, index, attempt])
    own = formats(draw, kind)
    optimizers = [
        (rules.rule_of(draw, own.updated), [{}, *([rules.group_of(draw)] if chance(draw, 0.4) else [])])
        for _ in range(2 if chance(draw, 0.15) else 1)
    ]
    groups = [(at, group) for at, (_, settings) in enumerate(optimizers) for group in range(len(settings))]
    microbatches = int(pick(draw, [1, 1, 2, 2, 3, 4, 5, 8, 16]))
    scaled = own.gradient in (F16, F32) and chance(draw, 0.3)
    each_reduced = kind in ("fsdp", "hsdp", "data") and chance(draw, 0.2)
    narrow = own.accumulator != own.gradient
    job = Job(
        mesh, own, parameters(draw, kind, mesh, own, groups), microbatches,
        sent=sent(draw, own),
        order=pick(draw, list(sums.ORDERS)),
        division=pick(draw, list(sums.DIVISIONS)),
        each_reduced=each_reduced,
        has_accumulated=narrow or (microbatches > 1 and chance(draw, 0.8)),
        stale_zeros=chance(draw, 0.1),
        loss_scale=float(pick(draw, [2.0**int(draw.integers(0, 25)), 1000.0])) if scaled else None,
        overflows=scaled and chance(draw, 0.15),
        clip=clipping(draw),
        optimizers=optimizers,
        warm_steps=pick(draw, [0, 1, 1, 2, 3, 6]),
        late_steps=pick(draw, [0, 0, 0, 0, 99, 1000, 100_000]),
        by_placement=chance(draw, 0.5),
    )  # fmt: skip
    job.has_accumulated |= hides_accumulator(job)
    return draw, job


def hides_accumulator(job):
    """Whether microbatches are summed in few bits which nothing after the sum is in. Nobody could know of
    such a sum unless it is recorded, and it is a finding where wider formats are declared."""
    own = job.formats
    is_narrow = own.accumulator in (BF16, F16) and own.accumulator not in (job.sent, own.reduced)
    return is_narrow and job.microbatches > 1 and not job.each_reduced
