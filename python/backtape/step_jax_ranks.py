"""Which ranks hold which addend of a gradient, read off the shardings that jax gives.

A gradient before communication is another array on every device, for which jax has no type that can
be read. So a job returns it from `shard_map` with one more dimension in front, as long as a mesh
axis and split along it: index i of it is the addend of the devices at i of that axis.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from backtape.jax_arrays import of_one, part_of
from backtape.sampling import Region, inside
from backtape.shards import REPLICATE, Box, Shard, moved
from backtape.shards import Mesh as RankMesh

Axes = tuple[str, ...]


def axes_of(axis: str | Sequence[str] | None) -> Axes:
    """One or several mesh axes as a tuple; none for None."""
    return (axis,) if isinstance(axis, str) else tuple(axis or ())


def joined(axes: Axes) -> str:
    """The name of a group of ranks that lies along several axes of the mesh."""
    return "+".join(axes)


def split_of(array: Any) -> list[Axes]:
    """For each dimension of an array with a NamedSharding the mesh axes that split it."""
    spec = tuple(array.sharding.spec)
    return [axes_of(axes) for axes in spec] + [()] * (array.ndim - len(spec))


def devices_of(array: Any, local: bool = False) -> int:
    """How many devices hold an array, or how many of this process; 1 for one of numpy."""
    if not isinstance(array, jax.Array):
        return 1
    sharding = array.sharding
    return len(sharding.addressable_devices if local else sharding.device_set)


def is_unreduced(array: Any) -> bool:
    """True for an array that jax is still to sum over a mesh axis: it hands out no shard of it."""
    sharding = getattr(array, "sharding", None)
    return bool(getattr(getattr(sharding, "spec", None), "unreduced", ()))


def refuses_axes(array: Any, axes: Axes) -> str | None:
    """Why the first dimension of an array is not split by these mesh axes; None where it is."""
    if not isinstance(getattr(array, "sharding", None), NamedSharding):
        return f"local_axis={joined(axes)!r} needs an array with a NamedSharding"
    sizes = array.sharding.mesh.shape
    if unknown := [axis for axis in axes if axis not in sizes]:
        return f"the mesh of its gradient has no axis {unknown[0]!r}, but {', '.join(sizes)}"
    count = math.prod(sizes[axis] for axis in axes)
    if not array.ndim or array.shape[0] != count or split_of(array)[0] != axes:
        return (
            f"its gradient, of shape {array.shape}, has no first dimension of {count} that "
            f"{joined(axes)!r} splits: return it so from shard_map, with out_specs=P({axes}, ...)"
        )
    return None


def is_one_addend(array: Any) -> bool:
    """True where all that this process holds of an array lies at one index of its first dimension,
    so that it is the addend of this rank."""
    size = array.shape[0]
    return len({piece.index[0].indices(size)[0] for piece in array.addressable_shards}) == 1


def addend_shards(
    array: Any, axes: Axes, regions: Sequence[Region] | None = None
) -> list[Shard]:
    """What this process holds of an addend, or of some regions of it: the shards of an array without
    its first dimension."""
    mesh, split, shape = array.sharding.mesh, split_of(array)[1:], array.shape[1:]
    placement: dict[str, int | str] = {str(axis): REPLICATE for axis in mesh.axis_names}
    placement |= {axis: "sum" for axis in axes}
    placement |= {axis: dim for dim, names in enumerate(split) for axis in names}
    copies = [axis for axis, word in placement.items() if word == REPLICATE]
    shards = []
    for piece in array.addressable_shards:
        offsets = tuple(part.indices(size)[0] for part, size in zip(piece.index[1:], shape))
        # A program on one device is refused while the job has set a mesh of several. The copies to
        # the host are recording's own, which the job may forbid its own code.
        alone = Mesh(np.array([piece.device]), ("device",))
        with jax.set_mesh(alone), jax.transfer_guard("allow"):
            if regions is None:
                parts = [of_one(piece.data.reshape(piece.data.shape[1:]), (shape, offsets))]
            else:
                cuts = inside(offsets, piece.data.shape[1:], regions)
                parts = [addend_part(piece.data, cut, (shape, offsets)) for cut in cuts]
        position = places(mesh)[piece.device]
        for shard in parts:
            shard.replica = 0
            for axis in copies:
                shard.replica = shard.replica * mesh.shape[axis] + position[axis]
            shard.placement, shard.partial = placement, "sum"
        shards += parts
    return shards


def addend_part(array: Any, cut: Region, box: Box) -> Shard:
    """The shard of these ranges of positions of an addend, of which the array, with one more dimension
    in front, holds this box."""
    shape, offsets = box
    part = part_of(array, ((0, 1), *cut))
    return of_one(part.reshape(part.shape[1:]), (shape, moved(offsets, cut)))


@lru_cache(maxsize=16)
def places(mesh: Mesh) -> dict[Any, dict[str, int]]:
    """By device, its index along each axis of the mesh."""
    return {
        device: dict(zip(mesh.axis_names, index)) for index, device in np.ndenumerate(mesh.devices)
    }


@lru_cache(maxsize=64)
def ranks_along(mesh: Mesh, axes: Axes) -> list[int]:
    """The processes that have devices on the lines along these axes through this process's own."""
    devices = mesh.devices
    here = jax.process_index()
    ranks = set()
    for index in np.argwhere(np.vectorize(lambda device: device.process_index == here)(devices)):
        position = dict(zip(mesh.axis_names, index))
        line = tuple(slice(None) if axis in axes else int(position[axis]) for axis in position)
        ranks |= {device.process_index for device in np.ravel(devices[line])}
    return sorted(ranks)


def group_along(array: Any, axes: Axes, ranks: RankMesh) -> tuple[list[int], int]:
    """The ranks that a reduction along mesh axes brings together, and the number of addends, by the
    mesh of the parameter, or else by that of the recorder.

    Raises ValueError where neither mesh has the axes.
    """
    sharding = getattr(array, "sharding", None)
    if isinstance(sharding, NamedSharding) and set(axes) <= set(sharding.mesh.axis_names):
        count = math.prod(sharding.mesh.shape[axis] for axis in axes)
        return ranks_along(sharding.mesh, axes), count
    if not ranks.sizes:
        return list(range(ranks.world_size)), ranks.world_size
    if not set(axes) <= set(ranks.sizes) or math.prod(ranks.sizes.values()) != ranks.world_size:
        raise ValueError(f"which ranks lie along {joined(axes)!r} is not known: give their ranks")
    numbers = np.arange(ranks.world_size).reshape(list(ranks.sizes.values()))
    line = tuple(slice(None) if axis in axes else ranks.here[axis] for axis in ranks.sizes)
    group = np.ravel(numbers[line]).tolist()
    return group, len(group)
