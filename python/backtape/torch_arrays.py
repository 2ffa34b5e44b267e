"""torch tensors to shards, and the proof of place.

A tensor can change at any time, so its bytes are copied at once, into host memory that was written
to before (python/src/staging.rs); those of a tensor on a GPU are copied by the device itself
(backtape/gpu.py). For a DTensor this rank's local shard is recorded, as the set of boxes that its
placements give it; nothing is gathered, and no collective runs.
"""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from backtape import frameworks, gpu
from backtape._native import Arriving, Copied, Cuts, Staging, check_dtype
from backtape.failopen import CAUGHT
from backtape.sampling import Region, inside
from backtape.shards import (
    REPLICATE,
    Box,
    Guard,
    PlainParts,
    Shard,
    boxes_of_run_in,
    moved,
    slices,
)

# Bytes of staging memory that are kept for later captures: as many as the recorder's queue may
# hold.
KEPT_BYTES = 1 << 30

# Up to this length, in bytes, a copy takes less time than the calls to have torch make it, which
# would use one thread for it.
SMALL_BYTES = 256 << 10

# What a job's own tensors are; any other class may do more than hold values.
PLAIN = (torch.Tensor, torch.nn.Parameter)

# Ranges [start, end).
Runs = list[tuple[int, int]]


@functools.cache
def staging() -> Staging:
    """The staging memory of this process."""
    return Staging(KEPT_BYTES)


def shards_of(
    tensor: torch.Tensor,
    box: Box | None,
    partial: str | None,
    run: tuple[int, tuple[int, ...]] | None,
    place_proof: bool,
    guard: Guard,
    regions: tuple[Region, ...] | None = None,
) -> list[Shard | Copied]:
    """The shards of `tensor` that this rank holds, copied.

    box: for a plain tensor, the box of the global tensor that it is.
    run: with `box`, the tensor is a run of the flattened box of this extent, from this element on.
    regions: the boxes of the global tensor that are taken; None takes all of it.

    Raises TypeError for a tensor that has no bytes of its own, ValueError for a dtype that cannot
    be dumped or a DTensor whose place contradicts the arguments.
    """
    check(tensor)
    values = tensor.detach()
    if is_dtensor(values):
        if box is not None:
            raise ValueError("a DTensor says itself where it lies: leave out global_shape")
        return of_dtensor(values, partial, place_proof, guard, regions)
    shape, offsets = box or (tuple(values.shape), (0,) * values.ndim)
    if run is None:
        return parts_of(values, shape, offsets, regions)
    return of_run(values, (shape, offsets), run, regions)


def check(tensor: torch.Tensor) -> None:
    """Raises TypeError for a tensor that has no bytes of its own."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise TypeError("sparse, quantized and nested tensors are not recorded: pass its parts")
    if tensor.is_meta or type(tensor).__name__ in ("FakeTensor", "FunctionalTensor"):
        raise TypeError("a tensor without data (meta, traced) has no bytes to record")
    dtype_name(tensor.dtype)


@functools.cache
def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in numpy or ml_dtypes, which is torch's too. Raises ValueError for one that
    cannot be dumped."""
    name = str(dtype).removeprefix("torch.")
    check_dtype(name)
    return name


def shard_of(piece: torch.Tensor, shape: Sequence[int], offsets: Sequence[int], **more: Any) -> Shard:
    """The shard of a piece of a tensor of this shape that starts at these offsets; `more` are other
    fields of the shard."""
    extent, dtype = tuple(piece.shape), dtype_name(piece.dtype)
    data = from_gpu(piece, dtype, first_of(offsets, more.get("indices"))) if piece.is_cuda else None
    if data is None:
        data = staged(piece)
    return Shard(data, dtype, tuple(shape), tuple(offsets), extent, **more)


def parts_of(
    piece: torch.Tensor,
    shape: Sequence[int],
    offsets: Sequence[int],
    regions: tuple[Region, ...] | None,
) -> list[Shard | Copied]:
    """The shards of what lies of a piece in these regions; with None the shard of all of it."""
    if regions is None:
        return [shard_of(piece, shape, offsets)]
    cuts = cuts_of(tuple(shape), tuple(offsets), tuple(piece.shape), regions)
    return shards_of_cuts(piece, shape, cuts)


