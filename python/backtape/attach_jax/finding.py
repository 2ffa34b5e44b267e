"""The loss heads in the program of a loss, and why one that is there cannot be recorded."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from backtape import attach_logits
from backtape.attach_jax.facts import (
    ALL,
    LABEL,
    LSE,
    ONE,
    SQUARE,
    Chosen,
    ExponentialRow,
    Labels,
    Row,
    Source,
    Vector,
)
from backtape.attach_jax.graph import (
    CALLS,
    CLOSED,
    LOOPS,
    Operation,
    Place,
    Program,
    Value,
    changing,
    depending,
    reaching,
    takers,
)
from backtape.attach_jax.rules import Facts
from backtape.attach_jax.shapes import MOVES, SAME

MIXED = (
    "something else than the loss takes the logits too and gives them a gradient ({}), as an entropy term does: no "
    "head is declared"
)
NARROW = "its softmax is computed in {}: cast the logits, as by logits.astype(jnp.float32)"
BETWEEN = "{} lies between the product of hidden states and unembedding and the loss"
CHANGED = "a function with a custom_vjp changes the gradient of the logits between the product and the loss"
OUTSIDE = "its logits come from outside of the function of which the gradient is taken"
APART = "its hidden states and its loss are in different loops"


class Unfollowed(Exception):
    """Why a head cannot be recorded, as the end of a sentence."""


@dataclass(frozen=True)
class Leaf:
    """One of the inputs of a program, of which a product's operand is made by casts and transpositions."""

    number: int
    is_transposed: bool


@dataclass(frozen=True)
class Fused:
    """A call with a derivative of its own that takes q and k, and in which the loss is computed."""

    place: Place
    q: Leaf  # among the inputs of the call
    k: Leaf


@dataclass(eq=False)
class Found:
    """A head: z0 = q k^T, and what the loss of each token is made of it."""

    product: Operation
    q: int  # which input of the product is q
    row: Row
    loss: Value  # the loss of each token, times `factor`
    summed: Operation | None  # the sum over classes and tokens at once that has no value for each token
    factor: float
    options: dict[str, Any]
    weight: Value  # what tells its unembedding from another
    classes: int | None = None  # the dimension of the classes in what it sums
    frozen: tuple[str, ...] = ()  # of q and k, those that take no gradient
    leaf: "Leaf | None" = None  # what is differentiated, where the unembedding is that and nothing else takes it
    fused: "Fused | None" = None  # the call with a derivative of its own that all of it is in

    @property
    def tokens(self) -> tuple[int, ...]:
        """The shape of the tokens, as the product has them."""
        return tuple(n for d, n in enumerate(self.row.source.made.shape) if d != self.row.source.classes)


def heads_of(program: Program, losses: Sequence[Value]) -> tuple[list[Found], list[str]]:
    """The heads of which these losses are made, and the reasons why others cannot be recorded."""
    reached, found, reasons = reaching(program, losses), [], []
    facts = Facts(program)
    known = _rows(facts, reached)
    # Of a product of two matrices either may be the unembedding: the classes tell.
    others = {id(s.product) for s in facts.sources if s.product is not None and s not in known}
    if others:
        swapped = Facts(program, others)
        more = {s: v for s, v in _rows(swapped, reached).items() if id(s.product) in others}
        if more:
            keep = others & {id(source.product) for source in more}
            facts = Facts(program, keep)
            known = _rows(facts, reached)
    for source, rows in known.items():
        try:
            found.append(_found(facts, source, rows, reached))
        except Unfollowed as error:
            reasons.append(str(error))
    return found, reasons


def _rows(facts: Facts, reached: set[int]) -> dict[Source, list[tuple[Value, Row, Operation | None]]]:
    """The rows that are the loss of a token, by the source of their logits: those that something takes which
    does not make another such row of them."""
    program, taken = facts.program, takers(facts.program)
    outputs = {id(value) for value in program.outputs}
    outputs |= {id(inner) for values in program.inside.values() for inner in values}
    found: dict[Source, list[tuple[Value, Row, Operation | None]]] = {}
    for operation in program.operations:
        if not operation.outputs:
            continue
        value = operation.outputs[0]
        row = facts.between.get(id(operation))
        if row is not None and _is_loss(row) and id(value) in reached:
            found.setdefault(row.source, []).append((operation.inputs[0], row, operation))
        row = facts.of.get(id(value))
        if row is None or not _is_loss(row) or id(value) not in reached:
            continue
        after = [one for one in taken.get(id(value), ()) if _is_reached(one, reached)]
        is_last = id(value) in outputs and not after
        if is_last or any(not isinstance(_fact_after(facts, one), Row) for one in after):
            found.setdefault(row.source, []).append((value, row, None))
    return found


