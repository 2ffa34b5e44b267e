"""What has been taken of a step, and of which parameter."""

import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from backtape._native import RecorderError, sums_of
from backtape.sampling import Sampling
from backtape.shards import PlainParts
from backtape.step_torch.choice import SUMMED, note_squares, regions_of, shape_of
from backtape.step_torch.parts import Gradient, Part, local, parts_of
from backtape.step_torch.patches import Patches
from backtape.step_torch.scales import Scales
from backtape.tape import Tape
from backtape.torch_arrays import dtype_name, is_dtensor, is_plain, plain_parts

# Adds to the communications of gradients, by parameter.
Reductions = Callable[["Capture", dict[str, list[dict[str, Any]]]], None]

# The place of a tensor that has all elements of its parameter.
WHOLE: dict[str, Any] = {}

# Integers of the same width, as which the bits of a tensor are summed.
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Said:
    """What the job says of a step by options."""

    reduce: dict[str, list[dict[str, Any]]] | None  # by globs of names
    rules: dict[str, Any]  # by the names of optimizers' classes
    accumulation: str | None = None  # "sum" or "mean" over microbatches
    loss_scale: float | None = None  # of the job's own


class Capture:
    """The capture of one step: the parameters, and what was taken of them.

    A gradient that changes several times within a step is one tensor that is recorded under several
    names. Each is taken once, by the first of several events that shows that the gradient is now
    what the name says: `reduced` is taken when the job unscales, norms, clips or steps, whichever
    comes first.
    """

    def __init__(
        self,
        tape: Tape,
        models: list[torch.nn.Module],
        owners: list[Any],
        sampling: Sampling | None,
        said: Said,
    ) -> None:
        self.tape = tape
        self._guards: dict[str, AbstractContextManager[None]] = {}
        self.models = models
        self.owners = owners  # the optimizers as the job gave them
        self.reduce = said.reduce
        self.rules = said.rules
        self.accumulation = said.accumulation
        self.sampling = sampling
        self.parts = parts_of(models)
        self.patches = Patches(self.guarded)
        self.handles: list[Any] = []  # hooks, to be removed
        self.lock = threading.Lock()  # hooks run in the threads of the backward
        self.microbatches = [0 for _ in models]
        self.norms: list[dict[str, Any]] = []
        self.clip_value: float | None = None
        self.loss_scale: float | None = None
        # What a GradScaler, or the job itself, multiplied the loss by.
        self.own_scale = None if said.loss_scale is None else float(said.loss_scale)
        self.scaled_loss = self.own_scale
        self.moved: dict[str, str] = {}  # when values became others, by parameter
        self.scales = Scales()  # of each backward pass
        self.divisor = 1.0  # of the sum over microbatches
        self.steps: list[Any] = []  # of optimizers.Step, by optimizer
        self.outers: list[Any] = []  # of outer.Outer
        self.is_refused = False  # what the job asked for cannot be
        self.copied: list[Part] = []  # those of which the job itself keeps copies of more bits
        # What else knows how the gradients of some parameters are reduced.
        self.reductions: list[tuple[list[Part], Reductions]] = []
        # What looks at the gradients before an optimizer takes them.
        self.own_clipping: Any = None
        self.scalings: Any = None  # own_scaling.Scalings
        # Those of each parameter, as they were at the first step of an optimizer.
        self.noted_reductions: dict[str, list[dict[str, Any]]] = {}
        self.unheld: list[Part] = []  # in no optimizer, where one holds tensors that are no parameters
        self.unknown: list[str] = []  # why an optimizer's step cannot be recorded

    def sample(self) -> None:
        """Draws what is recorded of each parameter."""
        for part in self.own:
            part.regions = regions_of(self.sampling, part)

    def give_up(self, reason: str) -> None:
        """Has none of the copies that a framework keeps, as not all that is needed of it was found."""
        for part in self.own:
            if part.master is not None:
                part.master = None
                part.refuse(reason)
        self.outers.clear()
        self.reductions.clear()
        self.patches.undo()
        self.patches = Patches(self.guarded)

    def guarded(self, subject: str) -> AbstractContextManager[None]:
        """Keeps what backtape raises from the job, unless the recorder is strict, and names it in the
        dump. That of a subject is made once and entered many times: it has no state."""
        guard = self._guards.get(subject)
        if guard is None:

            def omit(reason: str) -> None:
                self.tape.leave_out("step", None, f"{subject}: {reason}")

            # What the recorder refuses is named already.
            guard = self.tape.guarded("step algebra:", subject, omit, (RecorderError,))
            self._guards[subject] = guard
        return guard

    @property
    def own(self) -> Iterable[Part]:
        """The parameters without the second names of tied ones."""
        return (part for part in self.parts if part.same_as is None)

    def not_stepped(self) -> list[Part]:
        """The parameters that no optimizer has stepped: their `.grad` is still what it was before."""
        for step in self.steps:
            step.parts()  # notes which optimizer has which
        return [
            part
            for part in self.own
            if part.place is None or self.steps[part.place[0]].count == 0
        ]

    def take(self, stage: str, parts: Iterable[Part]) -> None:
        """Records `.grad` under the name of a stage, of the parameters of which it is not yet recorded."""
        for part in parts:
            # A gradient that came after the optimizer's step is of its next one.
            if stage in part.taken or part.same_as is not None or part.later:
                continue
            # A gradient that cannot be recorded, as one that is sparse, leaves the others as they are.
            with self.guarded(part.name):
                gradient = part.gradient()
                # A copy's gradient is made from that of the parameter, which is of its own format.
                if stage == "reduced" and part.master is not None and part.master.follows:
                    gradient = part.own_gradient() or gradient
                if stage == "reduced" and self.scalings is not None:
                    self.scalings.look(part)
                if gradient is not None:
                    self.take_gradient(stage, part, gradient)
                if stage == "reduced":
                    self.take_unscaled_copy(part)

    def take_unscaled_copy(self, part: Part) -> None:
        """Records the gradient of a copy from which the job has taken out a loss scale of its own."""
        copied = None if part.master is None or not part.master.follows else part.master.gradient()
        is_scaled = self.own_scale not in (None, 1.0) and "reduced" in part.taken
        if copied is not None and is_scaled and "unscaled" not in part.taken:
            self.loss_scale = self.own_scale
            self.take("unscaled", [part])

    def take_gradient(self, stage: str, part: Part, gradient: Gradient) -> None:
        """Records a gradient of a parameter under the name of a stage."""
        part.taken.add(stage)
        own = gradient.own()
        axes = partial_axes(own)
        bits = None
        if not axes and not (part.recorded and part.regions is None):
            bits = note_squares(part, stage, own, gradient.where)
        if not part.recorded:
            return
        if stage != "clipped":  # after which nobody asks
            part.mark = mark_of(gradient, bits)
        if axes:
            self._take_partial(stage, part, own, axes)
        else:
            self.record(stage, part, own, where=gradient.where)

    def _take_partial(
        self, stage: str, part: Part, gradient: torch.Tensor, axes: dict[str, str]
    ) -> None:
        """A DTensor gradient that is still an addend: the optimizer itself has it reduced, where nobody
        can look, so that `.grad` never holds the reduced gradient."""
        part.partial.update(axes)
        names = ", ".join(axes)
        reason = f".grad is still Partial over the mesh axis {names}: the optimizer reduces it"
        part.leave_out(stage, reason)
        if stage == "reduced" and "accumulated" not in part.taken:
            part.taken.add("accumulated")
            self.record("accumulated", part, gradient, addend=True)

    def same(self, parts: Iterable[Part]) -> None:
        """Notes that gradients which were written again, as with their product with 1, are still the same. Of one
        that is another the mark stays, so that it counts as changed."""
        for part in parts:
            now = mark_of(part.gradient())
            if now is not None and part.mark is not None and int(now[2]) == int(part.mark[2]):
                part.mark = now

    def note_clipped(self, parts: Iterable[Part]) -> None:
        """Notes that the gradients of these parameters are clipped now or were just now."""
        for part in parts:
            part.clipped = part.clipped or not part.later

    def record(
        self,
        stage: str,
        part: Part,
        tensor: torch.Tensor,
        *,
        microbatch: int | None = None,
        addend: bool = False,
        where: dict[str, Any] | None = None,
    ) -> None:
        """Hands a tensor of a parameter to the tape.

        addend: it is this rank's addend of a gradient.
        where: its place, as options of `Tape.record`, or `pieces`, each with the rows that it has of the
            tensor and its place; by default that of the holder. `WHOLE` is that of
            a whole parameter, as FSDP has it for a while, or of a tensor that has a shape of its own.
        """
        if not part.recorded:
            return
        name = f"step.{stage}:{part.name}"
        where = part.where if where is None else where
        if "pieces" in where:
            for rows, place in where["pieces"]:
                own = tensor[slice(*rows)]
                self._record(name, part, own, place, microbatch=microbatch, addend=addend)
            return
        self._record(name, part, tensor, where, microbatch=microbatch, addend=addend)

    def _record(
        self,
        name: str,
        part: Part,
        tensor: torch.Tensor,
        where: dict[str, Any],
        *,
        microbatch: int | None,
        addend: bool,
    ) -> None:
        if not where and is_plain(tensor) and (parts := self._plain_parts(part, tensor)):
            when, partial = ("pre_reduce", "sum") if addend else (None, None)
            self.tape.record_plain(name, tensor, parts, microbatch, when, partial)
            return
        key = dict(where)
        if addend:
            key["when"] = "pre_reduce"
            if partial_axes(tensor) and is_unsharded(tensor):
                # It says what it is an addend of on its own mesh, and nothing of data parallelism.
                tensor = local(tensor)
            if not partial_axes(tensor):
                key["partial"] = "sum"
        # A state of another shape, such as sums over rows, has no such elements.
        if part.regions is not None:
            shape = tuple(key.get("global_shape", tensor.shape))
            key["regions"] = part.regions if shape == shape_of(part) else None
        self.tape.record(name, tensor, microbatch=microbatch, **key)

    def _plain_parts(self, part: Part, tensor: torch.Tensor) -> PlainParts | None:
        """The parts of a tensor that are recorded, where `Tape.record_plain` takes it. All stages of a
        parameter mostly are alike."""
        like = (tensor.shape, tensor.dtype)
        if like not in part.plain:
            regions = part.regions if tuple(tensor.shape) == shape_of(part) else None
            part.plain[like] = plain_parts(tuple(tensor.shape), tensor.dtype, regions)
        return part.plain[like]

    def close(self) -> None:
        """Removes the hooks and puts back what was replaced. Raises nothing."""
        self.patches.undo()
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