@dataclass(frozen=True, slots=True)
class Cut:
    """A part of a piece of a tensor that is a shard."""

    place: Region  # positions in the piece
    offsets: tuple[int, ...]  # in the whole tensor
    extent: tuple[int, ...]
    # Where it lies in the memory of a piece in C order, in elements from its start, and how many it
    # has; None where it lies there with gaps.
    run: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a piece that are shards."""

    cuts: tuple[Cut, ...]
    # The same for one call that copies and describes all of them; None where a part lies with gaps,
    # or where there is nothing to be gained.
    together: Cuts | None = None
    longest: int = 0  # elements of the longest part


def parts_together(
    cuts: Sequence[Cut],
    shape: Sequence[int],
    indices: Sequence[Any] | None = None,
    replica: int = 0,
    placement: dict[str, int | str] | None = None,
) -> Parts:
    """These cuts of a tensor, with their description for one call; `indices` are those of each."""
    runs = [cut.run for cut in cuts if cut.run is not None]
    if len(cuts) < 2 or len(runs) < len(cuts):
        return Parts(tuple(cuts))
    boxes = [(cut.offsets, cut.extent, run) for cut, run in zip(cuts, runs)]
    together = Cuts(shape, boxes, indices, replica, placement or {})
    return Parts(tuple(cuts), together, max(count for _, count in runs))


@functools.lru_cache(maxsize=4096)
def cuts_of(
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    extent: tuple[int, ...],
    regions: tuple[Region, ...],
) -> Parts:
    """What lies in some regions of a piece of a tensor of this shape that starts at these offsets."""
    found = inside(offsets, extent, regions)
    return parts_together([cut_of(cut, moved(offsets, cut), extent) for cut in found], shape)


def cut_of(place: Region, offsets: tuple[int, ...], extent: Sequence[int]) -> Cut:
    """The cut at these positions of a piece of this extent."""
    lengths = tuple(high - low for low, high in place)
    start, below, is_short, is_run = 0, 1, False, True
    for (low, _), length, size in reversed(list(zip(place, lengths, extent))):
        # Outside of a dimension that is cut short only one index makes a run.
        is_run = is_run and (length == 1 or not is_short)
        is_short = is_short or length < size
        start, below = start + low * below, below * size
    run = (start, math.prod(lengths)) if is_run and math.prod(lengths) else None
    return Cut(place, offsets, lengths, run)


def shards_of_cuts(
    piece: torch.Tensor,
    shape: Sequence[int],
    parts: Parts,
    indices: Sequence[Any] | None = None,
    **more: Any,
) -> list[Shard | Copied]:
    """The shards of parts of a piece; `indices` are those of each, and `more` other fields of all. A
    short run of the host's memory is copied as such: to have torch cut it first would take longer
    than all the rest. Several of them are copied in one call."""
    shape, width, dtype = tuple(shape), piece.itemsize, dtype_name(piece.dtype)
    plain = bool(parts.cuts) and plain_memory(piece)
    first = piece.data_ptr() if plain else 0
    if plain and parts.together is not None and parts.longest * width < SMALL_BYTES:
        copied = staging().copy_cuts(first, piece.nbytes, dtype, parts.together)
        copied.partial = more.get("partial")
        return [copied]
    shards: list[Shard | Copied] = []
    for number, cut in enumerate(parts.cuts):
        own = more if indices is None else more | {"indices": indices[number]}
        if plain and cut.run is not None and cut.run[1] * width < SMALL_BYTES:
            start, count = cut.run
            data = staging().copy_of(first + start * width, count * width)
            shards.append(Shard(data, dtype, shape, cut.offsets, cut.extent, **own))
        else:
            shards.append(shard_of(piece[slices(cut.place)], shape, cut.offsets, **own))
    return shards


def first_of(offsets: Sequence[int], indices: list[Runs] | None) -> Sequence[int]:
    """The indices from which a GPU counts for the fingerprint: the first of torch's own along each
    dimension where they are contiguous, and the offsets of the box otherwise."""
    if indices is None or any(len(runs) != 1 for runs in indices):
        return offsets
    return [runs[0][0] for runs in indices]


def from_gpu(piece: Any, dtype: str, first: Sequence[int]) -> Arriving | None:
    """The bytes of a CUDA tensor on their way to the host; None where they are to be copied as any
    others. first: the indices in the global tensor at which the tensor starts.

    The job may change the tensor by later work on its stream, so the device makes a snapshot, in
    that stream's order. A capsule that is asked for with `stream=-1` does not wait for anything
    itself.
    """
    if not piece.is_cuda or torch.version.cuda is None or not piece.nbytes:
        return None
    # A subclass may have to do something first, such as wait for a collective, which `copy_` does.
    if type(piece) is not torch.Tensor:
        return None
    here = gpu.door(piece.device.index)
    if here.gpu is None or torch.cuda.is_current_stream_capturing():
        return None
    try:
        # torch makes capsules of tensors of the current device only.
        with torch.cuda.device(piece.device):
            values = piece.resolve_conj().resolve_neg().contiguous()
            raw = values.reshape(-1).view(torch.uint8)
            stream = torch.cuda.current_stream().cuda_stream
            arriving = here.gpu.capture(
                raw.__dlpack__(stream=-1),
                dtype,
                gpu.ranges(first, piece.shape),
                stream=stream,
                # Nobody else has a copy that was just made here.
                changing=values.data_ptr() == piece.data_ptr(),
            )
    except CAUGHT as error:
        return gpu.given_up(here, error)
    return arriving or gpu.full(here)


def staged(piece: torch.Tensor) -> Any:
    """A copy of the values in C order. The block is filled before anyone else sees it and no view of it
    is kept, as the recorder's thread relies on it not changing."""
    length = piece.nbytes
    if not length:
        return np.empty(0, np.uint8)
    if length < SMALL_BYTES and plain_memory(piece):
        return staging().copy_of(piece.data_ptr(), length)
    block = staging().take(length)
    torch.frombuffer(block, dtype=piece.dtype).view(piece.shape).copy_(piece)
    return block