def _is_loss(row: Any) -> bool:
    """Whether it has both lse and the label's logit."""
    is_row = isinstance(row, Row) and not isinstance(row, ExponentialRow)
    return is_row and LSE in row.sum and LABEL in row.sum


def _is_reached(operation: Operation, reached: set[int]) -> bool:
    is_through = operation.name != "stop_gradient"
    return is_through and any(id(value) in reached for value in operation.outputs)


def _fact_after(facts: Facts, operation: Operation) -> Any:
    return facts.of.get(id(operation.outputs[0])) if operation.outputs else None


def _found(
    facts: Facts, source: Source, rows: list[tuple[Value, Row, Operation | None]], reached: set[int]
) -> Found:
    """The head that has these logits. Raises Unfollowed."""
    if source.product is None:
        maker = source.made.maker
        raise Unfollowed(OUTSIDE if maker is None else BETWEEN.format(maker.name))
    (value, row, summed) = rows[0]
    after = _made_of(facts.program, value if summed is None else summed.outputs[0])
    if any(id(other) not in after for other, _, _ in rows[1:]):
        raise Unfollowed(MIXED.format("two losses of the same logits"))
    _refuse_others(facts, source, after, summed, reached)
    for changed in changing(facts.program) - after:
        if _source(facts.of.get(changed)) is source:
            raise Unfollowed(CHANGED)
    narrow = {dtype for dtype in source.softmax_dtypes if dtype not in ("float32", "float64")}
    if narrow:
        raise Unfollowed(NARROW.format(narrow.pop()))
    factor, options = _options(row, source)
    product, program = source.product, facts.program
    place = summed.place if summed is not None else _place_of(value)
    if _loop(program, product.place) != _loop(program, place):
        raise Unfollowed(APART)
    _refuse_apart(program, row, place)
    index = row.index.reshape(-1)
    if len(np.unique(index)) != len(index):
        raise Unfollowed("one hidden state gives several rows of the loss")
    held = facts.of.get(id(value)) if summed is not None else None
    return Found(
        product,
        source.q,
        row,
        value,
        summed,
        factor,
        options,
        _leaf(product.inputs[source.k]),
        classes=None if held is None else (held.vector if isinstance(held, Chosen) else held).dim,
        frozen=_frozen(program, product, source),
        leaf=_differentiated(program, product, source.k, reached),
        fused=_fused(program, product, source),
    )


def _frozen(program: Program, product: Operation, source: Source) -> tuple[str, ...]:
    """Which of q and k take no gradient."""
    takes = depending(program)
    operands = (("q", product.inputs[source.q]), ("k", product.inputs[source.k]))
    return tuple(name for name, value in operands if id(value) not in takes)


def _differentiated(program: Program, product: Operation, at: int, reached: set[int]) -> Leaf | None:
    """The input that an unembedding is, where it is one that nothing else takes."""
    if _loop(program, product.place):
        return None
    leaf = _among(program.inputs, product.inputs[at], ("transpose",))
    if leaf is None:
        return None
    value, taken, changed = product.inputs[at], takers(program), changing(program)
    while True:
        # Such a function is there to change the gradient, so that of the product is judged.
        if id(value) in changed:
            return None
        after = [one for one in taken.get(id(value), ()) if _is_reached(one, reached)]
        if len(after) != 1:
            return None
        if value.maker is None:
            return leaf
        value = value.maker.inputs[0]


def _fused(program: Program, product: Operation, source: Source) -> Fused | None:
    """The call that hides a product. Raises Unfollowed where q and k do not go into it."""
    place = _closed(program, product.place)
    if place is None:
        return None
    inputs = program.entries[place]
    q = _among(inputs, product.inputs[source.q], ("reshape",))
    k = _among(inputs, product.inputs[source.k], ("transpose",))
    if q is None or k is None or _loop(program, product.place) != _loop(program, place):
        raise Unfollowed("its hidden states or its unembedding are made inside of a function with a custom_vjp")
    return Fused(place, q, k)


def bias_of(row: Row) -> Value | None:
    """What is added to the product for each class, as it was before it was cast and shaped for that: so it is there
    also outside of a checkpoint in which it is added."""
    value = row.form.bias
    while value is not None and value.maker is not None and value.maker.name in (*SAME, *MOVES):
        before = value.maker.inputs[0]
        if math.prod(before.shape) != math.prod(value.shape) or value.maker.name in ("transpose", "slice"):
            break
        value = before
    return value


def _refuse_apart(program: Program, row: Row, place: Place) -> None:
    """Raises Unfollowed where labels or bias are not there any more where the loss is."""
    for value in (row.given.value if row.given is not None else None, bias_of(row)):
        made = _scope(program, _place_of(value)) if value is not None else ()
        if place[: len(made)] != made:
            raise Unfollowed("its labels or its bias are made inside of a loop or a checkpoint that its loss is not in")


