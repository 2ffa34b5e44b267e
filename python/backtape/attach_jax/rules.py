"""How each operation of a program makes facts of facts: the algebra of softmax cross-entropy."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from backtape.attach_jax.arithmetic import added, divided, multiplied, negative, square, subtracted
from backtape.attach_jax.constants import FOLDED, fold, number_of
from backtape.attach_jax.facts import Along, Exponential, Row, Source, Vector, Form
from backtape.attach_jax.graph import Operation, Program, Value
from backtape.attach_jax.labels import compared, differs, gathered, selected
from backtape.attach_jax.shapes import MOVES, SAME, moved
from backtape.attach_jax.softmax import absolute, exponential, finite, logarithm, maximum, product_of, summed_over, tanh


class Facts:
    """The facts of a program's values.

    swapped: the products of which the first operand is taken for the unembedding, where both may be.
    """

    def __init__(self, program: Program, swapped: Collection[int] = ()) -> None:
        self.program = program
        self.swapped = swapped
        self.of: dict[int, Any] = {}  # by the value's id
        self.sources: list[Source] = []
        # Sums over classes and rows at once, by id: the row that lies between.
        self.between: dict[int, Row] = {}
        for operation in program.operations:
            self._learn(operation)

    def _learn(self, operation: Operation) -> None:
        values = operation.outputs
        if len(values) != 1:
            for value, taken in zip(values, operation.inputs):
                if operation.name == "optimization_barrier" and id(taken) in self.of:
                    self.of[id(value)] = self.of[id(taken)]
            return
        fold(operation)
        rule = RULES.get(operation.name)
        if operation.name in SAME:
            rule = same
        elif operation.name in MOVES:
            rule = relaid
        fact = None if rule is None else rule(self, operation)
        if fact is not None:
            self.of[id(values[0])] = fact

    def get(self, value: Value) -> Any:
        """What is known of a value; None where nothing is."""
        fact = self.of.get(id(value))
        if fact is None and value.known is not None:
            return along(value.known)
        return fact

    def vector(self, value: Value, dim: int) -> Vector | None:
        """A value as logits, in which this dimension is the vocabulary."""
        fact = self.get(value)
        if isinstance(fact, Vector) and fact.dim == dim:
            return fact
        if fact is not None or not value.is_float or value.known is not None or not value.shape:
            return None
        shape = list(value.shape)
        width, shape[dim] = shape[dim], 1
        index = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
        source = Source(value, None, classes=dim)
        self.sources.append(source)
        vector = Vector(source, Form(dtypes=(str(value.dtype),)), index, dim, width)
        self.of[id(value)] = vector
        return vector


def along(known: Any) -> Along | None:
    """A constant that differs along one dimension alone."""
    wide = [dim for dim, size in enumerate(known.shape) if size > 1 and known.strides[dim]]
    if len(wide) != 1:
        return None
    return Along(wide[0], known[tuple(slice(None) if dim == wide[0] else 0 for dim in range(known.ndim))])


def same(facts: Facts, operation: Operation) -> Any:
    """An operation of `SAME`."""
    fact = facts.get(operation.inputs[0])
    if isinstance(fact, Vector) and not isinstance(fact, Exponential) and not fact.row:
        dtypes = (*fact.form.dtypes, str(operation.outputs[0].dtype))
        return replace(fact, form=replace(fact.form, dtypes=dtypes))
    if isinstance(fact, Row) and operation.name == "convert_element_type":
        fact.source.softmax_dtypes.add(str(operation.outputs[0].dtype))
    return fact


def relaid(facts: Facts, operation: Operation) -> Any:
    """An operation of `MOVES`."""
    value = operation.inputs[0]
    fact = facts.get(value)
    if fact is None:
        return None
    return moved(fact, operation.name, operation.params, value.shape, operation.outputs[0].shape)


def iota(facts: Facts, operation: Operation) -> Any:
    """The numbers of the places along a dimension."""
    dim = int(operation.params["dimension"])
    return Along(dim, np.arange(operation.outputs[0].shape[dim]))


def ordered(facts: Facts, operation: Operation) -> Any:
    """The numbers of classes compared with a number, where the constant is too large to be looked at."""
    along, number = facts.get(operation.inputs[0]), number_of(operation.inputs[1])
    if not isinstance(along, Along) or number is None:
        return None
    return Along(along.dim, FOLDED[operation.name]([along.numbers, number], {}, operation.outputs[0]))


RULES: Mapping[str, Callable[[Facts, Operation], Any]] = {
    "dot_general": product_of,
    "add": added,
    "add_any": added,
    "sub": subtracted,
    "mul": multiplied,
    "div": divided,
    "neg": negative,
    "exp": exponential,
    "log": logarithm,
    "tanh": tanh,
    "square": square,
    "integer_pow": square,
    "reduce_sum": summed_over,
    "reduce_max": maximum,
    "max": maximum,
    "eq": compared,
    "ne": differs,
    "select_n": selected,
    "is_finite": finite,
    "abs": absolute,
    "iota": iota,
    "lt": ordered,
    "le": ordered,
    "gt": ordered,
    "ge": ordered,
    "gather": gathered,
}
