"""What is declared of the gradients of a step in jax that are not recorded whole: the sums of squares
of what this process holds of them, by which norms are judged."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from backtape.sampling import Region
from backtape.step_jax_ranks import is_unreduced

# Elements that are widened to f64 at a time: the copy stays in the processor's cache.
CHUNK = 1 << 16


def squares_of(array: Any) -> tuple[float, list[Region]] | None:
    """The sum of the squares of what this process holds of an array, each element once, in f64, and the
    boxes that it holds. None for an array of which it has no shards."""
    if not isinstance(array, jax.Array):
        values = np.asarray(array)
        return of_host(values), [tuple((0, size) for size in values.shape)]
    if is_unreduced(array):
        return None
    held: dict[Region, Any] = {}
    for piece in array.addressable_shards:
        ranges = (part.indices(size)[:2] for part, size in zip(piece.index, array.shape))
        held.setdefault(tuple(ranges), piece.data)
    with jax.transfer_guard("allow"):
        total = sum(of_piece(piece) for piece in held.values())
    return total, list(held)


def of_piece(piece: jax.Array) -> float:
    """The sum of the squares of an array on one device, computed there."""
    if next(iter(piece.devices())).platform == "cpu":
        return of_host(np.asarray(piece))
    alone = jax.sharding.Mesh(np.array(list(piece.devices())), ("device",))
    with jax.enable_x64(True), jax.set_mesh(alone):
        return float(on_device(piece))


@jax.jit
def on_device(piece: jax.Array) -> jax.Array:
    """The sum of the squares in f64."""
    return jnp.sum(jnp.square(piece.astype(jnp.float64)))


def of_host(values: np.ndarray) -> float:
    """The sum of the squares of an array in the host's memory."""
    flat = values.reshape(-1)
    total = 0.0
    for start in range(0, flat.size, CHUNK):
        wide = flat[start : start + CHUNK].astype(np.float64)
        total += float(np.dot(wide, wide))
    return total
