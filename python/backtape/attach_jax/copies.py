"""Programs that are computed again, equation by equation, with something else in some places.

`Walk` does so for a program whatever it is made of. `Copy` is the copy of a function that is differentiated,
with the functions of `sites.py` where a head is.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.sharding import NamedSharding

from backtape.attach_jax import sites
from backtape.attach_jax.devices import manual_axes
from backtape.attach_jax.finding import Found, bias_of
from backtape.attach_jax.graph import CALLS, CLOSED, LOOPS, Place, Program, sub_jaxpr
from backtape.attach_jax.sites import Site


class Walk:
    """Computes a program equation by equation."""

    def run(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any], place: Place) -> list[Any]:
        """The results of a program that stands at this place."""
        held: dict[Any, Any] = dict(zip(jaxpr.constvars, consts)) | dict(zip(jaxpr.invars, inputs))
        self.entered(place, consts, inputs)
        for number, equation in enumerate(jaxpr.eqns):
            own = (*place, number)
            taken = [a.val if isinstance(a, core.Literal) else held[a] for a in equation.invars]
            with equation.ctx.manager:
                made = self.equation(equation, own, taken, (jaxpr, number, held))
            self.left(own, made)
            held |= dict(zip(equation.outvars, made))
        return [a.val if isinstance(a, core.Literal) else held[a] for a in jaxpr.outvars]

    def entered(self, place: Place, consts: Sequence[Any], inputs: Sequence[Any]) -> None:
        """What goes into the program at a place is known."""

    def left(self, place: Place, made: Sequence[Any]) -> None:
        """The results of the equation at a place are known."""

    def equation(self, equation: Any, place: Place, taken: list[Any], around: Any) -> list[Any]:
        """The results of an equation. around: the program that it is in, its number, and the values so far."""
        raise NotImplementedError

    def again(self, equation: Any, called: Any, taken: list[Any], place: Place) -> list[Any]:
        """The results of an equation that calls a program, with something else inside of that."""
        (jaxpr, consts), params, name = called, equation.params, equation.primitive.name

        def inside(*inputs: Any) -> list[Any]:
            return self.run(jaxpr, consts, inputs, place)

        if name in CALLS:
            return self.run(jaxpr, consts, _laid(taken, params), place)
        if name in LOOPS:
            return _looped(inside, params, taken)
        if name == "shard_map":
            mapped = jax.shard_map(
                inside,
                mesh=params["mesh"],
                in_specs=tuple(params["in_specs"]),
                out_specs=list(params["out_specs"]),
                axis_names=set(manual_axes(params)),
                check_vma=params["check_vma"],
            )
            return list(mapped(*taken))
        remade = jax.checkpoint(inside, policy=params["policy"], prevent_cse=params["prevent_cse"])
        return list(remade(*taken))



class Copy(Walk):
    """The program of a loss with its heads."""

    def __init__(self, program: Program, heads: Sequence[Site]) -> None:
        self._program = program
        self._products = {site.found.product.place: site for site in heads}
        self._losses = {id(site.found.loss): site for site in heads if site.found.summed is None}
        self._sums = {site.found.summed.place: site for site in heads if site.found.summed is not None}
        # What is to be kept, by id: labels and biases.
        self._wanted: set[int] = set()
        self._held: dict[int, Any] = {}
        self._is_plain = False  # it is computed only to keep what is wanted
        self._fused = {site.found.fused.place: site for site in heads if site.found.fused is not None}
        self._nothing: Any = None  # inside of a fused head, what makes its loss depend on something
        places = [*self._products, *self._sums]
        for site in heads:
            values = [site.found.loss, *(value for value in _extras(site.found) if value is not None)]
            self._wanted |= {id(value) for value in values[1:]}
            places += [value.maker.place for value in values if value.maker is not None]
        self._inside = {place[:n] for place in places for n in range(1, len(place))}

    def compute(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """The results of the program, as the function itself has them."""
        self._held.clear()
        return self.run(jaxpr, consts, inputs, ())

    def entered(self, place: Place, consts: Sequence[Any], inputs: Sequence[Any]) -> None:
        """Keeps what is wanted."""
        self._keep(self._program.constants[place], consts)
        self._keep(self._program.entries[place], inputs)

    def left(self, place: Place, made: Sequence[Any]) -> None:
        """Keeps what is wanted."""
        self._keep(self._program.made[place], made)

    def _keep(self, values: Sequence[Any], made: Sequence[Any]) -> None:
        for value, own in zip(values, made):
            if id(value) in self._wanted:
                self._held[id(value)] = own

    def equation(self, equation: Any, place: Place, taken: list[Any], around: Any) -> list[Any]:
        """The results of an equation, heard where it is a head's."""
        name = equation.primitive.name
        called = sub_jaxpr(equation) if place in self._inside else None
        is_within = self._is_plain or self._nothing is not None
        if called is not None and (name in CALLS or is_within and name not in LOOPS):
            return self.run(*called, _laid(taken, equation.params), place)
        if self._is_plain:
            return bound(equation, taken)
        if place in self._fused:
            return self._whole(self._fused[place], equation, called, taken, place)
        if place in self._products and self._nothing is None:
            return [self._product(self._products[place], equation, taken)]
        if place in self._sums:
            return [self._sum(self._sums[place], equation, taken[0])]
        if called is not None and name not in CLOSED:
            # What is traced inside of it is no value outside.
            kept = dict(self._held)
            made = self.again(equation, called, taken, place)
            self._held = kept
            return made
        made = bound(equation, taken)
        if called is not None and name in CLOSED:
            self._is_plain = True
            self.run(*called, [lax.stop_gradient(value) for value in taken], place)
            self._is_plain = False
        for at, value in enumerate(self._program.made[place]):
            if id(value) in self._losses:
                made[at] = self._loss(self._losses[id(value)], made[at])
        return made

    def _product(self, site: Site, equation: Any, taken: list[Any]) -> Any:
        is_first = site.found.q == 0

        def multiply(q: Any, k: Any) -> Any:
            return bound(equation, [q, k] if is_first else [k, q])[0]

        q, k = taken if is_first else taken[::-1]
        return sites.product(site, multiply, q, k)

    def _whole(self, site: Site, equation: Any, called: Any, taken: list[Any], place: Place) -> list[Any]:
        """A call with a derivative of its own in which there is a head. It is heard from outside what hidden states
        and unembedding get; what arrives at the loss of each token, by what the call computes forward."""
        fused = site.found.fused
        assert fused is not None
        given = list(taken)
        for name, leaf in (("q", fused.q), ("k", fused.k)):
            given[leaf.number] = sites.operand(site, name, leaf.is_transposed, given[leaf.number])
        made = bound(equation, given)
        self._nothing = sites.nothing(given[fused.q.number])
        inside = self.run(*called, [lax.stop_gradient(value) for value in taken], place)
        self._nothing = None
        wide = [at for at, value in enumerate(made) if jnp.issubdtype(value.dtype, jnp.inexact)]
        for at, value in zip(wide, sites.linked([made[n] for n in wide], [inside[n] for n in wide])):
            made[at] = value
        return made

    def _loss(self, site: Site, rows: Any) -> Any:
        if self._nothing is not None:
            rows = lax.stop_gradient(rows) + self._nothing.astype(rows.dtype)
        labels, bias = (
            None if value is None else self._held.get(id(value), value.known) for value in _extras(site.found)
        )
        if labels is None:
            raise ValueError("its labels are computed in another part of the program than its loss")
        labels = lax.stop_gradient(jnp.asarray(labels))
        if bias is not None:
            own = site.found.row.form.bias
            assert own is not None
            bias = lax.stop_gradient(jnp.asarray(bias)).astype(own.dtype)
        return sites.loss(site, rows, labels, bias)

    def _sum(self, site: Site, equation: Any, taken: Any) -> Any:
        """A sum over classes and tokens at once, one after the other."""
        axes = [int(axis) for axis in equation.params["axes"]]
        classes = _classes_in(site.found)
        rows = jnp.sum(taken, classes)
        rows = self._loss(site, rows)
        return jnp.sum(rows, tuple(axis - (axis > classes) for axis in axes if axis != classes))


