"""The models and optimizers of a job that has not handed them over, and the mesh that they lie on."""

import gc
from collections.abc import Sequence
from typing import Any

import torch

from backtape import frameworks
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
    for model in models:
        for parameter in model.parameters():
            if is_dtensor(parameter):
                mesh = parameter.device_mesh
                root = getattr(mesh, "_get_root_mesh", lambda mesh=mesh: mesh)()
                return root if root.size() == ranks else None
    return {"data": ranks} if ranks > 1 else None


def data_axes(models: Sequence[torch.nn.Module], mesh: Any) -> list[str] | None:
    """The axes of the mesh along which ranks have tokens of their own; None where ranks share tokens or that
    is not known, as in tensor parallelism."""
    if mesh is None or isinstance(mesh, dict):
        return list(mesh or ())
    names: tuple[str, ...] = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
    # FSDP reduces gradients over the axes of its own mesh, so their ranks have other tokens.
    sharded = [group.mesh_info.mesh for model in models for group in parameter_groups(model)]
    reduced = {mesh.size() for mesh in sharded}
    return list(names) if reduced == {mesh.size()} else None
