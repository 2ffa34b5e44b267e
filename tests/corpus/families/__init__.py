"""The faults, by the families of the catalogue and in its order."""

from corpus.families import arithmetic, scale, memory, data, unknown  # isort: skip

__all__ = ["arithmetic", "data", "memory", "scale", "unknown"]
