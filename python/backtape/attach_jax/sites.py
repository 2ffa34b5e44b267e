"""What is put into the copy of a loss: functions that hand on what they get, and in whose backward pass what is
recorded of the head is at hand."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from backtape.attach_jax.declared import UNREAD, options_of
from backtape.attach_jax.finding import Found
from backtape.failopen import CAUGHT, text_of
from backtape.shards import Key, Shard
from backtape.taps_jax import NO_MICROBATCH, Tap, listen

# The label of a token whose target is no class.
NO_CLASS = -1000


@dataclass(eq=False)
class Site:
    """A head in a program, and where what is heard of it goes."""

    found: Found
    number: int  # the heads of a process are counted in the order in which they are traced
    sink: Callable[["Site", str, Any, Callable[[], Shard]], None]
    trace: Any  # of `heads.py`, in which it was found
    # Inside shard_map, the axes of the mesh along which devices hold other operands of the product.
    operand_axes: tuple[frozenset[str], ...] = (frozenset(), frozenset())

    def take(self, tap: Tap, device: Any, shard: Callable[[], Shard]) -> None:
        """Takes a shard of what is heard, from the callback's thread."""
        self.sink(self, tap.key.name, device, shard)

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Inside shard_map, the axes of the mesh that split its tokens."""
        mesh, own = jax.sharding.get_abstract_mesh(), self.operand_axes[self.found.q]
        return tuple(name for name in mesh.axis_names if name in mesh.manual_axes and name in own)

    def listen(self, name: str, value: jax.Array, is_of_tokens: bool = True) -> None:
        """Has a value recorded: one of tokens, or one that all of them share."""
        spec = None
        if jax.sharding.get_abstract_mesh().manual_axes:
            axes = self.token_axes
            spec = PartitionSpec(axes) if axes and is_of_tokens else PartitionSpec()
            if self.operand_axes[1 - self.found.q] - set(axes):
                self.trace.add("inside shard_map its unembedding is cut over devices that share tokens")
                return
        tap = Tap(Key(name, None, None, None), None, spec, self)
        try:
            listen(tap, lax.optimization_barrier(value), jnp.int32(NO_MICROBATCH))
        except CAUGHT as error:
            self.trace.add(f"its {name} cannot be recorded: {text_of(error)}")

    @property
    def size(self) -> int:
        """How many logits it has."""
        return int(np.prod(self.found.product.outputs[0].shape, dtype=np.int64))

    @property
    def stored(self) -> int:
        """The bytes of its unembedding, and of the gradient."""
        k = self.found.product.inputs[1 - self.found.q]
        return int(np.prod(k.shape, dtype=np.int64)) * k.dtype.itemsize

    @property
    def weight(self) -> Any:
        """What tells its unembedding from another."""
        return self.found.weight

    @property
    def frozen(self) -> tuple[str, ...]:
        """Which of q and k take no gradient."""
        return self.found.frozen

    @property
    def needed(self) -> tuple[str, ...]:
        """What is heard of each run."""
        gradients = [f"d{name}" for name in ("q", "k") if name not in self.frozen]
        return ("q", "k", "labels", "loss", "cotangent", *gradients)

    @property
    def options(self) -> dict[str, Any]:
        """The head as options of `Tape.head`."""
        return options_of(self.found)

    @property
    def rows_shape(self) -> tuple[int, ...]:
        """The shape of tokens as they are recorded: [T], or [B, S]."""
        tokens = self.found.tokens
        return tokens if 1 <= len(tokens) <= 2 else (-1,)

    def placed(self, rows: jax.Array, fill: Any) -> jax.Array:
        """Values of the loss's rows, put to the tokens whose rows they are."""
        index = self.found.row.index.reshape(-1)
        count = int(np.prod(self.found.tokens, dtype=np.int64))
        flat = rows.reshape(-1)
        if len(index) != count or not (index == np.arange(count)).all():
            flat = jnp.full(count, fill, flat.dtype).at[index].set(flat)
        return flat.reshape(self.rows_shape)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def product(site: Site, multiply: Callable[..., Any], q: Any, k: Any) -> Any:
    """The product of hidden states and unembedding, in whose backward pass both are heard, and what they get.
    multiply: the product of the two, in the order that it takes them."""
    return multiply(q, k)


def _forward(site: Site, multiply: Callable[..., Any], q: Any, k: Any) -> Any:
    return multiply(q, k), (q, k)


def _backward(site: Site, multiply: Callable[..., Any], held: Any, arrived: Any) -> Any:
    gradients = jax.vjp(multiply, *held)[1](arrived)
    heard(site, held, gradients)
    return gradients


product.defvjp(_forward, _backward)


