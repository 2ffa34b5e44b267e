"""Types that the public functions take and return."""

import os
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

AnyArray: TypeAlias = npt.NDArray[Any]
"""An array in the dtype that the job had: numpy's, or ml_dtypes' bfloat16 and 8-bit floats."""

Float64Array: TypeAlias = npt.NDArray[np.float64]
"""An array of recomputed numbers."""

Place: TypeAlias = str | os.PathLike[str]
"""A directory, or the URL of a bucket such as s3://bucket/run-a."""

When: TypeAlias = Literal["before_op", "after_op", "pre_reduce", "post_reduce", "recompute"]
"""The moment at which a tensor was captured."""
