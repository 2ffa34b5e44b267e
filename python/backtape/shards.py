"""Arrays to shards: which part of which tensor, and its bytes as they lie.

No dtype is converted. bf16 and f8 have no buffer protocol in numpy, so the bytes are looked at
as uint8; a numpy array can be changed by the job at any time, so it is copied here and now.
"""

import operator
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from backtape._native import check_dtype

REPLICATE = "replicate"

# Bytes (uint8, C order), dtype's name and shape of an array that is in host memory.
Held = tuple[np.ndarray, str, tuple[int, ...]]

# Global shape and offsets of a box that the job placed itself.
Box = tuple[tuple[int, ...], tuple[int, ...]]

# Around what may fail without losing the shard: `Faults.guard`.
Guard = Callable[[str], AbstractContextManager[None]]


@dataclass(slots=True)
class Key:
    """Which value of which tensor, as the job said in `tape.record`."""

    name: str
    role: str | None = None
    microbatch: int | None = None
    when: str | None = None
    partial: str | None = None


@dataclass(slots=True)
class Shard:
    """One box of a tensor and its bytes, as `backtape._native.Tape.record` reads them."""

    data: np.ndarray  # uint8 [bytes], C order, never written again
    dtype: str  # numpy's or ml_dtypes' name
    shape: tuple[int, ...]  # of the global tensor
    offsets: tuple[int, ...]  # where the box starts
    extent: tuple[int, ...]  # how far it reaches
    replica: int = 0
    placement: dict[str, int | str] = field(default_factory=dict)  # axis: dimension or word
    fingerprint: tuple[int, int] | None = None  # two uint32 sums, by the framework


def shards_of(
    array: Any,
    *,
    global_shape: Sequence[int] | None = None,
    offsets: Sequence[int] | None = None,
    partial: str | None = None,
    place_proof: bool = True,
    guard: Guard = nullcontext,
) -> list[Shard]:
    """The shards of `array` that this process holds.

    Raises TypeError or ValueError for what cannot be recorded, and whatever the framework raises
    for an array that is gone (deleted, donated).
    """
    box = declared_box(global_shape, offsets)
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(array, jax.Array):
        import backtape.jax

        return backtape.jax.shards_of(array, box, partial, place_proof, guard)
    if "torch" in sys.modules and isinstance(array, sys.modules["torch"].Tensor):
        raise TypeError("torch tensors are not recorded yet: pass tensor.detach().cpu().numpy()")
    return [in_box(own_bytes(array), box)]


def declared_box(
    global_shape: Sequence[int] | None, offsets: Sequence[int] | None
) -> Box | None:
    """Global shape and offsets as the job gave them: both or neither."""
    if (global_shape is None) != (offsets is None):
        raise ValueError("global_shape and offsets say together where a box lies: give both")
    if global_shape is None or offsets is None:
        return None
    shape, start = (tuple(map(operator.index, sizes)) for sizes in (global_shape, offsets))
    return shape, start


def own_bytes(array: Any) -> Held:
    """A copy of a host array in C order and in this machine's byte order."""
    values = np.asarray(array)
    check_dtype(values.dtype.name)
    native = values.dtype.newbyteorder("=")
    copy = np.array(values, dtype=native, order="C", copy=True, subok=False)
    return flat(copy), native.name, values.shape


def flat(values: np.ndarray) -> np.ndarray:
    """The bytes of a C-ordered array, uint8 [bytes], without a copy."""
    return values.reshape(-1).view(np.uint8)


def in_box(held: Held, box: Box | None) -> Shard:
    """Bytes, dtype and shape as the declared box of a tensor, or as all of one."""
    data, dtype, extent = held
    shape, offsets = box or (extent, (0,) * len(extent))
    return Shard(data, dtype, shape, offsets, extent)
