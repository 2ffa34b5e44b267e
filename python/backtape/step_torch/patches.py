"""Functions of torch that are replaced while a tape is open, and put back when it ends."""

import contextlib
import functools
import inspect
import types
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import Any

import torch

# A function that looks at a call: it takes the arguments, runs up to its one `yield` before the
# call, and gets the result there after the call. Where the call raises, its `finally` runs.
Observer = Callable[..., Generator[None, Any, None]]


class Patches:
    """Replaced functions. Each replacement calls the original exactly once, with what it was given."""

    def __init__(self, guarded: Callable[[str], AbstractContextManager[None]]) -> None:
        self._guarded = guarded
        self._undo: list[Callable[[], None]] = []
        self._closed = False

    def attribute(self, owner: Any, name: str, observer: Observer) -> None:
        """Observes calls of a function or method by the attribute of a module or class that has it, or
        that inherits it."""
        is_own = name in vars(owner)
        original = vars(owner)[name] if is_own else getattr(owner, name)
        inherited = None if is_own else inspect.getattr_static(owner, name, None)
        replacement: Any
        if isinstance(original, (classmethod, types.ClassMethodDescriptorType)):

            def of_class(called: type, *args: Any, **options: Any) -> Any:
                return original.__get__(None, called)(*args, **options)

            # The observer gets the class as the first argument.
            replacement = classmethod(self._observed(of_class, observer))
        elif isinstance(inherited, (classmethod, types.ClassMethodDescriptorType)):
            of_owner = self._observed(original, observer)

            def of_called(called: type, *args: Any, **options: Any) -> Any:
                # A class that inherits it from this one runs its own code.
                own = of_owner if called is owner else inherited.__get__(None, called)
                return own(*args, **options)

            replacement = classmethod(of_called)
        else:
            replacement = self._observed(original, observer)
        setattr(owner, name, replacement)

        def undo() -> None:
            # Somebody who replaced it later calls ours, which then only hands on.
            if vars(owner).get(name) is not replacement:
                return
            if is_own:
                setattr(owner, name, original)
            else:
                delattr(owner, name)

        self._undo.append(undo)

    def inside(self, owner: Any, name: str, cell: str, observer: Observer) -> None:
        """Observes calls of a decorated function through the variable of the decorator that holds the
        undecorated one: so those are seen too that a job makes by a name that it imported before.
        Where there is no such variable, it is the attribute as above."""
        function = vars(owner)[name]
        free = getattr(getattr(function, "__code__", None), "co_freevars", ())
        if cell not in free:
            self.attribute(owner, name, observer)
            return
        variable = function.__closure__[free.index(cell)]
        original = variable.cell_contents
        replacement = self._observed(original, observer)
        variable.cell_contents = replacement

        def undo() -> None:
            if variable.cell_contents is replacement:
                variable.cell_contents = original

        self._undo.append(undo)

    def afterwards(self, call: Callable[[], Any]) -> None:
        """Has something called when all is put back, before what was replaced last."""
        self._undo.append(call)

    def undo(self) -> None:
        """Puts everything back, the last one first."""
        self._closed = True
        while self._undo:
            self._undo.pop()()

    def _observed(self, original: Callable[..., Any], observer: Observer) -> Callable[..., Any]:
        what = getattr(original, "__name__", "call")

        @functools.wraps(original)
        def replacement(*args: Any, **options: Any) -> Any:
            # Compiled code is left as it is: to look into it would break its graph, which a job may
            # have forbidden.
            if torch.compiler.is_compiling() or self._closed:
                return original(*args, **options)
            look: Generator[None, Any, None] | None = None
            with self._guarded(what), contextlib.suppress(StopIteration):
                args, options = without_iterators(args, options)
                look = observer(*args, **options)
                next(look)
            try:
                result = original(*args, **options)
                if look is not None:
                    with self._guarded(what), contextlib.suppress(StopIteration):
                        look.send(result)
                return result
            finally:
                if look is not None:
                    with self._guarded(what):
                        look.close()

        return replacement


def without_iterators(args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments with lists in place of iterators, such as `model.parameters()`: both the observer
    and the function can go through a list."""
    return (
        tuple(list(value) if is_iterator(value) else value for value in args),
        {name: list(value) if is_iterator(value) else value for name, value in options.items()},
    )


def is_iterator(value: Any) -> bool:
    """True for what can be gone through once only."""
    return hasattr(type(value), "__next__")
