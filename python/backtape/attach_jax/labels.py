"""How labels are told: by one-hot vectors, by an index, or by rows of targets."""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from backtape.attach_jax.constants import number_of
from backtape.attach_jax.facts import (
    MASKED,
    ALL,
    LABEL,
    Along,
    Chosen,
    Exponential,
    ExponentialRow,
    Finite,
    Given,
    Labels,
    Row,
    Vector,
    plus,
    times,
)
from backtape.attach_jax.graph import Operation, Value
from backtape.attach_jax.shapes import moved


def chosen(labels: Labels, vector: Vector) -> Any:
    """Labels and logits, entry by entry. Labels may be broadcast."""
    is_same = labels.dim == vector.dim and labels.width == vector.width
    if not is_same or labels.is_negated or labels.index.ndim != vector.index.ndim:
        return None
    index = np.broadcast_to(labels.index, vector.index.shape)
    return Chosen(replace(labels, index=index), vector)


def by_targets(value: Value, vector: Vector) -> Any:
    """Rows of targets that come from outside: they are taken for labels, which is looked at when they are
    recorded."""
    shape = list(vector.index.shape)
    shape[vector.dim] = vector.width
    if list(value.shape) != shape:
        return None
    index = np.arange(vector.index.size, dtype=np.int64).reshape(vector.index.shape)
    given = Given(value, vector.dim, vector.index.shape, are_targets=True)
    return Chosen(Labels(given, index, vector.dim, vector.width), vector)


def picked(
    facts: Any, operation: Operation, first: Any, second: Any, taken: Any, batched: Any
) -> Any:
    """A product of labels and logits over the classes, row by row."""
    if isinstance(first, Vector):
        first, second = second, first
        taken, batched = taken[::-1], batched[::-1]
    if not isinstance(first, Labels) or not isinstance(second, Vector):
        return None
    rows = [dim for dim in range(second.index.ndim) if dim != second.dim]
    if list(taken[1]) != [second.dim] or list(batched[1]) != rows or list(taken[0]) != [first.dim]:
        return None
    if list(batched[0]) != [dim for dim in range(first.index.ndim) if dim != first.dim]:
        return None
    labels = replace(first, index=np.squeeze(first.index, first.dim), dim=-1)
    vector = replace(second, index=np.squeeze(second.index, second.dim), dim=-1)
    return summed_choice(Chosen(labels, vector))


def summed_choice(chosen: Chosen) -> Any:
    """The sum over the classes of labels times a vector, of which the indices have no classes any more."""
    labels, vector = chosen.labels, chosen.vector
    label: dict[str, Any] = {"given": labels.given, "label_index": labels.index}
    if isinstance(vector, Exponential):
        if (labels.on, labels.off) != (1.0, 0.0):
            return None
        total = plus(vector.row, {LABEL: 1.0})
        return ExponentialRow(vector.source, vector.form, vector.index, total, **label)
    own = plus(vector.row, {LABEL: vector.factor})
    total = plus(times(own, labels.on - labels.off), sum_of_all(vector), labels.off)
    return Row(vector.source, vector.form, vector.index, total, **label)


def sum_of_all(vector: Vector) -> Any:
    """What the sum over the classes of a vector is a sum of."""
    return plus(times(vector.row, vector.width), {ALL: vector.factor})


def compared(facts: Any, operation: Operation) -> Any:
    """Labels compared with the numbers of the classes."""
    first, second = (facts.get(value) for value in operation.inputs)
    values = operation.inputs
    shape = operation.outputs[0].shape
    for along, fact, value in ((first, second, values[1]), (second, first, values[0])):
        if isinstance(fact, Labels) and number_of(values[0] if value is values[1] else values[1]) == 0:
            return replace(fact, is_negated=not fact.is_negated) if fact.off == 0 else None
        if not isinstance(along, Along) or value.known is not None or isinstance(fact, (Vector, Row)):
            continue
        width = shape[along.dim]
        counts = np.array_equal(along.numbers, np.arange(width))
        if not counts or len(value.shape) != len(shape) or value.is_float:
            continue
        rows = list(shape)
        rows[along.dim] = 1
        index = np.arange(math.prod(rows), dtype=np.int64).reshape(rows)
        return Labels(Given(value, along.dim, tuple(rows)), index, along.dim, width)
    return None


