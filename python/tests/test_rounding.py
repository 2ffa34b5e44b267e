"""The 8-bit roundings of the replayer are those of ml_dtypes.

Both sides hash the 8-bit patterns of all 65,536 bfloat16 numbers, widened to float32 and
rounded; replayer/src/kernels/round/tests.rs asserts the same constants.
"""

import ml_dtypes
import numpy as np
import pytest

NAN = 0x7F


def fnv1a(data: bytes) -> int:
    """FNV-1a in 64 bits: short enough to write down twice."""
    value = 0xCBF29CE484222325
    for byte in data:
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        (ml_dtypes.float8_e4m3fn, 0xE990F48673483715),
        (ml_dtypes.float8_e5m2, 0xA701DD201AF279E5),
    ],
)
def test_the_replayer_rounds_every_bfloat16_to_the_8_bits_that_ml_dtypes_does(dtype, wanted):
    wide = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
    with np.errstate(all="ignore"):
        narrow = wide.astype(dtype)
    bits = narrow.view(np.uint8).copy()
    # NaN has many patterns, and rounding keeps none of them in particular.
    bits[np.isnan(narrow.astype(np.float32))] = NAN
    assert hex(fnv1a(bits.tobytes())) == hex(wanted)
