"""What sums, differences, products and quotients make of facts."""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from backtape.attach_jax.constants import number_of
from backtape.attach_jax.facts import (
    MASKED,
    LSE,
    ONE,
    SQUARE,
    Along,
    Chosen,
    Exponential,
    ExponentialRow,
    Form,
    Labels,
    Row,
    Vector,
    plus,
    scaled,
    with_row,
)
from backtape.attach_jax.graph import Operation, Value
from backtape.attach_jax.labels import by_targets, chosen


def added(facts: Any, operation: Operation, sign: float = 1.0) -> Any:
    """The sum of two values, or their difference."""
    values = operation.inputs
    first, second = (facts.get(value) for value in values)
    number = [number_of(value) for value in values]
    if isinstance(first, Vector) and isinstance(second, Vector):
        return None
    if isinstance(first, Row) and isinstance(second, Row):
        return rows_plus(first, second, sign)
    if isinstance(first, Labels) and number[1] is not None:
        return replace(first, on=first.on + sign * number[1], off=first.off + sign * number[1])
    if isinstance(second, Labels) and number[0] is not None and not isinstance(first, Vector):
        on, off = (number[0] + sign * value for value in (second.on, second.off))
        return replace(second, on=on, off=off)
    if isinstance(second, Vector) or isinstance(second, Row) and not isinstance(first, Vector):
        # The other way round, which is the same but for the sign.
        first, second, number, values = second, first, number[::-1], values[::-1]
        first = scaled(first, sign) if sign < 0 else first
        sign = 1.0
    if isinstance(first, Exponential) or isinstance(first, ExponentialRow):
        return first if number[1] == 0 else None
    if isinstance(first, Row) and number[1] is not None:
        return replace(first, sum=plus(first.sum, {ONE: sign * number[1]}))
    if isinstance(first, Vector):
        if isinstance(second, Row) and not isinstance(second, ExponentialRow):
            return with_number(first, second, sign)
        if number[1] is not None:
            return with_row(first, {ONE: number[1]}, sign)
        if isinstance(second, Along) and second.dim == first.dim:
            return with_mask(first, sign * second.numbers)
        return with_bias(first, values[1]) if sign > 0 else None
    return None


def subtracted(facts: Any, operation: Operation) -> Any:
    """The difference of two values."""
    return added(facts, operation, -1.0)


def with_number(vector: Vector, row: Row, sign: float) -> Any:
    """Logits with a number of each row added to them."""
    index = across(row.index, vector)
    if row.source is not vector.source or row.given is not None or index is None:
        return None
    if not np.array_equal(np.broadcast_to(index, vector.index.shape), vector.index):
        return None
    return with_row(vector, row.sum, sign)


def across(index: np.ndarray, vector: Vector) -> np.ndarray | None:
    """The index of rows that are broadcast over the classes."""
    if index.ndim != vector.index.ndim:
        return None
    return index.take([0], axis=vector.dim)


def with_mask(vector: Vector, numbers: np.ndarray) -> Any:
    """Logits of which the last classes are made so small that they have no part."""
    valid = int((numbers == 0).sum())
    if vector.row or not (numbers[:valid] == 0).all() or not (numbers[valid:] <= MASKED).all():
        return None
    return replace(vector, form=replace(vector.form, valid=valid, mask=None))


def with_bias(vector: Vector, value: Value) -> Any:
    """Logits to which a value of each class is added."""
    form = vector.form
    shape = [1] * len(value.shape)
    if len(value.shape) == vector.index.ndim:
        shape[vector.dim] = vector.width
    is_wide = value.maker is not None and value.maker.name == "broadcast_in_dim"
    if is_wide and value.maker is not None:
        operation = value.maker
        source, dims = operation.inputs[0], list(operation.params["broadcast_dimensions"])
        if vector.dim not in dims or math.prod(source.shape) != vector.width:
            return None
        value = source
    elif tuple(shape) != value.shape:
        return None
    if form.bias is not None or form.cap is not None or form.scale != 1.0 or vector.row:
        return None
    return replace(vector, form=replace(form, bias=value))


