"""The parameters of a step, and what this rank holds of each.

Where a parameter's values and its reduced gradient lie, and where the gradient of one microbatch
appears, are two places under FSDP: the sharded parameter, which the optimizer updates, and the whole
one, which exists during forward and backward only.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from backtape import frameworks
from backtape.sampling import Region
from backtape.shards import PlainParts
from backtape.torch_parameters import flat_parameters, plain_name


@dataclass
class Values:
    """Samples of the values that a parameter had in the step; see moves.py."""

    begun: torch.Tensor | None  # when the tape began
    origin: torch.Tensor | None = None  # at the first backward pass
    first: torch.Tensor | None = None  # at the first one whose gradient is in the sum
    last: torch.Tensor | None = None  # at the last one
    stepped: torch.Tensor | None = None  # at the optimizer's step
    passes: int = 0
    is_fresh: bool = True  # the sum begins with the next pass


@dataclass
class Master:
    """What an optimizer updates in place of a parameter: a copy of more bits of it, or of a part of it."""

    # The tensor of the optimizer, which may have several parameters in it.
    holder: Callable[[], torch.Tensor | None]
    span: tuple[int, int] | None = None  # this parameter's elements in the flattened holder
    where: dict[str, Any] = field(default_factory=dict)  # its place, as options of `Tape.record`
    # The index of its group of the optimizer; None where only ranks know it that hold elements.
    group: int | None = None
    owner: Any = None  # the optimizer of torch that has it
    index: int = 0  # of the holder among those of the framework's optimizer
    begin: int = 0  # where it begins in what this rank has of the parameter, flattened
    # Where the gradient is; None: in the `.grad` of the holder.
    gradients: Callable[[], torch.Tensor | None] | None = None
    # The copy's gradient is made from the `.grad` of the parameter, which counts where it is not there yet.
    follows: bool = False
    left: tuple[Any, ...] | None = None  # the gradient that was there when the tape began

    def gradient(self) -> torch.Tensor | None:
        """The gradient of the whole holder."""
        if self.gradients is not None:
            return self.gradients()
        holder = self.holder()
        gradient = None if holder is None else holder.grad
        if gradient is not None and self.left is not None and self.left == state_of(gradient):
            return None
        self.left = None
        return gradient


def state_of(gradient: torch.Tensor) -> tuple[Any, ...]:
    """What tells a gradient from another that is written into its place. This waits for the device."""
    return id(gradient), gradient._version, float(local(gradient).double().sum())


@dataclass
class Gradient:
    """A gradient of a parameter as it is now."""

    whole: torch.Tensor  # of all that the holder has
    span: tuple[int, int] | None  # the parameter's elements in it
    where: dict[str, Any]  # its place, as options of `Tape.record`

    def own(self) -> torch.Tensor:
        """The gradient of the parameter alone."""
        return cut(self.whole, self.span)


@dataclass(eq=False)
class Part:
    """A parameter, and what this rank holds of it."""

    name: str
    model: int  # index of the model that it is of
    recorded: bool  # it is asked for
    # What has its values and `.grad`; None where this rank holds nothing of the parameter.
    holder: Callable[[], torch.Tensor | None]
    # What the optimizer has in its groups, where that is there without the values; FSDP1 only.
    listed: Callable[[], torch.Tensor | None] | None = None
    span: tuple[int, int] | None = None  # its elements in the flattened holder, if it is a part
    where: dict[str, Any] = field(default_factory=dict)  # its place, as options of `Tape.record`
    sharded: Any = None  # the FSDPParam of FSDP2
    flat: tuple[Any, int] | None = None  # the flat parameter of FSDP1, and the index in it
    leaf: torch.Tensor | None = None  # what a backward pass reaches, where that is not the holder
    # The place of the gradient that a backward pass gives, as options of `Tape.record`.
    whole: dict[str, Any] = field(default_factory=dict)
    # Where a framework sums gradients of microbatches, in place of `.grad`.
    summed: Callable[[], torch.Tensor | None] | None = None
    master: Master | None = None
    same_as: str | None = None  # the name of the parameter that it is tied to
    trainable: bool = True

    taken: set[str] = field(default_factory=set)  # stages that are recorded
    passes: list[int] = field(default_factory=list)  # microbatches whose gradient came
    reductions: int = 0  # communications of its gradient that were seen in this step
    partial: dict[str, str] = field(default_factory=dict)  # mesh axes of a Partial gradient
    clipped: bool = False  # something has clipped its gradient
    clip_value: float | None = None  # what its elements are to be clipped to
    stepped: tuple[Any, ...] | None = None  # which gradient it had when an optimizer had stepped it
    announced: bool = False  # the job has said only by which norm it is going to clip it
    mark: tuple[Any, ...] | None = None  # of the gradient when it was last recorded
    scalars: dict[str, list[Any]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    place: tuple[int, int | None] | None = None  # optimizer and group
    places: set[tuple[int, int | None]] = field(default_factory=set)  # of every optimizer that holds it
    # Of every optimizer that stepped while it had a gradient.
    stepped_by: set[int] = field(default_factory=set)
    later: bool = False  # a backward pass reached it after the step
    loss_scale: float | None = None  # what a scaler multiplied the loss by, before the last pass
    first_pass: int = 0  # the passes before this one were of another update
    values: Values | None = None  # None where nobody can know
    marks: tuple[Any, ...] = ()  # what shows whether something stepped since the last pass

    # What stands for it where it is sampled; None where it is recorded whole.
    regions: tuple[Region, ...] | None = None
    # Shape and dtype of tensors of it that lie in the host's memory, and what is recorded of these.
    plain: dict[tuple[Any, ...], PlainParts | None] = field(default_factory=dict)
    # By stage, the sum of the squares of what this rank holds of a gradient that is not recorded
    # whole; and shape, boxes held and dtype of that gradient, as they are declared.
    squares: dict[str, torch.Tensor | float] = field(default_factory=dict)
    held: dict[str, Any] = field(default_factory=dict)

    def value(self) -> torch.Tensor | None:
        """What this rank holds of the parameter."""
        holder = self.holder()
        return None if holder is None else self.cut(holder)

    def own_gradient(self) -> Gradient | None:
        """What this rank holds of `.grad` of the parameter itself."""
        holder = self.holder()
        if holder is None or holder.grad is None:
            return None
        return Gradient(holder.grad, self.span, self.where)

    def gradient(self) -> Gradient | None:
        """What this rank holds of the gradient: of that of its master copy where there is one."""
        if self.master is not None:
            whole = self.master.gradient()
            if whole is not None:
                return Gradient(whole, self.master.span, self.master.where)
            if not self.master.follows:
                return None
        return self.own_gradient()

    def in_groups(self) -> torch.Tensor | None:
        """What the optimizer has in its groups."""
        if self.master is not None:
            return self.master.holder()
        return self.holder() if self.listed is None else self.listed()

    def updated(self) -> Master:
        """What the optimizer updates: the master copy, or the parameter itself."""
        return self.master or Master(self.holder, self.span, self.where)

    def tensors(self) -> Iterator[torch.Tensor]:
        """The tensors by which a job may mean the parameter."""
        copy = None if self.master is None else self.master.holder()
        yield from (tensor for tensor in (self.leaf, self.holder(), copy) if tensor is not None)

    def cut(self, tensor: torch.Tensor) -> torch.Tensor:
        """This parameter's part of a tensor that has the elements of the holder."""
        return cut(tensor, self.span)

    def refuse(self, reason: str) -> None:
        """Notes that what happens to its gradient after the backward passes is not recorded."""
        for stage in ("reduced", "unscaled", "clipped"):
            self.taken.add(stage)
            self.leave_out(stage, reason)

    def leave_out(self, stage: str, reason: str) -> None:
        """Notes why a stage is not recorded; the first reason stays."""
        self.absent.setdefault(stage, reason)


