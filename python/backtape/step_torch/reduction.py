"""Over which ranks a gradient is reduced, with which operation, and in which dtype."""

import fnmatch
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from backtape import frameworks
from backtape.failopen import CAUGHT, describe
from backtape.shards import Mesh
from backtape.step_reductions import divisor_of
from backtape.step_torch.capture import Capture
from backtape.step_torch.parts import Part, parameter_groups
from backtape.torch_arrays import is_dtensor

# What torch's own hooks for DDP send.
SENT = {"fp16_compress_hook": "float16", "bf16_compress_hook": "bfloat16"}
PLAIN_HOOKS = {"allreduce_hook", *SENT}

Entry = dict[str, Any]


def checked(
    reduce: Mapping[str, Sequence[Mapping[str, Any]]] | None, mesh: Mesh | None
) -> dict[str, list[Entry]] | None:
    """What the job says of its reductions, with the ranks filled in. Raises ValueError for an entry that
    cannot be."""
    if reduce is None:
        return None
    return {glob: [_declared(dict(given), mesh) for given in listed] for glob, listed in reduce.items()}


def _declared(given: Entry, mesh: Mesh | None) -> Entry:
    unknown = given.keys() - {"axis", "op", "ranks", "group", "dtype", "divisor"}
    if unknown or given.get("op") not in ("sum", "mean") or not given.get("axis"):
        raise ValueError(
            f"reduce= has {given}: an entry is an axis, op 'sum' or 'mean', and ranks or a group "
            "where the axis is none of the recorder's mesh; dtype and divisor may be added"
        )
    more = {"divisor": divisor_of(given)} if given.get("divisor") is not None else {}
    axis, ranks = str(given["axis"]), given.get("ranks")
    if ranks is None and given.get("group") is not None:
        ranks = ranks_of(given["group"])
    if ranks is None:
        ranks = along(mesh, axis)
    if ranks is None:
        raise ValueError(f"reduce= names the axis {axis!r} without ranks, and the mesh has none")
    dtype = given.get("dtype")
    return entry(axis, given["op"], list(map(int, ranks)), dtype and name_of(dtype), **more)


def entry(axis: str, op: str, ranks: list[int], dtype: str | None, **more: Any) -> Entry:
    """One communication."""
    return {"axis": axis, "op": op, "ranks": ranks, "dtype": dtype, **more}


def name_of(dtype: Any) -> str:
    """A dtype's name, without torch's prefix."""
    return str(dtype).removeprefix("torch.")


def ranks_of(group: Any) -> list[int]:
    """The ranks of a process group, or of a mesh of one dimension. Of a group that was asked for before they are
    known when the job has destroyed it."""
    group = group.get_group() if hasattr(group, "get_group") else group
    if id(group) not in _ranks:
        distributed = frameworks.used("torch.distributed")
        _ranks[id(group)] = group, [int(rank) for rank in distributed.get_process_group_ranks(group)]
    return list(_ranks[id(group)][1])


# By id, the groups that were asked for, which are kept so that no other has their id, and their ranks.
_ranks: dict[int, tuple[Any, list[int]]] = {}


def along(mesh: Mesh | None, axis: str) -> list[int] | None:
    """The ranks along an axis of the recorder's mesh that this rank is on; without a mesh, all ranks.
    None where the mesh has no such axis, or does not count ranks row by row."""
    if mesh is None:
        return None
    if not mesh.sizes:
        return list(range(mesh.world_size))
    sizes, here = list(mesh.sizes.items()), mesh.here
    if axis not in mesh.sizes or set(here) != set(mesh.sizes):
        return None
    strides = {
        name: math.prod(size for _, size in sizes[index + 1 :])
        for index, (name, _) in enumerate(sizes)
    }
    own = sum(here[name] * strides[name] for name in strides)
    if own != mesh.rank:
        return None
    return [own + (i - here[axis]) * strides[axis] for i in range(mesh.sizes[axis])]


