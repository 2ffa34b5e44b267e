"""The program of a loss as one list of operations, whatever functions, loops and rules it is made of.

jax hands out a program (a jaxpr) in which calls, checkpoints, loops and custom derivatives each hold a
program of their own. Here they are laid open: an operation knows where it stands, and a value that is
handed into or out of a call is one value.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend import core

# Where an operation stands: the number of the equation at each level, from the outermost program inwards.
Place = tuple[int, ...]

# Calls whose program may be computed in the place of the call without another value or another gradient.
CALLS = ("jit", "pjit", "closed_call", "core_call")
# Calls of which the derivative, the memory or the place on devices is another one than that of what is
# inside.
SCOPES = ("remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "shard_map")
LOOPS = ("scan",)
# Calls with a derivative of their own: nothing can be put into them.
CLOSED = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")

# Constants of up to so many elements are looked at.
MOST_ELEMENTS = 1 << 22


@dataclass(eq=False)
class Value:
    """A value of the program."""

    shape: tuple[int, ...]
    dtype: Any
    maker: "Operation | None" = None  # None: it comes into the program
    output: int = 0  # which result of its maker it is
    known: Any = None  # what it is, where it does not depend on what comes in

    @property
    def is_float(self) -> bool:
        """Whether it may have a gradient."""
        return bool(jax.numpy.issubdtype(self.dtype, jax.numpy.floating))


@dataclass(eq=False)
class Operation:
    """One operation of the program, outside of which nothing is called any more."""

    name: str
    place: Place
    scope: Place  # the place of the innermost loop or call of `SCOPES` that it stands in
    params: dict[str, Any]
    inputs: list[Value]
    outputs: list[Value]


@dataclass
class Program:
    """The operations in the order in which they are computed."""

    operations: list[Operation] = field(default_factory=list)
    inputs: list[Value] = field(default_factory=list)
    outputs: list[Value] = field(default_factory=list)
    # By the place of each equation that calls a program: what goes into that, and by the place of each equation
    # what it hands out.
    entries: dict[Place, list[Value]] = field(default_factory=dict)
    made: dict[Place, list[Value]] = field(default_factory=dict)
    constants: dict[Place, list[Value]] = field(default_factory=dict)  # of each program that is called
    # For each value that a call or a loop hands out, what is inside of it.
    inside: dict[int, list[Value]] = field(default_factory=dict)
    kinds: dict[Place, str] = field(default_factory=dict)  # of the scopes


def program_of(closed: Any) -> Program:
    """The program of a closed jaxpr, laid open."""
    program = Program()
    program.inputs = [_value(var) for var in closed.jaxpr.invars]
    program.outputs = _laid_open(program, closed.jaxpr, closed.consts, program.inputs, (), ())
    return program


def sub_jaxpr(equation: Any) -> tuple[Any, Sequence[Any]] | None:
    """The program that an equation calls, and its constants; None where it calls none that takes the
    equation's own inputs."""
    name = equation.primitive.name
    if name not in (*CALLS, *SCOPES, *LOOPS):
        return None
    inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
    if inner is None:
        return None
    jaxpr, consts = (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, ())
    is_whole = len(jaxpr.invars) == len(equation.invars) and len(jaxpr.outvars) == len(equation.outvars)
    return (jaxpr, consts) if is_whole else None


def _value(var: Any, known: Any = None) -> Value:
    return Value(tuple(getattr(var.aval, "shape", ())), getattr(var.aval, "dtype", None), known=known)


