"""jax arrays to shards, and the proof of place.

Every shard that this process holds is recorded with the box, replica number and placement that jax
gives for it. Nothing is gathered, resharded or donated, and no collective runs, so a process that
records alone does not wait for the others.

XLA computes the fingerprint of src/fingerprint.rs on the sharded array. It takes the indices from
an iota over the *global* shape, which the partitioner splits as it has split the array. This shares
no arithmetic of boxes with the record, so the fingerprint does not agree with a wrong box.
"""

from collections.abc import Callable, Sequence
import functools
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from backtape import gpu
from backtape._native import Arriving, check_dtype
from backtape.failopen import CAUGHT
from backtape.sampling import Region, inside
from backtape.shards import (
    REPLICATE,
    Box,
    Guard,
    Held,
    Shard,
    flat,
    in_box,
    moved,
    own_bytes,
    slices,
)

# The constants of src/fingerprint.rs; a test compares both definitions on known values.
SEED, STRIDE, WORD, LANE = 0x9747B28C, 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
MIX_1, MIX_2 = 0x85EBCA6B, 0xC2B2AE35

# The program that copies an array; one that returned its argument would share its memory.
on_device = jax.jit(jnp.copy)

# How many compiled programs are kept: a step records tens of tensors, each in one shape and layout.
PROGRAMS = 512


def shards_of(
    array: jax.Array,
    box: Box | None,
    partial: str | None,
    place_proof: bool,
    guard: Guard,
    regions: Sequence[Region] | None = None,
) -> list[Shard]:
    """The addressable shards of `array`.

    box: for an array on one device, the box of the tensor that it is.
    regions: the boxes of the global tensor that are taken; None takes all of it. XLA's fingerprint
        is of all of a shard, so a part of one has none.

    jax knows neither the place of such a box nor that of an addend (`partial`), so they get no
    fingerprint here. Raises TypeError for a traced value, ValueError for a dtype that cannot be
    dumped, a box of an array on several devices, or an unreduced array that `partial` does not
    name.
    """
    if isinstance(array, jax.core.Tracer):
        raise TypeError("a traced value has no bytes yet: return it from the jitted function")
    name_of(array.dtype)
    placement = placement_of(array.sharding, partial)
    on_one = isinstance(array.sharding, SingleDeviceSharding)
    if box is not None and not on_one:
        raise ValueError("global_shape and offsets are for an array on one device")
    proved = place_proof and partial is None and box is None and regions is None
    # Recording does what a job may forbid its own code with jax.transfer_guard: it copies bytes to
    # the host, and for the proof constants to the devices. Allowing only the first takes less time.
    allow = jax.transfer_guard if proved else jax.transfer_guard_device_to_host
    with allow("allow"):
        if regions is not None:
            return parts_of(array, box, placement, regions)
        if on_one and not proved:
            return [of_one(array, box)]
        pieces = array.addressable_shards
        # Started first, so that it runs on the device while the bytes are copied to the host.
        lanes = {}
        if proved:
            with guard("place proof"):
                lanes = lanes_by_device(array)
        held, proofs = [], {}
        for piece in pieces:
            sums = lanes.get(piece.device)
            arriving = piece_from_gpu(piece, array.shape, sums)
            held.append(arriving or host_bytes(piece.data))
            # An array that arrives from a GPU brings its sums with it.
            if sums is not None and arriving is None:
                with guard("place proof"):
                    proofs[piece.device] = to_pair(sums)
    return [
        Shard(
            data,
            dtype,
            shape=array.shape,
            offsets=tuple(part.indices(size)[0] for part, size in zip(piece.index, array.shape)),
            extent=extent,
            replica=piece.replica_id,
            placement=placement,
            fingerprint=proofs.get(piece.device),
        )
        for piece, (data, dtype, extent) in zip(pieces, held)
    ]


def parts_of(
    array: jax.Array, box: Box | None, placement: dict[str, int | str], regions: Sequence[Region]
) -> list[Shard]:
    """The shards of what lies of an array in these regions."""
    shape = box[0] if box else array.shape
    shards = []
    for piece in array.addressable_shards:
        first = tuple(part.indices(size)[0] for part, size in zip(piece.index, array.shape))
        if box:
            first = tuple(own + start for own, start in zip(first, box[1]))
        for cut in inside(first, piece.data.shape, regions):
            shard = of_one(part_of(piece.data, cut), (shape, moved(first, cut)))
            shard.replica, shard.placement = piece.replica_id, placement
            shards.append(shard)
    return shards


