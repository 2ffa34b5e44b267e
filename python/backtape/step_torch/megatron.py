"""Megatron-LM: which parts of parameters its optimizers update on this rank, where they lie in the whole
parameter, and how their gradients are reduced.

What is read of it stands in these files of megatron/core, at release 0.16: optimizer/optimizer.py,
optimizer/distrib_optimizer.py, distributed/distributed_data_parallel.py,
distributed/param_and_grad_buffer.py and distributed/finalize_model_grads.py.
"""

import functools
from collections.abc import Generator, Iterator
from typing import Any

import torch

from backtape import frameworks
from backtape.step_torch.backward import reduced_from
from backtape.step_torch.capture import Capture
from backtape.step_torch.outer import Outer, observe_method
from backtape.step_torch.parts import Master, Part, holder_of, rename
from backtape.step_torch.reduction import Entry, axis_of, entry, name_of, ranks_of
from backtape.torch_parameters import plain_name

def attach(capture: Capture) -> None:
    """Finds the optimizers of Megatron-LM among what the job hands over, and the copies that they keep."""
    base = getattr(frameworks.imported("megatron.core.optimizer.optimizer"), "MegatronOptimizer", None)
    if base is None:
        return
    owners: list[Any] = []
    layout = None
    for given in capture.owners:
        if not isinstance(given, base):
            owners.append(given)
            continue
        if layout is None:
            layout = Layout(capture)
            layout.place()
            layout.watch()
        chained = getattr(given, "chained_optimizers", [given])
        chained = [one for one in chained if not getattr(one, "is_stub_optimizer", False)]
        owners += [one.optimizer for one in chained]
        _attach(capture, layout, given, chained)
    capture.owners = owners


def _attach(capture: Capture, layout: "Layout", given: Any, chained: list[Any]) -> None:
    by_id = {id(part.holder()): part for part in capture.own}
    parts: list[Part] = []
    for optimizer in chained:
        for parameter, master in copies_of(optimizer):
            part = by_id.get(id(parameter))
            if part is None:
                continue
            if master is not None:
                master.owner = optimizer.optimizer
                start, copy = master.where.pop("flat_offset", None), master.holder()
                if start is None or copy is None:
                    master.where = dict(part.where)
                else:
                    master.where = in_part(part, parameter, (start, start + copy.numel()))
                    master.begin = start
                part.master = master
            parts.append(part)
    config = given.config
    outer = Outer(
        capture,
        given,
        [one.optimizer for one in chained],
        parts,
        lambda: float(given.get_loss_scale()),
        float(config.clip_grad or 0.0),
        lambda result: result[1] if isinstance(result, tuple) and len(result) > 1 else None,
        unscales_first=True,
        groups=[one.optimizer.param_groups for one in chained],
    )
    outer.is_gathered_late = any(
        getattr(one.ddp_config, "overlap_param_gather", False) for one in layout.wrappers
    )
    capture.outers.append(outer)
    outer.watch()
    for optimizer in chained:
        _watch(capture, outer, optimizer)
    capture.reductions.append((parts, functools.partial(layout.reduce, parts)))


def copies_of(optimizer: Any) -> Iterator[tuple[Any, Master | None]]:
    """The parameters of an optimizer of Megatron-LM, each with what it updates in place of it on this rank."""
    refuse_others(optimizer)
    groups = optimizer.optimizer.param_groups
    group_of = {id(one): at for at, group in enumerate(groups) for one in group["params"]}
    listed: set[int] = set()
    for parameters, copies in pairs_of(optimizer):
        for parameter, copy in zip(parameters, copies):
            if copy is None:
                continue
            where = {}
            if hasattr(optimizer, "_get_model_param_range_map"):
                where["flat_offset"] = optimizer._get_model_param_range_map(parameter)["param"].start
            listed.add(id(parameter))
            holder = holder_of(copy, None)
            yield parameter, Master(holder, where=where, group=group_of.get(id(copy)))
    for chunk in getattr(optimizer, "model_chunks", ()):
        for parameter in chunk.parameters():
            # Other ranks have all of it, or another optimizer.
            is_own = is_expert(parameter) == is_of_experts(optimizer)
            if is_own and parameter.requires_grad and id(parameter) not in listed:
                yield parameter, Master(lambda: None)
    if not listed:
        for group in groups:
            yield from ((parameter, None) for parameter in group["params"])