def _scope(program: Program, place: Place) -> Place:
    """The place of the innermost loop, checkpoint or shard_map that a place is in."""
    inside = [place[:n] for n in range(1, len(place)) if program.kinds.get(place[:n]) not in (*CALLS, *CLOSED)]
    return inside[-1] if inside else ()


def _among(inputs: Sequence[Value], value: Value, moves: Sequence[str]) -> Leaf | None:
    """Which of these inputs a value is, but for casts and some moves of its elements; None where it is none."""
    is_transposed = False
    while True:
        found = [number for number, one in enumerate(inputs) if one is value]
        if found:
            return Leaf(found[0], is_transposed)
        if value.maker is None or value.maker.name not in (*SAME, *moves) or value.maker.name == "stop_gradient":
            return None
        is_transposed ^= value.maker.name == "transpose"
        value = value.maker.inputs[0]


def _place_of(value: Value) -> Place:
    return () if value.maker is None else value.maker.place


def _refuse_others(
    facts: Facts, source: Source, after: set[int], summed: Operation | None, reached: set[int]
) -> None:
    """Raises Unfollowed where something else takes the logits, too. after: the loss and all that is made of it,
    by id."""
    stopped: set[int] = set()
    for operation in facts.program.operations:
        floats = [value for value in operation.inputs if value.is_float and value.known is None]
        is_stopped = operation.name == "stop_gradient" or floats and all(id(v) in stopped for v in floats)
        if is_stopped:
            stopped |= {id(value) for value in operation.outputs}
        if operation is summed or not _is_reached(operation, reached):
            continue
        result = _source(_fact_after(facts, operation))
        for value in operation.inputs:
            is_past = id(value) in after or id(value) in stopped or not value.is_float
            if not is_past and _source(facts.of.get(id(value))) is source and result is not source:
                raise Unfollowed(MIXED.format(operation.name))


def _made_of(program: Program, value: Value) -> set[int]:
    """A value and all that is made of it, by id."""
    found = {id(value)}
    for operation in program.operations:
        if any(id(taken) in found for taken in operation.inputs):
            found |= {id(made) for made in operation.outputs}
    return found


def _source(fact: Any) -> Source | None:
    if isinstance(fact, Chosen):
        return fact.vector.source
    return fact.source if isinstance(fact, (Vector, Row)) else None


def _loop(program: Program, place: Place) -> Place:
    """The place of the innermost loop that a place is in."""
    inside = [place[:n] for n in range(1, len(place)) if program.kinds.get(place[:n]) in (*LOOPS, "shard_map")]
    return inside[-1] if inside else ()


def _closed(program: Program, place: Place) -> Place | None:
    """The place of the outermost call with a derivative of its own that a place is in."""
    inside = [place[:n] for n in range(1, len(place)) if program.kinds.get(place[:n]) in CLOSED]
    return inside[0] if inside else None


def _leaf(value: Value) -> Value:
    """What a value is made of by casts and moves alone."""
    while value.maker is not None and value.maker.name in (*SAME, *MOVES):
        value = value.maker.inputs[0]
    return value


def _options(row: Row, source: Source) -> tuple[float, dict[str, Any]]:
    """What the value of a row is a multiple of the loss by, and the loss as options of `Tape.head`. Raises
    Unfollowed where it is no softmax cross-entropy."""
    total, form, width = row.sum, row.form, source.made.shape[source.classes]
    valid = width if form.valid is None else form.valid
    factor = total[LSE]
    parts = {name: value / factor for name, value in total.items()}
    smoothing = -parts.pop(ALL, 0.0) * valid
    is_whole = math.isclose(parts.pop(LABEL), smoothing - 1.0, rel_tol=1e-5, abs_tol=1e-7)
    del parts[LSE]
    z_loss = parts.pop(SQUARE, 0.0)
    # A number that is added, as the entropy of smoothed labels is, gives no gradient.
    shift = parts.pop(ONE, 0.0)
    if parts or not is_whole or not -1e-9 <= smoothing < 1 or z_loss < -1e-12:
        raise Unfollowed("what the loss makes of the logits is no softmax cross-entropy")
    scale = form.scale if form.cap is None else form.scale * form.cap
    options = {
        "label_smoothing": _plain(smoothing),
        "z_loss": _plain(z_loss),
        "mask_value": form.mask,
        **attach_logits.options(
            _plain(scale),
            None if form.cap is None else _plain(form.cap),
            None if form.valid in (None, width) else form.valid,
        ),
    }
    return _plain(factor), options | {"shift": shift}


def _plain(value: float) -> float:
    """A number without the rounding of the few operations in f32 that it was made by."""
    for digits in (6, 7):
        rounded = float(f"{value:.{digits}g}")
        if math.isclose(rounded, value, rel_tol=6e-8):
            return rounded
    return float(value) + 0.0