def part_of(array: jax.Array, cut: Region) -> jax.Array | np.ndarray:
    """These ranges of positions of an array on one device. From the host's memory nothing is copied
    here; a GPU copies no more than that part."""
    if next(iter(array.devices())).platform == "cpu":
        return np.asarray(array)[slices(cut)]
    starts, sizes = [low for low, _ in cut], tuple(high - low for low, high in cut)
    # A program on one device is refused while the job has set a mesh of several (jax.set_mesh).
    with jax.set_mesh(Mesh(np.array(list(array.devices())), ("device",))):
        return sliced(array, np.array(starts, np.int32), sizes)


# One program for all places of parts of one size.
@functools.partial(jax.jit, static_argnums=2)
def sliced(array: jax.Array, starts: jax.Array, sizes: tuple[int, ...]) -> jax.Array:
    """The part of an array that starts there and has these sizes."""
    return lax.dynamic_slice(array, tuple(starts), sizes)


def of_one(array: jax.Array | np.ndarray, box: Box | None) -> Shard:
    """The shard of an array on one device: the declared box of a tensor, or a whole tensor. One of
    numpy is a view of a jax array, whose bytes are copied."""
    if isinstance(array, np.ndarray):
        return in_box(own_bytes(array), box)
    first = box[1] if box else (0,) * array.ndim
    dtype = name_of(array.dtype)
    arriving = from_gpu(array, dtype, first, None)
    return in_box((arriving, dtype, array.shape) if arriving else host_bytes(array), box)


def piece_from_gpu(piece: Any, shape: tuple[int, ...], sums: jax.Array | None) -> Held | None:
    """Bytes, dtype and shape of an addressable shard of an array of this shape, the bytes on their
    way from a GPU; None where they are to be copied as any others."""
    array = piece.data
    first = [part.indices(size)[0] for part, size in zip(piece.index, shape)]
    dtype = name_of(array.dtype)
    arriving = from_gpu(array, dtype, first, sums)
    return arriving and (arriving, dtype, array.shape)


def from_gpu(array: Any, dtype: str, first: Sequence[int], sums: Any) -> Arriving | None:
    """The bytes of a jax array on one CUDA device, on their way to the host; None where they are to
    be copied as any others.

    first: the indices in the tensor at which the array starts.
    sums: the array's fingerprint as XLA computes it, uint32 [1, 2] on the same device, or None.

    The bytes are those of a copy that XLA makes on the device, in the order of the job's programs.
    The array itself must not be held: XLA refuses to run a program to which a buffer is donated
    that a capsule holds ("Donation requested for buffer with external reference"), and the job
    would end.
    """
    if next(iter(array.devices())).platform != "gpu":
        return None
    if not array.nbytes or array.sharding.memory_kind not in (None, "device"):
        return None
    here: gpu.Door | None = None
    try:
        kind, ordinal = array.__dlpack_device__()
        if int(kind) != gpu.CUDA:
            return None
        here = gpu.door(int(ordinal))
        if here.gpu is None:
            return None
        held = here.copies.take(array.nbytes)
        if held is None:
            return gpu.full(here, "BACKTAPE_GPU_SNAPSHOTS", "the GPU's memory for copies of jax arrays")
        mine = copied(array)
        # jax makes that stream wait for the copy, and does not wait itself.
        stream = here.gpu.stream
        arriving = here.gpu.capture(
            mine.__dlpack__(stream=stream),
            dtype,
            gpu.ranges(first, array.shape),
            sums=None if sums is None else sums.__dlpack__(stream=stream),
            hold=held,
        )
    except CAUGHT as error:
        return gpu.given_up(here, error)
    return arriving or gpu.full(here)


def copied(array: Any) -> Any:
    """A copy of a jax array on its own device, made after the programs that the job has launched there.

    Raises BufferError where XLA has no memory for it, which is no fault of the device.
    """
    try:
        # A program on one device is refused while the job has set a mesh of several (jax.set_mesh).
        with jax.set_mesh(Mesh(np.array(list(array.devices())), ("device",))):
            return on_device(array)
    except RuntimeError as error:
        raise BufferError(f"XLA did not copy it: {error}") from error


def host_bytes(array: jax.Array) -> Held:
    """Bytes, dtype and shape of an array on one device; the bytes are the array's own memory where
    that is the host's.

    A view holds the array's buffer. When the job donates the array, XLA sees that and copies, so
    the bytes stay as they were.
    """
    values = np.asarray(array)
    if values.flags.c_contiguous and not values.flags.writeable:
        return flat(values), name_of(values.dtype), values.shape
    return own_bytes(values)


@lru_cache(maxsize=64)
def name_of(dtype: np.dtype) -> str:
    """A dtype's name, cached, as numpy makes it anew each time. Raises ValueError for a dtype that
    cannot be dumped."""
    check_dtype(dtype.name)
    return dtype.name


