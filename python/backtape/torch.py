"""torch tensors to shards, and taps for values and gradients.

A tensor can change at any time, so its bytes are copied where they stand, into host memory that
was written to before (python/src/staging.rs); on a GPU by the device itself (backtape/gpu.py). Of a
DTensor this rank's local shard is recorded, as the set of boxes that its placements give it; nothing
is gathered, and no collective runs.

    q = backtape.torch.tap("q", q, microbatch=i)                    # the value, and
    q = backtape.torch.tap_grad("dq", q, microbatch=i)              # its gradient, in the backward
    k = backtape.torch.tap_grad("dk", weight, microbatch=i, partial="mean", when="pre_reduce")

Both do nothing outside a recorded step. In code under torch.compile they break the graph, recorded
or not, so that the compiled arithmetic is the same either way.
"""

import contextlib
import fnmatch
import functools
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from backtape import gpu
from backtape._native import Staging, check_dtype
from backtape.shards import REPLICATE, Box, Guard, Shard, boxes_of_run
from backtape.tape import Tape, open_tape

# Staging memory that is kept for the next capture: what the recorder's queue may hold.
KEPT_BYTES = 1 << 30

# Up to this length a copy takes less time than torch's calls around it, and would not be shared
# among its threads.
SMALL_BYTES = 256 << 10

# What wrappers put into the names of parameters: DDP, torch.compile, FSDP1, checkpointing.
WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")

Runs = list[tuple[int, int]]


@functools.cache
def staging() -> Staging:
    """The staging memory of this process."""
    return Staging(KEPT_BYTES)


def shards_of(
    tensor: torch.Tensor,
    box: Box | None,
    partial: str | None,
    flat_offset: int | None,
    place_proof: bool,
    guard: Guard,
) -> list[Shard]:
    """The shards of `tensor` that this rank holds, copied.

    `box` is for a plain tensor, which is then that box of the global one; with `flat_offset` it is
    a run of the flattened global tensor.
    """
    check(tensor)
    values = tensor.detach()
    if is_dtensor(values):
        if box is not None:
            raise ValueError("a DTensor says itself where it lies: leave out global_shape")
        return of_dtensor(values, partial, place_proof, guard)
    shape, offsets = box or (tuple(values.shape), (0,) * values.ndim)
    if flat_offset is None:
        return [shard_of(values, shape, offsets)]
    return of_run(values, shape, flat_offset)


def check(tensor: torch.Tensor) -> None:
    """Raises TypeError for a tensor that has no bytes of its own."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise TypeError("sparse, quantized and nested tensors are not recorded: pass its parts")
    if tensor.is_meta or type(tensor).__name__ in ("FakeTensor", "FunctionalTensor"):
        raise TypeError("a tensor without data (meta, traced) has no bytes to record")
    dtype_name(tensor.dtype)


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """numpy's or ml_dtypes' name, which is torch's; raises for one that cannot be dumped."""
    name = str(dtype).removeprefix("torch.")
    check_dtype(name)
    return name


def shard_of(piece: torch.Tensor, shape: Sequence[int], offsets: Sequence[int], **more: Any) -> Shard:
    """A piece of a tensor and where it lies."""
    extent, dtype = tuple(piece.shape), dtype_name(piece.dtype)
    data = gpu.of_torch(piece, dtype, first_of(offsets, more.get("indices"))) if piece.is_cuda else None
    if data is None:
        data = staged(piece)
    return Shard(data, dtype, tuple(shape), tuple(offsets), extent, **more)


def first_of(offsets: Sequence[int], indices: list[Runs] | None) -> Sequence[int]:
    """Where the fingerprint begins to count: where torch's own indices do, if they are runs."""
    if indices is None or any(len(runs) != 1 for runs in indices):
        return offsets
    return [runs[0][0] for runs in indices]


def staged(piece: torch.Tensor) -> Any:
    """A copy of the values in C order. The block is filled before anyone else sees it, and no
    view of it is kept: the recorder's thread reads it without looking whether it changed."""
    length = piece.nbytes
    if not length:
        return np.empty(0, np.uint8)
    if length < SMALL_BYTES and plain_memory(piece):
        return staging().copy_of(piece.data_ptr(), length)
    block = staging().take(length)
    torch.frombuffer(block, dtype=piece.dtype).view(piece.shape).copy_(piece)
    return block


