"""A dump's tensors as numpy arrays."""

import ml_dtypes
import numpy as np

from backtape import _native


def _dtype(name: str) -> np.dtype:
    """numpy's dtype of this name; bf16 and the 8-bit floats are ml_dtypes'."""
    return np.dtype(getattr(ml_dtypes, name, None) or name)


def tensor_of(
    dump: _native.StepDump,
    name: str,
    microbatch: int | None,
    when: str | None,
    rank: int | None = None,
) -> np.ndarray:
    """A tensor of a dump in its own dtype; with `rank`, that rank's addend."""
    data, dtype, shape = dump.tensor(name, microbatch, when, rank)
    return np.frombuffer(data, dtype=_dtype(dtype)).reshape(shape)
