"""The parameters of a torch model: their names without wrappers, and what this rank holds of each."""

from collections.abc import Iterator
from typing import Any

import torch

from backtape import frameworks

# What torch.compile, FSDP1 and checkpointing add to the names of parameters: whole parts of a dotted
# name, so that a module that the job calls `submodule` keeps its name.
WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}

# What DDP adds, and wrappers of other libraries.
WRAPPED = "module"


def parts_of(
    module: torch.nn.Module, what: str
) -> Iterator[tuple[str, torch.Tensor | None, dict[str, Any]]]:
    """The name, the tensor and the place (as options of `Tape.record`) of each parameter's "value" or
    "grad", whichever `what` says; None for a tensor that is not there."""
    of = (lambda p: p) if what == "value" else (lambda p: p.grad)
    flat = set()
    for prefix, parameter in flat_parameters(module):
        flat.add(id(parameter))
        flat.update(map(id, parameter._params or ()))
        infos = zip(parameter._fqns, parameter._shapes, parameter._shard_param_infos)
        for index, (name, shape, info) in enumerate(infos):
            if info.in_shard:
                own = parameter._params and parameter._params[index]
                begin, end = info.offset_in_shard, info.offset_in_shard + info.numel_in_shard
                held = of(own) if own is not None else of(parameter)
                if held is not None and own is None:
                    held = held.reshape(-1)[begin:end]
                where = {"global_shape": tuple(shape), "flat_offset": info.intra_param_start_idx}
                yield plain_name(prefix + name, module), held, where
    for name, parameter in module.named_parameters():
        if id(parameter) not in flat:
            yield plain_name(name, module), of(parameter), {}


def flat_parameters(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """The flat parameters of FSDP1 modules in `module`, each with the prefix of their names."""
    fsdp = frameworks.imported("torch.distributed.fsdp")
    if fsdp is None:
        return
    for name, child in module.named_modules():
        handle = getattr(child, "_handle", None)
        if isinstance(child, fsdp.FullyShardedDataParallel) and handle is not None:
            yield f"{name}." if name else "", handle.flat_param


def plain_name(name: str, root: torch.nn.Module) -> str:
    """The name of a parameter of `root` in the module that the job has written, without wrappers.

    A part `module` of it is that of a wrapper where the module around it has nothing else: so no two
    parameters get one name.
    """
    kept, owner = [], root
    for part in name.split("."):
        if part not in WRAPPERS and not (part == WRAPPED and is_wrapper(owner)):
            kept.append(part)
        owner = getattr(owner, part, None)
    return ".".join(kept)


def is_wrapper(module: Any) -> bool:
    """Whether a module holds one other, as `.module`, and no parameters itself."""
    return (
        isinstance(module, torch.nn.Module)
        and list(module._modules) == [WRAPPED]
        and not module._parameters
    )


def in_backward() -> bool:
    """True inside a backward pass, where a forward that runs is a recomputation."""
    return torch._C._current_graph_task_id() != -1
