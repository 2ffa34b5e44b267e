"""Taps: values and gradients of traced code, recorded where they are computed.

    q = backtape.jax.tap("q", q, microbatch=i)              # the value, and
    q = backtape.jax.tap_grad("dq", q, microbatch=i)        # its cotangent, in the backward pass

They work inside jit, scan, remat and shard_map. Inside a step that is recorded (`with
recorder.step(n)`) they record every local shard; outside they record nothing. A function is
compiled once with its taps and once without, so steps that are not recorded run no callback. Both
programs have an optimization barrier at the tap, so that the arithmetic around it, and every bit of
the job, is the same in both.

The place of a shard is asked of the compiler (backtape/taps_jax.py). Inside shard_map the job says it:
`spec=`, or `partial=` for an addend.
"""

import logging
from functools import partial as bind
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from backtape.attach_jax import Attached as Attached
from backtape.attach_jax import attach as attach
from backtape.attach_jax import heads
from backtape.attach_jax import losses as losses
from backtape.failopen import CAUGHT, describe
from backtape.shards import Key
from backtape.step_jax import step_algebra as step_algebra
from backtape.tape import Tape, open_tape
from backtape.taps_jax import NO_MICROBATCH, Tap, listen
from backtape.taps_jax import taping as taping

log = logging.getLogger("backtape")


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
        listen(tap, x, _index(microbatch))
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


def wait_for_taps() -> None:
    """Waits until every callback of the programs that the job has started has run."""
    jax.effects_barrier()


def settle(tape: Tape) -> None:
    """Ends what taps do for a step: waits for them, and records the loss heads that were heard."""
    wait_for_taps()
    heads.finish(tape)
