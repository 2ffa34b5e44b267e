"""Marks in a program that is traced for its heads: where a function is differentiated, and what arrives at it.

While such a program is traced, `jax.vjp` (and with it `grad` and `value_and_grad`) does not differentiate. It puts a
mark on what goes into the function, calls it once, as jax does, and puts another mark where its gradient is asked
for. What lies between the marks is the function, in full: with its calls, loops and derivatives of its own.
"""

import functools
import itertools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

# Whether a program is traced for its heads. It is a part of jit's cache key.
marking = jax.make_user_context(False)

# What goes into a function of which a gradient is taken; handed on.
start_p = Primitive("backtape_start")
start_p.multiple_results = True
start_p.def_abstract_eval(lambda *values, number: list(values))

# The gradient of a function. It takes what start_p has handed on, the function's results, and what arrives at
# them, and gives the gradients by the first.
gradient_p = Primitive("backtape_gradient")
gradient_p.multiple_results = True
gradient_p.def_abstract_eval(lambda *values, number, inputs, results: list(values[:inputs]))

MARKS = (start_p.name, gradient_p.name)

_numbers = itertools.count()
# Whether a function that is differentiated is traced: what it differentiates itself is a part of it.
_inside: ContextVar[bool] = ContextVar("inside", default=False)


def is_inside() -> bool:
    """Whether a function is traced that is differentiated, and whose heads are looked for."""
    return marking.value and _inside.get()


def marked(own: Callable[..., Any]) -> Callable[..., Any]:
    """What stands for `jax.vjp`, which is `own`."""

    @functools.wraps(own)
    def vjp(function: Any, *primals: Any, has_aux: bool = False, **options: Any) -> Any:
        if not marking.value or _inside.get():
            return own(function, *primals, has_aux=has_aux, **options)
        leaves, tree = jax.tree.flatten(primals)
        number = next(_numbers)
        given = start_p.bind(*map(jnp.asarray, leaves), number=number)
        token = _inside.set(True)
        try:
            result = function(*jax.tree.unflatten(tree, given))
        finally:
            _inside.reset(token)
        result, aux = (result[0], result[1:]) if has_aux else (result, ())
        results, result_tree = jax.tree.flatten(result)
        results = [jnp.asarray(value) for value in results]

        def pull(arrived: Any) -> Any:
            cotangents = [
                jnp.asarray(value, one.dtype) for value, one in zip(result_tree.flatten_up_to(arrived), results)
            ]
            counts = {"number": number, "inputs": len(given), "results": len(results)}
            found = gradient_p.bind(*given, *results, *cotangents, **counts)
            return jax.tree.unflatten(tree, [_of_kind(one, leaf) for one, leaf in zip(found, given)])

        return (jax.tree.unflatten(result_tree, results), jax.tree_util.Partial(pull), *aux)

    return vjp


def _of_kind(gradient: Any, leaf: Any) -> Any:
    """The gradient by a leaf; jax gives one without bytes by a whole number."""
    is_wide = jnp.issubdtype(leaf.dtype, jnp.inexact)
    return gradient if is_wide else np.zeros(leaf.shape, jax.dtypes.float0)
