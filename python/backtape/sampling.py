"""Which elements of a large parameter stand for it where a step is sampled.

They are blocks of neighbours, chosen from the seed, the parameter's name and the shape of the whole
parameter alone. So every rank, however the parameter is sharded, every stage and every microbatch
records the same elements, without a word between the ranks. docs/step.md says what a verdict on them
does not see.
"""

import hashlib
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

# A box as ranges [start, end), one for each dimension.
Region = tuple[tuple[int, int], ...]

# Blocks that are taken of a parameter. They are spread over its rows, so that most of the ranks that
# hold a part of it record something; each costs the dump an entry.
BLOCKS = 8

# Elements that a fraction takes at the least: fewer could not tell the sums of some tens of ranks
# apart.
LEAST = 1024


@dataclass(frozen=True)
class Sampling:
    """How much of each parameter is recorded."""

    amount: int | float  # elements, or their share of the parameter
    seed: int

    def regions(self, name: str, shape: Sequence[int]) -> tuple[Region, ...] | None:
        """The blocks of the parameter of this name and shape; None where it is recorded whole."""
        total = math.prod(shape)
        share = isinstance(self.amount, float)
        wanted = max(LEAST, math.ceil(self.amount * total)) if share else int(self.amount)
        return None if total <= wanted else blocks(self.seed, name, tuple(shape), wanted)


def sampling_of(sample: int | float | None, seed: int) -> Sampling | None:
    """How a job asks for it: a number of elements, a share between 0 and 1, or None for everything.
    Raises ValueError for anything else."""
    if sample is None:
        return None
    number = isinstance(sample, (int, float)) and not isinstance(sample, bool)
    if number and isinstance(sample, int) and sample >= 1:
        return Sampling(sample, int(seed))
    if number and isinstance(sample, float) and 0 < sample < 1:
        return Sampling(sample, int(seed))
    raise ValueError(
        f"sample={sample!r}: it is how many elements of each parameter are recorded, as 4096, or "
        "their share, as 0.01"
    )


@lru_cache(maxsize=4096)
def blocks(seed: int, name: str, shape: tuple[int, ...], wanted: int) -> tuple[Region, ...]:
    """Blocks of about `wanted` elements in all, of a parameter that has more.

    A block is a range of indices of one dimension with everything that lies below them: whole rows
    where rows are short, a part of one row where they are long. Its place is drawn, one block from
    each of as many equal parts of the parameter, so no two share an element.
    """
    count = min(BLOCKS, wanted)
    each = wanted // count
    # The outermost dimension of which single indices fit into a block.
    dim, below = len(shape) - 1, 1
    while dim > 0 and below * shape[dim] <= each:
        below *= shape[dim]
        dim -= 1
    size = shape[dim]
    length = min(size, each // below)
    lines = math.prod(shape[:dim])
    key = f"{seed}/{name}/{shape}"
    found = []
    for block in range(min(lines, count)):
        first, last = block * lines // min(lines, count), (block + 1) * lines // min(lines, count)
        line = first + drawn(f"{key}/line {block}", last - first)
        cuts = max(1, count // lines)
        for cut in range(cuts):
            low, high = cut * size // cuts, (cut + 1) * size // cuts
            start = low + drawn(f"{key}/start {block} {cut}", high - low - length + 1)
            whole = ((0, extent) for extent in shape[dim + 1 :])
            found.append((*at(line, shape[:dim]), (start, start + length), *whole))
    return tuple(found)


def at(line: int, shape: Sequence[int]) -> list[tuple[int, int]]:
    """The ranges of one index each, of the `line`-th index of this shape in C order."""
    ranges = []
    for size in reversed(shape):
        line, index = divmod(line, size)
        ranges.append((index, index + 1))
    return ranges[::-1]


def drawn(key: str, below: int) -> int:
    """A number from 0 to below - 1 that the key alone decides."""
    digest = hashlib.blake2b(key.encode(), digest_size=16).digest()
    return int.from_bytes(digest, "little") % below


def as_tuples(regions: Sequence[Any] | None) -> tuple[Region, ...] | None:
    """The regions that a job gives, which may be lists, as JSON has them."""
    if regions is None or (type(regions) is tuple and set(map(type, regions)) <= {tuple}):
        return regions
    return tuple(
        tuple((operator.index(low), operator.index(high)) for low, high in region)
        for region in regions
    )


def inside(
    offsets: Sequence[int], extent: Sequence[int], regions: Sequence[Region]
) -> list[Region]:
    """What of a box lies in these regions, as ranges of positions in the box. Raises ValueError for a
    region of another number of dimensions."""
    found = []
    for region in regions:
        if len(region) != len(offsets):
            raise ValueError(f"a tensor of {len(offsets)} dimensions has no region {region}")
        ranges = tuple(
            (max(low - offset, 0), min(high - offset, length))
            for (low, high), offset, length in zip(region, offsets, extent)
        )
        if all(low < high for low, high in ranges):
            found.append(ranges)
    return found
