"""Where each item of a head's declaration is from. A dump has it beside the declaration, and the report groups
the items by it; what has no source is assumed, by its default.

An item is an option of `Tape.head`, or a point of its dtypes: `dtypes.logits`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from backtape import _native

SEEN = "seen"  # an argument of the job's call, or what its graph has
MEASURED = "measured"  # numbers or dtypes that flowed
DECLARED = "declared"  # by hand
ASSUMED = "assumed"

DTYPES = "dtypes"

# What a loss is divided by. It is measured by the gradient that arrives at the loss, whatever the call says:
# what is declared of it is only compared with that.
DIVISION = ("reduction", "denominator", "scope", "cotangent", "microbatch_reduction")

# How tensors were recorded. Where backtape records them itself there is nothing to declare of it.
RECORDING = ("k_layout", "labels_shifted", "tied_embedding")


@dataclass
class Sourced:
    """A head's options, where each item is from, and what was declared by hand of items that were found."""

    options: dict[str, Any]
    sources: dict[str, str]
    by_hand: dict[str, Any] = field(default_factory=dict)
    # The batch that each microbatch is of, where several losses of one backward pass are of one.
    batches: list[int] = field(default_factory=list)


def options() -> list[str]:
    """The names of all options of `Tape.head`."""
    head, _ = _native.head_options()
    return [name for name, *_ in head]


def of_items(declaration: Mapping[str, Any], source: str) -> dict[str, str]:
    """The same source for each item of a declaration."""
    return dict.fromkeys(_items(declaration), source)


def _items(declaration: Mapping[str, Any]) -> Iterable[str]:
    for name, value in declaration.items():
        if name == DTYPES and isinstance(value, Mapping):
            yield from (f"{DTYPES}.{point}" for point in value)
        else:
            yield name


def counts_by_microbatch(declaration: Mapping[str, Any]) -> bool:
    """Whether a loss is declared to be divided by tokens of its own microbatch."""
    scope = declaration.get("scope", "global")
    over_all = scope.get("microbatches", "all") == "all" if isinstance(scope, Mapping) else scope == "global"
    is_counted = isinstance(declaration.get("denominator", "valid"), str)
    return declaration.get("reduction", "mean") == "mean" and is_counted and not over_all


def joined(found: Sourced, declared: Mapping[str, Any]) -> Sourced:
    """What was found of a head, with what is declared by hand: that takes the place of what is assumed. What was
    seen or measured stays, and what is declared of it is kept beside it, so that a replay can tell where they
    differ."""
    all = Sourced(dict(found.options), dict(found.sources), dict(found.by_hand), found.batches)
    for name, value in declared.items():
        if name == DTYPES and isinstance(value, Mapping):
            _join_dtypes(all, value)
        elif name in DIVISION or all.sources.get(name, ASSUMED) in (SEEN, MEASURED):
            if name not in RECORDING:
                all.by_hand[name] = value
        else:
            all.options[name], all.sources[name] = value, DECLARED
    return all


def _join_dtypes(all: Sourced, declared: Mapping[str, Any]) -> None:
    """The dtypes of a declaration, point by point."""
    own = dict(all.options.get(DTYPES, {}))
    for point, dtype in declared.items():
        if point in own:
            all.by_hand.setdefault(DTYPES, {})[point] = dtype
        else:
            own[point], all.sources[f"{DTYPES}.{point}"] = dtype, DECLARED
    all.options[DTYPES] = own
