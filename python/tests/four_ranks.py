"""One rank of a jax job over gloo, run by test_processes.py.

    python four_ranks.py RANK WORLD PORT DIRECTORY together|alone
"""

import json
import os
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import backtape
from backtape.jax import tap, tap_grad
from backtape.jax_arrays import lanes_by_device, to_pair

rank, world, port = map(int, sys.argv[1:4])
directory, mode = Path(sys.argv[4]), sys.argv[5]

os.environ.pop("XLA_FLAGS", None)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", world, rank)
mesh = Mesh(np.array(jax.devices()).reshape(2, world // 2), ("data", "fsdp"))
host = np.arange(8 * 16).reshape(8, 16).astype(jnp.bfloat16)


def place(spec):
    return jax.make_array_from_callback(host.shape, NamedSharding(mesh, spec), lambda i: host[i])


def together():
    os.environ |= {"BACKTAPE_STEPS": "0", "BACKTAPE_DIR": str(directory / "run"), "BACKTAPE_STRICT": "1"}
    with backtape.Recorder.from_env(mesh=mesh) as recorder, recorder.step(0) as tape:
        tape.head(loss="softmax_xent", path="fused")
        tape.record("q", place(P("data", "fsdp")), microbatch=0)
        tape.record("k", place(P(None, "fsdp")))
        addend = np.full((2, 2), rank, np.float32)
        tape.record("dk", addend, partial="sum", when="pre_reduce", microbatch=0)


def alone():
    """Rank 0 proves the place of its shards while the others have stopped calling jax."""
    array = place(P("data", "fsdp"))
    array.block_until_ready()
    multihost_utils.sync_global_devices("placed")
    done = directory / "lanes-of-rank-0"
    if rank == 0:
        (sums,) = lanes_by_device(array).values()
        written = directory / "lanes"
        written.write_text(json.dumps(to_pair(sums)))
        written.rename(done)
    while not done.exists():
        time.sleep(0.05)


def tapped():
    """Taps in one program of four processes: scan under remat, with the mesh known and without."""
    environment = {"BACKTAPE_STEPS": "0", "BACKTAPE_DIR": str(directory / "run"), "BACKTAPE_STRICT": "1"}
    os.environ |= environment

    @jax.checkpoint
    def body(x, i):
        x = tap_grad("dq", x, microbatch=i)
        return tap("q", jnp.sin(x), microbatch=i), None

    program = jax.jit(jax.grad(lambda x: jax.lax.scan(body, x, jnp.arange(2))[0].astype(jnp.float32).sum()))
    with backtape.Recorder.from_env(mesh=mesh) as recorder, recorder.step(0) as tape:
        with jax.set_mesh(mesh):
            tape.record("gradient", program(place(P("data", "fsdp"))))
        # One device a process: which it is needs no mesh.
        jax.jit(lambda x: tap("columns", x * 2))(place(P(None, ("data", "fsdp"))))


{"together": together, "alone": alone, "tapped": tapped}[mode]()
jax.distributed.shutdown()
