"""One rank of a job whose arrays do not know their place: `placement=` says it.

placed_rank.py RANK WORLD DIRECTORY
"""

import sys

import jax.numpy as jnp
import numpy as np

import backtape

rank, world, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
whole = jnp.arange(12 * world, dtype=jnp.float32).reshape(2 * world, 6)
with backtape.Recorder(directory, rank=rank, world_size=world, mesh={"data": world}, strict=True) as recorder:
    with recorder.step(0) as tape:
        for name, of in ("jax", whole), ("numpy", np.asarray(whole)):
            part = of[2 * rank : 2 * rank + 2]
            tape.record(f"{name}_rows", part, placement={"data": 0})
            tape.record(f"{name}_whole", of, placement={"data": "replicate"})
