"""The faults, by the families of the catalogue."""

from corpus.families import arithmetic, data, memory, scale

__all__ = ["arithmetic", "data", "memory", "scale"]
