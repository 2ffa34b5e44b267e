"""Taps: values and gradients of traced code, recorded where they are computed.

    q = backtape.jax.tap("q", q, microbatch=i)              # the value, and
    q = backtape.jax.tap_grad("dq", q, microbatch=i)        # its cotangent, in the backward pass

They work inside jit, scan, remat and shard_map. Inside a step that is recorded (`with
recorder.step(n)`) they record every local shard; outside they record nothing. A function is
compiled once with its taps and once without, so steps that are not recorded run no callback. Both
programs have an optimization barrier at the tap, so that the arithmetic around it, and every bit of
the job, is the same in both.

How the place of a shard is known: jax hands a callback the local shard and nothing else. So the
device's index in the mesh is passed to the callback as an operand, and the compiler, which chooses
the sharding, is asked for it. Inside shard_map the job says it: `spec=`, or `partial=` for an
addend.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial as bind
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir, partial_eval
from jax.sharding import AxisType, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from backtape.failopen import CAUGHT, describe
from backtape.jax_arrays import placement_of
from backtape.shards import REPLICATE, Key, Shard, own_bytes
from backtape.step_jax import step_algebra as step_algebra
from backtape.tape import open_tape

log = logging.getLogger("backtape")

# True while a step is recorded. It is a part of jit's cache key, so that functions are then traced
# anew.
taping = jax.make_user_context(False)

NO_MICROBATCH = -1
UNKNOWN = -1  # for the index of a device in the mesh


@dataclass(frozen=True)
class Tap:
    """What a tap says of its tensor: all of it is known when the function is traced."""

    key: Key  # without the microbatch, which may be traced
    partial: str | None = None
    spec: PartitionSpec | None = None

    def key_of(self, microbatch: Any, again: Any) -> Key:
        """The key of a value that has arrived; `again`: jax.checkpoint has computed it anew."""
        index = int(np.asarray(microbatch))
        when = "recompute" if np.asarray(again) else self.key.when
        return replace(self.key, microbatch=None if index == NO_MICROBATCH else index, when=when)


def tap_of(
    name: str,
    role: str | None = None,
    partial: str | None = None,
    when: str | None = None,
    spec: PartitionSpec | None = None,
) -> Tap:
    """The tap that these arguments of `tap` and `tap_grad` make."""
    return Tap(Key(name, role, None, when), partial, spec)


def tap(
    name: str,
    x: jax.Array,
    *,
    microbatch: Any = None,
    role: str | None = None,
    partial: str | None = None,
    when: str | None = None,
    spec: PartitionSpec | None = None,
) -> jax.Array:
    """Records `x` under `name` and returns it.

    microbatch: a number, which may be traced: the loop variable of a scan.
    role, partial, when: as in `tape.record`.
    spec: inside shard_map, how the local shards make up the tensor (P() where all are the same).

    A value that `jax.checkpoint` computes again in the backward pass is recorded with
    when="recompute". A tap that cannot be compiled is left out: the dump names the tensor and the
    reason.
    """
    return _tapped(tap_of(name, role, partial, when, spec), x, microbatch)


def tap_grad(name: str, x: jax.Array, *, microbatch: Any = None, **key: Any) -> jax.Array:
    """Returns `x`; the cotangent of what is returned is recorded under `name`.

    key: role, partial, when and spec, as in `tap`.

    For a weight, the cotangent is the part that flows through this use of it. It works in reverse
    mode only, as every custom_vjp does.
    """
    return _grad_tapped(tap_of(name, **key), x, _index(microbatch))


@bind(jax.custom_vjp, nondiff_argnums=(0,))
def _grad_tapped(tap: Tap, x: jax.Array, microbatch: Any) -> jax.Array:
    return x


def _forward(tap: Tap, x: jax.Array, microbatch: Any) -> tuple[jax.Array, Any]:
    return x, microbatch


def _backward(tap: Tap, microbatch: Any, cotangent: jax.Array) -> tuple[jax.Array, None]:
    return _tapped(tap, cotangent, microbatch), None


_grad_tapped.defvjp(_forward, _backward)


def _index(microbatch: Any) -> Any:
    return jnp.int32(NO_MICROBATCH if microbatch is None else microbatch)


def _tapped(tap: Tap, x: jax.Array, microbatch: Any) -> jax.Array:
    """Returns `x` behind an optimization barrier, which is there whether or not the step is recorded:
    without it XLA would fuse, and so round, differently where a callback reads the value."""
    x = lax.optimization_barrier(x)
    if not taping.value:
        return x
    try:
        _listen(tap, x, _index(microbatch))
    except CAUGHT as error:
        # The job is being traced, and the trace goes on without the tap.
        _leave_out(tap.key, error)
    return x


def _leave_out(key: Key, error: BaseException) -> None:
    tape = open_tape()
    reason = f"its tap cannot be compiled: {describe(error)}"
    if tape is not None:
        tape.leave_out(key.name, None, reason)
    log.warning("%s is not recorded: %s", key.name, reason)


def _listen(tap: Tap, x: jax.Array, microbatch: jax.Array) -> None:
    """Puts the callback into the program that is being traced."""
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


def _device_index(mesh: Any) -> jax.Array:
    """The index of each device in the mesh, int32 [1] on every device; [UNKNOWN] where no mesh is
    set."""
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

    _record(tap, shard, microbatch, again)


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

    _record(tap, shard, microbatch, again)


def _record(tap: Tap, shard: Callable[[], Shard], microbatch: Any, again: Any) -> None:
    tape = open_tape()
    if tape is None:
        # The step is over. Its own programs have run by then, as the tape waits for their taps.
        return
    tape.record_shards(tap.key_of(microbatch, again), shard)


def wait_for_taps() -> None:
    """Waits until every callback of the programs that the job has started has run."""
    jax.effects_barrier()
