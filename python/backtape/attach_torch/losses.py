"""Sees the calls of losses, whatever name the job imported them by: those of `known.py`, and those that the user
names. A library that the job has not imported is not looked for.
"""

import inspect
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from backtape import frameworks
from backtape.attach_torch import functions, inputs
from backtape.attach_torch.calls import Call, Loss, Seen, options_of
from backtape.attach_torch.rows import Unfollowed
from backtape.attach_torch.inputs import Read
from backtape.attach_torch.known import LOSSES
from backtape.step_torch.patches import Patches


@dataclass
class Watched:
    """What is watched already."""

    paths: set[str] = field(default_factory=set)  # of the losses
    inside: list[str] = field(default_factory=list)  # the losses that are being computed
    reads: list[Read] = field(default_factory=list)  # the lookups in embeddings since the last loss


def watch(
    patches: Patches, seen: Seen, named: Mapping[str, Mapping[str, str]], watched: Watched
) -> None:
    """Has `seen` called with every call of a known loss whose result takes a gradient. Called again, it adds
    those of libraries that were imported since.

    named: losses of the job's own, as "package.module:function", with the names of its arguments q, k,
        labels, bias and logits.
    """
    def told(call: Call) -> None:
        if not call.is_normaliser and call.problem is None:
            call.reads, watched.reads[:] = list(watched.reads), []
        seen(call)

    for loss in (*LOSSES, *losses_of(named)):
        *path, attribute = loss.attribute.split(".")
        owner: Any = frameworks.imported(loss.module)
        for name in path:
            owner = getattr(owner, name, None)
        function = getattr(owner, attribute, None)
        # A class that stands for a function would be none any more.
        whole = f"{loss.module}.{loss.attribute}"
        if function is None or isinstance(function, type) or whole in watched.paths:
            continue
        watched.paths.add(whole)
        observer = _observer(loss, function, told, watched.inside)
        patches.attribute(owner, attribute, observer)
        _known_to_script(patches, function, getattr(owner, attribute))
        for holder, name in _imported_by(function) if loss.is_named else ():
            patches.attribute(holder, name, observer)
    if EMBEDDING not in watched.paths:
        watched.paths.add(EMBEDDING)
        function = torch.embedding
        patches.attribute(torch, "embedding", inputs.observer(watched.reads))
        _known_to_script(patches, function, torch.embedding)
    # Where the user names losses there is nothing to guess.
    if not named and ANY not in watched.paths:
        watched.paths.add(ANY)
        patches.attribute(torch.autograd.Function, "apply", functions.observer(told, watched.inside))


EMBEDDING = "torch.embedding"
# An autograd.Function that nobody knows.
ANY = "torch.autograd.Function.apply"


def _known_to_script(patches: Patches, function: Any, replacement: Any) -> None:
    """torch.jit.script knows torch's own functions by their identity, and is to know what stands for one."""
    builtins = frameworks.imported("torch.jit._builtins")
    name = builtins._find_builtin(function) if builtins is not None else None
    if name is not None:
        builtins._register_builtin(replacement, name)
        # The replacement's identity is that of another object once it is gone.
        table = builtins._get_builtin_table()
        patches.afterwards(lambda: table.pop(id(replacement), None))


def _observer(
    loss: Loss, function: Any, seen: Seen, inside: list[str]
) -> Callable[..., Generator[None, Any, None]]:
    """Looks at the calls of one loss. inside: the losses that are being computed, so that one which is
    called by another is not taken for a loss of its own."""
    bound = _binder(loss, function)

    def observe(*args: Any, **options: Any) -> Generator[None, Any, None]:
        given = {} if inside else bound(args, options)
        if inside or not loss.applies(given):
            return
        inside.append(loss.name)
        try:
            result = yield
        finally:
            inside.pop()
        first = result[0] if isinstance(result, tuple) else result
        if isinstance(first, torch.Tensor) and first.requires_grad:
            try:
                call = loss.read(loss.name, given, first)
            except Unfollowed as error:
                call = Call(loss.name, first, first, problem=str(error))
            seen(call)

    return observe


def _binder(loss: Loss, function: Any) -> Callable[[Any, Any], dict[str, Any]]:
    """Gives the arguments of a call by their names."""
    if loss.parameters:
        names = loss.parameters.split()
        return lambda args, options: dict(zip(names, args)) | options
    signature = _signature(function)

    def bound(args: Any, options: Any) -> dict[str, Any]:
        arguments = signature.bind(*args, **options)
        arguments.apply_defaults()
        return dict(arguments.arguments)

    return bound


def _signature(function: Any) -> inspect.Signature:
    """Of a function, or of `apply` of an autograd.Function, which takes what its `forward` takes."""
    owner = getattr(function, "__self__", None)
    if not (isinstance(owner, type) and issubclass(owner, torch.autograd.Function)):
        return inspect.signature(function)
    parameters = list(inspect.signature(owner.forward).parameters.values())
    has_context = owner.setup_context is torch.autograd.Function.setup_context
    return inspect.Signature(parameters[1:] if has_context else parameters)


def _named(path: str, names: Mapping[str, str]) -> Loss:
    """A loss that the user names. Raises ValueError where the name or the arguments cannot be used."""
    module, _, attribute = path.partition(":")
    known = {"q", "k", "labels", "bias", "logits"}
    is_whole = "labels" in names and ({"q", "k"} <= names.keys() or "logits" in names)
    if not attribute or not is_whole or not names.keys() <= known:
        raise ValueError(
            f"losses= has {path!r}: {dict(names)}: the name is package.module:function, and its arguments "
            "are named as labels and either logits or q and k; bias may be added"
        )

    def read(function: str, given: dict[str, Any], result: torch.Tensor) -> Call:
        unknown = set(names.values()) - given.keys()
        if unknown:
            raise Unfollowed(f"it has no argument {', '.join(unknown)}: it has {', '.join(given)}")
        taken = {name: given[argument] for name, argument in names.items()}
        return Call(function, result=result, is_known=False, **taken, **options_of(given, set(names.values())))

    return Loss(path, module, attribute, read, is_named=True)


def losses_of(named: Mapping[str, Mapping[str, str]]) -> list[Loss]:
    """The losses that a user has named. Raises ValueError where they cannot be."""
    return [_named(path, names) for path, names in named.items()]


def _imported_by(function: Any) -> list[tuple[Any, str]]:
    """The modules that have imported a function by its name, each with the name."""
    return [
        (module, name)
        for module in list(frameworks.all_imported())
        for name, value in list(getattr(module, "__dict__", {}).items())
        if value is function
    ]
