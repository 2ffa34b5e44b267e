"""Trains the small language model of train_jax.py in torch, with backtape in the loop.

    python examples/train_torch.py --launch 4                                  # just train, DDP
    BACKTAPE_STEPS=0 BACKTAPE_DIR=/dumps/ddp python examples/train_torch.py --launch 4
    BACKTAPE_STEPS=0 BACKTAPE_DIR=/dumps/fsdp python examples/train_torch.py --launch 4 --parallel fsdp2

The same weights, tokens and loss as train_jax.py; `--parallel` chooses DDP or FSDP2. Both average
gradients over ranks, so every rank's loss is multiplied by their number: the mean is then over all
tokens of the step, wherever they lie.

Five bugs that real trainers had can be put back: `--label-gather bf16`, `--mean-of-means` (each
microbatch divides by its own tokens), `--sum-for-mean` (DDP's all-reduce sums), `--sync never` (no
microbatch leaves `no_sync`, so that every rank keeps its gradient to itself), `--sync first` (only the
first is reduced over ranks, and the others are added to it by each rank alone). What it takes to record a step is the taps in
xent_torch.py, `declare` and `record_reduced` below, and one call of `step_algebra` in the training loop.
"""

import contextlib
import sys
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

import backtape
import backtape.torch
import arguments
import ranks
import text
import xent_torch
from parameters import Shape, init_parameters
from transformer_torch import Transformer


@dataclass
class Job:
    """What a step depends on, beside weights and tokens."""

    rank: int
    ranks: int
    valid_vocab: int
    microbatches: int
    fused: bool
    tile: int
    gather_dtype: torch.dtype
    fsdp: bool
    mean_of_means: bool = False
    sync: str = "last"
    by_rows: dict = field(default_factory=lambda: {"data": 0})
    by_addend: dict = field(default_factory=lambda: {"data": "mean"})


def declare(tape, job):
    """The loss head, as the job means it."""
    tape.head(
        loss="softmax_xent",
        path="fused" if job.fused else "plain",
        reduction="mean",
        denominator="weights",
        scope="global",  # over all microbatches and ranks of the step
        microbatches=job.microbatches,
        microbatch_reduction="sum",
        cotangent=float(job.ranks),  # gradients are averaged over ranks
        valid_vocab=job.valid_vocab,
        mask_value=xent_torch.MASK,
        dtypes={"logits": "f32", "lse": "f32", "accumulate": "f32", "reduce": "f32"}
        | ({"dlogits": "bf16"} if job.fused else {}),
        tiles={"vocab": job.tile} if job.fused else {},
    )


def record_reduced(tape, model, norm):
    """What the backward passes left: the reduced gradient of the unembedding and the norm."""
    unwrapped = model.module if hasattr(model, "module") else model
    tape.record("dk", unwrapped.unembed.grad, when="post_reduce")
    tape.record("grad_norm", norm)


def meant(job):
    """How gradients are to come together under DDP, where `summed` may stand for the communication: what a
    hook is to do nobody else says. Of FSDP2 backtape knows it."""
    each = [{"axis": axis, "op": op} for axis, op in job.by_addend.items()]
    return None if job.fsdp else {"*": each}


def synchronised(model, job, reduced):
    """A context in which gradients are reduced over ranks, or kept."""
    if job.fsdp:
        model.set_requires_gradient_sync(reduced)
        return contextlib.nullcontext()
    return contextlib.nullcontext() if reduced else model.no_sync()


