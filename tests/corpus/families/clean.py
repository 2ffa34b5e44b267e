"""Jobs without a fault: every option of docs/heads.md, and stories that only look like one."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from corpus import train
from corpus.case import Case, draw_kept, plant
from corpus.families.scale import code_for, kept_for
from corpus.job import DTYPES, draw_job, pick
from corpus.record import names_of

# The option draws of the Python tests: heads in plain jnp, differentiated by JAX.
sys.path.append(str(Path(__file__).parents[3] / "python" / "tests"))


@plant("clean-options")
def options(rng, seed):
    """A head with options drawn at random: softmax, logits, policy losses."""
    import test_head_options as drawn

    dtype, number = DTYPES[pick(rng, ["bf16", "f32"])], int(rng.integers(2**31))

    def write(tape):
        case, own = drawn.draw_case(seed, number, dtype)
        policy = case.options["loss"] == "grpo"
        outputs = drawn.compute(case, jit=True, narrow=bool(rng.random() < 0.3))
        chosen = drawn.choose(own, case) | ({"dlogprobs"} if policy else set())
        drawn.record(tape, case, outputs, chosen, own)

    return Case("clean-options", [set()], draw_kept(rng), write, write, {"number": number}, kind="clean")


@plant("clean-shown-dlogits")
def shown_dlogits(rng, seed):
    """dlogits are recorded with other bits than the products take: rounded for the one or the other
    alone. Entries of confident tokens are nearly one number, so all of them err alike."""
    job = draw_job(rng, seed, dtype=pick(rng, ["bf16", "bf16", "f16"]), confident=0.7)
    code, kept = code_for(rng, job, "kernel"), draw_kept(rng, dlogits=True, parts=False)
    shown, products = pick(rng, [(None, job.dtype), (job.dtype, "f32")])
    code = replace(code, shown_dlogits=shown, dlogits=products)
    names = frozenset(names_of(kept) | {"loss", "dk", "dq"})
    run = lambda: (job, train.train(job, code, names=names))
    return Case("clean-shown-dlogits", [set()], kept, run, run, {"shown": shown, "products": products}, kind="clean")


@plant("kahan-red-herring")
def kahan(rng, seed):
    """A finite difference of the f32 loss is 41 % off the gradient, and compensated summation is
    blamed for want of it. Loss and gradients are right: the difference is the difference's own."""
    job = draw_job(rng, seed, size=(int(rng.integers(150, 300)) | 1, 35, 33), dtype="f32", ranks=1, microbatches=1, padded=False)
    code = code_for(rng, job, pick(rng, ["plain", "kernel"]))
    kept = kept_for(rng, code, loss=True)
    names = frozenset(names_of(kept) | {"loss", "dk", "dq"})
    run = lambda: (job, train.train(job, code, names=names))
    return Case("kahan-red-herring", [set()], kept, run, run, {"difference": difference(job, code)}, kind="clean")


def difference(job, code, eps=1e-5):
    """How far a central difference of the f32 loss along one entry of q is off its gradient."""
    data, weights = job.microbatches[0], train.token_weights(job, 0)
    row = int(np.argmax(weights))

    def loss(step):
        q = data["q"].copy()
        q[row, 0] += np.float32(step)
        return float(train.run_head(job, code, data | {"q": q}, weights, [job.denominator(0)])[0]["loss"])

    found = train.run_head(job, code, data, weights, [job.denominator(0)])[0]["dq"][row, 0]
    wanted = (loss(eps) - loss(-eps)) / (2 * eps) * job.options.cotangent
    return abs(wanted - float(found)) / abs(float(found))