def refuse_others(optimizer: Any) -> None:
    """Raises TypeError for an optimizer that keeps its copies otherwise."""
    kinds = {type(optimizer).__name__, type(optimizer.optimizer).__name__}
    for name in kinds & {"LayerWiseDistributedOptimizer", "HybridDeviceOptimizer"}:
        raise TypeError(f"{name} of Megatron-LM keeps parameters where backtape does not look for them")
    if getattr(optimizer.config, "use_precision_aware_optimizer", False):
        raise TypeError("what use_precision_aware_optimizer of Megatron-LM keeps is not known to backtape")


def pairs_of(optimizer: Any) -> Iterator[tuple[list[Any], list[Any]]]:
    """Parameters and copies, group by group."""
    if hasattr(optimizer, "shard_fp32_from_float16_groups"):
        yield from zip(optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups)
        yield from zip(optimizer.model_fp32_groups, optimizer.shard_fp32_groups)
    elif hasattr(optimizer, "fp32_from_float16_groups"):
        yield from zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups)
        yield from ((own, own) for own in optimizer.fp32_from_fp32_groups)


def is_expert(parameter: Any) -> bool:
    """Whether it is a parameter of an expert, which ranks of other experts do not have."""
    return not getattr(parameter, "allreduce", True)


def is_of_experts(optimizer: Any) -> bool:
    """Whether an optimizer steps experts alone."""
    own = [one for group in optimizer.optimizer.param_groups for one in group["params"]]
    groups = [group for group in optimizer.optimizer.param_groups if group["params"]]
    return bool(own) and all(group.get("is_expert_parallel") for group in groups)


def in_part(part: Part, parameter: torch.Tensor, run: tuple[int, int]) -> dict[str, Any]:
    """The place of a run of the flattened part of a parameter that this rank has."""
    extent, (start, end) = tuple(parameter.shape), run
    if not part.where:
        return {"global_shape": extent, "flat_offset": start}
    if "pieces" not in part.where:
        return {**part.where, "flat_offset": start, "extent": extent}
    pieces, row = [], parameter.numel() // extent[0]
    for (first, last), place in part.where["pieces"]:
        begin, stop = max(first * row, start), min(last * row, end)
        if begin < stop:
            inside = {"flat_offset": begin - first * row, "extent": (last - first, *extent[1:])}
            pieces.append(((begin - start, stop - start), place | inside))
    return {"global_shape": part.where["global_shape"], "pieces": pieces}


def _watch(capture: Capture, outer: Outer, optimizer: Any) -> None:
    """Observes when the gradients are in their place, and when the loss scale is out of them."""

    def copied(given: Any, *_: Any, **__: Any) -> Generator[None, Any, None]:
        yield
        if given is optimizer and outer.turns <= 1:
            outer.take("reduced", _of(outer, optimizer))

    def unscaled(given: Any, *_: Any, **__: Any) -> Generator[None, Any, None]:
        yield
        if given is optimizer and outer.turns <= 1 and capture.loss_scale is not None:
            outer.take("unscaled", _of(outer, optimizer))

    is_mixed = hasattr(optimizer, "_copy_model_grads_to_main_grads")
    first = "_copy_model_grads_to_main_grads" if is_mixed else "prepare_grads"
    observe_method(capture, optimizer, first, copied)
    if is_mixed:
        observe_method(capture, optimizer, "_unscale_main_grads_and_check_for_nan", unscaled)


def _of(outer: Outer, optimizer: Any) -> list[Part]:
    """The parameters of one of several optimizers."""
    own = {id(one) for group in optimizer.optimizer.param_groups for one in group["params"]}
    return [part for part in outer.parts if id(part.in_groups()) in own]


