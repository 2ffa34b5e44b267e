"""The part of the corpus that is only reported on: programs in numpy, drawn from wide ranges."""
