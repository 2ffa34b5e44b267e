"""Inside shard_map: along which axes of the mesh devices hold other values.

jax says it by the type of a value (`vma`), unless the job has asked it not to look (check_vma=False), as pmap
does. Then it is followed here through the program, from what goes into it.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend import core

from backtape.attach_jax.graph import LOOPS, sub_jaxpr

Axes = frozenset[str]
NONE: Axes = frozenset()

# Operations after which all devices along their axes hold the same.
JOINING = (
    "psum", "psum2", "psum_invariant", "pmax", "pmin", "all_gather", "all_gather_invariant", "all_gather_reduced",
)  # fmt: skip


def manual_axes(params: Any) -> frozenset[str]:
    """The axes of the mesh that a shard_map takes apart."""
    return frozenset(params.get("newly_manual_axes", params.get("manual_axes", ())))


def axes_of_specs(specs: Sequence[Any]) -> list[Axes]:
    """The axes that split what goes into a shard_map."""
    found = []
    for spec in specs:
        names = [name for part in spec for name in ((part,) if isinstance(part, str) else part or ())]
        found.append(frozenset(map(str, names)))
    return found


def follow(jaxpr: Any, given: Sequence[Axes], known: dict[Any, Axes]) -> list[Axes]:
    """The axes along which the results of a program differ, of those of its inputs. known: filled with those of
    every variable in it."""
    known |= dict(zip(jaxpr.invars, given))

    def read(atom: Any) -> Axes:
        return NONE if isinstance(atom, core.Literal) else known.get(atom, NONE)

    for equation in jaxpr.eqns:
        taken = [read(atom) for atom in equation.invars]
        together = frozenset().union(*taken) if taken else NONE
        called, name = sub_jaxpr(equation), equation.primitive.name
        if called is not None:
            made = follow(called[0], taken, known)
            if name in LOOPS:
                # What a loop carries may have become another from one round to the next.
                fixed, carried = equation.params["num_consts"], equation.params["num_carry"]
                again = [one | two for one, two in zip(taken[fixed : fixed + carried], made)]
                made = follow(called[0], [*taken[:fixed], *again, *taken[fixed + carried :]], known)
        else:
            axes = _named(equation.params)
            if name in JOINING:
                together -= axes
            elif name == "axis_index":
                together |= axes
            made = [together] * len(equation.outvars)
        known |= dict(zip(equation.outvars, made))
    return [read(atom) for atom in jaxpr.outvars]


def _named(params: Any) -> Axes:
    """The axes that a collective operation names."""
    axes = params.get("axes", params.get("axis_name", ()))
    return frozenset(map(str, (axes,) if isinstance(axes, str) else axes))
