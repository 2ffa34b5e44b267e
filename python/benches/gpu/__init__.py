"""The GPU lines of the benchmarks, against their peers: `make bench-gpu`.

What is printed are ratios, shares of what the card reached in the same run, and milliseconds by the
device's own clock. A contender is first compared with a reference in f64 at a small shape and on
samples at the shape that is timed: one that is wrong is named and not timed. One that is not
installed, does not support the card or runs out of its memory is named with its reason.

Modules: `card` (what the card reaches), `head` (inputs, reference and bounds of the loss head),
`losses` (the contenders in torch), `xla` (the one in jax, a program of its own), `crossentropy` (the
line of both), `reference` (backtape's own in f64), `children` (programs that answer on a pipe),
`capture` and `xla_capture` (recording tensors of a GPU), `activity` (what the device did then),
`loading` (a dump to the GPU), `timing` and `table`. `__main__` runs the lines in turn.
"""
