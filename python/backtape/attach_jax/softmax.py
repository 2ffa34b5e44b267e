"""From a product of hidden states and unembedding to the log of its softmax."""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from backtape.attach_jax.arithmetic import replace_row
from backtape.attach_jax.constants import number_of
from backtape.attach_jax.facts import (
    LSE,
    Chosen,
    Exponential,
    ExponentialRow,
    Finite,
    Form,
    Labels,
    Row,
    Source,
    Vector,
    plus,
)
from backtape.attach_jax.graph import Operation
from backtape.attach_jax.labels import picked, sum_of_all, summed_choice
from backtape.attach_jax.shapes import moved


def product_of(facts: Any, operation: Operation) -> Any:
    """A product of matrices: that of hidden states and unembedding, or one that picks a label's entry."""
    first, second = (facts.get(value) for value in operation.inputs)
    (taken, batched) = operation.params["dimension_numbers"]
    if isinstance(first, Labels) or isinstance(second, Labels):
        return picked(facts, operation, first, second, taken, batched)
    if batched[0] or batched[1]:
        return None
    can_be = [
        at for at in (1, 0) if len(operation.inputs[at].shape) == 2 and len(taken[at]) == 1
    ]
    if not can_be or not operation.outputs[0].is_float:
        return None
    k = can_be[-1] if id(operation) in facts.swapped else can_be[0]
    shape = list(operation.outputs[0].shape)
    classes = len(shape) - 1 if k == 1 else 0
    width, shape[classes] = shape[classes], 1
    source = Source(operation.outputs[0], operation, q=1 - k, k=k, classes=classes)
    facts.sources.append(source)
    index = np.arange(math.prod(shape), dtype=np.int64).reshape(shape)
    form = Form(dtypes=(str(operation.outputs[0].dtype),))
    return Vector(source, form, index, classes, width)


def exponential(facts: Any, operation: Operation) -> Any:
    """exp of a value."""
    value = operation.inputs[0]
    fact = facts.get(value)
    if isinstance(fact, ExponentialRow) or isinstance(fact, Exponential):
        return None
    if isinstance(fact, Row):
        return ExponentialRow(**vars(fact))
    if not isinstance(fact, Vector) or fact.factor != 1.0:
        return None
    fact.source.softmax_dtypes.add(str(value.dtype))
    return Exponential(**vars(fact))


def logarithm(facts: Any, operation: Operation) -> Any:
    """The logarithm of a value."""
    fact = facts.get(operation.inputs[0])
    if isinstance(fact, ExponentialRow):
        return replace_row(fact)
    return Vector(**vars(fact)) if isinstance(fact, Exponential) else None


def tanh(facts: Any, operation: Operation) -> Any:
    """tanh of logits, which bounds them."""
    fact = facts.get(operation.inputs[0])
    is_plain = isinstance(fact, Vector) and not isinstance(fact, Exponential) and not fact.row
    if not is_plain or fact.form.cap is not None or fact.form.valid is not None:
        return None
    return replace(fact, form=replace(fact.form, cap=1.0))


def summed_over(facts: Any, operation: Operation) -> Any:
    """The sum of a value over some of its dimensions."""
    value = operation.inputs[0]
    fact = facts.get(value)
    axes = [int(axis) for axis in operation.params["axes"]]
    if isinstance(fact, Row):
        if not all(value.shape[axis] == 1 for axis in axes):
            return None
        return moved(fact, "squeeze", {"dimensions": axes}, value.shape, operation.outputs[0].shape)
    held = fact.vector if isinstance(fact, Chosen) else fact
    if not isinstance(held, Vector) or held.dim not in axes:
        return None
    row = summed(fact)
    if row is None or axes == [held.dim]:
        return row
    # Over rows at once: what lies between is the row.
    facts.between[id(operation)] = row
    return None


def summed(fact: Any) -> Any:
    """The sum over the classes."""
    if isinstance(fact, Chosen):
        labels, vector = fact.labels, fact.vector
        return summed_choice(
            Chosen(
                replace(labels, index=np.squeeze(labels.index, labels.dim)),
                replace(vector, index=np.squeeze(vector.index, vector.dim)),
            )
        )
    index = np.squeeze(fact.index, fact.dim)
    if isinstance(fact, Exponential):
        return ExponentialRow(fact.source, fact.form, index, plus(fact.row, {LSE: 1.0}))
    return Row(fact.source, fact.form, index, sum_of_all(fact))


def maximum(facts: Any, operation: Operation) -> Any:
    """The largest of each row, or the larger of that and a number."""
    if operation.name == "max":
        first, second = (facts.get(value) for value in operation.inputs)
        number = [number_of(value) for value in operation.inputs]
        for fact, other in ((first, number[1]), (second, number[0])):
            if isinstance(fact, Row) and other is not None and other < -1e30:
                return fact
        return None
    value = operation.inputs[0]
    axes = [int(axis) for axis in operation.params["axes"]]
    vector = facts.vector(value, axes[0]) if len(axes) == 1 else None
    if vector is None or isinstance(vector, Exponential) or vector.factor != 1.0:
        return None
    index = np.squeeze(vector.index, vector.dim)
    largest = ("largest", replace(vector.form, dtypes=()))
    return Row(vector.source, vector.form, index, plus(vector.row, {largest: 1.0}))


def finite(facts: Any, operation: Operation) -> Any:
    """Whether a row's number is finite."""
    return Finite() if isinstance(facts.get(operation.inputs[0]), Row) else None


def absolute(facts: Any, operation: Operation) -> Any:
    """The absolute value of what is positive."""
    fact = facts.get(operation.inputs[0])
    return fact if isinstance(fact, (ExponentialRow, Exponential)) else None