def axis_of(mesh: Mesh | None, ranks: list[int], otherwise: str) -> str:
    """The axis of the recorder's mesh that has exactly these ranks, or another name."""
    names = mesh.sizes if mesh is not None else ()
    fitting = [name for name in names if along(mesh, name) == ranks and len(ranks) > 1]
    return fitting[0] if len(fitting) == 1 else otherwise


def note(capture: Capture) -> None:
    """Looks at the communications before the optimizer's first step: at the end of the tape a job may have
    destroyed its process groups."""
    # What a framework tells is told at the end alone, when all of its step has run.
    if not capture.noted_reductions and not capture.reductions:
        with capture.guarded("reductions"):
            capture.noted_reductions = of_parts(capture)


def told(capture: Capture) -> dict[str, list[Entry]]:
    """The communications of each parameter's gradient as they are at the end of the tape, or as they were
    noted. Where neither can be told, every parameter says why."""
    try:
        reductions = of_parts(capture)
    except CAUGHT as error:
        reductions = capture.noted_reductions
        if not reductions:
            for part in capture.own:
                part.leave_out("reduce", describe(error))
            raise
    explain(capture, reductions)
    return reductions


def of_parts(capture: Capture) -> dict[str, list[Entry]]:
    """The communications of each parameter's gradient, in their order, by name."""
    reductions: dict[str, list[Entry]] = {part.name: [] for part in capture.parts}
    for part in capture.own:
        reductions[part.name] += _of_tensor_parallelism(part)
    for model in capture.models:
        _add_ddp(capture, model, reductions)
        _add_fsdp2(capture, model, reductions)
        _add_fsdp1(capture, model, reductions)
    for parts, add in capture.reductions:
        with capture.guarded("reductions of a framework"):
            try:
                add(capture, reductions)
            except CAUGHT as error:
                for part in parts:
                    reductions[part.name] = []
                    part.leave_out("reduce", describe(error))
                raise
    for part in capture.own:
        for glob, listed in (capture.reduce or {}).items():
            if fnmatch.fnmatchcase(part.name, glob):
                dtype = dtype_of(part)
                reductions[part.name] = [
                    given | {"dtype": given["dtype"] or dtype} for given in listed
                ]
                break
    for part in capture.parts:
        if part.same_as is not None:
            reductions[part.name] = reductions.get(part.same_as, [])
    return reductions


def dtype_of(part: Part) -> str | None:
    """The dtype of a parameter's gradient, where there is one."""
    holder = part.holder()
    if holder is None:
        return None if part.flat is None else name_of(part.flat[0].dtype)
    return name_of((holder if holder.grad is None else holder.grad).dtype)


def _of_tensor_parallelism(part: Part) -> Iterable[Entry]:
    """A gradient that torch has as Partial is summed by whoever uses it next."""
    holder = part.holder()
    if not part.partial or holder is None:
        return []
    # Under FSDP2 the mesh of tensor parallelism is that of the whole parameter.
    whole = getattr(part.sharded, "_unsharded_param", holder)
    mesh = whole.device_mesh  # type: ignore[union-attr]
    names = mesh.mesh_dim_names or [f"axis{i}" for i in range(mesh.ndim)]
    return [
        entry(axis, op, ranks_of(mesh.get_group(list(names).index(axis))), dtype_of(part))
        for axis, op in part.partial.items()
    ]


def _add_ddp(capture: Capture, model: torch.nn.Module, reductions: dict[str, list[Entry]]) -> None:
    for module in model.modules():
        if not isinstance(module, torch.nn.parallel.DistributedDataParallel):
            continue
        ranks = ranks_of(module.process_group)
        group = getattr(module.process_group, "group_desc", "") or "group"
        axis = axis_of(capture.tape.mesh, ranks, group)
        hooks = [hook for hook, _ in getattr(module, "_comm_hooks", [])]
        precision = getattr(module, "mixed_precision", None)
        sent = getattr(precision, "reduce_dtype", None) or getattr(precision, "param_dtype", None)
        more = {}
        if hooks:
            name = getattr(hooks[-1], "__name__", type(hooks[-1]).__name__)
            sent = SENT.get(name, sent)
            if name not in PLAIN_HOOKS:
                # What it does nobody can see; DDP's contract is the mean.
                more["hook"] = f"{getattr(hooks[-1], '__module__', '?')}.{name}"
        reduced = {
            id(parameter)
            for name, parameter in module.module.named_parameters()
            if name not in module.parameters_to_ignore and parameter.requires_grad
        }
        for part in capture.own:
            if id(part.holder()) in reduced:
                dtype = name_of(sent) if sent is not None else dtype_of(part)
                reductions[part.name].append(entry(axis, "mean", ranks, dtype, **more))