def heard(site: Site, held: Sequence[Any], gradients: Sequence[Any]) -> None:
    """Has q, k and their gradients recorded."""
    (q, k), (dq, dk) = held, gradients
    operation, at = site.found.product, site.found.q
    (contracted, _) = operation.params["dimension_numbers"]
    for name, value in (("q", q), ("dq", dq)):
        if name == "q" or "q" not in site.found.frozen:
            moved = jnp.moveaxis(value, int(contracted[at][0]), -1)
            site.listen(name, moved.reshape(*site.rows_shape, moved.shape[-1]))
    site.listen("k", k, is_of_tokens=False)
    if "k" not in site.found.frozen and site.found.leaf is None:
        site.listen("dk", summed(site, dk), is_of_tokens=False)


def varying(value: Any) -> frozenset[str]:
    """Inside shard_map, the axes of the mesh along which jax knows that devices hold other values."""
    kind = jax.typeof(value)
    return frozenset(getattr(getattr(kind, "mat", None), "varying", getattr(kind, "vma", ())) or ())


def summed(site: Site, dk: Any) -> Any:
    """Inside shard_map, the sum of what devices with other tokens have of the gradient of the unembedding."""
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return dk
    if not site.token_axes:
        return dk
    # Where jax looks after that (check_vma), a value that is a sum already varies along none of them.
    is_known = bool(varying(lax.axis_index(site.token_axes)))
    axes = [name for name in site.token_axes if not is_known or name in varying(dk)]
    return lax.psum(dk, tuple(axes)) if axes else dk


def heard_leaf(site: Site, gradients: Sequence[Any]) -> None:
    """Has the gradient of an unembedding recorded that is differentiated itself: it has all that lies between."""
    leaf = site.found.leaf
    if leaf is not None and "k" not in site.found.frozen:
        gradient = gradients[leaf.number]
        own = summed(site, gradient)
        site.listen("dk", own.T if leaf.is_transposed else own, is_of_tokens=False)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def operand(site: Site, name: str, is_transposed: bool, value: Any) -> Any:
    """What goes into a call with a derivative of its own, which is heard in the backward pass, and what it gets."""
    return value


def _operand_forward(site: Site, name: str, is_transposed: bool, value: Any) -> Any:
    return value, value


def _operand_backward(site: Site, name: str, is_transposed: bool, value: Any, arrived: Any) -> Any:
    for own, one in ((name, value), (f"d{name}", arrived)):
        if name == "q":
            site.listen(own, one.reshape(*site.rows_shape, one.shape[-1]))
        elif own == "k" or site.found.leaf is None:
            one = one if own == "k" else summed(site, one)
            site.listen(own, one.T if is_transposed else one, is_of_tokens=False)
    return (arrived,)


operand.defvjp(_operand_forward, _operand_backward)


@jax.custom_vjp
def nothing(value: Any) -> Any:
    """Zero, which passes for something that depends on a value."""
    return jnp.zeros(())


nothing.defvjp(lambda value: (jnp.zeros(()), value), lambda value, _: (jnp.zeros_like(value),))


@jax.custom_vjp
def linked(results: Any, others: Any) -> Any:
    """The results; what arrives at them arrives at the others, too."""
    return results


linked.defvjp(lambda results, others: (results, None), lambda _, arrived: (arrived, arrived))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def loss(site: Site, rows: Any, labels: Any, bias: Any) -> Any:
    """The loss of each row, in whose backward pass it is heard, and what arrives at it."""
    return rows


def _loss_forward(site: Site, rows: Any, labels: Any, bias: Any) -> Any:
    return rows, (rows, labels, bias)


def _loss_backward(site: Site, held: Any, arrived: Any) -> Any:
    rows, given, bias = held
    found = site.found
    shift, valid = found.options["shift"], found.options["valid_vocab"]
    classes = valid or found.product.outputs[0].shape[found.row.source.classes]
    labels = _labels(found, given).reshape(rows.shape)
    is_outside = (labels < 0) | (labels >= classes)
    is_unread = is_outside & ((arrived == 0) | (rows == 0))
    nll = rows / found.factor - shift
    site.listen("labels", site.placed(jnp.where(is_unread, UNREAD, labels), UNREAD))
    site.listen("loss", site.placed(jnp.where(is_unread, 0, nll), 0))
    site.listen("cotangent", site.placed(arrived * found.factor, 0))
    if bias is not None:
        site.listen("bias", bias.reshape(-1), is_of_tokens=False)
    return arrived, None, None


loss.defvjp(_loss_forward, _loss_backward)


def _labels(found: Found, given: Any) -> jax.Array:
    """The label of each row of the loss."""
    form = found.row.given
    assert form is not None and found.row.label_index is not None
    if form.are_targets:
        largest = jnp.argmax(given, form.dim, keepdims=True)
        top, total = jnp.max(given, form.dim, keepdims=True), jnp.sum(given, form.dim, keepdims=True)
        taken = jnp.where((top == 1) & (total == 1), largest, jnp.where(total == 0, -1, NO_CLASS))
    else:
        taken = lax.index_in_dim(given, -1, form.dim)
    labels = jnp.broadcast_to(taken, form.shape).reshape(-1).astype(jnp.int32)
    index = found.row.label_index.reshape(-1)
    if len(index) != labels.size or not (index == np.arange(labels.size)).all():
        labels = labels[index]
    return labels
