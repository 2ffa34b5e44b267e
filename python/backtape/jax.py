"""Taps: values and gradients of traced code, recorded where they are computed.

    q = backtape.jax.tap("q", q, microbatch=i)              # the value, and
    q = backtape.jax.tap_grad("dq", q, microbatch=i)        # its cotangent, in the backward pass

They work inside jit, scan, remat and shard_map, and record every local shard of the step that
is open (`with recorder.step(n)`), or nothing. A function is compiled once with its taps and once
without: steps that are not recorded run no callback. What the tap does to the arithmetic around it
is the same in both (an optimization barrier), so that recording changes no bit of the job.

How a shard says where it lies. jax hands a callback the local shard and nothing else, so the device's
index in the mesh comes along as an operand, and the sharding, which the compiler chooses, is asked of
the compiler. Inside shard_map the job says it: `spec=`, or `partial=` for an addend.
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
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
from backtape.shards import REPLICATE, Shard, own_bytes
from backtape.tape import Tape, open_tape

log = logging.getLogger("backtape")

# Part of jit's cache key: True while a step is recorded, so that its functions are traced anew.
taping = jax.make_user_context(False)

NO_MICROBATCH = -1
UNKNOWN = -1  # which device of the mesh


@dataclass(frozen=True)
class Key:
    """What a tap says of its tensor, all static."""

    name: str
    role: str | None = None
    partial: str | None = None
    when: str | None = None
    spec: PartitionSpec | None = None

    def options(self, microbatch: int, again: bool) -> dict[str, Any]:
        """Keyword arguments of `tape.record_shards`."""
        return {
            "role": self.role,
            "partial": self.partial,
            "when": "recompute" if again else self.when,
            "microbatch": None if microbatch == NO_MICROBATCH else microbatch,
        }


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

    microbatch: a number, or a traced one: the loop variable of a scan.
    role, partial, when: as in `tape.record`.
    spec: inside shard_map, how the local shards make up the tensor (P() where all are alike).

    What `jax.checkpoint` computes again in the backward pass is recorded under when="recompute".
    """
    return _tapped(Key(name, role, partial, when, spec), x, microbatch)


def tap_grad(name: str, x: jax.Array, *, microbatch: Any = None, **key: Any) -> jax.Array:
    """Returns `x`; the cotangent of what is returned is recorded under `name`.

    Of a weight that is the part that flows through this use of it. For reverse mode only, as
    every custom_vjp.
    """
    return _grad_tapped(Key(name, **key), x, _index(microbatch))


@bind(jax.custom_vjp, nondiff_argnums=(0,))
def _grad_tapped(key: Key, x: jax.Array, microbatch: Any) -> jax.Array:
    return x


def _forward(key: Key, x: jax.Array, microbatch: Any) -> tuple[jax.Array, Any]:
    return x, microbatch


def _backward(key: Key, microbatch: Any, cotangent: jax.Array) -> tuple[jax.Array, None]:
    return _tapped(key, cotangent, microbatch), None


_grad_tapped.defvjp(_forward, _backward)


def _index(microbatch: Any) -> Any:
    return jnp.int32(NO_MICROBATCH if microbatch is None else microbatch)


def _tapped(key: Key, x: jax.Array, microbatch: Any) -> jax.Array:
    """`x` behind a barrier that stands there whether or not the step is recorded: without it XLA
    would fuse, and so round, differently where a callback looks on."""
    x = lax.optimization_barrier(x)
    if not taping.value:
        return x
    try:
        _listen(key, x, _index(microbatch))
    except CAUGHT as error:
        # While the job is traced: there is no value yet, and no device that could be at fault.
        _leave_out(key, error)
    return x


def _leave_out(key: Key, error: BaseException) -> None:
    tape = open_tape()
    reason = f"its tap cannot be compiled: {describe(error)}"
    if tape is not None:
        tape.leave_out(key.name, None, reason)
    log.warning("%s is not recorded: %s", key.name, reason)


# --- in the traced program ------------------------------------------------------------------