def train_step(model, job, batch, tape):
    """Loss of the step and norm of its gradient, which is left in the parameters."""
    mine = batch.tokens.shape[1] // job.ranks
    own = slice(job.rank * mine, (job.rank + 1) * mine)
    declare(tape, job)
    total = torch.zeros(())
    for i in range(job.microbatches):
        tokens, labels, weights = (
            torch.from_numpy(getattr(batch, name)[i, own])
            for name in ("tokens", "labels", "weights")
        )
        # The mean is over the whole step: every rank has all of the weights.
        whole = batch.weights[i] if job.mean_of_means else batch.weights
        denominator = float(whole.sum()) * (job.microbatches if job.mean_of_means else 1)
        backtape.torch.tap("weights", weights.reshape(-1), microbatch=i, placement=job.by_rows)

        def head(q, k):
            if i == 0:
                backtape.torch.tap("k", k)
            return xent_torch.token_losses(job, q, k, labels.reshape(-1).long(), i)

        reduced = {"last": i == job.microbatches - 1, "first": i == 0, "never": False}[job.sync]
        with synchronised(model, job, reduced):
            loss = (weights.reshape(-1) * model(tokens.long(), head)).sum() / denominator
            (loss * job.ranks).backward()
        total += loss.detach()
    dist.all_reduce(total)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    tape.record("loss", total)
    record_reduced(tape, model, norm)
    return total, norm


def wrapped(model, args):
    """The model under DDP or FSDP2; `--sum-for-mean` leaves out the division by the ranks."""
    if args.parallel == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        return model
    model = torch.nn.parallel.DistributedDataParallel(model)
    if args.sum_for_mean:
        model.register_comm_hook(None, summed)
    return model


def summed(_, bucket):
    """DDP's all-reduce without the division."""
    done = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return done.then(lambda future: future.value()[0])


def train(args):
    """Joins the job as one rank and trains."""
    torch.set_num_threads(1)
    host, port = args.coordinator_address.rsplit(":", 1)
    store = f"tcp://{host}:{port}"
    dist.init_process_group("gloo", init_method=store, rank=args.rank, world_size=args.world_size)

    texts = text.library_sources()
    vocabulary = text.Vocabulary(texts, args.vocab)
    rows = args.rows * args.world_size
    stream = text.Stream(vocabulary, texts, args.steps * args.num_microbatches * rows * args.length)
    shape = Shape(args.padded_vocab, args.width, args.layers, args.heads, args.length)
    job = Job(
        rank=args.rank,
        ranks=args.world_size,
        valid_vocab=vocabulary.size,
        microbatches=args.num_microbatches,
        fused=args.use_fused_xent_loss == "true",
        tile=args.tile,
        gather_dtype={"bf16": torch.bfloat16, "f32": torch.float32}[args.label_gather],
        fsdp=args.parallel == "fsdp2",
        mean_of_means=args.mean_of_means,
        sync=args.sync,
    )
    model = wrapped(Transformer(shape, init_parameters(shape)), args)
    run_steps(job, model, stream, args)
    dist.destroy_process_group()


def run_steps(job, model, stream, args):
    """The training loop."""
    recorder = backtape.Recorder.from_env(mesh={"data": job.ranks})
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    with contextlib.closing(recorder):
        for step in range(args.steps):
            rows = args.rows * job.ranks
            batch = stream.batch(step, job.microbatches, rows, args.length)
            with recorder.step(step) as tape:
                backtape.torch.step_algebra(tape, model, optimizer, reduce=meant(job))
                loss, norm = train_step(model, job, batch, tape)
                optimizer.step()
            optimizer.zero_grad()
            if job.rank == 0:
                print(f"step {step} loss={float(loss):.9g} grad_norm={float(norm):.9g}")


def parse_arguments(argv):
    parser = arguments.of_job(__doc__.split("\n")[0])
    parser.add_argument("--parallel", choices=("ddp", "fsdp2"), default="ddp")
    parser.add_argument("--mean-of-means", action="store_true")
    parser.add_argument("--sum-for-mean", action="store_true")
    parser.add_argument("--sync", choices=("last", "first", "never"), default="last")
    args = arguments.parsed(parser, argv)
    if args.sum_for_mean and args.parallel != "ddp":
        parser.error("--sum-for-mean is for DDP: gloo has no reduce-scatter that FSDP2 could sum with")
    return args


def main(argv):
    args = parse_arguments(argv)
    if args.launch is None:
        return ranks.run(train, args)
    return ranks.launch(args.launch, ranks.without_launch(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