def differs(facts: Any, operation: Operation) -> Any:
    """Labels that are compared with zero."""
    for value, other in (operation.inputs, operation.inputs[::-1]):
        fact = facts.get(value)
        if isinstance(fact, Labels) and fact.off == 0 and number_of(other) == 0:
            return replace(fact, on=1.0)
    return None


def selected(facts: Any, operation: Operation) -> Any:
    """One of two values, by a condition: the second where it is true."""
    if len(operation.inputs) != 3:
        return None
    condition, no, yes = operation.inputs
    fact, others = facts.get(condition), (facts.get(no), facts.get(yes))
    number = (number_of(no), number_of(yes))
    if isinstance(fact, Finite) and isinstance(others[1], Row):
        return others[1]
    if isinstance(fact, Labels):
        if fact.is_negated and isinstance(others[0], Chosen) and number[1] == 0:
            return others[0]
        if not fact.is_negated and isinstance(others[1], Chosen) and number[0] == 0:
            return others[1]
        off, on = number
        if on is not None and off is not None and not fact.is_negated:
            return replace(fact, on=on, off=off)
        if isinstance(others[1], Vector) and number[0] == 0 and not fact.is_negated:
            return chosen(replace(fact, on=1.0), others[1])
    if isinstance(fact, Along):
        keeps = fact.numbers.astype(bool)
        vector, other = (others[1], number[0]) if isinstance(others[1], Vector) else (others[0], number[1])
        keeps = keeps if vector is others[1] else ~keeps
        is_logits = isinstance(vector, Vector) and not isinstance(vector, Exponential) and not vector.row
        valid = int(keeps.sum())
        if is_logits and vector.dim == fact.dim and keeps[:valid].all() and other is not None:
            mask = None if other <= MASKED else other
            return replace(vector, form=replace(vector.form, valid=valid, mask=mask))
    return None


def gathered(facts: Any, operation: Operation) -> Any:
    """The entry of the label of each row, by an index."""
    value, at = operation.inputs[:2]
    numbers = operation.params["dimension_numbers"]
    sizes = [int(size) for size in operation.params["slice_sizes"]]
    fact = facts.get(value)
    result = operation.outputs[0].shape
    if isinstance(fact, Row):
        kept = [d for d, size in enumerate(value.shape) if sizes[d] != size]
        one = all(value.shape[d] == 1 for d in numbers.start_index_map)
        return moved(fact, "reshape", {}, value.shape, result) if one and not kept else None
    started = [int(d) for d in numbers.start_index_map]
    if not value.is_float or not started or value.known is not None:
        return None
    batched = [int(d) for d in numbers.operand_batching_dims]
    dim = started[-1]
    others = [d for d in range(len(value.shape)) if d != dim]
    vector = facts.vector(value, dim)
    if vector is None or sizes[dim] != 1:
        return None
    if started == [dim] and batched == others:
        tokens = vector.index.reshape(result) if vector.index.size == math.prod(result) else None
    elif started == [*others, dim] and not batched:
        tokens = rows_of(facts, at, vector, result)
    else:
        return None
    if tokens is None:
        return None
    labels = np.arange(math.prod(result), dtype=np.int64).reshape(result)
    kind, total = (
        (ExponentialRow, plus(vector.row, {LABEL: 1.0}))
        if isinstance(vector, Exponential)
        else (Row, plus(vector.row, {LABEL: vector.factor}))
    )
    # The last entry of each index is the label.
    given = Given(at, len(at.shape) - 1, (*at.shape[:-1], 1))
    return kind(vector.source, vector.form, tokens, total, given, labels)


def rows_of(facts: Any, at: Value, vector: Vector, result: Any) -> np.ndarray | None:
    """The tokens of rows that are chosen by an index of every dimension, all but the last one constant."""
    maker = at.maker
    if maker is None or maker.name != "concatenate" or maker.params["dimension"] != len(at.shape) - 1:
        return None
    *rows, _ = maker.inputs
    if not rows or any(row.known is None for row in rows):
        return None
    places = np.concatenate([np.broadcast_to(row.known, row.shape) for row in rows], axis=-1)
    places = places.reshape(-1, places.shape[-1]).T
    index = np.squeeze(vector.index, vector.dim)
    return index[tuple(places)].reshape(result) if len(places) == index.ndim else None