def plain_memory(piece: torch.Tensor) -> bool:
    """True where the values are bytes of this process, as they stand and in C order."""
    return (
        type(piece) is torch.Tensor
        and piece.device.type == "cpu"
        and piece.is_contiguous()
        and not piece.is_neg()
        and not piece.is_conj()
        and piece.data_ptr() != 0
    )


def of_run(values: torch.Tensor, shape: Sequence[int], start: int) -> list[Shard]:
    """The boxes of a run of the flattened tensor, as FSDP1 cuts parameters."""
    flat = values.reshape(-1)
    shards, at = [], 0
    for (offsets, extent), count in boxes_of_run(shape, start, flat.numel()):
        shards.append(shard_of(flat[at : at + count].view(extent), shape, offsets))
        at += count
    return shards


def is_dtensor(tensor: torch.Tensor) -> bool:
    """True for a DTensor, without importing torch.distributed for a job that does not."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def of_dtensor(values: Any, partial: str | None, place_proof: bool, guard: Guard) -> list[Shard]:
    """The boxes of a DTensor's local shard: several where shards are strided (FSDP2 over TP)."""
    mesh, placements = values.device_mesh, tuple(values.placements)
    here = mesh.get_coordinate()
    if here is None:
        return []  # A mesh that this rank is not part of.
    shape, local = tuple(values.shape), values.to_local()
    held = [indices_of(dim, size, placements, mesh, here) for dim, size in enumerate(shape)]
    if tuple(map(len, held)) != tuple(local.shape):
        raise ValueError(
            f"its local shard is {tuple(local.shape)} where {placements} over {tuple(mesh.shape)} "
            f"of {shape} gives {tuple(map(len, held))}: record it with global_shape and offsets"
        )
    placed, reduction = placement_of(mesh, placements)
    if partial is not None and reduction not in (None, partial):
        raise ValueError(f"partial={partial!r}, but the DTensor is to be reduced by {reduction!r}")
    theirs = None
    if place_proof:
        with guard("place proof"):
            theirs = [by_torch(dim, size, placements, mesh) for dim, size in enumerate(shape)]
    return [
        shard_of(
            local[tuple(slice(a, b) for a, b in place)],
            shape,
            [held[dim][a] if a < b else 0 for dim, (a, b) in enumerate(place)],
            replica=replica_of(mesh, placements, here),
            placement=placed,
            partial=reduction,
            indices=theirs and [runs_of(at[a:b]) for at, (a, b) in zip(theirs, place)],
        )
        for place in places(held)
    ]


def indices_of(
    dim: int, size: int, placements: Sequence[Any], mesh: Any, here: Sequence[int]
) -> np.ndarray:
    """Which indices of dimension `dim` the rank at mesh coordinates `here` holds, int64 [n].

    Shard cuts as torch.chunk does: ceil(n / parts) to each, the last ones less or nothing.
    _StridedShard cuts every one of `split_factor` chunks so and joins what is ours.
    """
    held = np.arange(size)
    for axis, placement in enumerate(placements):
        if getattr(placement, "dim", None) != dim:
            continue
        factor = getattr(placement, "split_factor", 1)
        chunks = [chunk(held, i, factor) for i in range(factor)]
        held = np.concatenate([chunk(one, here[axis], mesh.shape[axis]) for one in chunks])
    return held


