"""An optimizer of your own: its rule as a function, by which `replay` judges its steps.

    from backtape.rule import sign

    def tiger(param, grad, state, hyper):
        moment = hyper.beta * state.exp_avg + (1 - hyper.beta) * grad
        return param - hyper.lr * sign(moment), {"exp_avg": moment}

    backtape.torch.step_algebra(tape, model, optimizer, rules={"Tiger": tiger})

The function is called once for each group of the optimizer with symbols in place of tensors and
numbers, and what it does with them is written into the dump as a formula (docs/step-format.md). So
it costs nothing, and a replay needs no code of the job. It is written with `+ - * / **`,
comparisons inside of `where`, and the functions below. Hyper-parameters have their numbers, so that
it may branch on these; on what a tensor or the state holds it cannot.
"""

from typing import Any, TypeAlias

from backtape.failopen import text_of
from backtape.rule_symbols import ONE, TWO, Condition, RuleError, Symbol, is_number

__all__ = [
    "Number", "abs", "exp", "log", "maximum", "minimum", "sign", "sqrt", "tanh", "where",
]  # fmt: skip

Number: TypeAlias = Symbol | float
"""What a rule computes with."""


def applied(name: str, x: Any) -> Any:
    """An operation on a symbol or a number."""
    if isinstance(x, Symbol):
        return x._formula.one(name, x)
    if not is_number(x):
        raise RuleError(f"it takes {name} of a {type(x).__name__}, which is no number of a rule")
    return ONE[name](float(x))


def sqrt(x: Number) -> Number:
    """The square root."""
    return applied("sqrt", x)  # type: ignore[no-any-return]


def abs(x: Number) -> Number:  # noqa: A001
    """The absolute value."""
    return applied("abs", x)  # type: ignore[no-any-return]


def sign(x: Number) -> Number:
    """-1, 0 or 1."""
    return applied("sign", x)  # type: ignore[no-any-return]


def exp(x: Number) -> Number:
    """e to it."""
    return applied("exp", x)  # type: ignore[no-any-return]


def log(x: Number) -> Number:
    """The natural logarithm."""
    return applied("log", x)  # type: ignore[no-any-return]


def tanh(x: Number) -> Number:
    """The hyperbolic tangent."""
    return applied("tanh", x)  # type: ignore[no-any-return]


def chosen(name: str, a: Any, b: Any) -> Any:
    """The larger or the smaller of two."""
    formula = next((one._formula for one in (a, b) if isinstance(one, Symbol)), None)
    made = TWO[name](float(a), float(b)) if formula is None else formula.two(name, a, b)
    if made is NotImplemented:
        given = f"{text_of(a)} and {text_of(b)}"
        raise RuleError(f"it takes the {name} of {given}, which are no numbers")
    return made


def maximum(a: Number, b: Number) -> Number:
    """The larger of two, element by element; NaN where one is."""
    return chosen("maximum", a, b)  # type: ignore[no-any-return]


def minimum(a: Number, b: Number) -> Number:
    """The smaller of two, element by element; NaN where one is."""
    return chosen("minimum", a, b)  # type: ignore[no-any-return]


def where(condition: Any, one: Number, other: Number) -> Number:
    """`one` where a comparison (`>`, `>=`, `<`, `<=`) holds, else `other`, element by element."""
    if not isinstance(condition, Condition):
        return one if condition else other
    given = (condition.a, condition.b, one, other)
    formula = next(part._formula for part in given if isinstance(part, Symbol))
    parts = [part for part in map(formula.symbol, given) if part is not None]
    if len(parts) < len(given):
        raise RuleError("it chooses by where() between what is no number of a rule")
    name = "where_from" if condition.is_from else "where_above"
    tensor = any(part._tensor for part in parts)
    return formula.node(name, *(part._node for part in parts), tensor=tensor)