def bound(equation: Any, taken: Sequence[Any]) -> list[Any]:
    """The results of an equation as it is."""
    made = equation.primitive.bind(*taken, **equation.primitive.get_bind_params(equation.params))
    return list(made) if equation.primitive.multiple_results else [made]


def _laid(taken: Sequence[Any], params: Any) -> list[Any]:
    """What goes into a call, laid on devices as that asks for it."""
    wanted = params.get("in_shardings") or [None] * len(taken)
    return [
        lax.with_sharding_constraint(value, one) if isinstance(one, NamedSharding) else value
        for value, one in zip(taken, wanted)
    ]


def _looped(inside: Callable[..., list[Any]], params: Any, taken: list[Any]) -> list[Any]:
    fixed, carried = params["num_consts"], params["num_carry"]
    consts, first, given = taken[:fixed], taken[fixed : fixed + carried], taken[fixed + carried :]

    def body(carry: list[Any], some: list[Any]) -> tuple[list[Any], list[Any]]:
        made = inside(*consts, *carry, *some)
        return made[:carried], made[carried:]

    last, made = lax.scan(
        body, first, given, length=params["length"], reverse=params["reverse"], unroll=params["unroll"]
    )
    return [*last, *made]


def _extras(found: Found) -> tuple[Any, Any]:
    """The values that a loss is heard with: labels and bias."""
    assert found.row.given is not None
    return found.row.given.value, bias_of(found.row)


def _classes_in(found: Found) -> int:
    """The dimension of the classes in what is summed over classes and tokens at once."""
    assert found.classes is not None
    return found.classes
