"""Parameters and the optimizer's state as jax holds them: pytrees, whose paths give the names.

A leaf of the state belongs to the parameter whose path its own path ends with: below `mu` of
optax's ScaleByAdamState lies a tree like that of the parameters. What stands before that path names
the leaf, so no class of optax is known by name here, and the states of `chain`, `MultiSteps`,
`masked`, `multi_transform` and of hand-written optimizers are read in one way.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from backtape.sampling import Region

# The texts of a path's keys: dicts, attributes and indices are told apart by nothing in a name.
Path = tuple[str, ...]

# The name of a parameter that is not in a tree but alone, and of a state that is.
ALONE, STATE = "parameter", "state"

# A colon would end the stage in `step.STAGE:PARAMETER`.
REFUSED = re.compile(r"[^A-Za-z0-9._\-+=@\[\],]")

# optax keeps the states of `multi_transform` in a dict of this name, by label.
LABELLED = "inner_states"


@dataclass
class Parameter:
    """One parameter: what of it the step does not change, and what is to be declared of it."""

    name: str
    path: Path
    array: Any  # before the step, or after it; its values may be gone
    scalars: dict[str, list[Any]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    addend_dtype: str | None = None  # of its gradient before communication
    # What stands for it where it is sampled; None where it is recorded whole.
    regions: tuple[Region, ...] | None = None
    # By stage, the sum of the squares of what this process holds of a gradient that is not recorded
    # whole; and shape, boxes held and dtype of that gradient, as they are declared.
    squares: dict[str, float] = field(default_factory=dict)
    held: dict[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the global tensor."""
        return tuple(self.array.shape)

    def refuses(self, leaf: Any, shape: tuple[int, ...]) -> str | None:
        """Why a leaf cannot be a stage of this parameter; None where it can.

        shape: the one that it must have."""
        if leaf is None:
            return "the tree that was given has no array at its path"
        if getattr(leaf, "dtype", None) == jax.dtypes.float0:
            return "it has no gradient: it is no array of floating point numbers"
        if gone(leaf):
            return (
                "its array was deleted, as the step donates its arguments: "
                "compile the step that is recorded without donate_argnums"
            )
        if tuple(np.shape(leaf)) != shape:
            return f"the array that was given has the shape {np.shape(leaf)}, not {shape}"
        return None


def gone(leaf: Any) -> bool:
    """True for a jax array whose memory the job has given away."""
    return isinstance(leaf, jax.Array) and leaf.is_deleted()


def leaves_of(tree: Any) -> list[tuple[Path, Any]]:
    """The arrays and numbers of a tree with their paths, in jax's order."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [
        (tuple(jax.tree_util.keystr((key,), simple=True) for key in path), leaf)
        for path, leaf in leaves
        if hasattr(leaf, "shape") or isinstance(leaf, (bool, int, float))
    ]


def dotted(path: Path) -> str:
    """A path as a name: joined by dots, and `_` for each character that a name cannot have."""
    return REFUSED.sub("_", ".".join(path)).lstrip(".")


def parameters_of(tree: Any) -> tuple[dict[Path, Parameter], dict[str, list[Path]]]:
    """The parameters of a tree by path, and the names that several of its leaves would have, each
    with the paths of these leaves, which are no parameters then."""
    by_name: dict[str, list[tuple[Path, Any]]] = defaultdict(list)
    for path, leaf in leaves_of(tree):
        if hasattr(leaf, "shape"):
            by_name[dotted(path) or ALONE].append((path, leaf))
    parameters, doubled = {}, {}
    for name, leaves in by_name.items():
        if len(leaves) > 1:
            doubled[name] = [path for path, _ in leaves]
        else:
            ((path, leaf),) = leaves
            parameters[path] = Parameter(name, path, leaf)
    return parameters, doubled


@dataclass
class States:
    """The leaves of an optimizer's state, each under its name."""

    tensors: dict[Path, dict[str, Any]]  # by the parameter's path
    scalars: dict[Path, dict[str, Any]]
    absent: dict[Path, dict[str, str]]  # why a leaf is no state that can be recorded
    others: dict[str, str]  # leaves that belong to no parameter, and why they are not recorded


def states_of(tree: Any, parameters: Mapping[Path, Parameter]) -> States:
    """The leaves of an optimizer's state, those of each parameter and those that it shares with
    others, as the count of its steps."""
    states = States(defaultdict(dict), defaultdict(dict), defaultdict(dict), {})
    tensors: dict[Path, list[tuple[Path, Any]]] = defaultdict(list)
    shared: list[tuple[Path, Any]] = []
    for path, leaf in leaves_of(tree):
        owner = owner_of(path, parameters)
        if owner is not None and (np.ndim(leaf) or not parameters[owner].shape):
            tensors[owner].append((path[: len(path) - len(owner)], leaf))
        elif owner is not None:
            add(states.scalars[owner], path[: len(path) - len(owner)], leaf)
        elif np.ndim(leaf) == 0 and not is_key(leaf):
            shared.append((path, leaf))
        else:
            states.others[dotted(path)] = f"{kind_of(leaf)} at the path of no parameter"
    for owner, leaves in tensors.items():
        for name, leaf in named(leaves).items():
            if fits(np.shape(leaf), parameters[owner].shape):
                states.tensors[owner][name] = leaf
            else:
                reason = f"its shape {np.shape(leaf)} is neither the parameter's nor a factor's"
                states.absent[owner][name] = reason
    share(shared, tensors, states, parameters)
    return states


