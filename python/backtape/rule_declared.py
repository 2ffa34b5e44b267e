"""What the declaration of a step says of a rule of the job's own (`backtape.rule`): `rules=` of
`step_algebra`, in torch and in jax."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from backtape.failopen import CAUGHT, describe, text_of
from backtape.rule_symbols import Formula, RuleError, is_number

# What JSON has no number for.
WORDS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}
# Characters of what another exception says.
MOST_WORDS = 160
HINT = "; a rule is written with ordinary operators and the functions of backtape.rule"


class Named:
    """The state or the hyper-parameters, by name or as attributes."""

    def __init__(self, what: str, of: Callable[[str], Any]) -> None:
        self._what, self._of = what, of

    def __getitem__(self, name: str) -> Any:
        return self._of(name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return self._of(name)

    def __setitem__(self, name: str, value: Any) -> None:
        raise RuleError(f"it assigns {self._what}[{name!r}]: return what changes, as a dict")

    def __iter__(self) -> Any:
        raise RuleError(f"it goes through all of its {self._what}: ask for each by its name")


class State(Named):
    """The state: what it holds is known only when the step is judged."""

    def __contains__(self, name: object) -> bool:
        return True


class Hyper(Named):
    """The hyper-parameters of a group."""

    def __init__(self, of: Callable[[str], Any], names: set[str]) -> None:
        super().__init__("hyper", of)
        self._names = names

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def get(self, name: str, default: Any = None) -> Any:
        """A hyper-parameter, or another number where the group has none of that name."""
        return self._of(name) if name in self._names else default


def formula_of(function: Callable[..., Any], group: Mapping[str, Any]) -> dict[str, Any]:
    """The formula that a rule is for a group of an optimizer. Raises RuleError, or what the
    function raises."""
    formula = Formula()

    def hyper(name: str) -> Any:
        if name not in group:
            listed = ", ".join(group) or "none"
            raise RuleError(f"it takes the hyper-parameter {name!r}, and the group has {listed}")
        return setting(formula, name, group[name])

    state = State("state", lambda name: formula.node("state", str(name)))
    param, grad = (formula.node(name, tensor=True) for name in ("param", "grad"))
    made = function(param, grad, state, Hyper(hyper, set(group)))
    if not isinstance(made, tuple) or len(made) != 2:
        raise RuleError("it returns no pair: return new_param, new_state")
    new_param, new_state = made
    if new_state is not None and not isinstance(new_state, Mapping):
        raise RuleError("the new state that it returns is no dict of what it changes")

    def node(name: str, value: Any) -> int:
        symbol = formula.symbol(value)
        if symbol is None:
            kind = type(value).__name__
            raise RuleError(f"what it returns as {name} is a {kind} and no number of a rule")
        return symbol._node

    param_node = node("new_param", new_param)
    states = {str(name): node(str(name), value) for name, value in (new_state or {}).items()}
    return {"nodes": formula.nodes, "param": param_node, "state": states}


def setting(formula: Formula, name: str, value: Any) -> Any:
    """A hyper-parameter as a rule sees it: a number as a symbol, and a switch as it is."""
    if isinstance(value, (list, tuple)):
        return tuple(setting(formula, f"{name}.{at}", one) for at, one in enumerate(value))
    if isinstance(value, str) and value in WORDS:
        value = WORDS[value]
    if isinstance(value, bool) or not is_number(value):
        return value
    return formula.node("hyper", name, value=float(value))


def checked(rules: Any) -> dict[str, Any]:
    """What `rules=` says. Raises ValueError for what is no rule."""
    if rules is None:
        return {}
    if not isinstance(rules, Mapping):
        raise ValueError("rules= is no dict of rules by the names of optimizers' classes")
    for name, rule in rules.items():
        if not isinstance(rule, str) and not callable(rule):
            raise ValueError(
                f"rules= has a {type(rule).__name__} for {name}: a rule is the name of a known "
                "optimizer's class, or a function of (param, grad, state, hyper)"
            )
    return dict(rules)


def said_of(error: BaseException) -> str:
    """What kept a function from being a formula, in one sentence."""
    if isinstance(error, RuleError):
        return text_of(error)
    words = describe(error)
    return f"{words if len(words) <= MOST_WORDS else words[:MOST_WORDS] + '...'}{HINT}"


def declared(
    rules: Mapping[str, Any], name: str, groups: list[dict[str, Any]]
) -> tuple[dict[str, Any], Exception | None]:
    """What the declaration of an optimizer has of its rule, empty where `rules` has none, and why
    it has no formula."""
    rule = rules.get(name)
    if rule is None or isinstance(rule, str):
        return ({} if rule is None else {"rule": rule}), None
    own = getattr(rule, "__qualname__", type(rule).__name__)
    title = f"{getattr(rule, '__module__', '?')}.{own}"
    formulas: list[dict[str, Any]] = []
    of_groups: list[int | None] = []
    lacking: dict[str, str] = {}
    for at, group in enumerate(groups):
        try:
            formula = formula_of(rule, group)
        except CAUGHT as error:
            lacking[str(at)] = f"{text_of(title)}: {said_of(error)}"
            of_groups.append(None)
            continue
        if formula not in formulas:
            formulas.append(formula)
        of_groups.append(formulas.index(formula))
    why = next(iter(lacking.values()), None)
    if why is not None and not formulas:
        return {"rule": {"function": text_of(title), "absent": why}}, RuleError(why)
    told = {"function": text_of(title), "formulas": formulas, "groups": of_groups}
    # Groups without a formula are not judged; those of one optimizer may follow several rules.
    if why is not None:
        told["lacking"] = lacking
    return {"rule": told}, None if why is None else RuleError(why)
