"""How each operation of a program makes facts of facts: the algebra of softmax cross-entropy."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from backtape.attach_jax.facts import (
    ALL,
    LABEL,
    LSE,
    ONE,
    SQUARE,
    Along,
    Chosen,
    Exponential,
    ExponentialRow,
    Finite,
    Given,
    Labels,
    Row,
    Source,
    Vector,
    Form,
    plus,
    scaled,
    times,
    with_row,
)
from backtape.attach_jax.graph import MOST_ELEMENTS, Operation, Program, Value
from backtape.attach_jax.shapes import MOVES, SAME, moved

# What is added to logits that are to have no part in a softmax is this or less.
MASKED = -1e4


class Facts:
    """The facts of a program's values.

    swapped: the products of which the first operand is taken for the unembedding, where both may be.
    """

    def __init__(self, program: Program, swapped: set[int] = frozenset()) -> None:
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
        self._fold(operation)
        rule = RULES.get(operation.name)
        if operation.name in SAME:
            rule = _same
        elif operation.name in MOVES:
            rule = _moved
        fact = None if rule is None else rule(self, operation)
        if fact is not None:
            self.of[id(values[0])] = fact

    def _fold(self, operation: Operation) -> None:
        """Computes what does not depend on what comes into the program, where it is small."""
        value, inputs = operation.outputs[0], [taken.known for taken in operation.inputs]
        fold = FOLDED.get(operation.name)
        if fold is None and operation.name in SAME:
            fold = _as_it_is
        # Constants that are broadcast take no memory, however large they are.
        is_small = operation.name == "broadcast_in_dim" or math.prod(value.shape) <= MOST_ELEMENTS
        if fold is not None and is_small and all(known is not None for known in inputs):
            found = np.asarray(fold(inputs, operation.params, value))
            value.known = np.broadcast_to(found, value.shape)

    def get(self, value: Value) -> Any:
        """What is known of a value; None where nothing is."""
        fact = self.of.get(id(value))
        if fact is None and value.known is not None:
            return _along(value.known)
        return fact

    def number(self, value: Value) -> float | None:
        """The number that a value is, the same everywhere; None where it is none."""
        if value.known is None or not value.known.size:
            return None
        # What is broadcast is looked at once.
        own = np.asarray(value.known)[tuple(slice(None) if step else slice(1) for step in value.known.strides)]
        first = own.reshape(-1)[0]
        return float(first) if own.size == 1 or bool((own == first).all()) else None

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


def _along(known: Any) -> Along | None:
    """A constant that differs along one dimension alone."""
    wide = [dim for dim, size in enumerate(known.shape) if size > 1 and known.strides[dim]]
    if len(wide) != 1:
        return None
    return Along(wide[0], known[tuple(slice(None) if dim == wide[0] else 0 for dim in range(known.ndim))])


def _same(facts: Facts, operation: Operation) -> Any:
    fact = facts.get(operation.inputs[0])
    if isinstance(fact, Vector) and not isinstance(fact, Exponential) and not fact.row:
        dtypes = (*fact.form.dtypes, str(operation.outputs[0].dtype))
        return replace(fact, form=replace(fact.form, dtypes=dtypes))
    if isinstance(fact, Row) and operation.name == "convert_element_type":
        fact.source.softmax_dtypes.add(str(operation.outputs[0].dtype))
    return fact


def _moved(facts: Facts, operation: Operation) -> Any:
    value = operation.inputs[0]
    fact = facts.get(value)
    if fact is None:
        return None
    return moved(fact, operation.name, operation.params, value.shape, operation.outputs[0].shape)


def _product(facts: Facts, operation: Operation) -> Any:
    """A product of matrices: that of hidden states and unembedding, or one that picks a label's entry."""
    first, second = (facts.get(value) for value in operation.inputs)
    (taken, batched) = operation.params["dimension_numbers"]
    if isinstance(first, Labels) or isinstance(second, Labels):
        return _picked(facts, operation, first, second, taken, batched)
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


