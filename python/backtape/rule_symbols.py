"""What a rule of the job's own (`backtape.rule`) is called with in place of numbers and tensors:
symbols, which note what is done with them."""

import math
import numbers
from collections.abc import Callable
from typing import Any

# As many as a replay reads.
MOST_NODES = 512


class RuleError(ValueError):
    """A rule that no formula can be made of."""


class Symbol:
    """A number or a tensor of a rule: all that is known of it is what it is made of."""

    # numpy leaves operations with it to it.
    __array_ufunc__ = None

    def __init__(self, formula: "Formula", node: int, value: float | None, tensor: bool) -> None:
        self._formula = formula
        self._node = node
        # Of constants and hyper-parameters, and of what is made of these alone.
        self._value = value
        self._tensor = tensor  # surely no number of the state

    def __repr__(self) -> str:
        return self._formula.words(self._node)

    def __add__(self, other: Any) -> Any:
        return self._formula.two("add", self, other)

    def __radd__(self, other: Any) -> Any:
        return self._formula.two("add", other, self)

    def __sub__(self, other: Any) -> Any:
        return self._formula.two("sub", self, other)

    def __rsub__(self, other: Any) -> Any:
        return self._formula.two("sub", other, self)

    def __mul__(self, other: Any) -> Any:
        return self._formula.two("mul", self, other)

    def __rmul__(self, other: Any) -> Any:
        return self._formula.two("mul", other, self)

    def __truediv__(self, other: Any) -> Any:
        return self._formula.two("div", self, other)

    def __rtruediv__(self, other: Any) -> Any:
        return self._formula.two("div", other, self)

    def __pow__(self, other: Any) -> Any:
        return self._formula.two("pow", self, other)

    def __rpow__(self, other: Any) -> Any:
        return self._formula.two("pow", other, self)

    def __neg__(self) -> Any:
        return self._formula.one("neg", self)

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return self._formula.one("abs", self)

    def __gt__(self, other: Any) -> Any:
        return compared(self, other, is_from=False)

    def __ge__(self, other: Any) -> Any:
        return compared(self, other, is_from=True)

    def __lt__(self, other: Any) -> Any:
        return compared(other, self, is_from=False)

    def __le__(self, other: Any) -> Any:
        return compared(other, self, is_from=True)

    def __eq__(self, other: Any) -> Any:
        return self._known("compares") == other

    def __ne__(self, other: Any) -> Any:
        return self._known("compares") != other

    __hash__ = None  # type: ignore[assignment]

    def __bool__(self) -> bool:
        return bool(self._known("branches on"))

    def __float__(self) -> float:
        return float(self._known("needs the value of"))

    def __int__(self) -> int:
        return int(self._known("needs the value of"))

    def __index__(self) -> int:
        value = self._known("counts by")
        if value != int(value):
            raise RuleError(f"it counts by {self!r}, which is {value} and no whole number")
        return int(value)

    def _known(self, does: str) -> float:
        if self._value is None:
            raise RuleError(f"it {does} {self!r}, {UNKNOWN}")
        return self._value


UNKNOWN = (
    "whose value is known only when the step is judged: choose by where(a > b, one, other) of "
    "backtape.rule"
)


class Condition:
    """What `where` chooses by: whether `a` is above `b`, or not below it."""

    def __init__(self, a: Any, b: Any, is_from: bool) -> None:
        self.a, self.b, self.is_from = a, b, is_from

    def __bool__(self) -> bool:
        words = f"{self.a!r} {'>=' if self.is_from else '>'} {self.b!r}"
        raise RuleError(f"it branches on {words}, {UNKNOWN}")


def compared(a: Any, b: Any, is_from: bool) -> Any:
    """`a > b` or `a >= b`: at once where both are known."""
    if not all(isinstance(one, Symbol) or is_number(one) for one in (a, b)):
        return NotImplemented
    x, y = (one._value if isinstance(one, Symbol) else float(one) for one in (a, b))
    if x is None or y is None:
        return Condition(a, b, is_from)
    return x >= y if is_from else x > y


