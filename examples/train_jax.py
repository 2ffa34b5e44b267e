"""Trains a small language model on four processes, with backtape in the loop.

    python examples/train_jax.py --launch 4                                    # just train
    BACKTAPE_STEPS=0 BACKTAPE_DIR=/dumps/fused python examples/train_jax.py --launch 4
    BACKTAPE_STEPS=0 BACKTAPE_DIR=/dumps/plain python examples/train_jax.py --launch 4 \\
        --use-fused-xent-loss false

Data parallel x FSDP over a mesh (data, fsdp): tokens are split over both axes, parameters over
`fsdp`. A step sums the gradients of `--num-microbatches` microbatches in a scan. `--label-gather
bf16` puts back a bug that a real trainer had: loss and dq stay right, the gradient of frequent
labels' rows of the unembedding does not. What it takes to record a step is `write_tape`, below.
"""

import argparse
import sys
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

import backtape
import ranks
import text
import xent_jax
from transformer_jax import COMPUTE, Shape, backbone, init_parameters, parameter_specs

RANKS = ("data", "fsdp")  # tokens and addends are split over every rank
BATCH = P(None, RANKS, None)  # tokens, labels, weights [M, rows, S]
PER_TOKEN, PER_TOKEN_ROW = P(RANKS), P(RANKS, None)  # [T], [T, D]
ADDENDS = P(RANKS, None, None)  # [ranks, V, D]: each rank's own term of a sum over ranks
K_SPEC = parameter_specs()["unembed"]

# What the loss head returns for one microbatch, and how it is laid out over the ranks.
HEAD_SPECS = {"label_logits": PER_TOKEN, "lse": PER_TOKEN, "loss": P()}
HEAD_SPECS |= {"dq": PER_TOKEN_ROW, "dk": ADDENDS}
PATH_SPECS = {"dq_lse": PER_TOKEN_ROW, "dq_label": PER_TOKEN_ROW}
PATH_SPECS |= {"dk_lse": ADDENDS, "dk_label": ADDENDS}
INPUT_SPECS = {"q": PER_TOKEN_ROW, "labels": PER_TOKEN, "weights": PER_TOKEN}


@dataclass(frozen=True)
class Job:
    """What the traced step depends on, beside the arrays."""

    mesh: jax.sharding.Mesh
    shape: Shape
    valid_vocab: int
    microbatches: int
    fused: bool
    tile: int
    gather_dtype: jnp.dtype
    learning_rate: float

    def sharding(self, spec):
        return NamedSharding(self.mesh, spec)

    def head_specs(self):
        return HEAD_SPECS | PATH_SPECS if self.fused else HEAD_SPECS


def loss_head(job, q, k, labels, weights, denominator):
    """The head's results for one microbatch, as global arrays (specs: `job.head_specs()`).

    q [T, D], k [V, D] bf16; labels, weights [T]; T counts the tokens of all ranks.
    """

    def on_one_rank(q, k_columns, labels, weights, denominator):
        k = jax.lax.all_gather(k_columns, "fsdp", axis=1, tiled=True)
        if job.fused:
            head = partial(xent_jax.fused_head, tile=job.tile, gather_dtype=job.gather_dtype)
        else:
            head = xent_jax.plain_head
        out = head(q, k, labels, weights, denominator, valid_vocab=job.valid_vocab)
        out = {n: x[None] if n.startswith("dk") else x for n, x in out.items()}
        # Every value ends its fusion here, so that the compiler cannot round it in one place when
        # it is recorded and in another when it is not.
        out = jax.lax.optimization_barrier(out)
        return out | {"loss": jax.lax.psum(out["loss"], RANKS)}

    # check_vma=False: with the check, jax knows that k is equal along `data` and would sum its
    # cotangent over that axis inside the head. Here dk is this rank's own addend, reduced once a
    # step. It also keeps the label scatter a local one: XLA on CPU turns a bf16 scatter that it
    # partitions itself into an f32 one, which would hide what `--label-gather bf16` is to show.
    return jax.shard_map(
        on_one_rank,
        mesh=job.mesh,
        in_specs=(PER_TOKEN_ROW, K_SPEC, PER_TOKEN, PER_TOKEN, P()),
        out_specs=job.head_specs(),
        check_vma=False,
    )(q, k, labels, weights, denominator)


