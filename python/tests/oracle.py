"""The fingerprint of src/fingerprint.rs a third time: element by element, in Python integers.

Too slow for anything and too simple to be wrong; shares no code with what it judges.
"""

import itertools

import numpy as np

M = 0xFFFFFFFF


def fmix(h):
    h ^= h >> 16
    h = h * 0x85EBCA6B & M
    h ^= h >> 13
    h = h * 0xC2B2AE35 & M
    return h ^ h >> 16


def fingerprint(array, offsets=None):
    """Two sums over the elements of `array`, which lies at `offsets` of its tensor."""
    array = np.asarray(array)
    offsets = offsets or (0,) * array.ndim
    a_sum = b_sum = 0
    for index in itertools.product(*map(range, array.shape)):
        raw = np.ascontiguousarray(array[index]).tobytes()
        words = [int.from_bytes(raw[i : i + 4], "little") for i in range(0, len(raw), 4)]
        for number, word in enumerate(words):
            place = [i + offset for i, offset in zip(index, offsets)]
            if len(raw) == 8:
                place.append(number)
            h = 0x9747B28C
            for i in place:
                h = fmix(h + (i + 1) * 0x9E3779B1 & M)
            a = fmix(h ^ word * 0x85EBCA77 & M)
            a_sum, b_sum = a_sum + a & M, b_sum + fmix(a ^ 0xC2B2AE3D) & M
    return a_sum, b_sum
