"""jax.Array to shards, and the proof of place.

Every shard that this process holds is recorded with the box, replica and placement that jax
itself gives. Nothing is gathered, resharded or donated, and no collective runs: a process that
records alone does not wait for the others.

The fingerprint of src/fingerprint.rs is computed here by XLA on the sharded array: indices come
from an iota over the *global* shape, which the partitioner splits as it split the array. It shares
no arithmetic of boxes with the record, so a wrong box cannot agree with it.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from backtape import gpu
from backtape._native import check_dtype
from backtape.shards import REPLICATE, Box, Guard, Held, Shard, flat, in_box, own_bytes

# The constants of src/fingerprint.rs; known values in tests tie the two definitions.
SEED, STRIDE, WORD, LANE = 0x9747B28C, 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
MIX_1, MIX_2 = 0x85EBCA6B, 0xC2B2AE35

# Compiled programs kept: a step records tens of tensors, each in one shape and layout.
PROGRAMS = 512


def shards_of(
    array: jax.Array, box: Box | None, partial: str | None, place_proof: bool, guard: Guard
) -> list[Shard]:
    """The addressable shards of `array`.

    `box` is for an array on one device, which is then that box of the tensor. Neither such a box
    nor an addend (`partial`) has a place that jax knows: they get no fingerprint here.
    """
    if isinstance(array, jax.core.Tracer):
        raise TypeError("a traced value has no bytes yet: return it from the jitted function")
    name_of(array.dtype)
    placement = placement_of(array.sharding, partial)
    on_one = isinstance(array.sharding, SingleDeviceSharding)
    if box is not None and not on_one:
        raise ValueError("global_shape and offsets are for an array on one device")
    proved = place_proof and partial is None and box is None
    # What the job forbids its own code (jax.transfer_guard) is what recording is: bytes to the
    # host, and for the proof constants to the devices, which takes three guards and their time.
    allow = jax.transfer_guard if proved else jax.transfer_guard_device_to_host
    with allow("allow"):
        if on_one and not proved:
            return [of_one(array, box)]
        pieces = array.addressable_shards
        # Started first, so that it runs on the device while the bytes come to the host.
        lanes = {}
        if proved:
            with guard("place proof"):
                lanes = lanes_by_device(array)
        held, proofs = [], {}
        for piece in pieces:
            sums = lanes.get(piece.device)
            arriving = from_gpu(piece, array.shape, sums)
            held.append(arriving or host_bytes(piece.data))
            # What arrives from a GPU brings the sums along.
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


def of_one(array: jax.Array, box: Box | None) -> Shard:
    """An array on one device, as the declared box of a tensor or as all of one."""
    first = box[1] if box else (0,) * array.ndim
    dtype = name_of(array.dtype)
    arriving = gpu.of_jax(array, dtype, first, None)
    return in_box((arriving, dtype, array.shape) if arriving else host_bytes(array), box)


def from_gpu(piece: Any, shape: tuple[int, ...], sums: jax.Array | None) -> Held | None:
    """The same of an array on a GPU, on its way to the host; None where it does not go that way."""
    array = piece.data
    first = [part.indices(size)[0] for part, size in zip(piece.index, shape)]
    dtype = name_of(array.dtype)
    arriving = gpu.of_jax(array, dtype, first, sums)
    return arriving and (arriving, dtype, array.shape)


def host_bytes(array: jax.Array) -> Held:
    """Bytes, dtype and shape of an array on one device; its own memory where that is the host's.

    A view holds the device buffer. When the job donates the array, XLA sees the hold and copies,
    so the bytes stay what they were.
    """
    values = np.asarray(array)
    if values.flags.c_contiguous and not values.flags.writeable:
        return flat(values), name_of(values.dtype), values.shape
    return own_bytes(values)


@lru_cache(maxsize=64)
def name_of(dtype: np.dtype) -> str:
    """A dtype's name, which numpy makes anew each time; raises for one that cannot be dumped."""
    check_dtype(dtype.name)
    return dtype.name


def placement_of(sharding: Sharding, partial: str | None) -> dict[str, int | str]:
    """Per mesh axis the dimension that it splits, or `replicate`; {} where no mesh is known.

    Of an addend only the split axes are said: along which others it adds up, jax does not know.
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
    """The fingerprint of every addressable shard, uint32 [1, 2], still on its device.

    Empty for a layout that no mesh describes: the recorder computes its own.
    """
    found = layout_of(array.sharding)
    if found is None:
        return {}
    mesh, spec = found
    # The job's own mesh context (jax.set_mesh) may be another one than the array's.
    with jax.set_mesh(mesh):
        sums = fingerprinting(array.shape, array.dtype, mesh, spec)(array)
    return {piece.device: piece.data for piece in sums.addressable_shards}


def layout_of(sharding: Sharding) -> tuple[Mesh, PartitionSpec] | None:
    """The mesh and spec of an array; one device is a mesh of its own."""
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

    Positions are mixed in on the global array, then every device sums what it holds (shard_map
    knows no indices). One program, so that XLA fuses it into one pass without temporaries.
    """
    del shape, dtype  # They only key the cache.
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
