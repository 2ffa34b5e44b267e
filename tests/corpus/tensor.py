"""A head whose vocabulary is cut over ranks (tensor parallelism): every rank holds all tokens.

`wrong`: "dq": the parts of dq are not summed; "lse": the sum of exponentials is reduced twice.
"""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec as P

from corpus.train import Captured, token_weights


@lru_cache(maxsize=64)
def program(ranks, own, wrong):
    """(q, k, labels, g) -> lse, label logits, dq (of each rank), dk."""
    mesh = Mesh(np.array(jax.devices()[:ranks]), ("tensor",))

    def one_rank(q, k, labels, g):
        first = jax.lax.axis_index("tensor") * own
        z = jnp.einsum("td,vd->tv", q, k, preferred_element_type=jnp.float32)
        top = jax.lax.pmax(z.max(-1), "tensor")
        total = jax.lax.psum(jnp.exp(z - top[:, None]).sum(-1), "tensor")
        if wrong == "lse":
            total = jax.lax.psum(total, "tensor")
        lse = top + jnp.log(total)
        here = labels - first
        held = (here >= 0) & (here < own)
        picked = jnp.take_along_axis(z, jnp.where(held, here, 0)[:, None], -1)[:, 0]
        own_logit = jax.lax.psum(jnp.where(held, picked, 0.0), "tensor")
        onehot = (jnp.arange(own) == here[:, None]) & held[:, None]
        d = (g[:, None] * (jnp.exp(z - lse[:, None]) - onehot)).astype(q.dtype)
        dq = jnp.einsum("tv,vd->td", d, k, preferred_element_type=jnp.float32)
        if wrong != "dq":
            dq = jax.lax.psum(dq, "tensor")
        dk = jnp.einsum("tv,td->vd", d, q, preferred_element_type=jnp.float32)
        return lse, own_logit, dq.astype(q.dtype)[None], dk.astype(k.dtype)

    whole, cut = P(), P("tensor")
    return jax.jit(
        jax.shard_map(
            one_rank, mesh=mesh, in_specs=(whole, cut, whole, whole),
            out_specs=(whole, whole, cut, cut), check_vma=False,
        )  # fmt: skip
    )


def train(job, wrong):
    """The whole step; of dq what rank 0 holds."""
    forward, addends, total = [], [], 0
    for mb, data in enumerate(job.microbatches):
        weights, n = token_weights(job, mb), job.denominator(mb)
        g = (job.options.cotangent * weights / n).astype(np.float32)
        run = program(job.tensor, job.vocab // job.tensor, wrong)
        lse, own, dq, dk = (np.asarray(x) for x in run(data["q"], job.k, data["labels"], g))
        loss = np.float32((weights * (lse - own)).sum(dtype=np.float32) / n)
        forward.append({"lse": lse, "label_logits": own, "loss": loss, "dq": dq[0]})
        addends.append({"dk": [dk]})
        total = total + dk.astype(np.float32)
    return Captured(forward, addends, reduced=total)