def _laid_open(
    program: Program, jaxpr: Any, consts: Sequence[Any], inputs: list[Value], place: Place, scope: Place
) -> list[Value]:
    """Adds the operations of a jaxpr, and returns its results."""
    program.entries[place] = inputs
    held: dict[Any, Value] = dict(zip(jaxpr.invars, inputs))
    for var, value in zip(jaxpr.constvars, consts):
        held[var] = _value(var, _known(value))
    program.constants[place] = [held[var] for var in jaxpr.constvars]

    def read(atom: Any) -> Value:
        return _value(atom, np.asarray(atom.val)) if isinstance(atom, core.Literal) else held[atom]

    for number, equation in enumerate(jaxpr.eqns):
        own = (*place, number)
        taken = [read(atom) for atom in equation.invars]
        called = sub_jaxpr(equation)
        name = equation.primitive.name
        if called is None:
            made = [_value(var) for var in equation.outvars]
            operation = Operation(name, own, scope, equation.params, taken, made)
            for index, value in enumerate(made):
                value.maker, value.output = operation, index
            program.operations.append(operation)
        elif name in CALLS or name not in LOOPS and name != "shard_map":
            inner_scope = scope if name in CALLS else own
            program.kinds[own] = name
            made = _laid_open(program, called[0], called[1], taken, own, inner_scope)
        else:
            program.kinds[own] = name
            made = _looped(program, equation, called, taken, own, scope)
        program.made[own] = made
        held |= dict(zip(equation.outvars, made))
    return [read(atom) for atom in jaxpr.outvars]


def _looped(
    program: Program, equation: Any, called: Any, taken: list[Value], place: Place, scope: Place
) -> list[Value]:
    """Adds what is inside of a loop or a shard_map: other values go in than those that the operation takes,
    of other shapes."""
    jaxpr, consts = called
    fixed = equation.params.get("num_consts", 0) if equation.primitive.name in LOOPS else 0
    inner = [
        value if index < fixed else _value(var)
        for index, (var, value) in enumerate(zip(jaxpr.invars, taken))
    ]
    results = _laid_open(program, jaxpr, consts, inner, place, place)
    made = [_value(var) for var in equation.outvars]
    operation = Operation(equation.primitive.name, place, scope, equation.params, taken, made)
    for index, value in enumerate(made):
        value.maker, value.output = operation, index
        program.inside[id(value)] = [results[index]]
    program.operations.append(operation)
    return made


def _known(value: Any) -> Any:
    """A constant of a program, where it is no value that is being traced."""
    is_traced = isinstance(value, jax.core.Tracer)
    return None if is_traced or math.prod(np.shape(value)) > MOST_ELEMENTS else np.asarray(value)


def reaching(program: Program, outputs: Sequence[Value]) -> set[int]:
    """The values, by id, from which a gradient of these outputs comes."""
    reached = {id(value) for value in outputs if value.is_float}
    for value in outputs:
        reached |= {id(inner) for inner in program.inside.get(id(value), ())}
    for operation in reversed(program.operations):
        made = [value for value in operation.outputs if id(value) in reached]
        if not made or operation.name == "stop_gradient":
            continue
        for value in made:
            reached |= {id(inner) for inner in program.inside.get(id(value), ())}
        reached |= {id(value) for value in operation.inputs if value.is_float}
    return reached


def depending(program: Program) -> set[int]:
    """The values, by id, that have a gradient by the program's inputs."""
    found = {id(value) for value in program.inputs if value.is_float}
    while True:
        before = len(found)
        for operation in program.operations:
            if operation.name == "stop_gradient" or not any(id(value) in found for value in operation.inputs):
                continue
            found |= {id(value) for value in operation.outputs if value.is_float}
            # What goes into a loop comes before it in the list.
            found |= {id(value) for value in program.entries.get(operation.place, ()) if value.is_float}
        if len(found) == before:
            return found


def takers(program: Program) -> dict[int, list[Operation]]:
    """The operations that take each value, by its id."""
    found: dict[int, list[Operation]] = {}
    for operation in program.operations:
        for value in operation.inputs:
            found.setdefault(id(value), []).append(operation)
    return found


def changing(program: Program) -> set[int]:
    """The values, by id, that a call with a derivative of its own hands on as they are: what it changes is their
    gradient."""
    found: set[int] = set()
    for place, made in program.made.items():
        if program.kinds.get(place) in CLOSED:
            found |= {id(value) for value in made} & {id(value) for value in program.entries[place]}
    return found