def _add_fsdp2(
    capture: Capture, model: torch.nn.Module, reductions: dict[str, list[Entry]]
) -> None:
    parts = {id(part.sharded): part for part in capture.own if part.sharded is not None}
    for group in parameter_groups(model):
        mesh, mesh_info = capture.tape.mesh, group.mesh_info
        axes = []
        # The reduce-scatter comes first, then the all-reduce over copies.
        for kind in ("shard", "replicate"):
            process_group = getattr(mesh_info, f"{kind}_process_group", None)
            if process_group is not None:
                ranks = ranks_of(process_group)
                dim = getattr(mesh_info, f"{kind}_mesh_dim")
                names = mesh_info.mesh.mesh_dim_names
                axis = names[dim] if names else axis_of(mesh, ranks, f"axis{dim}")
                axes.append((axis, ranks))
        divisor = getattr(group, "gradient_divide_factor", None)
        op: Entry = {"op": "mean"} if divisor is None else {"op": "sum", "divisor": float(divisor)}
        for parameter in group.fsdp_params:
            part = parts.get(id(parameter))
            if part is None or not part.trainable:
                continue
            sent = group._reduce_dtype or parameter.param_dtype or parameter.orig_dtype
            for number, (axis, ranks) in enumerate(axes):
                more = op if number == 0 else {"op": op["op"]}
                reductions[part.name].append(entry(axis=axis, ranks=ranks, dtype=name_of(sent), **more))


def _add_fsdp1(
    capture: Capture, model: torch.nn.Module, reductions: dict[str, list[Entry]]
) -> None:
    fsdp = frameworks.imported("torch.distributed.fsdp")
    if fsdp is None:
        return
    for module in model.modules():
        handle = getattr(module, "_handle", None)
        if not isinstance(module, fsdp.FullyShardedDataParallel) or handle is None:
            continue
        groups = [("shard", module.process_group)]
        if getattr(module, "_inter_node_pg", None) is not None:
            groups.append(("replicate", module._inter_node_pg))
        more = {}
        if getattr(module, "_comm_hook", None) is not None:
            hook = module._comm_hook
            more["hook"] = f"{hook.__module__}.{getattr(hook, '__name__', type(hook).__name__)}"
        listed = [(ranks_of(group), name) for name, group in groups]
        sent = name_of(handle._reduce_dtype)
        for part in capture.own:
            if part.flat is None or part.flat[0] is not handle.flat_param or not part.trainable:
                continue
            for ranks, name in listed:
                axis = axis_of(capture.tape.mesh, ranks, name)
                reductions[part.name].append(entry(axis, "mean", ranks, sent, **more))


def explain(capture: Capture, reductions: dict[str, list[Entry]]) -> None:
    """Names gradients of which nothing tells how those of several ranks come together. Parts of a
    DTensor need not, as each rank has its own."""
    mesh = capture.tape.mesh
    if mesh is None or mesh.world_size == 1:
        return
    for part in capture.own:
        by_hand = any(fnmatch.fnmatchcase(part.name, glob) for glob in capture.reduce or {})
        if reductions[part.name] or by_hand or not part.trainable or is_dtensor(part.holder()):
            continue
        reason = "neither DDP nor FSDP reduces its gradient: where the job does, say so in reduce="
        if hasattr(part.holder(), "_hp_mapping") or hasattr(part.holder(), "ds_id"):
            reason = "it is in an engine of DeepSpeed: hand over what deepspeed.initialize gave"
        part.leave_out("reduce", reason)
