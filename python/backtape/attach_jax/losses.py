"""Losses that register their own head: drop-ins for those of optax, and one of hidden states and unembedding.

    from backtape.jax import losses

    loss = losses.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

Their values have the same bits as those of optax, and optax need not be there. In a step that is recorded (`with
recorder.step(n)`, or `attach`) the head is recorded; outside of it nothing is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from backtape.attach_jax import heads, marks
from backtape.attach_jax.copies import Copy
from backtape.attach_jax.declared import NAMES, UNREAD
from backtape.attach_jax.finding import heads_of
from backtape.attach_jax.graph import program_of
from backtape.attach_jax.heads import Trace
from backtape.attach_jax.sites import Site
from backtape.failopen import CAUGHT, describe, text_of
from backtape.shards import Key, Shard
from backtape.taps_jax import NO_MICROBATCH, Tap, listen, taping


def softmax_cross_entropy_with_integer_labels(
    logits: Any, labels: Any, axis: int = -1, where: Any = None
) -> jax.Array:
    """The cross-entropy of each token, as optax's function of this name computes it.

    logits: [..., V], in which `axis` is the vocabulary; labels: [...], whole numbers; where: as logits, the
        classes that take part.

    In a recorded step its logits, labels, loss, and their gradients are a head on logits; with `attach` around the
    step the product that the logits come from is found, and judged with it. A head with `where` is recorded by
    `attach` alone. Returns [...].
    """
    axis = axis % logits.ndim

    def loss(logits: Any, labels: Any) -> jax.Array:
        picked = jnp.take_along_axis(logits, jnp.expand_dims(labels, axis), axis=axis).take(0, axis=axis)
        normalizers = jax.nn.logsumexp(logits, axis=axis, where=where)
        result = normalizers - picked
        return result if where is None else jnp.where(jnp.any(where, axis), result, 0.0)

    if marks.marking.value or where is not None or axis != logits.ndim - 1:
        return loss(logits, labels)
    return _on_logits(loss, lax.optimization_barrier(logits), labels)


def softmax_cross_entropy(logits: Any, labels: Any, axis: int = -1, where: Any = None) -> jax.Array:
    """The cross-entropy with targets of each token, as optax's function of this name computes it.

    logits, labels: [..., V], in which `axis` is the vocabulary; the targets of each token sum to 1. where: as
        logits, the classes that take part. Returns [...].

    Its head is recorded with `attach` around the step, where the targets are made of labels by one_hot, or are
    those of one class each.
    """
    logs = jax.nn.log_softmax(logits, axis, where)
    return -(labels * logs).sum(axis, where=where)


def linear_cross_entropy(
    q: Any, k: Any, labels: Any, *, precision: Any = None, preferred_element_type: Any = jnp.float32
) -> jax.Array:
    """The cross-entropy of each token, of hidden states and unembedding.

    q: [..., D]; k: [V, D]; labels: [...], whole numbers; precision, preferred_element_type: as of jnp.einsum.

    Its values have the bits of optax.softmax_cross_entropy_with_integer_labels on the product of both. In a
    recorded step q, k, labels, the loss and their gradients are the head. Returns [...].
    """

    def loss(q: Any, k: Any, labels: Any) -> jax.Array:
        logits = jnp.einsum(
            "...d,vd->...v", q, k, precision=precision, preferred_element_type=preferred_element_type
        )
        picked = jnp.take_along_axis(logits, labels[..., None], axis=-1).take(0, axis=-1)
        return jax.nn.logsumexp(logits, axis=-1) - picked

    if marks.marking.value:
        return loss(q, k, labels)
    given = (*lax.optimization_barrier((q, k)), labels)
    return _heard(loss, given) if taping.value else loss(*given)


def _traced() -> Trace | None:
    """What is found in a loss that registers itself; None where an attachment finds it."""
    step = heads.of_step()
    if step is None or step.is_attached:
        return None
    step.traces.append(Trace())
    return step.traces[-1]


def _heard(function: Callable[..., Any], given: Sequence[Any]) -> Any:
    """The results of a function of arrays, in which its head is heard."""
    trace = _traced()
    if trace is None:
        return function(*given)
    try:
        closed = jax.make_jaxpr(function)(*given)
        program = program_of(closed)
        found, trace.reasons = heads_of(program, program.outputs)
        for one in found:
            one.leaf = None
        trace.sites = [Site(one, next(heads.numbers), heads.heard, trace) for one in found]
        return Copy(program, trace.sites).compute(closed.jaxpr, closed.consts, given)[0]
    except CAUGHT as error:
        trace.add(f"a head cannot be looked for: {describe(error)}")
        return function(*given)


@dataclass(eq=False)
class LogitsSite:
    """A loss of which the logits are heard, and not what they are made of."""

    logits: tuple[int, ...]  # their shape
    dtype: str
    number: int
    trace: Trace

    needed = ("logits", "labels", "loss", "cotangent", "dlogits")
    frozen: tuple[str, ...] = ()
    weight, stored = None, 0

    @property
    def size(self) -> int:
        """How many logits it has."""
        return int(np.prod(self.logits, dtype=np.int64))

    @property
    def options(self) -> dict[str, Any]:
        """The head as options of `Tape.head`."""
        own = NAMES.get(self.dtype)
        wide = {name: own for name in ("logits", "lse", "p", "dlogits")} if own in ("f32", "f64") else {}
        return {
            "loss": "xent_logits",
            "path": "plain",
            "reduction": "none",
            "scope": "rank",
            "microbatch_reduction": "sum",
            "ignore_label": UNREAD,
            "autocast": None,
            "dtypes": wide,
        }

    def take(self, tap: Tap, device: Any, shard: Callable[[], Shard]) -> None:
        """Takes a shard of what is heard, from the callback's thread."""
        heads.heard(self, tap.key.name, device, shard)

    def listen(self, name: str, value: jax.Array) -> None:
        """Has a value recorded."""
        tap = Tap(Key(name, None, None, None), None, None, self)
        try:
            listen(tap, lax.optimization_barrier(value), jnp.int32(NO_MICROBATCH))
        except CAUGHT as error:
            self.trace.add(f"its {name} cannot be recorded: {text_of(error)}")


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _on_logits(loss: Callable[..., Any], logits: Any, labels: Any) -> Any:
    return loss(logits, labels)


def _forward(loss: Callable[..., Any], logits: Any, labels: Any) -> Any:
    result, pull = jax.vjp(lambda logits: loss(logits, labels), logits)
    return result, (logits, labels, result, pull)


def _backward(loss: Callable[..., Any], held: Any, arrived: Any) -> Any:
    logits, labels, result, pull = held
    gradient = pull(arrived)[0]
    trace = _traced() if taping.value else None
    if trace is not None:
        site = LogitsSite(logits.shape, str(logits.dtype), next(heads.numbers), trace)
        rows = logits.shape[:-1] if 2 <= logits.ndim <= 3 else (-1,)
        is_unread = ((labels < 0) | (labels >= logits.shape[-1])) & (arrived == 0)
        site.listen("logits", logits.reshape(*rows, logits.shape[-1]))
        site.listen("dlogits", gradient.reshape(*rows, logits.shape[-1]))
        site.listen("labels", jnp.where(is_unread, UNREAD, labels).astype(jnp.int32).reshape(rows))
        site.listen("loss", jnp.where(is_unread, 0, result).reshape(rows))
        site.listen("cotangent", arrived.reshape(rows))
    return gradient, None


_on_logits.defvjp(_forward, _backward)
