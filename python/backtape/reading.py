"""A dump's tensors as numpy arrays, without a copy."""

from typing import Any

import ml_dtypes
import numpy as np

from backtape import _native
from backtape.typing import AnyArray


def dtype_of(name: str) -> np.dtype[Any]:
    """The numpy dtype of this name; bf16 and the 8-bit floats are ml_dtypes'."""
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def array_of(memory: _native.Memory, dtype: str, shape: list[int]) -> AnyArray:
    """A read-only array of this dtype and shape over memory, which lives as long as the array."""
    if len(memory) == 0:
        return np.empty(shape, dtype_of(dtype))
    flat: AnyArray = np.frombuffer(memoryview(memory), dtype=dtype_of(dtype))
    return flat.reshape(shape)


def tensor_of(
    dump: _native.StepDump,
    name: str,
    microbatch: int | None,
    when: str | None,
    rank: int | None = None,
) -> AnyArray:
    """A tensor of a dump in the dtype that the job had; with `rank`, that rank's addend. Raises
    KeyError for a tensor that is not there, RuntimeError for one that cannot be assembled."""
    return array_of(*dump.tensor(name, microbatch, when, rank))
