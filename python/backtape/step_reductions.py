"""What a job says of a reduction in the same words in torch and in jax: `reduce=` of `step_algebra`."""

import math
from collections.abc import Mapping
from typing import Any


def divisor_of(given: Mapping[str, Any]) -> float:
    """What a sum is divided by after the communication. Raises ValueError where it is of no sum, or
    nothing can be divided by it."""
    divisor = float(given["divisor"])
    if given["op"] != "sum" or not math.isfinite(divisor) or divisor == 0.0:
        raise ValueError(
            f"reduce= has the divisor {given['divisor']} with op {given['op']!r}: a divisor is a number "
            "other than 0 that a 'sum' is divided by, as the number of tokens of all ranks"
        )
    return divisor