def reduce_addends(job, addends):
    """The sum over ranks of addends [ranks, V, D], as [V, D] split along D over `fsdp`."""

    def on_one_rank(addend):
        own = jax.lax.psum_scatter(addend[0], "fsdp", scatter_dimension=1, tiled=True)
        return jax.lax.psum(own, "data")

    return jax.shard_map(
        on_one_rank, mesh=job.mesh, in_specs=ADDENDS, out_specs=K_SPEC, check_vma=False
    )(addends)


def gradients(job, params, batch, recorded):
    """Loss and gradients of a step, and what the tape is to hold of it ({} unless `recorded`)."""
    # The mean is over the whole step, so its denominator is summed before the first microbatch.
    denominator = jnp.sum(batch["weights"])
    k = params["unembed"].astype(COMPUTE)
    body = {name: value for name, value in params.items() if name != "unembed"}

    def microbatch(sums, inputs):
        tokens, labels, weights = inputs
        q, backward = jax.vjp(lambda body: backbone(body, tokens, job.shape.heads), body)
        q = jax.lax.with_sharding_constraint(q, job.sharding(PER_TOKEN_ROW))
        labels, weights = labels.reshape(-1), weights.reshape(-1)
        head = loss_head(job, q, k, labels, weights, denominator)
        addends = head["loss"], backward(head["dq"])[0], head["dk"].astype(jnp.float32)
        held = head | {"q": q, "labels": labels, "weights": weights} if recorded else {}
        return jax.tree.map(jnp.add, sums, addends), held

    dk_sums = jnp.zeros((job.mesh.size, *k.shape), jnp.float32, device=job.sharding(ADDENDS))
    zeros = jnp.float32(0), jax.tree.map(jnp.zeros_like, body), dk_sums
    inputs = batch["tokens"], batch["labels"], batch["weights"]
    (loss, grads, dk_addends), held = jax.lax.scan(microbatch, zeros, inputs)
    dk = reduce_addends(job, dk_addends)
    tape = {}
    if recorded:
        # The scan stacks along an unsharded dimension: a slice of it moves no data between ranks.
        by_microbatch = [jax.tree.map(lambda x: x[i], held) for i in range(job.microbatches)]
        tape = {"k": k, "dk": dk, "microbatches": by_microbatch}
    return loss, grads | {"unembed": dk}, tape


def adam(state, grads, learning_rate):
    """One Adam step on the f32 master weights."""
    count = state["count"] + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], grads)
    square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, state["square"], grads)
    rate = learning_rate * jnp.sqrt(1 - 0.99**count) / (1 - 0.9**count)
    update = lambda p, m, s: p - rate * m / (jnp.sqrt(s) + 1e-8)
    params = jax.tree.map(update, state["params"], mean, square)
    return {"params": params, "mean": mean, "square": square, "count": count}


def train_step(state, batch, *, job, recorded):
    """The next state, {loss, grad_norm}, and the tape's tensors."""
    loss, grads, tape = gradients(job, state["params"], batch, recorded)
    # The same barrier as in the head: the optimizer and the tape read the same bits.
    loss, grads = jax.lax.optimization_barrier((loss, grads))
    grad_norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    state = adam(state, grads, job.learning_rate)
    return state, {"loss": loss, "grad_norm": grad_norm}, tape


def compile_step(job, recorded):
    """`train_step` as one program. The recorded one only has more outputs, not other numerics."""
    specs = job.head_specs() | INPUT_SPECS
    microbatch = {name: job.sharding(spec) for name, spec in specs.items()}
    k = job.sharding(K_SPEC)
    tape = {"k": k, "dk": k, "microbatches": [microbatch] * job.microbatches} if recorded else {}
    return jax.jit(
        partial(train_step, job=job, recorded=recorded),
        out_shardings=(state_shardings(job), job.sharding(P()), tape),
        donate_argnums=0,
    )


def write_tape(tape, job, taped, metrics):
    """Declares the loss head and records one step. Every process calls this."""
    tape.head(
        loss="softmax_xent",
        path="fused" if job.fused else "plain",
        reduction="mean",
        denominator="weights",
        scope="global",  # over all microbatches and ranks of the step
        microbatches=job.microbatches,
        microbatch_reduction="sum",
        valid_vocab=job.valid_vocab,
        mask_value=xent_jax.MASK,
        # Only what the code above states. How dk_label accumulates is left out: its author never
        # decided it, and a declared accumulator would count as intended.
        dtypes={"logits": "f32", "lse": "f32", "accumulate": "f32", "reduce": "f32"},
        tiles={"vocab": job.tile} if job.fused else {},
    )
    tape.record("k", taped["k"])
    for i, tensors in enumerate(taped["microbatches"]):
        for name, array in tensors.items():
            if name.startswith("dk"):
                own = array.addressable_shards[0].data[0]
                tape.record(name, own, microbatch=i, partial="sum", when="pre_reduce")
            else:
                tape.record(name, array, microbatch=i)
    tape.record("dk", taped["dk"], when="post_reduce")
    tape.record("grad_norm", metrics["grad_norm"])