def rows_plus(first: Row, second: Row, sign: float) -> Any:
    """The sum of two numbers of each row."""
    if isinstance(first, ExponentialRow) or isinstance(second, ExponentialRow):
        return None
    if first.source is not second.source or not is_one_form(first.form, second.form):
        return None
    try:
        shape = np.broadcast_shapes(first.index.shape, second.index.shape)
    except ValueError:
        return None
    index = np.broadcast_to(first.index, shape)
    if not np.array_equal(index, np.broadcast_to(second.index, shape)):
        return None
    has = first if first.given is not None else second
    if first.given is not None and second.given not in (None, first.given):
        return None
    total = plus(first.sum, second.sum, sign)
    labels = None if has.label_index is None else np.broadcast_to(has.label_index, shape)
    return replace(has, form=first.form, index=index, sum=total, label_index=labels)


def is_one_form(first: Form, second: Form) -> bool:
    """Whether logits are the same, in whatever dtype they were taken."""
    return replace(first, dtypes=()) == replace(second, dtypes=())


def multiplied(facts: Any, operation: Operation) -> Any:
    """The product of two values, entry by entry."""
    first, second = (facts.get(value) for value in operation.inputs)
    number = [number_of(value) for value in operation.inputs]
    for one, other, by, value in (
        (first, second, number[1], operation.inputs[1]),
        (second, first, number[0], operation.inputs[0]),
    ):
        if isinstance(one, (Exponential, ExponentialRow)):
            if by == 1:
                return one
            continue
        if isinstance(one, (Vector, Row, Chosen)) and by is not None:
            return scaled(one, by)
        if isinstance(one, Labels) and by is not None:
            return replace(one, on=one.on * by, off=one.off * by)
        if not isinstance(one, Vector):
            continue
        if isinstance(other, Labels):
            return chosen(other, one)
        is_other = other is None or isinstance(other, Vector) and other.source is not one.source
        if is_other and LSE in one.row and value.known is None:
            return by_targets(value, one)
    if isinstance(first, Row) and isinstance(second, Row):
        return squared(first) if first.sum == second.sum else None
    return None


def divided(facts: Any, operation: Operation) -> Any:
    """The quotient of two values."""
    first, second = (facts.get(value) for value in operation.inputs)
    number = number_of(operation.inputs[1])
    if isinstance(first, Exponential) and isinstance(second, ExponentialRow):
        return with_number(first, replace_row(second), -1.0)
    if isinstance(first, ExponentialRow) and isinstance(second, ExponentialRow):
        total = rows_plus(replace_row(first), replace_row(second), -1.0)
        return None if total is None else ExponentialRow(**vars(total))
    if isinstance(first, (Exponential, ExponentialRow)):
        return first if number == 1 else None
    if isinstance(first, (Vector, Row, Chosen)) and number:
        return scaled(first, 1 / number)
    if isinstance(first, Labels) and number:
        return replace(first, on=first.on / number, off=first.off / number)
    return None


def replace_row(row: ExponentialRow) -> Row:
    """The number of which this is exp."""
    return Row(**vars(row))


def negative(facts: Any, operation: Operation) -> Any:
    """A value with the other sign."""
    fact = facts.get(operation.inputs[0])
    if isinstance(fact, (Exponential, ExponentialRow)):
        return None
    if isinstance(fact, Labels):
        return replace(fact, on=-fact.on, off=-fact.off)
    return scaled(fact, -1.0) if isinstance(fact, (Vector, Row, Chosen)) else None


def squared(row: Row) -> Any:
    """The square of lse alone, of which a z-loss is made."""
    return replace(row, sum={SQUARE: row.sum[LSE] ** 2}) if row.sum.keys() == {LSE} else None


def square(facts: Any, operation: Operation) -> Any:
    """The square of a value."""
    fact = facts.get(operation.inputs[0])
    if operation.name == "integer_pow" and operation.params["y"] != 2:
        return None
    return squared(fact) if isinstance(fact, Row) and not isinstance(fact, ExponentialRow) else None
