"""Meshes, and which part of a tensor lies on which rank."""

import itertools
import math
from dataclasses import dataclass


class Mesh:
    """Axes by their sizes, outermost first; ranks are row-major."""

    def __init__(self, sizes):
        self.sizes = dict(sizes)
        self.world = math.prod(self.sizes.values())
        every = itertools.product(*(range(size) for size in self.sizes.values()))
        self.places = [dict(zip(self.sizes, place)) for place in every]

    def group(self, rank, axes):
        """The ranks that differ from this one along these axes alone."""
        own = self.places[rank]
        others = [axis for axis in self.sizes if axis not in axes]
        same = lambda place: all(place[axis] == own[axis] for axis in others)  # noqa: E731
        return [other for other, place in enumerate(self.places) if same(place)]


@dataclass(frozen=True)
class Whole:
    """All of a tensor."""

    def cut(self, tensor):
        return tensor

    def where(self, shape):
        return {}


@dataclass(frozen=True)
class Slice:
    """Some indices of one dimension."""

    dimension: int
    begin: int
    end: int

    def cut(self, tensor):
        return tensor.narrow(self.dimension, self.begin, self.end - self.begin)

    def where(self, shape):
        offsets = [0] * len(shape)
        offsets[self.dimension] = self.begin
        return {"global_shape": tuple(shape), "offsets": tuple(offsets)}


@dataclass(frozen=True)
class Run:
    """Some elements of the flattened tensor, as FSDP1 and sharded optimizers cut it."""

    begin: int
    end: int

    def cut(self, tensor):
        return tensor.reshape(-1)[self.begin : self.end]

    def where(self, shape):
        return {"global_shape": tuple(shape), "flat_offset": self.begin}


def span(length, parts, index):
    """Where part `index` begins and ends, as torch.chunk cuts: the last parts may be empty."""
    size = -(-length // parts)
    return min(index * size, length), min((index + 1) * size, length)


def slice_of(shape, dimension, parts, index):
    """Part `index` of a tensor that is cut in a dimension."""
    return Slice(dimension, *span(shape[dimension], parts, index))


def run_of(shape, parts, index):
    """Part `index` of the flattened tensor."""
    return Run(*span(math.prod(shape), parts, index))
