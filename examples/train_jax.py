"""Trains a small language model on four processes, with backtape in the loop.

    python examples/train_jax.py --launch 4                                    # just train
    BACKTAPE_STEPS=0 BACKTAPE_DIR=/dumps/fused python examples/train_jax.py --launch 4
    BACKTAPE_STEPS=0 BACKTAPE_DIR=/dumps/plain python examples/train_jax.py --launch 4 \\
        --use-fused-xent-loss false

Data parallel x FSDP over a mesh (data, fsdp): tokens are split over both axes, parameters over
`fsdp`. `--label-gather bf16` puts back a bug that a real trainer had: loss and dq stay right, the
gradient of frequent labels' rows of the unembedding does not. With `--rows 16` the most frequent
label has hundreds of hits on each rank, and grad_norm at step 0 comes out 2 % too small.
`--no-bias-correction` is a bug of real optimizers: the gradients stay right, the weights do not.

What it takes to record a step is `write_tape` for the loss head and `write_step` for the rest.
"""

import contextlib
import sys

import backtape
import backtape.jax
import jax
import jax.numpy as jnp
import numpy as np

import arguments
import ranks
import text
import xent_jax
from parameters import Shape, init_parameters
from step_jax import BATCH, RANKS, Job, compile_step, state_shardings


def declared_dtypes(job):
    """Only what the code states.

    The label scatter's is left out: whoever wrote the bf16 gather never chose an accumulator, and
    a declared one would count as intended. So is the plain path's dlogits, which autodiff chooses.
    """
    dtypes = {"logits": "f32", "lse": "f32", "accumulate": "f32", "reduce": "f32"}
    return dtypes | {"dlogits": "bf16"} if job.fused else dtypes


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
        dtypes=declared_dtypes(job),
        tiles={"vocab": job.tile} if job.fused else {},
    )
    tape.record("k", taped["k"])
    for i, tensors in enumerate(taped["microbatches"]):
        for name, array in tensors.items():
            if name.startswith("dk"):
                own = array.addressable_shards[0].data
                tape.record(name, own, microbatch=i, partial="sum", when="pre_reduce")
            else:
                tape.record(name, array, microbatch=i)
    tape.record("dk", taped["grads"]["unembed"], when="post_reduce")
    tape.record("grad_norm", metrics["grad_norm"])


def declared_optimizer(job):
    """The rule of `step_jax.adam`, which its arrays do not tell."""
    return {"name": "adam", "lr": job.learning_rate, "b1": 0.9, "b2": 0.99, "eps": 1e-8}


def write_step(tape, job, before, after, taped, metrics):
    """Records what became of the gradients: the state before and after the step. Every process calls
    this."""
    moments = {"mu": "mean", "nu": "square", "count": "count"}
    backtape.jax.step_algebra(
        tape,
        params=before["params"],
        new_params=after["params"],
        grads=taped["grads"],
        opt_state={name: before[key] for name, key in moments.items()},
        new_opt_state={name: after[key] for name, key in moments.items()},
        optimizer=declared_optimizer(job),
        norm=metrics["grad_norm"],
        microbatches=job.microbatches,
    )


def place(array, sharding):
    """A host array that every process holds whole, as a global array split by `sharding`."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def place_batch(job, batch):
    """The batch as global arrays, of which this process holds its own rows."""
    sharding = job.sharding(BATCH)
    return {n: place(getattr(batch, n), sharding) for n in ("tokens", "labels", "weights")}


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
    job = Job(
        mesh=mesh,
        shape=shape,
        valid_vocab=vocabulary.size,
        microbatches=args.num_microbatches,
        fused=args.use_fused_xent_loss == "true",
        tile=args.tile,
        gather_dtype=gather_dtype,
        learning_rate=args.learning_rate,
        corrects_bias=not args.no_bias_correction,
    )
    with jax.set_mesh(mesh):
        run_steps(job, stream, args)
    jax.distributed.shutdown()


def run_steps(job, stream, args):
    """The training loop."""
    rank, world_size = jax.process_index(), jax.process_count()
    recorder = backtape.Recorder.from_env(rank=rank, world_size=world_size, mesh=job.mesh)
    steps = {recorded: compile_step(job, recorded) for recorded in (False, True)}
    state = init_state(job)
    with contextlib.closing(recorder):
        for step in range(args.steps):
            rows = args.rows * job.mesh.size
            batch = place_batch(job, stream.batch(step, job.microbatches, rows, args.length))
            with recorder.step(step) as tape:
                before = state
                state, metrics, taped = steps[tape.active](before, batch)
                if tape.active:
                    write_tape(tape, job, taped, metrics)
                    write_step(tape, job, before, state, taped, metrics)
            if rank == 0:
                loss, grad_norm = float(metrics["loss"]), float(metrics["grad_norm"])
                # Nine digits tell any two f32 numbers apart.
                print(f"step {step} loss={loss:.9g} grad_norm={grad_norm:.9g}")


def parse_arguments(argv):
    parser = arguments.of_job(__doc__.split("\n")[0])
    parser.add_argument("--fsdp", type=int, default=2, help="ranks along fsdp; the rest are data")
    parser.add_argument("--no-bias-correction", action="store_true")
    args = arguments.parsed(parser, argv)
    if (args.launch or args.world_size) % args.fsdp:
        parser.error("--fsdp must divide the number of ranks")
    return args


def main(argv):
    args = parse_arguments(argv)
    if args.launch is None:
        return ranks.run(train, args)
    return ranks.launch(args.launch, ranks.without_launch(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