def owner_of(path: Path, parameters: Mapping[Path, Parameter]) -> Path | None:
    """The longest path of a parameter with which this one ends."""
    ends = (path[first:] for first in range(len(path) + 1))
    return next((end for end in ends if end in parameters), None)


def owners_below(tensors: Mapping[Path, list[tuple[Path, Any]]]) -> dict[Path, set[Path]]:
    """For each node of the state, the parameters that have a tensor below it."""
    below: dict[Path, set[Path]] = defaultdict(set)
    for owner, leaves in tensors.items():
        for prefix, _ in leaves:
            for length in range(len(prefix) + 1):
                below[prefix[:length]].add(owner)
    return below


def share(
    scalars: Iterable[tuple[Path, Any]],
    tensors: Mapping[Path, list[tuple[Path, Any]]],
    states: States,
    parameters: Mapping[Path, Parameter],
) -> None:
    """Gives each number of the state to the parameters that it is of: those with tensors below the
    nearest node above it.

    The one that stands beside tensors, as `count` beside `mu` and `nu`, has its name. Others of
    that name, as the count of a schedule, have their path."""
    below = owners_below(tensors)
    beside = {prefix[:-1] for leaves in tensors.values() for prefix, _ in leaves}
    for path, leaf in sorted(scalars, key=lambda scalar: scalar[0][:-1] not in beside):
        for owner in owners_above(path[:-1], below, parameters):
            add(states.scalars[owner], path, leaf)


def owners_above(
    node: Path, below: Mapping[Path, set[Path]], parameters: Mapping[Path, Parameter]
) -> set[Path]:
    """The parameters below the nearest node that has some, from this one upwards; all where none
    has.

    Above a label of `multi_transform` lie the parameters of other labels: a label without tensors
    has those that no label has."""
    for length in range(len(node), -1, -1):
        above = node[:length]
        if below.get(above):
            return below[above]
        if length > 1 and above[-2] == LABELLED:
            return set(parameters) - below.get(above[:-1], set())
    return set(parameters)


def add(scalars: dict[str, Any], path: Path, leaf: Any) -> None:
    """Adds a number under its short name, or under its path where another has that. The path of one
    at the top of the state is its short name: it then starts with `state.`."""
    names = name_of(path), dotted(path), f"{STATE}.{dotted(path)}"
    scalars[next((name for name in names if name not in scalars), names[-1])] = leaf


def named(leaves: list[tuple[Path, Any]]) -> dict[str, Any]:
    """The tensors of one parameter by name: `mu`, or where two would be `trace`, `0.trace`."""
    short = [name_of(prefix) for prefix, _ in leaves]
    return {
        dotted(prefix) if short.count(name) > 1 else name: leaf
        for name, (prefix, leaf) in zip(short, leaves)
    }


def name_of(path: Path) -> str:
    """The last key of a path that is a word, without the indices of a chain."""
    words = tuple(key for key in path if not key.isdigit())
    return dotted(words[-1:] or path[-1:]) or STATE


def fits(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """True for a parameter's shape and for that of a factor of it, which lacks one dimension."""
    factors = (whole[:dim] + whole[dim + 1 :] for dim in range(len(whole)))
    return shape == whole or (len(whole) > 1 and shape in factors)


def is_key(leaf: Any) -> bool:
    """True for a key of jax's random numbers, which is no number."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def kind_of(leaf: Any) -> str:
    """What a leaf is, in a few words."""
    return f"{getattr(leaf, 'dtype', type(leaf).__name__)} of the shape {np.shape(leaf)}"


def number_of(value: Any) -> int | float | str | None:
    """A number, or an array of one element, as JSON has it: one that is not finite is a word. It
    waits for the value. None for an array that is gone, or of which this process holds nothing."""
    if value is None or gone(value):
        return None
    if isinstance(value, jax.Array):
        if not value.addressable_shards:
            return None
        with jax.transfer_guard_device_to_host("allow"):
            value = np.asarray(value.addressable_data(0))
    number = np.asarray(value).item()
    if isinstance(number, bool):
        return int(number)
    if isinstance(number, float) and not math.isfinite(number):
        return "nan" if math.isnan(number) else "inf" if number > 0 else "-inf"
    if not isinstance(number, (int, float)):
        raise TypeError(f"{kind_of(value)} is no number")
    return number


def in_json(value: Any, name: str) -> Any:
    """An option of the job as JSON has it. Raises ValueError for a function, such as a schedule."""
    if value is None or isinstance(value, (str, bool)):
        return value
    if isinstance(value, Mapping):
        return {str(key): in_json(item, str(key)) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [in_json(item, name) for item in value]
    if isinstance(value, (np.dtype, type)):
        return np.dtype(value).name
    if callable(value):
        raise ValueError(f"{name} is a function: declare the number that it gave for this step")
    if np.ndim(value):
        raise ValueError(f"{name} is {kind_of(value)}: declare a number")
    return number_of(value)