def cut(tensor: torch.Tensor, span: tuple[int, int] | None) -> torch.Tensor:
    """Some elements of a flattened tensor; all of it where there is no span."""
    return tensor if span is None else tensor.detach().reshape(-1)[slice(*span)]


def parts_of(models: list[torch.nn.Module]) -> list[Part]:
    """The parameters of all models. Where two models have parameters of one name, `model0.`, `model1.`
    ... stand before the names of all."""
    listed = [list(of_model(index, model)) for index, model in enumerate(models)]
    names = [part.name for parts in listed for part in parts]
    if len(set(names)) < len(names):
        for index, parts in enumerate(listed):
            for part in parts:
                part.name = f"model{index}.{part.name}"
                if part.same_as is not None:
                    part.same_as = f"model{index}.{part.same_as}"
    parts = [part for parts in listed for part in parts]
    first: dict[int, str] = {}
    for part in parts:
        if part.same_as is None and part.sharded is None and part.flat is None:
            name = first.setdefault(id(part.holder()), part.name)
            # A module that two models share.
            part.same_as = None if name == part.name else name
    return parts


def rename(parts: list[Part], named: Callable[[Part], str]) -> None:
    """Gives parameters other names."""
    names = {part.name: named(part) for part in parts}
    for part in parts:
        part.name = names[part.name]
        part.same_as = names.get(part.same_as or "", part.same_as)