def layers_of(model: torch.nn.Module) -> Iterator[tuple[str, str]]:
    """What the names of the parameters of each layer begin with, in a stage of a pipeline and in the whole model."""
    for name, module in model.named_modules():
        number = getattr(module, "layer_number", None)
        head, _, index = plain_name(name, model).rpartition(".")
        if isinstance(number, int) and index.isdigit():
            yield f"{head}.{index}.", f"{head}.{number - 1}."


class Layout:
    """How the parameters of a model of Megatron-LM lie on the ranks, and how their gradients are reduced."""

    def __init__(self, capture: Capture) -> None:
        self.capture = capture
        self.state = frameworks.imported("megatron.core.parallel_state")
        ddp = frameworks.imported("megatron.core.distributed.distributed_data_parallel")
        kind = getattr(ddp, "DistributedDataParallel", ())
        modules = [module for model in capture.models for module in model.modules()]
        self.wrappers = [module for module in modules if isinstance(module, kind)]
        self.factors = {id(module): 1.0 for module in self.wrappers}

    def place(self) -> None:
        """Names the parameters as the whole model has them, and says which part of each this rank has."""
        layers = [list(layers_of(model)) for model in self.capture.models]
        parts = self.capture.parts
        names = [self._name(part, part.holder(), layers[part.model]) for part in parts]
        # Chunks of one stage have other layers, and need no number before their names.
        short = [name.removeprefix(f"model{part.model}.") for name, part in zip(names, parts)]
        told = dict(zip(map(id, parts), short if len({*short}) == len(parts) else names))
        rename(parts, lambda part: told[id(part)])
        for part in self.capture.parts:
            parameter = part.holder()
            box = None if parameter is None else self._box(parameter)
            if box is not None:
                part.where = part.whole = box
            if hasattr(parameter, "main_grad"):
                part.summed = functools.partial(getattr, parameter, "main_grad")

    def _name(self, part: Part, parameter: Any, layers: list[tuple[str, str]]) -> str:
        name, chunk = part.name, ""
        if name.startswith(f"model{part.model}."):
            chunk, name = f"model{part.model}.", name.removeprefix(f"model{part.model}.")
        # A stage of a pipeline counts its own layers.
        own = next((pair for pair in layers if name.startswith(pair[0])), ("", ""))
        name = chunk + own[1] + name.removeprefix(own[0])
        if getattr(parameter, "shared_embedding", False) and self._embedding_ranks(parameter):
            return "embedding.word_embeddings.weight"
        size = self._size("expert_model") if is_expert(parameter) else 1
        return name if size == 1 else f"{name}@ep{self._rank('expert_model')}"

    def _box(self, parameter: Any) -> dict[str, Any] | None:
        """Which part of a parameter that is split over tensor parallel ranks this rank has."""
        kind = "expert_tensor" if is_expert(parameter) else "tensor_model"
        size, rank = self._size(kind), self._rank(kind)
        dim = getattr(parameter, "partition_dim", -1)
        is_split = getattr(parameter, "tensor_model_parallel", False) and dim >= 0 and size > 1
        # Of both halves of a gated layer each rank has its rows, one half after the other.
        count = getattr(parameter, "partition_stride", 1)
        if not is_split or count > 1 and dim > 0:
            return None
        shape, offsets = list(parameter.shape), [0] * parameter.ndim
        rows = shape[dim] // count
        shape[dim] *= size
        whole = {"global_shape": tuple(shape)}
        places = []
        for index in range(count):
            offsets[dim] = (index * size + rank) * rows
            place = whole | {"offsets": tuple(offsets)}
            places.append(((index * rows, (index + 1) * rows), place))
        return places[0][1] if count == 1 else whole | {"pieces": places}

    def _size(self, kind: str) -> int:
        return int(self._asked(f"get_{kind}_parallel_world_size", 1))

    def _rank(self, kind: str) -> int:
        return int(self._asked(f"get_{kind}_parallel_rank", 0))

    def _asked(self, name: str, otherwise: Any) -> Any:
        """What the state of parallelism says; groups that the job did not make are of one rank."""
        try:
            return getattr(self.state, name)()
        except (AssertionError, AttributeError):
            return otherwise

    def _embedding_ranks(self, parameter: Any) -> list[int]:
        """The ranks of the stages of a pipeline that share an embedding."""
        if not getattr(parameter, "shared_embedding", False):
            return []
        group = self._asked("get_embedding_group", None)
        ranks = [] if group is None else ranks_of(group)
        return ranks if len(ranks) > 1 else []

    def watch(self) -> None:
        """Observes the buffers of gradients: what goes into their communication, and by what they are scaled."""
        by_id = {id(part.holder()): part for part in self.capture.own}

        def scaled(module: Any, factor: Any, *_: Any, **__: Any) -> Generator[None, Any, None]:
            if id(module) in self.factors:
                self.factors[id(module)] *= float(factor)
            yield

        def sent(group: Any, *_: Any, **__: Any) -> Generator[None, Any, None]:
            for bucket in group.buckets:
                for parameter in bucket.params_list:
                    part = by_id.get(id(parameter))
                    if part is not None:
                        reduced_from(self.capture, part, parameter.main_grad, whole=True)
            yield

        for module in self.wrappers[:1]:
            observe_method(self.capture, module, "scale_gradients", scaled)
            groups = [*module.bucket_groups, *module.expert_parallel_bucket_groups]
            for group in groups[:1]:
                observe_method(self.capture, group, "start_grad_sync", sent)

    def reduce(
        self, parts: list[Part], capture: Capture, reductions: dict[str, list[Entry]]
    ) -> None:
        """Adds the communications of each parameter's gradient."""
        of_buffer = {}
        for module in self.wrappers:
            for buffer in [*module.buffers, *module.expert_parallel_buffers]:
                for parameter in buffer.param_to_bucket:
                    of_buffer[id(parameter)] = (module, buffer)
        for part in parts:
            parameter = part.holder()
            if id(parameter) not in of_buffer:
                continue
            module, buffer = of_buffer[id(parameter)]
            reductions[part.name] += self._of(part, parameter, module, buffer)

    def _of(self, part: Part, parameter: Any, module: Any, buffer: Any) -> Iterator[Entry]:
        mesh, sent = self.capture.tape.mesh, name_of(buffer.grad_dtype)
        group = module.expt_dp_group if is_expert(parameter) else module.dp_cp_group
        ranks = ranks_of(group)
        factor = float(buffer.gradient_scaling_factor) * self.factors[id(module)]
        if module.ddp_config.average_in_collective:
            factor /= len(ranks)
        if abs(factor * len(ranks) - 1.0) < 1e-12:
            yield entry(axis_of(mesh, ranks, "data"), "mean", ranks, sent)
        else:
            yield entry(axis_of(mesh, ranks, "data"), "sum", ranks, sent, divisor=1.0 / factor)
        op = self._over_tensor_ranks(part, parameter)
        if op is not None:
            tensor = ranks_of(self.state.get_tensor_model_parallel_group())
            yield entry(axis_of(mesh, tensor, "tp"), op, tensor, sent)
        shared = self._embedding_ranks(parameter)
        if shared:
            yield entry(axis_of(mesh, shared, "pipe"), "sum", shared, sent)

    def _over_tensor_ranks(self, part: Part, parameter: Any) -> str | None:
        """What is done with gradients that each tensor parallel rank has of its own tokens or heads."""
        if self._size("tensor_model") == 1:
            return None
        if getattr(parameter, "average_gradients_across_tp_domain", False):
            return "mean"
        config = next((module.config for module in self.wrappers), None)
        is_norm = "q_layernorm" in part.name or "k_layernorm" in part.name
        if getattr(config, "sequence_parallel", False) and getattr(parameter, "sequence_parallel", False):
            return "sum"
        return "sum" if is_norm and getattr(config, "qk_layernorm", False) else None