def place(array, sharding):
    """A host array that every process holds whole, as a global array split by `sharding`."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def place_batch(job, batch):
    """The batch as global arrays, of which this process holds its own rows."""
    sharding = job.sharding(BATCH)
    return {n: place(getattr(batch, n), sharding) for n in ("tokens", "labels", "weights")}


def state_shardings(job):
    params = {name: job.sharding(spec) for name, spec in parameter_specs().items()}
    return {"params": params, "mean": params, "square": params, "count": job.sharding(P())}


def init_state(job):
    """Parameters and Adam's moments."""
    params = init_parameters(job.shape)
    zeros = jax.tree.map(np.zeros_like, params)
    state = {"params": params, "mean": zeros, "square": zeros, "count": np.int32(0)}
    return jax.tree.map(place, state, state_shardings(job))


def train(args):
    """Joins the job as one rank and trains."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(args.coordinator_address, args.world_size, args.rank)
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((args.world_size // args.fsdp, args.fsdp), RANKS, axis_types=auto)

    texts = text.library_sources()
    vocabulary = text.Vocabulary(texts, args.vocab)
    rows = args.rows * mesh.size
    stream = text.Stream(vocabulary, texts, args.steps * args.num_microbatches * rows * args.length)

    shape = Shape(args.padded_vocab, args.width, args.layers, args.heads, args.length)
    gather_dtype = {"bf16": jnp.bfloat16, "f32": jnp.float32}[args.label_gather]
    job = Job(mesh, shape, vocabulary.size, args.num_microbatches, args.use_fused_xent_loss,
              args.tile, gather_dtype, args.learning_rate)
    with jax.set_mesh(mesh):
        run_steps(job, stream, args)
    jax.distributed.shutdown()


def run_steps(job, stream, args):
    """The training loop."""
    recorder = backtape.Recorder.from_env(
        rank=jax.process_index(), world_size=jax.process_count(), mesh=job.mesh
    )
    steps = {recorded: compile_step(job, recorded) for recorded in (False, True)}
    state = init_state(job)
    for step in range(args.steps):
        rows = args.rows * job.mesh.size
        batch = place_batch(job, stream.batch(step, job.microbatches, rows, args.length))
        with recorder.step(step) as tape:
            state, metrics, taped = steps[tape.active](state, batch)
            if tape.active:
                write_tape(tape, job, taped, metrics)
        if jax.process_index() == 0:
            loss, grad_norm = np.asarray(metrics["loss"]), np.asarray(metrics["grad_norm"])
            print(f"step {step} loss={loss:.9g} grad_norm={grad_norm:.9g}")
    recorder.close()


def parse_arguments(argv):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ranks.add_arguments(parser)
    truth = lambda word: {"true": True, "false": False}[word.lower()]
    parser.add_argument("--use-fused-xent-loss", type=truth, default=True, metavar="true|false")
    parser.add_argument("--label-gather", choices=("bf16", "f32"), default="f32")
    parser.add_argument("--num-microbatches", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--fsdp", type=int, default=2, help="ranks along fsdp; the rest are data")
    parser.add_argument("--rows", type=int, default=4, help="rows per rank and microbatch")
    parser.add_argument("--length", type=int, default=256, help="tokens in a row")
    parser.add_argument("--vocab", type=int, default=8300, help="entries learnt from the text")
    parser.add_argument("--padded-vocab", type=int, default=8448)
    parser.add_argument("--tile", type=int, default=1024, help="vocabulary entries in a tile")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    return parser.parse_args(argv)


def main(argv):
    args = parse_arguments(argv)
    if args.launch is None:
        return train(args)
    at = next(i for i, word in enumerate(argv) if word.startswith("--launch"))
    rest = argv[:at] + argv[at + (1 if "=" in argv[at] else 2) :]
    return ranks.launch(args.launch, rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