def plain_memory(piece: torch.Tensor) -> bool:
    """True where the values lie in this process's memory as they are, in C order."""
    return (
        type(piece) is torch.Tensor
        and piece.device.type == "cpu"
        and piece.is_contiguous()
        and not piece.is_neg()
        and not piece.is_conj()
        and piece.data_ptr() != 0
    )


@functools.lru_cache(maxsize=4096)
def plain_parts(
    shape: tuple[int, ...], dtype: torch.dtype, regions: tuple[Region, ...] | None
) -> PlainParts | None:
    """The parts of a tensor of this shape that lie in these regions, with None all of it, for
    `Tape.record_plain`; None where it does not take them: a part is long, or has gaps."""
    try:
        name = dtype_name(dtype)
    except ValueError:
        return None
    whole = tuple((0, size) for size in shape)
    zeros = (0,) * len(shape)
    cuts = [cut_of(cut, moved(zeros, cut), shape) for cut in inside(zeros, shape, regions or (whole,))]
    runs = [cut.run for cut in cuts if cut.run is not None]
    small = all(count * dtype.itemsize < SMALL_BYTES for _, count in runs)
    if not cuts or len(runs) < len(cuts) or not small:
        return None
    boxes = [(cut.offsets, cut.extent, run) for cut, run in zip(cuts, runs)]
    return PlainParts(staging(), Cuts(shape, boxes, None, 0, {}), name)


def is_plain(tensor: torch.Tensor) -> bool:
    """True where `Tape.record_plain` can read a tensor: as `check` and `plain_memory` together, which
    look at one that is detached."""
    return (
        type(tensor) in PLAIN
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_conj()
        and tensor.data_ptr() != 0
    )


