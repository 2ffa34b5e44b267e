"""One optimizer step: microbatches in a scan, gradients reduced once, Adam.

The forward is cut in two, backbone and loss head, so that the step holds what lies between them:
the hidden states q and their gradient dq. Everything here is traced; shapes and layouts are in the
specs below.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import xent_jax
from parameters import Shape
from transformer_jax import COMPUTE, backbone, parameter_specs

RANKS = ("data", "fsdp")  # tokens and addends are split over every rank
BATCH = P(None, RANKS, None)  # tokens, labels, weights [M, rows, S]
PER_TOKEN, PER_TOKEN_ROW = P(RANKS), P(RANKS, None)  # [T], [T, D]
# Each rank's own term of a sum over ranks, one below the other: [ranks * V, D]. So a rank's shard
# is its addend, [V, D], with nothing to index or reshape.
ADDENDS = P(RANKS, None)
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
    corrects_bias: bool = True

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
        # Every value ends its fusion here, so that no compiler may round it in one place when it is
        # recorded and in another when it is not. (XLA on CPU gives the same bits without.)
        out = jax.lax.optimization_barrier(out)
        return out | {"loss": jax.lax.psum(out["loss"], RANKS)}

    # check_vma=False: with the check, jax knows that k is equal along `data` and would sum its
    # cotangent over that axis inside the head. Here dk is this rank's own addend, reduced once a
    # step. Being per rank also fixes what `--label-gather bf16` computes: one scatter-add over
    # this rank's tokens, rounded to bf16 after every addend (on CPU, bit for bit). A scatter that
    # XLA partitions by itself groups the addends as it likes.
    return jax.shard_map(
        on_one_rank,
        mesh=job.mesh,
        in_specs=(PER_TOKEN_ROW, K_SPEC, PER_TOKEN, PER_TOKEN, P()),
        out_specs=job.head_specs(),
        check_vma=False,
    )(q, k, labels, weights, denominator)


def reduce_addends(job, addends):
    """The sum over ranks of addends [ranks * V, D], as [V, D] split along D over `fsdp`."""

    def on_one_rank(addend):
        own = jax.lax.psum_scatter(addend, "fsdp", scatter_dimension=1, tiled=True)
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

    stacked = job.mesh.size * k.shape[0], k.shape[1]
    dk_sums = jnp.zeros(stacked, jnp.float32, device=job.sharding(ADDENDS))
    zeros = jnp.float32(0), jax.tree.map(jnp.zeros_like, body), dk_sums
    inputs = batch["tokens"], batch["labels"], batch["weights"]
    (loss, grads, dk_addends), held = jax.lax.scan(microbatch, zeros, inputs)
    dk = reduce_addends(job, dk_addends)
    tape = {}
    if recorded:
        # The scan stacks along an unsharded dimension: a slice of it moves no data between ranks.
        by_microbatch = [{n: x[i] for n, x in held.items()} for i in range(job.microbatches)]
        tape = {"k": k, "microbatches": by_microbatch}
    return loss, grads | {"unembed": dk}, tape


def adam(state, grads, job):
    """One Adam step on the f32 master weights, as `train_jax.declared_optimizer` says it, unless the
    job leaves out the correction of the moments' bias."""
    count = state["count"] + 1
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mean"], grads)
    square = jax.tree.map(lambda s, g: 0.99 * s + 0.01 * g * g, state["square"], grads)
    unbiased, unbiased_square = 1 - 0.9**count, 1 - 0.99**count
    if not job.corrects_bias:
        unbiased, unbiased_square = 1.0, 1.0

    def update(p, m, s):
        return p - job.learning_rate * (m / unbiased) / (jnp.sqrt(s / unbiased_square) + 1e-8)

    params = jax.tree.map(update, state["params"], mean, square)
    return {"params": params, "mean": mean, "square": square, "count": count}


def train_step(state, batch, *, job, recorded):
    """The next state, {loss, grad_norm}, and the tape's tensors."""
    loss, grads, tape = gradients(job, state["params"], batch, recorded)
    # The same barrier as in the head: the optimizer and the tape read the same bits.
    loss, grads = jax.lax.optimization_barrier((loss, grads))
    if recorded:
        tape["grads"] = grads
    grad_norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    state = adam(state, grads, job)
    return state, {"loss": loss, "grad_norm": grad_norm}, tape


def state_shardings(job):
    params = {name: job.sharding(spec) for name, spec in parameter_specs().items()}
    return {"params": params, "mean": params, "square": params, "count": job.sharding(P())}


def compile_step(job, recorded):
    """`train_step` as one program. The recorded one only has more outputs, not other numerics, and
    keeps the state that it takes, as the tape is to hold what it was."""
    specs = job.head_specs() | INPUT_SPECS
    microbatch = {name: job.sharding(spec) for name, spec in specs.items()}
    state = state_shardings(job)
    tape = {"k": job.sharding(K_SPEC), "grads": state["params"]}
    tape |= {"microbatches": [microbatch] * job.microbatches}
    return jax.jit(
        partial(train_step, job=job, recorded=recorded),
        out_shardings=(state, job.sharding(P()), tape if recorded else {}),
        donate_argnums=() if recorded else 0,
    )