def placement_of(sharding: Sharding, partial: str | None) -> dict[str, int | str]:
    """For each mesh axis the dimension that it splits, or `replicate`; {} where no mesh is known.

    For an addend only the axes that split it are given: jax does not know along which others it is
    to be added up. Raises ValueError for an unreduced array unless `partial` says that it is an
    addend.
    """
    if not isinstance(sharding, NamedSharding):
        return {}
    unreduced = getattr(sharding.spec, "unreduced", ())
    if unreduced and partial is None:
        axes = ", ".join(map(str, unreduced))
        raise ValueError(f"the array is not reduced along {axes}: say partial='sum'")
    placement: dict[str, int | str] = {}
    if partial is None:
        placement = {str(axis): REPLICATE for axis in sharding.mesh.axis_names}
    for dim, axes in enumerate(sharding.spec):
        for axis in (axes,) if isinstance(axes, str) else axes or ():
            placement[str(axis)] = dim
    return placement


def lanes_by_device(array: jax.Array) -> dict[jax.Device, jax.Array]:
    """The fingerprint of every addressable shard, uint32 [1, 2], on the shard's own device.

    Empty for a layout that no mesh describes, where the recorder computes its own.
    """
    found = layout_of(array.sharding)
    if found is None:
        return {}
    mesh, spec = found
    # The mesh that the job has set (jax.set_mesh) may be another one than the array's.
    with jax.set_mesh(mesh):
        sums = fingerprinting(array.shape, array.dtype, mesh, spec)(array)
    return {piece.device: piece.data for piece in sums.addressable_shards}


def layout_of(sharding: Sharding) -> tuple[Mesh, PartitionSpec] | None:
    """The mesh and spec of a sharding, where one device is a mesh of its own; None for a sharding that
    has neither."""
    if isinstance(sharding, NamedSharding):
        return sharding.mesh, sharding.spec
    if isinstance(sharding, SingleDeviceSharding):
        return Mesh(np.array(list(sharding.device_set)), ("device",)), PartitionSpec()
    return None


@lru_cache(maxsize=PROGRAMS)
def fingerprinting(
    shape: tuple[int, ...], dtype: np.dtype, mesh: Mesh, spec: PartitionSpec
) -> Callable[[jax.Array], jax.Array]:
    """The jitted fingerprint: an array -> uint32 [devices, 2], a row on each device.

    Indices are mixed in on the global array, as shard_map does not know them; then every device
    sums what it holds. It is one program, so that XLA fuses it into one pass without temporaries.
    """
    del shape, dtype  # They are parts of the cache's key only.
    axes = PartitionSpec(mesh.axis_names, None)
    local = jax.shard_map(
        sum_lanes, mesh=mesh, in_specs=spec, out_specs=axes, check_vma=False
    )
    return jax.jit(lambda array: local(first_lane(array)))


def first_lane(array: jax.Array) -> jax.Array:
    """fmix(position ^ bits * WORD) of each element, uint32, of the array's shape, or [*shape, 2]
    for the words of 64-bit elements. Positions are global."""
    bits = words(array)
    position = jnp.full(bits.shape, SEED, jnp.uint32)
    for dim in range(bits.ndim):
        index = lax.broadcasted_iota(jnp.uint32, bits.shape, dim)
        position = fmix(position + (index + jnp.uint32(1)) * jnp.uint32(STRIDE))
    return fmix(position ^ (bits * jnp.uint32(WORD)))


def words(array: jax.Array) -> jax.Array:
    """The bits of each element as uint32: zero-extended, or two words, least significant first."""
    if array.dtype == jnp.bool_:
        return array.astype(jnp.uint32)
    width = array.dtype.itemsize
    unsigned = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[width]
    return lax.bitcast_convert_type(array, unsigned).astype(jnp.uint32)


def sum_lanes(first: jax.Array) -> jax.Array:
    """Both lanes summed modulo 2**32 over one device's elements: uint32 [1, 2]."""
    second = fmix(first ^ jnp.uint32(LANE))
    return jnp.stack([jnp.sum(first, dtype=jnp.uint32), jnp.sum(second, dtype=jnp.uint32)])[None]


def to_pair(sums: jax.Array) -> tuple[int, int]:
    """Two lanes as Python integers; waits for them."""
    first, second = np.asarray(sums)[0]
    return int(first), int(second)


def fmix(h: jax.Array) -> jax.Array:
    """murmur3's 32-bit finaliser."""
    h = (h ^ (h >> 16)) * jnp.uint32(MIX_1)
    h = (h ^ (h >> 13)) * jnp.uint32(MIX_2)
    return h ^ (h >> 16)
