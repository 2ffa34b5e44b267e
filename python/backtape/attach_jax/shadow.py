"""The shadow of a program of the job: the same functions, traced once more for their heads, and run before it.

The job's own program is not touched. Its shadow takes the same arrays, gives nothing back, and of it the compiler
leaves what the records need: the forward passes up to the heads, and the gradients of the heads alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from backtape.attach_jax import heads
from backtape.attach_jax.copies import Copy, Walk, bound
from backtape.attach_jax.devices import NONE, Axes, axes_of_specs, follow
from backtape.attach_jax.finding import heads_of
from backtape.attach_jax.graph import CALLS, LOOPS, Operation, Place, program_of, sub_jaxpr
from backtape.attach_jax.heads import Trace
from backtape.attach_jax.marks import MARKS, gradient_p, start_p
from backtape.attach_jax.sites import Site, heard_leaf
from backtape.failopen import CAUGHT, describe

CALLS_BACK = (
    "the compiled step calls Python back ({}), as jax.debug.print and io_callback do, and would do so twice in the "
    "step that is recorded: leave that out of the step, or tap the head by hand"
)
HIDDEN = "a gradient is taken inside of {}, where its head is not looked for"


class Shadow(Walk):
    """The shadow of one program."""

    def __init__(self, closed: Any, trace: Trace) -> None:
        self._closed, self.trace = closed, trace
        self._with_marks: dict[int, bool] = {}
        self._axes: dict[Any, Axes] = {}  # of the variables inside of shard_map
        self.is_wanted = self._has_marks(closed.jaxpr)  # whether a gradient is taken in it
        # Axes that are named and uses of an array's place are effects, too, and harmless.
        back = sorted({type(one).__name__ for one in closed.effects if "Debug" in str(one) or "IO" in str(one)})
        if back and self.is_wanted:
            self.is_wanted = False
            trace.add(CALLS_BACK.format(", ".join(back)))
        self.run_on: Callable[..., None] = jax.jit(self._computed)

    def _computed(self, *inputs: Any) -> None:
        self.run(self._closed.jaxpr, self._closed.consts, inputs, ())

    def equation(self, equation: Any, place: Place, taken: list[Any], around: Any) -> list[Any]:
        """The results of an equation; at the mark of a gradient its function is differentiated."""
        primitive = equation.primitive
        if primitive is start_p:
            return taken
        if primitive is gradient_p:
            return self._gradient(equation, taken, around)
        if not any(self._has_marks(inner) for inner in _inner(equation)):
            return bound(equation, taken)
        called = sub_jaxpr(equation)
        if primitive.name == "shard_map" and called is not None:
            follow(called[0], axes_of_specs(equation.params["in_specs"]), self._axes)
        if called is None or primitive.name not in (*CALLS, *LOOPS, "shard_map"):
            self.trace.add(HIDDEN.format(primitive.name))
            raise NotImplementedError(HIDDEN.format(primitive.name))
        return self.again(equation, called, taken, place)

    def _has_marks(self, jaxpr: Any) -> bool:
        """Whether a gradient is taken in a program or in one that it calls."""
        found = self._with_marks.get(id(jaxpr))
        if found is None:
            found = any(
                equation.primitive.name in MARKS or any(map(self._has_marks, _inner(equation)))
                for equation in jaxpr.eqns
            )
            self._with_marks[id(jaxpr)] = found
        return found

    def _gradient(self, equation: Any, taken: list[Any], around: Any) -> list[Any]:
        """The gradients of a function, by a copy of it in which its heads are heard."""
        jaxpr, number, held = around
        count, results = equation.params["inputs"], equation.params["results"]
        given, arrived = taken[:count], taken[count + results :]
        function, consts = _function(jaxpr, number, equation, count, results)
        values = [held[var] for var in consts]
        walk: Any = _Plain()
        sites: list[Site] = []
        try:
            program = program_of(core.ClosedJaxpr(function, values))
            found, reasons = heads_of(program, program.outputs)
            for reason in reasons:
                self.trace.add(reason)
            known = {var: self._axes.get(var, NONE) for var in consts}
            follow(function, [self._axes.get(var, NONE) for var in function.invars], known)
            sites = [
                Site(one, next(heads.numbers), heads.heard, self.trace, _axes_at(function, one.product, known))
                for one in found
            ]
            self.trace.sites += sites
            walk = Copy(program, sites) if sites else walk
        except CAUGHT as error:
            self.trace.add(f"a head cannot be looked for: {describe(error)}")
        wide = [jax.numpy.issubdtype(value.dtype, jax.numpy.inexact) for value in given]

        def again(*some: Any) -> list[Any]:
            rest = iter(some)
            mixed = [next(rest) if is_wide else value for is_wide, value in zip(wide, given)]
            return walk.compute(function, values, mixed)

        pull = jax.vjp(again, *(value for is_wide, value in zip(wide, given) if is_wide))[1]
        by_wide = iter(pull(list(arrived)))
        gradients = [next(by_wide) if is_wide else value for is_wide, value in zip(wide, given)]
        for site in sites:
            heard_leaf(site, gradients)
        return gradients


class _Plain(Walk):
    """A function without heads."""

    def compute(self, jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any]) -> list[Any]:
        """Its results."""
        return self.run(jaxpr, consts, inputs, ())

    def equation(self, equation: Any, place: Place, taken: list[Any], around: Any) -> list[Any]:
        """The results of an equation."""
        return bound(equation, taken)


def _axes_at(jaxpr: Any, product: Operation, known: dict[Any, Axes]) -> tuple[Axes, ...]:
    """The axes along which devices hold other operands of a product."""
    *path, last = product.place
    for number in path:
        called = sub_jaxpr(jaxpr.eqns[number])
        assert called is not None
        jaxpr = called[0]
    return tuple(known.get(var, NONE) for var in jaxpr.eqns[last].invars)


def _inner(equation: Any) -> list[Any]:
    """The programs that an equation calls, of whatever kind it is."""
    found = []
    for value in equation.params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            one = getattr(one, "jaxpr", one)
            if hasattr(one, "eqns"):
                found.append(one)
    return found


def _function(
    jaxpr: Any, number: int, equation: Any, count: int, results: int
) -> tuple[Any, list[Any]]:
    """The function that is differentiated at an equation of a program: what lies between the marks, and what its
    results are made of besides. Also the variables of the program that it takes as constants."""
    given, made = equation.invars[:count], equation.invars[count : count + results]
    needed = {var for var in made if not isinstance(var, core.Literal)}
    marks, kept = set(given), []
    for before in reversed(jaxpr.eqns[:number]):
        is_mark = before.primitive in (start_p, gradient_p)
        if not is_mark and any(var in needed for var in before.outvars):
            kept.append(before)
            needed |= {var for var in before.invars if not isinstance(var, core.Literal)}
    kept.reverse()
    inside = {var for one in kept for var in one.outvars} | marks
    consts = [var for var in needed if var not in inside]
    function = core.Jaxpr(consts, list(given), list(made), kept, debug_info=jaxpr.debug_info)
    return function, consts

