"""Planted faults: small training programs that have one, and the same programs without it."""
