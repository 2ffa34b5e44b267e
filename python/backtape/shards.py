"""Arrays to shards: which part of which tensor an array is, and its bytes as they lie.

No dtype is converted. bf16 and f8 have no buffer protocol in numpy, so bytes are looked at as
uint8. A numpy array can be changed by the job at any time, so it is copied here and now.

The two classes at the top are all that is said of a shard on its way to the recorder.
python/src/shard.rs reads them into the description that the recorder carries on (src/shard.rs).
"""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from backtape._native import Cuts, Staging, check_dtype
from backtape.frameworks import arrays_of, framework_of
from backtape.sampling import Region, as_tuples, inside

REPLICATE = "replicate"

# Bytes (uint8, C order), dtype's name and shape of an array; the bytes of one on a GPU are on
# their way (`_native.Arriving`).
Held = tuple[Any, str, tuple[int, ...]]

# Shape of the global tensor and offsets of the box in it that the job says an array to be.
Box = tuple[tuple[int, ...], tuple[int, ...]]

# Offsets and extent of a box.
Span = tuple[tuple[int, ...], tuple[int, ...]]

# Per mesh axis the dimension that it splits, or "replicate", "sum", "mean".
Placement = Mapping[str, int | str]

# Around what may fail without losing the shard: `Faults.guard`.
Guard = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True, slots=True)
class Key:
    """Which value of which tensor, as the job says in `tape.record`."""

    name: str
    role: str | None = None
    microbatch: int | None = None
    when: str | None = None


@dataclass(slots=True)
class Shard:
    """One box of a tensor and its bytes, as `backtape._native.Tape.record` reads them."""

    # C-ordered bytes: a uint8 array, a staging block or what arrives from a GPU, not written again
    data: Any
    dtype: str  # numpy's or ml_dtypes' name
    shape: tuple[int, ...]  # of the global tensor
    offsets: tuple[int, ...]  # where the box starts
    extent: tuple[int, ...]  # how far it reaches
    replica: int = 0  # 0 for the first holder of the box, higher for those that hold the same
    placement: dict[str, int | str] = field(default_factory=dict)  # axis: dimension or word
    partial: str | None = None  # the bytes are an addend of the tensor: "sum" or "mean"
    fingerprint: tuple[int, int] | None = None  # two uint32 sums, by the framework
    # Global indices per dimension as ranges [start, end), by the framework.
    indices: list[list[tuple[int, int]]] | None = None
    compiled: bool = False  # a graph compiler made the code around the capture


@dataclass(frozen=True, slots=True)
class PlainParts:
    """Parts of a tensor that lies in the host's memory in C order, as `Tape.record_plain` takes them."""

    staging: Staging
    cuts: Cuts
    dtype: str  # numpy's or ml_dtypes' name


@dataclass(frozen=True, slots=True)
class Mesh:
    """The job's mesh and where this rank sits on it."""

    sizes: dict[str, int]  # by axis, outermost first; empty where the job named none
    here: dict[str, int]
    rank: int
    world_size: int

    def along(self, axis: str) -> tuple[int, int]:
        """The size of an axis and this rank's index on it. Without a mesh, the only axis is that of all
        ranks, under any name. Raises ValueError for an axis that the mesh has not."""
        if not self.sizes:
            return self.world_size, self.rank
        if axis not in self.sizes:
            raise ValueError(f"the mesh has no axis {axis!r}, but {', '.join(self.sizes)}")
        if axis not in self.here:
            raise ValueError("where this rank sits on the mesh is not known: say offsets instead")
        return self.sizes[axis], self.here[axis]


def shards_of(
    array: Any,
    *,
    global_shape: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None,
    partial: str | None = None,
    flat_offset: int | None = None,
    extent: Sequence[int] | None = None,
    placement: Placement | None = None,
    regions: Sequence[Any] | None = None,
    mesh: Mesh | None = None,
    place_proof: bool = True,
    guard: Guard = nullcontext,
) -> list[Shard]:
    """The shards of `array` that this process holds.

    global_shape, offsets, flat_offset, extent, partial, placement, regions: as in `Tape.record`.
    mesh: on which `placement` lies.
    place_proof: have the framework compute where the elements lie, beside the box.
    guard: around that, which may fail without losing the shard.

    Raises TypeError or ValueError for what cannot be recorded, and whatever the framework raises
    for an array that is gone (deleted, donated).
    """
    box = declared_box(global_shape, offsets, flat_offset, extent)
    run = None
    if flat_offset is not None and box is not None:
        run = operator.index(flat_offset), tuple(map(operator.index, extent or box[0]))
    regions = as_tuples(regions)
    if placement is not None:
        if box is not None or mesh is None:
            raise ValueError("placement says where the array lies: leave out global_shape")
        if partial is not None and any(isinstance(word, str) for word in placement.values()):
            raise ValueError("what it is an addend of is said twice: in partial and in placement")
        if regions is not None:
            raise ValueError("regions are of the whole tensor: say global_shape and offsets beside them")
        # Of an array that is a part of the tensor the framework knows no indices in the tensor, so
        # it cannot prove the place.
        place_proof = place_proof and all(isinstance(word, str) for word in placement.values())
        options = {"partial": partial, "place_proof": place_proof, "guard": guard}
        return [by_placement(shard, placement, mesh) for shard in shards_of(array, **options)]
    framework = framework_of(array)
    if framework == "torch":
        make = arrays_of("torch").shards_of
        return make(array, box, partial, run, place_proof, guard, regions)
    if flat_offset is not None:
        raise TypeError("flat_offset is for torch tensors")
    if framework == "jax":
        return arrays_of("jax").shards_of(array, box, partial, place_proof, guard, regions)
    if regions is None:
        return [in_box(own_bytes(array), box)]
    values = np.asarray(array)
    shape, first = box or (values.shape, (0,) * values.ndim)
    return [
        in_box(own_bytes(values[slices(cut)]), (shape, moved(first, cut)))
        for cut in inside(first, values.shape, regions)
    ]