class Formula:
    """The operations of a rule, each once, in the order in which they were done."""

    def __init__(self) -> None:
        self.nodes: list[list[Any]] = []
        self.known: dict[tuple[Any, ...], Symbol] = {}

    def node(self, *node: Any, value: float | None = None, tensor: bool = False) -> Symbol:
        """A node of the formula, and the same for the same operation on the same numbers."""
        key = tuple((type(part), repr(part)) for part in node)
        if key not in self.known:
            if len(self.nodes) == MOST_NODES:
                raise RuleError(f"it does more than {MOST_NODES} operations")
            self.nodes.append(list(node))
            self.known[key] = Symbol(self, len(self.nodes) - 1, value, tensor)
        return self.known[key]

    def symbol(self, number: Any) -> Symbol | None:
        """A number of the job as one of the formula; None for what is none."""
        if isinstance(number, Symbol):
            if number._formula is not self:
                raise RuleError(f"it keeps {number!r} of another call")
            return number
        if not is_number(number):
            return None
        value = float(number)
        return self.node("number", value if math.isfinite(value) else str(value), value=value)

    def one(self, name: str, of: Symbol) -> Symbol:
        """An operation on one number."""
        value = valued(ONE[name], of._value)
        return self.node(name, of._node, value=value, tensor=of._tensor)

    def two(self, name: str, a: Any, b: Any) -> Any:
        """An operation on two numbers, one of them a symbol."""
        if isinstance(a, Symbol) and name in NEUTRAL and is_same(b, NEUTRAL[name]):
            return a
        if isinstance(b, Symbol) and name in ("add", "mul") and is_same(a, NEUTRAL[name]):
            return b
        one, other = self.symbol(a), self.symbol(b)
        if one is None or other is None:
            return NotImplemented
        if name == "pow" and other._tensor:
            raise RuleError(f"it raises to the power of {other!r}, and an exponent is a number")
        value = valued(TWO[name], one._value, other._value)
        tensor = one._tensor or other._tensor
        return self.node(name, one._node, other._node, value=value, tensor=tensor)

    def words(self, node: int, depth: int = 4) -> str:
        """A node as people write it, cut where it is made of much."""
        name, *rest = self.nodes[node]
        if name in ("grad", "param"):
            return str(name)
        if name == "number":
            return str(rest[0])
        if name in ("state", "hyper"):
            return f"{name}[{rest[0]!r}]"
        if not depth:
            return f"{name}(...)"
        return f"{name}({', '.join(self.words(at, depth - 1) for at in rest)})"


def is_number(value: Any) -> bool:
    """Whether it is a number of Python or numpy."""
    return isinstance(value, numbers.Real)


def is_same(number: Any, other: float) -> bool:
    """Whether it is this number, and no symbol."""
    return is_number(number) and float(number) == other


def valued(operation: Callable[..., float], *values: float | None) -> float | None:
    """What an operation gives, where it is known what it takes."""
    if None in values:
        return None
    try:
        made = operation(*values)
        return made if isinstance(made, float) else float(made)
    except (ArithmeticError, ValueError, TypeError):
        return math.nan


def sign_of(x: float) -> float:
    """-1, 0 or 1."""
    return float((x > 0) - (x < 0))


ONE: dict[str, Callable[[float], float]] = {
    "neg": lambda x: -x, "abs": math.fabs, "sqrt": math.sqrt, "sign": sign_of, "exp": math.exp,
    "log": math.log, "tanh": math.tanh,
}  # fmt: skip
TWO: dict[str, Callable[[float, float], float]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
    "div": lambda a, b: a / b, "pow": lambda a, b: a**b, "maximum": max, "minimum": min,
}  # fmt: skip
# What changes nothing as the second number.
NEUTRAL = {"add": 0.0, "sub": 0.0, "mul": 1.0, "div": 1.0, "pow": 1.0}