def of_run(
    values: torch.Tensor,
    box: Box,
    run: tuple[int, tuple[int, ...]],
    regions: tuple[Region, ...] | None,
) -> list[Shard | Copied]:
    """The shards of a run of a flattened box of the tensor, as FSDP1 cuts parameters."""
    flat = values.reshape(-1)
    shards: list[Shard | Copied] = []
    (shape, first), (start, whole), at = box, run, 0
    for (offsets, extent), count in boxes_of_run_in(first, whole, start, flat.numel()):
        shards += parts_of(flat[at : at + count].view(extent), shape, offsets, regions)
        at += count
    return shards


def is_dtensor(tensor: torch.Tensor) -> bool:
    """True for a DTensor. Does not import torch.distributed for a job that has not."""
    if type(tensor) in PLAIN:
        return False
    module = frameworks.imported("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def held_by_this_rank(
    tensor: Any, box: Box | None, run: tuple[int, tuple[int, ...]] | None
) -> list[Region]:
    """The boxes of the global tensor that `shards_of` would record, without a look at the values."""
    if is_dtensor(tensor):
        if tensor.device_mesh.get_coordinate() is None:
            return []
        where = (tensor.device_mesh, tuple(tensor.placements), tuple(tensor.shape), None)
        spans = [(cut.offsets, cut.extent) for cut in layout_of(*where).boxes.cuts]
    elif run is not None and box is not None:
        spans = [span for span, _ in boxes_of_run_in(box[1], run[1], run[0], tensor.numel())]
    else:
        spans = [(box[1] if box else (0,) * tensor.ndim, tuple(tensor.shape))]
    return [
        tuple((low, low + length) for low, length in zip(offsets, extent))
        for offsets, extent in spans
    ]


@dataclass(frozen=True)
class Layout:
    """How a DTensor lies on this rank."""

    extent: tuple[int, ...]  # of the local part
    boxes: Parts  # that the local part consists of
    replica: int
    placement: dict[str, int | str]
    reduction: str | None


def of_dtensor(
    values: Any,
    partial: str | None,
    place_proof: bool,
    guard: Guard,
    regions: tuple[Region, ...] | None,
) -> list[Shard | Copied]:
    """The shards of a DTensor's local part: several boxes where it is strided (FSDP2 over TP), or where
    only some regions of it are taken."""
    mesh, placements = values.device_mesh, tuple(values.placements)
    if mesh.get_coordinate() is None:
        return []  # This rank is not part of the mesh.
    shape, local = tuple(values.shape), values.to_local()
    where = (mesh, placements, shape, regions)
    layout = layout_of(*where)
    if layout.extent != tuple(local.shape):
        raise ValueError(
            f"its local shard is {tuple(local.shape)} where {placements} over {tuple(mesh.shape)} "
            f"of {shape} gives {layout.extent}: record it with global_shape and offsets"
        )
    if partial is not None and layout.reduction not in (None, partial):
        raise ValueError(
            f"partial={partial!r}, but the DTensor is to be reduced by {layout.reduction!r}"
        )
    boxes, theirs = layout.boxes, None
    if place_proof:
        with guard("place proof"):
            boxes, theirs = proved_indices(*where)
    return shards_of_cuts(
        local,
        shape,
        boxes,
        theirs,
        replica=layout.replica,
        placement=layout.placement,
        partial=layout.reduction,
    )


# A step records each parameter in a dozen stages, and all of them lie alike.
@functools.lru_cache(maxsize=4096)
def layout_of(
    mesh: Any,
    placements: tuple[Any, ...],
    shape: tuple[int, ...],
    regions: tuple[Region, ...] | None,
) -> Layout:
    """How a DTensor with these placements lies on this rank, or what of it lies in some regions. Raises
    ValueError for a reduction that is no sum or mean."""
    here = mesh.get_coordinate()
    held = [indices_of(dim, size, placements, mesh, here) for dim, size in enumerate(shape)]
    extent = tuple(map(len, held))
    boxes = []
    for place in places(held):
        offsets = tuple(int(at[a]) if a < b else 0 for at, (a, b) in zip(held, place))
        if regions is None:
            boxes.append(cut_of(place, offsets, extent))
            continue
        for part in inside(offsets, [b - a for a, b in place], regions):
            within = tuple((a + low, a + high) for (a, _), (low, high) in zip(place, part))
            boxes.append(cut_of(within, moved(offsets, part), extent))
    placed, reduction = placement_of(mesh, placements)
    replica = replica_of(mesh, placements, here)
    parts = parts_together(boxes, shape, None, replica, placed)
    return Layout(extent, parts, replica, placed, reduction)


