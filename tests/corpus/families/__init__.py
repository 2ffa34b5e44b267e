"""The faults, by the families of the catalogue and in its order."""

from corpus.families import arithmetic, scale, memory, data, unknown, composite, clean  # isort: skip

__all__ = ["arithmetic", "clean", "composite", "data", "memory", "scale", "unknown"]