def partial_axes(tensor: torch.Tensor) -> dict[str, str]:
    """The mesh axes over which a DTensor is still to be reduced, each with "sum" or "mean"."""
    if not is_dtensor(tensor):
        return {}
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    placements = tensor.placements  # type: ignore[attr-defined]
    names = mesh.mesh_dim_names or [f"axis{i}" for i in range(len(placements))]
    return {
        name: "mean" if getattr(placement, "reduce_op", "sum") == "avg" else "sum"
        for name, placement in zip(names, placements)
        if placement.is_partial()
    }


def is_unsharded(tensor: torch.Tensor) -> bool:
    """Whether each rank holds all elements of a DTensor."""
    return not any(placement.is_shard() for placement in tensor.placements)  # type: ignore[attr-defined]


def mark_of(gradient: Gradient | None, bits: int | None = None) -> tuple[Any, ...] | None:
    """What shows cheaply whether a gradient was changed: which tensor it is, how often torch has changed
    it in place, and a sum of its bits, which also sees what is written through `.data`. bits: that sum,
    where it is known."""
    if gradient is None:
        return None
    whole = gradient.whole
    return id(whole), whole._version, bits_of(gradient.own()) if bits is None else bits


def bits_of(gradient: torch.Tensor) -> Any:
    """The sum of the bits of a gradient: as integers of its own width where `note_squares` sums them,
    and otherwise of 64 bits where it has as many."""
    if gradient.dtype in SUMMED and is_plain(gradient):
        return sums_of(gradient.data_ptr(), gradient.nbytes, dtype_name(gradient.dtype))[1]
    flat = local(gradient).contiguous().reshape(-1)
    if not flat.numel() or flat.itemsize not in WORDS:
        return 0
    # Wide words are summed five times as fast.
    if flat.nbytes % 8 == 0 and flat.storage_offset() * flat.itemsize % 8 == 0:
        return flat.view(torch.int64).sum()
    return flat.view(WORDS[flat.itemsize]).sum(dtype=torch.int64)


def changed(part: Part) -> bool:
    """Whether a gradient is another than when it was last recorded."""
    now = mark_of(part.gradient())
    if now is None or part.mark is None:
        return now is not part.mark
    return now[:2] != part.mark[:2] or int(now[2]) != int(part.mark[2])