def _listen(key: Key, x: jax.Array, microbatch: jax.Array) -> None:
    """Puts the callback into the program that is being traced."""
    if is_mapped(x):
        raise ValueError("inside vmap a value has no place in a tensor: tap outside of it")
    mesh = jax.sharding.get_abstract_mesh()
    again = recomputed_p.bind(again=0)
    if mesh.manual_axes:
        if set(mesh.manual_axes) != set(mesh.axis_names):
            raise ValueError("a shard_map over some axes of the mesh only: tap outside of it")
        spec = key.spec
        if spec is None and key.partial is None:
            raise ValueError("inside shard_map say spec=P(...), or partial='sum' for an addend")
        sizes = dict(zip(mesh.axis_names, mesh.axis_sizes))
        place = jnp.stack([lax.axis_index(name) for name in mesh.axis_names])
        heard = bind(_heard_local, key, spec or PartitionSpec(), sizes)
        jax.debug.callback(heard, x, place, microbatch, again)
        return
    if key.spec is not None:
        raise ValueError("spec= is for the inside of shard_map: elsewhere the compiler is asked")
    layout = Layout(tuple(x.shape))
    jax.debug.inspect_array_sharding(x, callback=layout.add)
    heard = bind(_heard, key, layout)
    jax.debug.callback(heard, x, _device_index(mesh), microbatch, again, partitioned=True)


def is_mapped(x: Any) -> bool:
    """True for a value that vmap follows, also below grad."""
    while x is not None:
        if type(x).__name__ == "BatchTracer":
            return True
        x = getattr(x, "primal", None)
    return False


def _device_index(mesh: Any) -> jax.Array:
    """int32 [1] on every device of the mesh: its index; [UNKNOWN] where no mesh is set."""
    if mesh.empty:
        return jnp.full(1, UNKNOWN, jnp.int32)
    spec = PartitionSpec(mesh.axis_names)
    index = jnp.arange(mesh.size, dtype=jnp.int32)
    if all(kind == AxisType.Explicit for kind in mesh.axis_types):
        return jax.sharding.reshard(index, spec)
    return lax.with_sharding_constraint(index, spec)


# 0 in the forward pass, 1 where jax.checkpoint computes it again: the rule below is asked which
# part of an equation belongs to which, and gives the second a copy that says so.
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


# --- when a value arrives -------------------------------------------------------------------


@dataclass
class Layout:
    """Where the compiler put an array: known once the program is compiled."""

    shape: tuple[int, ...]
    found: list[Sharding] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, sharding: Sharding) -> None:
        """Called by the compiler, once for each copy of the tap in the program."""
        with self.lock:
            if sharding not in self.found:
                self.found.append(sharding)

    def place(self, index: int, extent: tuple[int, ...]) -> tuple[Sharding, tuple[slice, ...], int]:
        """Sharding, box and replica of the shard of the mesh's `index`-th device."""
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
    """The index of this process's device, where it has one only."""
    here = jax.process_index()
    local = [i for i, device in enumerate(devices) if device.process_index == here]
    if len(local) != 1:
        raise ValueError("which device it comes from is not known: trace under jax.set_mesh(mesh)")
    return local[0]


def _heard(key: Key, layout: Layout, block: Any, index: Any, microbatch: Any, again: Any) -> None:
    """One local shard, from the callback's thread."""

    def shard() -> Shard:
        values = np.asarray(block)
        sharding, box, replica = layout.place(int(np.asarray(index)[0]), values.shape)
        offsets = tuple(part.indices(size)[0] for part, size in zip(box, layout.shape))
        data, dtype, extent = own_bytes(values)
        placement = placement_of(sharding, key.partial)
        return Shard(data, dtype, layout.shape, offsets, extent, replica, placement)

    _record(key, shard, microbatch, again)


def _heard_local(
    key: Key,
    spec: PartitionSpec,
    sizes: dict[str, int],
    block: Any,
    place: Any,
    microbatch: Any,
    again: Any,
) -> None:
    """One shard inside shard_map, whose place the job said."""

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
        if key.partial and jax.local_device_count() > 1:
            raise ValueError("addends of several devices of one process: run one process a device")
        words = used if key.partial else {axis: used.get(axis, REPLICATE) for axis in sizes}
        return Shard(
            data, dtype, tuple(shape), tuple(offsets), extent, 0 if key.partial else replica, words
        )

    _record(key, shard, microbatch, again)


def _record(key: Key, shard: Callable[[], Shard], microbatch: Any, again: Any) -> None:
    tape = open_tape()
    if tape is None:
        # The step was over: `wait_for_taps` makes this impossible for a program of the step.
        return
    options = key.options(int(np.asarray(microbatch)), bool(np.asarray(again)))
    tape.record_shards(key.name, shard, **options)


def wait_for_taps() -> None:
    """Returns when every callback of the programs that were started has run."""
    jax.effects_barrier()
