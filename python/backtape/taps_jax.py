"""What a tap puts into a program that is being traced: a callback that gets the local shards of a value, and
finds out where they lie in it.

A callback gets the local shard and nothing else. So the device's index in the mesh is passed to it as an
operand, and the compiler, which chooses the sharding, is asked for it. Inside shard_map the job says it.
"""

import threading
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import partial as bind
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir, partial_eval
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from backtape.jax_arrays import placement_of
from backtape.shards import REPLICATE, Key, Shard, own_bytes
from backtape.tape import open_tape

# True while a step is recorded. It is a part of jit's cache key, so that functions are then traced
# anew.
taping = jax.make_user_context(False)

NO_MICROBATCH = -1
UNKNOWN = -1  # for the index of a device in the mesh


class Sink(Protocol):
    """Where shards go that are not to be recorded at once."""

    def take(self, tap: "Tap", device: Any, shard: Callable[[], Shard]) -> None:
        """Takes a shard, which is made when it is called for. device: what tells the device that it comes
        from."""


@dataclass(frozen=True)
class Tap:
    """What a tap says of its tensor: all of it is known when the function is traced."""

    key: Key  # without the microbatch, which may be traced
    partial: str | None = None
    spec: PartitionSpec | None = None
    sink: Sink | None = None  # None: it is recorded at once

    def key_of(self, microbatch: Any, again: Any) -> Key:
        """The key of a value that has arrived; `again`: jax.checkpoint has computed it anew."""
        index = int(np.asarray(microbatch))
        when = "recompute" if np.asarray(again) else self.key.when
        return replace(self.key, microbatch=None if index == NO_MICROBATCH else index, when=when)


def listen(tap: Tap, x: jax.Array, microbatch: jax.Array) -> None:
    """Puts the callback into the program that is being traced. Raises ValueError where the place of what it gets
    would not be known."""
    if is_mapped(x):
        raise ValueError("inside vmap a value has no place in a tensor: tap outside of it")
    mesh = jax.sharding.get_abstract_mesh()
    again = recomputed_p.bind(again=0)
    if mesh.manual_axes:
        if set(mesh.manual_axes) != set(mesh.axis_names):
            raise ValueError("a shard_map over some axes of the mesh only: tap outside of it")
        spec = tap.spec
        if spec is None and tap.partial is None:
            raise ValueError("inside shard_map say spec=P(...), or partial='sum' for an addend")
        sizes = dict(zip(mesh.axis_names, mesh.axis_sizes))
        place = jnp.stack([lax.axis_index(name) for name in mesh.axis_names])
        heard = bind(_heard_local, tap, spec or PartitionSpec(), sizes)
        jax.debug.callback(heard, x, place, microbatch, again)
        return
    if tap.spec is not None:
        raise ValueError("spec= is for the inside of shard_map: elsewhere the compiler is asked")
    layout = Layout(tuple(x.shape))
    jax.debug.inspect_array_sharding(x, callback=layout.add)
    heard = bind(_heard, tap, layout)
    jax.debug.callback(heard, x, _device_index(mesh), microbatch, again, partitioned=True)


def is_mapped(x: Any) -> bool:
    """True for a value that vmap traces, also where grad traces it too."""
    while x is not None:
        if type(x).__name__ == "BatchTracer":
            return True
        x = getattr(x, "primal", None)
    return False


# The mesh that a job's arrays lie on, where the job has set none while it is traced (jax.set_mesh).
lying_on: ContextVar[Mesh | None] = ContextVar("lying_on", default=None)


def _device_index(mesh: Any) -> jax.Array:
    """The index of each device in the mesh, int32 [1] on every device; [UNKNOWN] where no mesh is
    known."""
    found = lying_on.get()
    if mesh.empty and found is not None:
        index = jnp.arange(found.size, dtype=jnp.int32)
        return lax.with_sharding_constraint(index, NamedSharding(found, PartitionSpec(found.axis_names)))
    if mesh.empty:
        return jnp.full(1, UNKNOWN, jnp.int32)
    spec = PartitionSpec(mesh.axis_names)
    index = jnp.arange(mesh.size, dtype=jnp.int32)
    if all(kind == AxisType.Explicit for kind in mesh.axis_types):
        return jax.sharding.reshard(index, spec)
    return lax.with_sharding_constraint(index, spec)


# A primitive that returns 0 in the forward pass and 1 where jax.checkpoint computes that again. jax
# asks the rule below how to divide each equation between the two passes: the rule keeps the
# equation for the forward pass and gives the recomputation a copy with another parameter.
recomputed_p = Primitive("backtape_recomputed")
recomputed_p.def_impl(lambda *, again: jnp.int32(again))
recomputed_p.def_abstract_eval(lambda *, again: jax.core.ShapedArray((), jnp.int32))
mlir.register_lowering(
    recomputed_p,
    mlir.lower_fun(lambda *, again: jnp.int32(again), multiple_results=False),
)


