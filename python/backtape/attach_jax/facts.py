"""What is known of a value between the product of hidden states and unembedding and the loss of each token.

Every form of softmax cross-entropy is made of a few things: logits z with something added to each row,
exp of that, and for each row sums of lse, of the label's logit, and of all logits. The forms differ in the
order in which they are added up, and so a value is kept as what it is a sum of.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from backtape.attach_jax.graph import Operation, Value

# What a row's value is a sum of, by name: lse = log sum exp(z), the label's logit, the sum of all logits,
# lse squared, a number; any other name is a number of the row that the loss must not depend on.
LSE, LABEL, ALL, SQUARE, ONE = "lse", "label", "all", "square", "one"

# What is added to logits that are to have no part in a softmax is this or less.
MASKED = -1e4

Sum = Mapping[Any, float]


def plus(first: Sum, second: Sum, factor: float = 1.0) -> Sum:
    """first + factor second."""
    total = dict(first)
    for name, value in second.items():
        total[name] = total.get(name, 0.0) + factor * value
    return {name: value for name, value in total.items() if abs(value) > 1e-12}


def times(some: Sum, factor: float) -> Sum:
    """factor some."""
    return plus({}, some, factor)


@dataclass(eq=False)
class Source:
    """Where logits come from."""

    made: Value  # the product, or what is taken for logits where no product is found
    product: Operation | None
    q: int = 0  # which input of the product is q
    k: int = 1
    classes: int = 0  # the dimension of the product that is the vocabulary
    softmax_dtypes: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Form:
    """What is made of the product's z0 before the softmax: z = cap tanh(scale (z0 + bias) / cap)."""

    scale: float = 1.0
    cap: float | None = None
    bias: Value | None = None
    valid: int | None = None  # the first of the classes are valid
    mask: float | None = None  # what the others are set to; None: they have no part
    dtypes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class Vector:
    """A value of every class of each row: factor z + row."""

    source: Source
    form: Form
    index: np.ndarray  # the token of each row, of the value's shape, but 1 in the dimension of the classes
    dim: int  # that dimension
    width: int  # its length
    row: Sum = field(default_factory=dict)
    factor: float = 1.0


@dataclass(frozen=True, eq=False)
class Exponential(Vector):
    """exp(z + row)."""


@dataclass(eq=False)
class Given:
    """Labels, as the job gives them: the last entry of `value` in dimension `dim`, broadcast to `shape`, which is
    1 there; or where they are rows of targets the place of the largest."""

    value: Value
    dim: int
    shape: tuple[int, ...]
    are_targets: bool = False


@dataclass(frozen=True, eq=False)
class Labels:
    """on at the label of each row, off elsewhere."""

    given: Given
    index: np.ndarray  # which of the labels is that of each row; 1 in dimension `dim`
    dim: int
    width: int
    on: float = 1.0
    off: float = 0.0
    is_negated: bool = False  # it says where no label is


@dataclass(frozen=True, eq=False)
class Chosen:
    """Labels times a vector."""

    labels: Labels
    vector: Vector


@dataclass(frozen=True, eq=False)
class Row:
    """One number for each row."""

    source: Source
    form: Form
    index: np.ndarray  # the token of each, of the value's shape
    sum: Sum
    given: Given | None = None
    label_index: np.ndarray | None = None  # which of the labels is that of each


@dataclass(frozen=True, eq=False)
class ExponentialRow(Row):
    """exp of such a number."""


@dataclass(frozen=True, eq=False)
class Finite:
    """Whether a row's number is finite."""


@dataclass(frozen=True, eq=False)
class Along:
    """Numbers that depend on the place in one dimension alone."""

    dim: int
    numbers: np.ndarray  # one for each place


Fact = Vector | Exponential | Labels | Chosen | Row | ExponentialRow | Finite | Along


def with_row(vector: Vector, row: Sum, factor: float) -> Vector:
    """The vector with a number added to each row."""
    return replace(vector, row=plus(vector.row, row, factor))


def scaled(fact: Any, factor: float) -> Any:
    """A vector or a row, times a number. Before anything was added to a row of logits it is a scale of
    them."""
    if isinstance(fact, Row):
        return replace(fact, sum=times(fact.sum, factor))
    if isinstance(fact, Chosen):
        return replace(fact, vector=scaled_logs(fact.vector, factor))
    if fact.row or fact.factor != 1.0:
        return scaled_logs(fact, factor)
    form = fact.form
    if form.cap is None:
        return replace(fact, form=replace(form, scale=form.scale * factor))
    return replace(fact, form=replace(form, cap=form.cap * factor))


def scaled_logs(vector: Vector, factor: float) -> Vector:
    """The vector with its row, times a number."""
    return replace(vector, factor=vector.factor * factor, row=times(vector.row, factor))