def by_placement(shard: Shard, placement: Placement, mesh: Mesh) -> Shard:
    """The shard of a whole array, which becomes this rank's equal part of a tensor, or its addend,
    as the job places it. Raises ValueError for a placement that cannot be."""
    if shard.placement:
        raise ValueError("the array says itself how it lies on the mesh: leave out placement")
    if len(placement) > 1 and not mesh.sizes:
        raise ValueError("a placement over several axes needs mesh= of the recorder")
    shape, offsets = list(shard.shape), [0] * len(shard.shape)
    words: dict[str, int | str] = {axis: REPLICATE for axis in mesh.sizes} | dict(placement)
    replica = 0
    # The outermost axis first, as the mesh cuts: an inner axis cuts what an outer one has left.
    for axis, word in words.items():
        size, at = mesh.along(axis)
        if word == REPLICATE:
            replica = replica * size + at
        elif isinstance(word, str):
            if shard.partial not in (None, word):
                raise ValueError(f"it is an addend of a {shard.partial} and of a {word}")
            shard.partial = word
        else:
            dim = operator.index(word)
            if not 0 <= dim < len(shape):
                raise ValueError(f"it has no dimension {dim} that {axis!r} could split")
            shape[dim] *= size
            offsets[dim] = offsets[dim] * size + at * shard.extent[dim]
    shard.shape, shard.offsets = tuple(shape), tuple(offsets)
    shard.placement, shard.replica = words, replica
    return shard


def declared_box(
    global_shape: Sequence[int] | None,
    offsets: Sequence[int] | None,
    flat_offset: int | None = None,
    extent: Sequence[int] | None = None,
) -> Box | None:
    """The box that the job declares an array to be; None where it declares none.

    With `flat_offset` the array is a run of the flattened tensor, or of its box of this extent at the offsets.
    Raises ValueError where only a part of the arguments is given.
    """
    if flat_offset is not None and (global_shape is None or (offsets is None) != (extent is None)):
        raise ValueError(
            "flat_offset takes global_shape beside it, and offsets with the extent of a box or neither"
        )
    if flat_offset is None and extent is not None:
        raise ValueError("extent is that of the box in which flat_offset counts: give both")
    if flat_offset is None and (global_shape is None) != (offsets is None):
        raise ValueError("global_shape and offsets say together where a box lies: give both")
    if global_shape is None:
        return None
    shape = tuple(map(operator.index, global_shape))
    return shape, tuple(map(operator.index, offsets or (0,) * len(shape)))


def boxes_of_run(shape: Sequence[int], start: int, count: int) -> list[tuple[Span, int]]:
    """The boxes that elements [start, start + count) of a flattened tensor make up.

    Returns each box, its offsets and its extent, with the number of its elements, in the order of
    the run: the ragged ends, at most two a dimension, and one box between them.
    """
    if count == 0:
        return []
    if not shape:
        return [(((), ()), 1)]
    inner = math.prod(shape[1:])
    row, ahead = divmod(start, inner)
    boxes: list[tuple[Span, int]] = []
    if ahead or count < inner:
        first = min(count, inner - ahead)
        boxes += _inside_row(row, shape, ahead, first)
        row, count = row + 1, count - first
    if whole := count // inner:
        offsets, extent = (row, *(0 for _ in shape[1:])), (whole, *shape[1:])
        boxes.append(((offsets, extent), whole * inner))
        row, count = row + whole, count - whole * inner
    return boxes + _inside_row(row, shape, 0, count)


def boxes_of_run_in(
    offsets: Sequence[int], extent: Sequence[int], start: int, count: int
) -> list[tuple[Span, int]]:
    """The same of elements of a flattened box of a tensor."""
    return [
        ((tuple(first + at for first, at in zip(offsets, inside)), lengths), elements)
        for (inside, lengths), elements in boxes_of_run(extent, start, count)
    ]


def _inside_row(
    row: int, shape: Sequence[int], start: int, count: int
) -> list[tuple[Span, int]]:
    """The boxes of a run that lies in one index of the first dimension."""
    return [
        (((row, *offsets), (1, *extent)), elements)
        for (offsets, extent), elements in boxes_of_run(shape[1:], start, count)
    ]


def slices(cut: Region) -> tuple[slice, ...]:
    """The index of an array that takes these ranges of positions."""
    return tuple(slice(low, high) for low, high in cut)


def moved(offsets: Sequence[int], cut: Region) -> tuple[int, ...]:
    """Where a part of a box starts, which are these ranges of positions in it."""
    return tuple(offset + low for offset, (low, _) in zip(offsets, cut))


def own_bytes(array: Any) -> Held:
    """A copy of a host array in C order and in this machine's byte order, with its dtype and shape.
    Raises ValueError for a dtype that cannot be dumped."""
    values = np.asarray(array)
    check_dtype(values.dtype.name)
    native = values.dtype.newbyteorder("=")
    copy = np.array(values, dtype=native, order="C", copy=True, subok=False)
    return flat(copy), native.name, values.shape


def flat(values: np.ndarray) -> np.ndarray:
    """The bytes of a C-ordered array, uint8 [number of bytes], without a copy."""
    return values.reshape(-1).view(np.uint8)


def in_box(held: Held, box: Box | None) -> Shard:
    """The shard with these bytes, dtype and shape: the declared box of a tensor, or a whole tensor."""
    data, dtype, extent = held
    shape, offsets = box or (extent, (0,) * len(extent))
    return Shard(data, dtype, shape, offsets, extent)