@functools.lru_cache(maxsize=4096)
def proved_indices(
    mesh: Any,
    placements: tuple[Any, ...],
    shape: tuple[int, ...],
    regions: tuple[Region, ...] | None,
) -> tuple[Parts, list[list[Runs]]]:
    """The boxes of the same layout, and of each the indices along each dimension, as torch itself cuts
    them."""
    theirs = [by_torch(dim, size, placements, mesh) for dim, size in enumerate(shape)]
    layout = layout_of(mesh, placements, shape, regions)
    cuts = layout.boxes.cuts
    indices = [[runs_of(at[a:b]) for at, (a, b) in zip(theirs, cut.place)] for cut in cuts]
    parts = parts_together(cuts, shape, indices, layout.replica, layout.placement)
    return parts, indices


def indices_of(
    dim: int, size: int, placements: Sequence[Any], mesh: Any, here: Sequence[int]
) -> np.ndarray:
    """Which indices of dimension `dim` the rank at mesh coordinates `here` holds, int64 [n].

    A Shard is cut as torch.chunk does: ceil(n / parts) indices to each rank, and fewer or none to
    the last ones. A _StridedShard is cut into `split_factor` chunks first, each of which is cut so,
    and a rank holds its part of every chunk.
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
    """The `index`-th of the `parts` pieces that torch.chunk makes; empty where it makes fewer."""
    each = -(-len(held) // parts)
    return held[index * each : (index + 1) * each]


def places(held: list[np.ndarray]) -> Iterator[tuple[tuple[int, int], ...]]:
    """The boxes that a local shard consists of, each as ranges [start, end) of local positions per
    dimension. `held` has the global indices along each dimension."""
    if not held:
        yield ()
        return
    first, *rest = held
    for begin, end in cuts(first):
        for others in places(rest):
            yield ((begin, end), *others)


def cuts(indices: np.ndarray) -> Runs:
    """The ranges of positions [a, b) in which the indices count up by one."""
    jumps = (np.flatnonzero(np.diff(indices) != 1) + 1).tolist()
    return list(zip([0, *jumps], [*jumps, len(indices)]))


def runs_of(indices: np.ndarray) -> Runs:
    """The indices as ranges [start, end)."""
    return [(int(indices[a]), int(indices[b - 1]) + 1) for a, b in cuts(indices) if a < b]


def by_torch(dim: int, size: int, placements: tuple[Any, ...], mesh: Any) -> np.ndarray:
    """The indices of `indices_of` as torch itself cuts them out of [0, size), int64 [n]: the proof of
    place. With `src_data_rank=None` every rank cuts its own copy, and nothing is sent.
    """
    tensor = frameworks.used("torch.distributed.tensor")
    def along(placement: Any) -> Any:
        if getattr(placement, "dim", None) != dim:
            return tensor.Replicate()
        factor = getattr(placement, "split_factor", None)
        return tensor.Shard(0) if factor is None else type(placement)(0, split_factor=factor)

    counted = torch.arange(size, device=mesh.device_type)
    cut = tensor.distribute_tensor(counted, mesh, [*map(along, placements)], src_data_rank=None)
    return cut.to_local().cpu().numpy()


def placement_of(mesh: Any, placements: Sequence[Any]) -> tuple[dict[str, int | str], str | None]:
    """For each mesh axis the dimension that it splits, `replicate`, `sum` or `mean`; and the
    reduction if the tensor is an addend. Raises ValueError for other reductions, and for two
    different ones."""
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
    """Which of the equal copies this rank holds, counted over the axes that replicate."""
    index = 0
    for size, placement, at in zip(mesh.shape, placements, here):
        if placement.is_replicate():
            index = index * size + at
    return index