def _picked(
    facts: Facts, operation: Operation, first: Any, second: Any, taken: Any, batched: Any
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
    return _summed_choice(Chosen(labels, vector))


def _plus(facts: Facts, operation: Operation, sign: float = 1.0) -> Any:
    values = operation.inputs
    first, second = (facts.get(value) for value in values)
    number = [facts.number(value) for value in values]
    if isinstance(first, Vector) and isinstance(second, Vector):
        return None
    if isinstance(first, Row) and isinstance(second, Row):
        return _rows_plus(first, second, sign)
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
            return _with_row(first, second, sign)
        if number[1] is not None:
            return with_row(first, {ONE: number[1]}, sign)
        if isinstance(second, Along) and second.dim == first.dim:
            return _with_mask(first, sign * second.numbers)
        return _with_bias(first, values[1]) if sign > 0 else None
    return None


def _minus(facts: Facts, operation: Operation) -> Any:
    return _plus(facts, operation, -1.0)


def _with_row(vector: Vector, row: Row, sign: float) -> Any:
    """Logits with a number of each row added to them."""
    index = _across(row.index, vector)
    if row.source is not vector.source or row.given is not None or index is None:
        return None
    if not np.array_equal(np.broadcast_to(index, vector.index.shape), vector.index):
        return None
    return with_row(vector, row.sum, sign)


def _across(index: np.ndarray, vector: Vector) -> np.ndarray | None:
    """The index of rows that are broadcast over the classes."""
    if index.ndim != vector.index.ndim:
        return None
    return index.take([0], axis=vector.dim)


def _with_mask(vector: Vector, numbers: np.ndarray) -> Any:
    """Logits of which the last classes are made so small that they have no part."""
    valid = int((numbers == 0).sum())
    if vector.row or not (numbers[:valid] == 0).all() or not (numbers[valid:] <= MASKED).all():
        return None
    return replace(vector, form=replace(vector.form, valid=valid, mask=None))


def _with_bias(vector: Vector, value: Value) -> Any:
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


def _rows_plus(first: Row, second: Row, sign: float) -> Any:
    """The sum of two numbers of each row."""
    if isinstance(first, ExponentialRow) or isinstance(second, ExponentialRow):
        return None
    if first.source is not second.source or not _is_one_form(first.form, second.form):
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


def _is_one_form(first: Form, second: Form) -> bool:
    """Whether logits are the same, in whatever dtype they were taken."""
    return replace(first, dtypes=()) == replace(second, dtypes=())


def _times(facts: Facts, operation: Operation) -> Any:
    first, second = (facts.get(value) for value in operation.inputs)
    number = [facts.number(value) for value in operation.inputs]
    for one, other, by, value in (
        (first, second, number[1], operation.inputs[1]),
        (second, first, number[0], operation.inputs[0]),
    ):
        if isinstance(one, (Exponential, ExponentialRow)):
            return one if by == 1 else None
        if isinstance(one, (Vector, Row, Chosen)) and by is not None:
            return scaled(one, by)
        if isinstance(one, Labels) and by is not None:
            return replace(one, on=one.on * by, off=one.off * by)
        if isinstance(one, Vector) and isinstance(other, Labels):
            return _chosen(other, one)
        if isinstance(one, Vector) and other is None and LSE in one.row and value.known is None:
            return _by_targets(value, one)
    if isinstance(first, Row) and isinstance(second, Row):
        return _squared(first) if first.sum == second.sum else None
    return None


def _chosen(labels: Labels, vector: Vector) -> Any:
    """Labels and logits, entry by entry. Labels may be broadcast."""
    is_same = labels.dim == vector.dim and labels.width == vector.width
    if not is_same or labels.is_negated or labels.index.ndim != vector.index.ndim:
        return None
    index = np.broadcast_to(labels.index, vector.index.shape)
    return Chosen(replace(labels, index=index), vector)


def _by_targets(value: Value, vector: Vector) -> Any:
    """Rows of targets that come from outside: they are taken for labels, which is looked at when they are
    recorded."""
    shape = list(vector.index.shape)
    shape[vector.dim] = vector.width
    if list(value.shape) != shape:
        return None
    index = np.arange(vector.index.size, dtype=np.int64).reshape(vector.index.shape)
    given = Given(value, vector.dim, vector.index.shape, are_targets=True)
    return Chosen(Labels(given, index, vector.dim, vector.width), vector)


def _divided(facts: Facts, operation: Operation) -> Any:
    first, second = (facts.get(value) for value in operation.inputs)
    number = facts.number(operation.inputs[1])
    if isinstance(first, Exponential) and isinstance(second, ExponentialRow):
        return _with_row(first, replace_row(second), -1.0)
    if isinstance(first, ExponentialRow) and isinstance(second, ExponentialRow):
        total = _rows_plus(replace_row(first), replace_row(second), -1.0)
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


def _negative(facts: Facts, operation: Operation) -> Any:
    fact = facts.get(operation.inputs[0])
    if isinstance(fact, (Exponential, ExponentialRow)):
        return None
    if isinstance(fact, Labels):
        return replace(fact, on=-fact.on, off=-fact.off)
    return scaled(fact, -1.0) if isinstance(fact, (Vector, Row, Chosen)) else None


def _exponential(facts: Facts, operation: Operation) -> Any:
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


def _logarithm(facts: Facts, operation: Operation) -> Any:
    fact = facts.get(operation.inputs[0])
    if isinstance(fact, ExponentialRow):
        return replace_row(fact)
    return Vector(**vars(fact)) if isinstance(fact, Exponential) else None


def _tanh(facts: Facts, operation: Operation) -> Any:
    fact = facts.get(operation.inputs[0])
    is_plain = isinstance(fact, Vector) and not isinstance(fact, Exponential) and not fact.row
    if not is_plain or fact.form.cap is not None or fact.form.valid is not None:
        return None
    return replace(fact, form=replace(fact.form, cap=1.0))


def _square(facts: Facts, operation: Operation) -> Any:
    fact = facts.get(operation.inputs[0])
    if operation.name == "integer_pow" and operation.params["y"] != 2:
        return None
    return _squared(fact) if isinstance(fact, Row) and not isinstance(fact, ExponentialRow) else None


def _squared(row: Row) -> Any:
    """The square of lse alone, of which a z-loss is made."""
    return replace(row, sum={SQUARE: row.sum[LSE] ** 2}) if row.sum.keys() == {LSE} else None


def _sum(facts: Facts, operation: Operation) -> Any:
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
    row = _summed(fact)
    if row is None or axes == [held.dim]:
        return row
    # Over rows at once: what lies between is the row.
    facts.between[id(operation)] = row
    return None


def _summed(fact: Any) -> Any:
    """The sum over the classes."""
    if isinstance(fact, Chosen):
        labels, vector = fact.labels, fact.vector
        return _summed_choice(
            Chosen(
                replace(labels, index=np.squeeze(labels.index, labels.dim)),
                replace(vector, index=np.squeeze(vector.index, vector.dim)),
            )
        )
    index = np.squeeze(fact.index, fact.dim)
    if isinstance(fact, Exponential):
        return ExponentialRow(fact.source, fact.form, index, plus(fact.row, {LSE: 1.0}))
    return Row(fact.source, fact.form, index, _sum_of_all(fact))


def _sum_of_all(vector: Vector) -> Any:
    return plus(times(vector.row, vector.width), {ALL: vector.factor})


def _summed_choice(chosen: Chosen) -> Any:
    """The sum over the classes of labels times a vector, of which the indices have no classes any more."""
    labels, vector = chosen.labels, chosen.vector
    label: dict[str, Any] = {"given": labels.given, "label_index": labels.index}
    if isinstance(vector, Exponential):
        if (labels.on, labels.off) != (1.0, 0.0):
            return None
        total = plus(vector.row, {LABEL: 1.0})
        return ExponentialRow(vector.source, vector.form, vector.index, total, **label)
    own = plus(vector.row, {LABEL: vector.factor})
    total = plus(times(own, labels.on - labels.off), _sum_of_all(vector), labels.off)
    return Row(vector.source, vector.form, vector.index, total, **label)


def _maximum(facts: Facts, operation: Operation) -> Any:
    """The largest of each row, or the larger of that and a number."""
    if operation.name == "max":
        first, second = (facts.get(value) for value in operation.inputs)
        number = [facts.number(value) for value in operation.inputs]
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


def _compared(facts: Facts, operation: Operation) -> Any:
    """Labels compared with the numbers of the classes."""
    first, second = (facts.get(value) for value in operation.inputs)
    values = operation.inputs
    shape = operation.outputs[0].shape
    for along, fact, value in ((first, second, values[1]), (second, first, values[0])):
        if isinstance(fact, Labels) and facts.number(values[0] if value is values[1] else values[1]) == 0:
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


def _differs(facts: Facts, operation: Operation) -> Any:
    for value, other in (operation.inputs, operation.inputs[::-1]):
        fact = facts.get(value)
        if isinstance(fact, Labels) and fact.off == 0 and facts.number(other) == 0:
            return replace(fact, on=1.0)
    return None


def _selected(facts: Facts, operation: Operation) -> Any:
    """One of two values, by a condition: the second where it is true."""
    if len(operation.inputs) != 3:
        return None
    condition, no, yes = operation.inputs
    fact, others = facts.get(condition), (facts.get(no), facts.get(yes))
    number = (facts.number(no), facts.number(yes))
    if isinstance(fact, Finite) and isinstance(others[1], Row):
        return others[1]
    if isinstance(fact, Labels):
        if fact.is_negated and isinstance(others[0], Chosen) and number[1] == 0:
            return others[0]
        if not fact.is_negated and isinstance(others[1], Chosen) and number[0] == 0:
            return others[1]
        if None not in number and not fact.is_negated:
            return replace(fact, on=number[1], off=number[0])
        if isinstance(others[1], Vector) and number[0] == 0 and not fact.is_negated:
            return _chosen(replace(fact, on=1.0), others[1])
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


def _finite(facts: Facts, operation: Operation) -> Any:
    return Finite() if isinstance(facts.get(operation.inputs[0]), Row) else None


def _absolute(facts: Facts, operation: Operation) -> Any:
    fact = facts.get(operation.inputs[0])
    return fact if isinstance(fact, (ExponentialRow, Exponential)) else None


def _iota(facts: Facts, operation: Operation) -> Any:
    dim = int(operation.params["dimension"])
    return Along(dim, np.arange(operation.outputs[0].shape[dim]))


def _gathered(facts: Facts, operation: Operation) -> Any:
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
        tokens = _rows_of(facts, at, vector, result)
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


def _rows_of(facts: Facts, at: Value, vector: Vector, result: Any) -> np.ndarray | None:
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


def _ordered(facts: Facts, operation: Operation) -> Any:
    """The numbers of classes compared with a number, where the constant is too large to be looked at."""
    along, number = facts.get(operation.inputs[0]), facts.number(operation.inputs[1])
    if not isinstance(along, Along) or number is None:
        return None
    return Along(along.dim, FOLDED[operation.name]([along.numbers, number], {}, operation.outputs[0]))


RULES: Mapping[str, Callable[[Facts, Operation], Any]] = {
    "dot_general": _product,
    "add": _plus,
    "add_any": _plus,
    "sub": _minus,
    "mul": _times,
    "div": _divided,
    "neg": _negative,
    "exp": _exponential,
    "log": _logarithm,
    "tanh": _tanh,
    "square": _square,
    "integer_pow": _square,
    "reduce_sum": _sum,
    "reduce_max": _maximum,
    "max": _maximum,
    "eq": _compared,
    "ne": _differs,
    "select_n": _selected,
    "is_finite": _finite,
    "abs": _absolute,
    "iota": _iota,
    "lt": _ordered,
    "le": _ordered,
    "gt": _ordered,
    "ge": _ordered,
    "gather": _gathered,
}


def _as_it_is(inputs: Any, _: Any, value: Value) -> Any:
    return inputs[0].astype(value.dtype)


def _folded_iota(_: Any, params: Any, value: Value) -> Any:
    shape = [1] * len(value.shape)
    dim = int(params["dimension"])
    shape[dim] = value.shape[dim]
    return np.arange(value.shape[dim]).reshape(shape)


def _folded_concatenate(inputs: Any, params: Any, _: Value) -> Any:
    return np.concatenate(inputs, axis=params["dimension"])


# Operations on constants that are computed here.
FOLDED: Mapping[str, Callable[[Any, Any, Value], Any]] = {
    "iota": _folded_iota,
    "concatenate": _folded_concatenate,
    "lt": lambda given, _, __: given[0] < given[1],
    "le": lambda given, _, __: given[0] <= given[1],
    "gt": lambda given, _, __: given[0] > given[1],
    "ge": lambda given, _, __: given[0] >= given[1],
    "and": lambda given, _, __: given[0] & given[1],
    "or": lambda given, _, __: given[0] | given[1],
    "not": lambda given, _, __: ~given[0],
    "add": lambda given, _, __: given[0] + given[1],
    "sub": lambda given, _, __: given[0] - given[1],
    "mul": lambda given, _, __: given[0] * given[1],
    "div": lambda given, _, __: given[0] / given[1] if given[0].dtype.kind == "f" else given[0] // given[1],
    "neg": lambda given, _, __: -given[0],
    "sqrt": lambda given, _, __: np.sqrt(given[0]),
    "rsqrt": lambda given, _, __: 1 / np.sqrt(given[0]),
    "integer_pow": lambda given, params, __: given[0] ** params["y"],
    "select_n": lambda given, _, __: np.where(given[0], given[2], given[1]),
    "broadcast_in_dim": lambda given, params, value: MOVES["broadcast_in_dim"](given[0], params, value.shape),
    "reshape": lambda given, params, value: given[0].reshape(value.shape),
    "squeeze": lambda given, params, value: given[0].reshape(value.shape),
    "transpose": lambda given, params, value: MOVES["transpose"](given[0], params, value.shape),
    "slice": lambda given, params, value: MOVES["slice"](given[0], params, value.shape),
}
