"""The models and optimizers of a job that has not handed them over, and the mesh that they lie on."""

import gc
from collections.abc import Sequence
from typing import Any

import torch

from backtape import frameworks
from backtape.attach_torch.graph import TENSOR
from backtape.step_torch.parts import parameter_groups
from backtape.torch_arrays import is_dtensor


def optimizers_of(models: Sequence[torch.nn.Module]) -> list[Any]:
    """The optimizers of this process that hold parameters of these models."""
    held = {id(parameter) for model in models for parameter in model.parameters()}
    found = [
        optimizer
        for optimizer in _living(torch.optim.Optimizer)
        # A wrapper hands on the groups of the one that it wraps.
        if "param_groups" in vars(optimizer) and held & _parameters_of(optimizer)
    ]
    of_engines = [model.optimizer for model in models if is_engine(model)]
    found += [own for own in of_engines if own is not None and all(own is not one for one in found)]
    # ZeroRedundancyOptimizer has one of its own that steps for it, and so have those of DeepSpeed.
    inner = {id(own) for optimizer in found for own in vars(optimizer).values()}
    return [optimizer for optimizer in found if id(optimizer) not in inner and not is_list(optimizer)]


def is_list(optimizer: Any) -> bool:
    """Whether an optimizer has several that step for it, in a list, as that of torchtitan has."""
    held = [own for own in vars(optimizer).values() if isinstance(own, (list, tuple)) and own]
    return any(all(isinstance(one, torch.optim.Optimizer) for one in own) for own in held)


def with_wrappers(models: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """The models, or what a job has wrapped them in since it has handed them over: DDP and an engine of DeepSpeed
    hold their model and not the other way round."""
    kinds = [torch.nn.parallel.DistributedDataParallel, *_engine_kinds()]
    wrappers = [wrapper for kind in kinds for wrapper in _living(kind) if "_modules" in vars(wrapper)]
    around = {id(wrapper.module): wrapper for wrapper in wrappers}
    return [around.get(id(model), model) for model in models]


def is_engine(model: Any) -> bool:
    """Whether a model is an engine of DeepSpeed, which has the optimizer of its model: what that holds may be
    buffers in place of parameters."""
    return isinstance(model, tuple(_engine_kinds()))


def _engine_kinds() -> list[type]:
    """The class of DeepSpeed's engines, where the job has imported it."""
    kind = getattr(frameworks.imported("deepspeed.runtime.engine"), "DeepSpeedEngine", None)
    return [] if kind is None else [kind]


def models_of_optimizers() -> list[torch.nn.Module]:
    """The outermost modules that have parameters which an optimizer holds."""
    held: set[int] = set()
    for optimizer in _living(torch.optim.Optimizer):
        if "param_groups" in vars(optimizer):
            held |= _parameters_of(optimizer)
    modules = [module for module in _living(torch.nn.Module) if "_modules" in vars(module)]
    children = {id(child) for module in modules for child in module._modules.values()}
    return [
        module
        for module in modules
        if id(module) not in children
        and (is_engine(module) or any(id(p) in held for p in module.parameters()))
    ]


def _parameters_of(optimizer: Any) -> set[int]:
    return {id(p) for group in optimizer.param_groups for p in group["params"]}


def _living(kind: type) -> list[Any]:
    """Every object of a class that this process holds; those that nothing refers to any more are let go."""
    gc.collect()
    return [found for found in gc.get_objects() if issubclass(type(found), kind)]


def mesh_of(models: Sequence[torch.nn.Module]) -> Any:
    """The mesh that the ranks of a job are on: that of its DTensors, or one axis "data" of all ranks; None
    in a job of one rank."""
    distributed = frameworks.imported("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    ranks = distributed.get_world_size()
    of_megatron = _mesh_of_megatron(distributed)
    if of_megatron:
        return of_megatron
    for model in models:
        for parameter in model.parameters():
            if is_dtensor(parameter):
                mesh = parameter.device_mesh
                root = getattr(mesh, "_get_root_mesh", lambda mesh=mesh: mesh)()
                return root if root.size() == ranks else None
    return {"data": ranks} if ranks > 1 else None


def has_loss() -> bool:
    """Whether this rank computes a loss: of Megatron-LM's pipelines the last stage does."""
    state = frameworks.imported("megatron.core.parallel_state")
    is_pipeline = state is not None and state.model_parallel_is_initialized()
    return not is_pipeline or state.is_pipeline_last_stage(ignore_virtual=True)


def _mesh_of_megatron(distributed: Any) -> dict[str, int]:
    """The axes of a job of Megatron-LM, outermost first, without those of one rank; empty in any other job, and
    where its ranks lie in another order than the usual one."""
    state = frameworks.imported("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return {}
    groups = {
        "pipe": state.get_pipeline_model_parallel_group(),
        "data": state.get_data_parallel_group(),
        "context": state.get_context_parallel_group(),
        TENSOR: state.get_tensor_model_parallel_group(),
    }
    sizes = {name: group.size() for name, group in groups.items() if group.size() > 1}
    stride = 1
    for name, size in reversed(sizes.items()):
        ranks = distributed.get_process_group_ranks(groups[name])
        if any(after - before != stride for before, after in zip(ranks, ranks[1:])):
            return {}
        stride *= size
    return sizes


def axes_of(models: Sequence[torch.nn.Module], mesh: Any) -> tuple[list[str], dict[str, int]]:
    """The axes of the mesh along which ranks have tokens of their own, and those along which they share them, as
    in tensor parallelism, with their sizes."""
    if mesh is None or isinstance(mesh, dict):
        axes = dict(mesh or {})
        shared = {TENSOR: axes.pop(TENSOR)} if TENSOR in axes else {}
        axes.pop("pipe", None)  # The stage that has the head has all of it.
        return list(axes), shared
    names: tuple[str, ...] = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
    # FSDP reduces gradients over the axes of its own mesh, so their ranks have other tokens.
    sharded = [group.mesh_info.mesh for model in models for group in parameter_groups(model)]
    if {own.size() for own in sharded} == {mesh.size()}:
        return list(names), {}
    own = {name for one in sharded for name in one.mesh_dim_names or ()}
    return [name for name in names if name in own], {
        name: size for name, size in zip(names, mesh.shape) if name not in own
    }