def of_model(index: int, model: torch.nn.Module) -> Iterator[Part]:
    """The parameters of one model, each under its first name, and the other names of tied ones."""
    flat = set()
    for prefix, parameter in flat_parameters(model):
        flat.add(id(parameter))
        flat.update(map(id, parameter._params or ()))
        flat.update(map(id, parameter._shared_params or ()))
        yield from of_flat(index, model, prefix, parameter)
    sharded = sharded_parameters(model)
    first: dict[int, str] = {}
    for long_name, parameter in model.named_parameters(remove_duplicate=False):
        name = plain_name(long_name, model)
        if id(parameter) in flat:
            continue
        of_fsdp = sharded.get(id(parameter))
        identity = id(of_fsdp) if of_fsdp is not None else id(parameter)
        yield Part(
            name,
            index,
            True,
            holder_of(parameter, of_fsdp),
            sharded=of_fsdp,
            same_as=first.get(identity),
            trainable=parameter.requires_grad,
        )
        first.setdefault(identity, name)


def holder_of(parameter: torch.Tensor, of_fsdp: Any) -> Callable[[], torch.Tensor | None]:
    """Gives the tensor that the optimizer has. FSDP2 replaces it where a job loads other values."""
    if of_fsdp is None:
        return lambda: parameter
    return lambda: of_fsdp.sharded_param


def of_flat(
    index: int, model: torch.nn.Module, prefix: str, parameter: Any
) -> Iterator[Part]:
    """The parameters that FSDP1 has made one flat parameter of."""
    infos = zip(parameter._fqns, parameter._shapes, parameter._shard_param_infos)
    for position, (name, shape, info) in enumerate(infos):
        part = Part(plain_name(prefix + name, model), index, True, lambda: None)
        part.flat = (parameter, position)
        part.trainable = parameter.requires_grad
        own = parameter._params[position] if parameter._params else None
        part.listed = holder_of(parameter if own is None else own, None)
        if own is not None:
            part.trainable = own.requires_grad
        if info.in_shard:
            begin = info.offset_in_shard
            part.where = {"global_shape": tuple(shape), "flat_offset": info.intra_param_start_idx}
            part.holder = part.listed
            part.span = (begin, begin + info.numel_in_shard) if own is None else None
        yield part
    for shared in parameter._shared_param_infos:
        name = ".".join(filter(None, (shared.module_name, shared.param_name)))
        prime = ".".join(filter(None, (shared.prim_module_name, shared.prim_param_name)))
        part = Part(plain_name(prefix + name, model), index, True, lambda: None)
        part.same_as = plain_name(prefix + prime, model)
        yield part


def sharded_parameters(model: torch.nn.Module) -> dict[int, Any]:
    """The FSDPParam of FSDP2, by the id of the sharded parameter and by that of the whole one."""
    by_id = {}
    for group in parameter_groups(model):
        for parameter in group.fsdp_params:
            by_id[id(parameter.sharded_param)] = parameter
            if hasattr(parameter, "_unsharded_param"):
                by_id[id(parameter._unsharded_param)] = parameter
    return by_id


def parameter_groups(model: torch.nn.Module) -> Iterator[Any]:
    """The FSDPParamGroups of FSDP2: the parameters that it communicates together. Modules that were handed to
    `fully_shard` as a list have one group in common."""
    fsdp = frameworks.imported("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", None)
    if kind is None:
        return
    seen: set[int] = set()
    for module in model.modules():
        if isinstance(module, kind):
            state = module._get_fsdp_state()
            several = getattr(state, "_fsdp_param_groups", None)
            groups = [state._fsdp_param_group] if several is None else several
            for group in groups:
                if group is not None and id(group) not in seen:
                    seen.add(id(group))
                    yield group


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor on this rank, or all of another tensor, without its history. No collective
    runs here, as could in any operation on a DTensor itself: even `detach` gathers a norm."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()