def chunk(held: np.ndarray, index: int, parts: int) -> np.ndarray:
    """The `index`-th of torch.chunk's `parts` pieces; empty where torch makes fewer."""
    each = -(-len(held) // parts)
    return held[index * each : (index + 1) * each]


def places(held: list[np.ndarray]) -> Iterator[tuple[tuple[int, int], ...]]:
    """Local ranges, per dimension, of the boxes that index lists make up."""
    if not held:
        yield ()
        return
    first, *rest = held
    for begin, end in cuts(first):
        for others in places(rest):
            yield ((begin, end), *others)


def cuts(indices: np.ndarray) -> Runs:
    """Ranges [a, b) of positions between which the indices count up by one."""
    jumps = (np.flatnonzero(np.diff(indices) != 1) + 1).tolist()
    return list(zip([0, *jumps], [*jumps, len(indices)]))


def runs_of(indices: np.ndarray) -> Runs:
    """The same indices as ranges [start, end) of index."""
    return [(int(indices[a]), int(indices[b - 1]) + 1) for a, b in cuts(indices) if a < b]


def by_torch(dim: int, size: int, placements: tuple[Any, ...], mesh: Any) -> np.ndarray:
    """The same indices by torch's own cutting of [0, size), for the proof of place, int64 [n].

    `src_data_rank=None`: every rank cuts its own copy, nothing is sent.
    """
    from torch.distributed.tensor import Replicate, Shard as Split, distribute_tensor

    def along(placement: Any) -> Any:
        if getattr(placement, "dim", None) != dim:
            return Replicate()
        factor = getattr(placement, "split_factor", None)
        return Split(0) if factor is None else type(placement)(0, split_factor=factor)

    counted = torch.arange(size, device=mesh.device_type)
    cut = distribute_tensor(counted, mesh, [*map(along, placements)], src_data_rank=None)
    return cut.to_local().cpu().numpy()


def placement_of(mesh: Any, placements: Sequence[Any]) -> tuple[dict[str, int | str], str | None]:
    """Per mesh axis the dimension it splits, `replicate`, `sum` or `mean`; and the reduction."""
    names = mesh.mesh_dim_names or [f"axis{i}" for i in range(len(placements))]
    words: dict[str, int | str] = {}
    reductions = set()
    for name, placement in zip(names, placements):
        if placement.is_replicate():
            words[name] = REPLICATE
        elif placement.is_partial():
            word = {"sum": "sum", "avg": "mean"}.get(str(getattr(placement, "reduce_op", "")))
            if word is None or type(placement).__name__ != "Partial":
                raise ValueError(f"it is to be reduced by {placement}: only sum and avg add up")
            words[name] = word
            reductions.add(word)
        else:
            words[name] = int(placement.dim)
    if len(reductions) > 1:
        raise ValueError("it is to be summed along one axis and averaged along another")
    return words, next(iter(reductions), None)


def replica_of(mesh: Any, placements: Sequence[Any], here: Sequence[int]) -> int:
    """Which copy this rank holds, counted over the axes that replicate."""
    index = 0
    for size, placement, at in zip(mesh.shape, placements, here):
        if placement.is_replicate():
            index = index * size + at
    return index


# --- taps -----------------------------------------------------------------------------------


def tap(name: str, x: torch.Tensor, **key: Any) -> torch.Tensor:
    """Records `x` in the step that is open, and returns it; `key` is what `tape.record` takes.

    A forward that activation checkpointing runs again, in the backward pass, is recorded under
    when="recompute".
    """
    _tap(name, x, torch.compiler.is_compiling(), key)
    return x


def _tap(name: str, x: torch.Tensor, compiled: bool, key: dict[str, Any]) -> None:
    tape = open_tape()
    if tape is None:
        return
    if in_backward():
        key = key | {"when": "recompute"}
    record = uncompiled(_record) if compiled else _record
    record(tape, name, x, compiled, key)


def _record(tape: Tape, name: str, x: Any, compiled: bool, key: dict[str, Any]) -> None:
    tape.record_compiled(name, x, compiled, **key)


def tap_grad(name: str, x: torch.Tensor, **key: Any) -> torch.Tensor:
    """Returns `x` so that the gradient of what is returned, as the backward computes it, is
    recorded under `name`: of a weight, the part that flows through this use of it."""
    return _tap_grad(name, x, torch.compiler.is_compiling(), key)


def _tap_grad(name: str, x: torch.Tensor, compiled: bool, key: dict[str, Any]) -> torch.Tensor:
    tape = open_tape()
    # Without grad mode there is no backward: reentrant checkpointing's first forward.
    if tape is None or not torch.is_grad_enabled():
        return x
    if not x.requires_grad:
        tape.leave_out(name, key.get("microbatch"), "the tapped tensor does not require a gradient")
        return x
    tape.expect(name, key.get("microbatch"))
    apply = uncompiled(_TapGrad.apply) if compiled else _TapGrad.apply
    return apply(x, tape, name, compiled, key)


@functools.cache
def uncompiled(call: Any) -> Any:
    """`call`, below which dynamo compiles nothing. Asked for in compiled code only: it imports
    all of torch._dynamo."""
    return torch.compiler.disable(call)


# Dynamo breaks the graph at these two instead of tracing into them.
_tap._torchdynamo_disable = True  # type: ignore[attr-defined]
_tap_grad._torchdynamo_disable = True  # type: ignore[attr-defined]


class _TapGrad(torch.autograd.Function):
    """The identity, whose backward records what flows through it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tape: Tape, name: str, compiled: bool, key: dict) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call = (tape, name, compiled, key)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        tape, name, compiled, key = ctx.call
        if grad is not None:
            tape.arrived(name, key.get("microbatch"))
            record = uncompiled(_record) if compiled else _record
            record(tape, name, grad, compiled, key)
        return grad, None, None, None, None


def in_backward() -> bool:
    """True inside a backward pass: a forward that runs there is a recomputation."""
    return torch._C._current_graph_task_id() != -1


# --- whole modules --------------------------------------------------------------------------


def record_parameters(
    tape: Tape, module: torch.nn.Module, *, names: str = "*", prefix: str = "", **key: Any
) -> None:
    """Records parameters whose name matches the glob `names`, as `prefix` + their own name.

    Plain, DDP, FSDP1 (its flat parameters, cut back into the parameters they were made of) and
    FSDP2 alike; every rank records what it holds.
    """
    _record_each(tape, module, names, prefix, "value", key)


def record_gradients(
    tape: Tape, module: torch.nn.Module, *, names: str = "*", prefix: str = "grad.", **key: Any
) -> None:
    """Records `.grad` of those parameters: after the last backward of a step the reduced gradient
    under DDP and FSDP (when="post_reduce"), or this rank's own under no_sync."""
    _record_each(tape, module, names, prefix, "grad", key)


def _record_each(
    tape: Tape, module: torch.nn.Module, names: str, prefix: str, what: str, key: dict[str, Any]
) -> None:
    if not tape.active:
        return
    with tape.guarded(f"record {what}s of", type(module).__name__):
        for name, held, where in parts_of(module, what):
            if not fnmatch.fnmatchcase(name, names):
                continue
            if held is None:
                tape.leave_out(prefix + name, key.get("microbatch"), f"it has no {what}")
            else:
                tape.record(prefix + name, held, **key, **where)


def parts_of(
    module: torch.nn.Module, what: str
) -> Iterator[tuple[str, torch.Tensor | None, dict[str, Any]]]:
    """Name, tensor and place (arguments of `tape.record`) of each parameter, or of its gradient."""
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
                yield plain_name(prefix + name), held, where
    for name, parameter in module.named_parameters():
        if id(parameter) not in flat:
            yield plain_name(name), of(parameter), {}


def flat_parameters(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """The sharded flat parameters of FSDP1 below `module`, with the name of what they belong to."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return
    for name, child in module.named_modules():
        handle = getattr(child, "_handle", None)
        if isinstance(child, fsdp.FullyShardedDataParallel) and handle is not None:
            yield f"{name}." if name else "", handle.flat_param


def plain_name(name: str) -> str:
    """The parameter's name in the module that the job wrote."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


@contextlib.contextmanager
def gradients(
    tape: Tape, module: torch.nn.Module, *, names: str = "*", prefix: str = "grad.", **key: Any
) -> Iterator[None]:
    """Around one `backward()`: records the gradient of each matching parameter as this backward
    computes it, before it is added to `.grad` and before DDP reduces it.

        with backtape.torch.gradients(tape, model, microbatch=i, partial="mean", when="pre_reduce"):
            loss.backward()

    Under FSDP the hook of a sharded parameter never fires: use `tap_grad` in the forward.
    """
    handles = []
    seen: set[str] = set()
    lock = threading.Lock()

    def hook(name: str, grad: torch.Tensor) -> None:
        with lock:
            seen.add(name)
        tape.record(prefix + name, grad, **key)

    watched = []
    if tape.active:
        with tape.guarded("gradients of", type(module).__name__):
            sharded = {name for name, held, where in parts_of(module, "value") if where or is_dtensor(held)}
            for name, parameter in module.named_parameters():
                name = plain_name(name)
                if not parameter.requires_grad or not fnmatch.fnmatchcase(name, names):
                    continue
                watched.append(name)
                if name not in sharded:
                    handles.append(parameter.register_hook(functools.partial(hook, name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for name in watched:
            if name not in seen:
                reason = "its hook did not fire in this backward: under FSDP use tap_grad"
                tape.leave_out(prefix + name, key.get("microbatch"), reason)