def _split(saveable: Any, unknown: Any, instantiated: Any, equation: Any) -> Any:
    later = equation.replace(params={"again": 1})
    return equation, later, [False], [True], []


partial_eval.partial_eval_jaxpr_custom_rules[recomputed_p] = _split


@dataclass
class Layout:
    """The shardings that the compiler has chosen for an array; known once the program is compiled."""

    shape: tuple[int, ...]
    found: list[Sharding] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, sharding: Sharding) -> None:
        """Adds a sharding. The compiler calls this once for each copy of the tap in the program."""
        with self.lock:
            if sharding not in self.found:
                self.found.append(sharding)

    def place(self, index: int, extent: tuple[int, ...]) -> tuple[Sharding, tuple[slice, ...], int]:
        """The sharding, box and replica number of the shard on the mesh's `index`-th device. Raises
        ValueError where the extent does not say which of several shardings it is."""
        with self.lock:
            found = [one for one in self.found if one.shard_shape(self.shape) == extent]
        if len(found) != 1:
            kinds = ", ".join(map(str, self.found)) or "none"
            raise ValueError(f"a shard of {extent} fits none or several of its shardings: {kinds}")
        sharding = found[0]
        devices = ordered_devices(sharding)
        if index == UNKNOWN:
            index = only_local(devices)
        boxes = sharding.devices_indices_map(self.shape)
        box = boxes[devices[index]]
        replica = sum(boxes[device] == box for device in devices[:index])
        return sharding, box, replica


def ordered_devices(sharding: Sharding) -> list[Any]:
    """The devices of a sharding in the order of its mesh."""
    if isinstance(sharding, NamedSharding):
        return list(sharding.mesh.devices.flat)
    if isinstance(sharding, SingleDeviceSharding):
        return list(sharding.device_set)
    return list(sharding._device_assignment)


def only_local(devices: list[Any]) -> int:
    """The index of this process's one device. Raises ValueError where it has none or several."""
    here = jax.process_index()
    local = [i for i, device in enumerate(devices) if device.process_index == here]
    if len(local) != 1:
        raise ValueError("which device it comes from is not known: trace under jax.set_mesh(mesh)")
    return local[0]


def _heard(tap: Tap, layout: Layout, block: Any, index: Any, microbatch: Any, again: Any) -> None:
    """Records one local shard; called from the callback's thread."""

    def shard() -> Shard:
        values = np.asarray(block)
        sharding, box, replica = layout.place(int(np.asarray(index)[0]), values.shape)
        offsets = tuple(part.indices(size)[0] for part, size in zip(box, layout.shape))
        data, dtype, extent = own_bytes(values)
        placement = placement_of(sharding, tap.partial)
        return Shard(
            data, dtype, layout.shape, offsets, extent, replica, placement, partial=tap.partial
        )

    _record(tap, int(np.asarray(index)[0]), shard, microbatch, again)


def _heard_local(
    tap: Tap,
    spec: PartitionSpec,
    sizes: dict[str, int],
    block: Any,
    place: Any,
    microbatch: Any,
    again: Any,
) -> None:
    """Records one local shard of code inside shard_map, whose place the job has given; called from the
    callback's thread."""

    def shard() -> Shard:
        data, dtype, extent = own_bytes(np.asarray(block))
        here = dict(zip(sizes, np.asarray(place).tolist()))
        split = [(axes,) if isinstance(axes, str) else axes or () for axes in spec]
        split += [()] * (len(extent) - len(split))
        shape, offsets = [], []
        for size, axes in zip(extent, split, strict=True):
            count, at = 1, 0
            for axis in axes:
                count, at = count * sizes[axis], at * sizes[axis] + here[axis]
            shape.append(size * count)
            offsets.append(size * at)
        used = {axis: dim for dim, axes in enumerate(split) for axis in axes}
        replica = 0
        for axis in sizes:
            if axis not in used:
                replica = replica * sizes[axis] + here[axis]
        if tap.partial and jax.local_device_count() > 1:
            raise ValueError("addends of several devices of one process: run one process a device")
        words = used if tap.partial else {axis: used.get(axis, REPLICATE) for axis in sizes}
        replica = 0 if tap.partial else replica
        box = (tuple(shape), tuple(offsets), extent)
        return Shard(data, dtype, *box, replica, words, partial=tap.partial)

    _record(tap, tuple(np.asarray(place).tolist()), shard, microbatch, again)


def _record(tap: Tap, device: Any, shard: Callable[[], Shard], microbatch: Any, again: Any) -> None:
    tape = open_tape()
    if tape is None:
        # The step is over. Its own programs have run by then, as the tape waits for their taps.
        return
    if tap.sink is not None:
        tap.sink.take(tap, device, shard)
        return
    tape.record_shards(tap.key_of(microbatch, again), shard)
