"""One rank of a jax job over gloo, which records the gradients that its own device computed.

    python step_algebra_rank.py RANK WORLD PORT DIRECTORY
"""

import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import backtape
import backtape.jax

rank, world, port = map(int, sys.argv[1:4])
directory = Path(sys.argv[4])

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 1)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", world, rank)
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "fsdp"))


def place(host, spec):
    return jax.make_array_from_callback(host.shape, NamedSharding(mesh, spec), lambda index: host[index])


draw = np.random.default_rng(0)
w = draw.standard_normal((4, 6)).astype(np.float32)
batch = draw.standard_normal((4, 4)).astype(np.float32)


def addend(w, batch):
    """The gradient of sum((batch @ w)**2) by the columns that this device holds, for its own rows."""
    return (2 * batch.T @ (batch @ w))[None]


@jax.jit
def step(w, batch):
    specs = P(None, "fsdp"), P("data")
    local = jax.shard_map(addend, mesh=mesh, in_specs=specs, out_specs=P("data", None, "fsdp"))(w, batch)
    return local, local.sum(0)


params = {"w": place(w, P(None, "fsdp"))}
with jax.set_mesh(mesh):
    local, reduced = step(params["w"], place(batch, P("data")))
    with backtape.Recorder(directory / "run", rank=rank, world_size=world, mesh=mesh, strict=True) as recorder:
        with recorder.step(0) as tape:
            backtape.jax.step_algebra(
                tape, params=params, grads={"w": reduced}, local_grads=[{"w": local}], accumulated={"w": local},
                local_axis="data", reduce={"*": [{"axis": "data", "op": "sum"}]},
            )  # fmt: skip
whole = jax.jit(lambda x: x, out_shardings=NamedSharding(mesh, P()))(local)
if rank == 0:
    np.savez(directory / "expected.npz", grad=np.asarray(whole), accumulated=np.asarray(whole))
jax.distributed.shutdown()
