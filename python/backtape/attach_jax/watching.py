"""Where a function is differentiated while a step is recorded: a copy of it is put beside it, in which its heads
are heard."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from backtape.attach_jax import heads
from backtape.attach_jax.copies import Copy
from backtape.attach_jax.finding import heads_of
from backtape.attach_jax.graph import program_of
from backtape.attach_jax.heads import Trace
from backtape.attach_jax.sites import Site
from backtape.failopen import CAUGHT, describe
from backtape.taps_jax import taping

# Whether a function that is differentiated is being traced: those that it differentiates itself are a part of it.
_inside: ContextVar[bool] = ContextVar("inside", default=False)


def is_watching() -> bool:
    """Whether a function is traced whose heads are found from outside."""
    return _inside.get()


@contextlib.contextmanager
def _within() -> Iterator[None]:
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


def watched(function: Callable[..., Any], has_aux: bool | None) -> Callable[..., Any]:
    """The function, beside which a copy is put wherever it is traced while a step is recorded.

    has_aux: whether the first of two results alone is differentiated; None: it is taken to be so where the
        result is a tuple.
    """

    def call(*args: Any, **options: Any) -> Any:
        if _inside.get() or not taping.value:
            return function(*args, **options)
        with _within():
            result = function(*args, **options)
            trace = Trace()
            try:
                return _beside(function, args, options, result, has_aux, trace)
            except CAUGHT as error:
                trace.reasons.append(f"the loss cannot be traced a second time: {describe(error)}")
                return result
            finally:
                heads.traced(trace)

    return call


def _beside(
    function: Callable[..., Any],
    args: Any,
    options: Any,
    result: Any,
    has_aux: bool | None,
    trace: Trace,
) -> Any:
    """The result of the function, linked to a copy of it."""
    leaves, tree = jax.tree.flatten((args, options))
    places = [at for at, leaf in enumerate(leaves) if _is_array(leaf)]
    arrays = [leaves[at] for at in places]

    def again(*given: Any) -> list[Any]:
        mixed = list(leaves)
        for at, value in zip(places, given):
            mixed[at] = value
        args, options = jax.tree.unflatten(tree, mixed)
        return _losses(function(*args, **options), has_aux)

    closed = jax.make_jaxpr(again)(*arrays)
    program = program_of(closed)
    found, trace.reasons = heads_of(program, program.outputs)
    first = heads.number_of_sites()
    trace.sites = [Site(one, first + at, heads.heard) for at, one in enumerate(found)]
    if not trace.sites:
        return result
    copy = Copy(closed, program, trace.sites)
    whole, result_tree = jax.tree.flatten(result)
    count = len(_losses(result, has_aux))
    linked = _linked(copy, trace, whole[:count], list(closed.consts), arrays)
    return jax.tree.unflatten(result_tree, [*linked, *whole[count:]])


def _losses(result: Any, has_aux: bool | None) -> list[Any]:
    """The results that are differentiated."""
    is_pair = isinstance(result, tuple) if has_aux is None else has_aux
    return jax.tree.leaves(result[0] if is_pair and result else result)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic, float, int, complex)) and not isinstance(leaf, bool)


def _linked(
    copy: Copy, trace: Trace, losses: Sequence[Any], consts: Sequence[Any], arrays: Sequence[Any]
) -> list[Any]:
    """The losses, whose gradient goes into the copy, too. Nothing of it comes back."""

    @jax.custom_vjp
    def link(losses: Any, inputs: Any) -> Any:
        return losses

    def forward(losses: Any, inputs: Any) -> Any:
        try:
            return losses, _pull(copy, *lax.optimization_barrier(inputs))
        except CAUGHT as error:
            trace.reasons.append(f"the copy of the loss cannot be traced: {describe(error)}")
            return losses, None

    def backward(pull: Any, arrived: Any) -> Any:
        if pull is not None:
            try:
                with _within():
                    pull(arrived)
            except CAUGHT as error:
                trace.reasons.append(f"its gradients cannot be recorded: {describe(error)}")
        return arrived, None

    link.defvjp(forward, backward)
    inputs = ([jnp.asarray(value) for value in consts], [jnp.asarray(value) for value in arrays])
    return list(link(list(losses), lax.stop_gradient(inputs)))


def _pull(copy: Copy, consts: Sequence[Any], arrays: Sequence[Any]) -> Any:
    """What takes the gradient of the losses into the copy."""

    def is_wide(value: Any) -> bool:
        return jnp.issubdtype(jnp.result_type(value), jnp.inexact)

    def losses(some: Sequence[Any]) -> list[Any]:
        rest = iter(some)
        mixed = [next(rest) if is_wide(value) else value for value in (*consts, *arrays)]
        return copy(mixed[: len(consts)], mixed[len(consts) :])

    with _within():
        return jax.vjp(losses, [value for value in (*consts, *arrays) if is_wide(value)])[1]
