"""jax, torch and Ray, without importing them: the one place of backtape that imports late.

Importing backtape imports none of them. It would take seconds, initialise devices that the job
wants to set up itself, and fail where one is not installed. So a module that needs a framework does
one of two things:

- it asks here whether the job has imported the framework, and does without where it has not;
- it imports the framework at its top, as `backtape.jax`, `backtape.jax_arrays`, `backtape.torch` and
  `backtape.torch_arrays` do, and is itself imported here, when the job names it or records an array
  of that framework.
"""

import functools
import importlib
import sys
from types import ModuleType
from typing import Any

# By framework: the class of its arrays, and the module of backtape that makes shards of them.
ARRAYS = {
    "torch": ("Tensor", "backtape.torch_arrays"),
    "jax": ("Array", "backtape.jax_arrays"),
}


def imported(name: str) -> ModuleType | None:
    """A module that this process has imported; None where it has not. Imports nothing."""
    return sys.modules.get(name)


def all_imported() -> list[ModuleType]:
    """The modules that this process has imported."""
    return [module for module in sys.modules.values() if isinstance(module, ModuleType)]


def used(name: str) -> ModuleType:
    """A module that the job must have imported, as it handed over something of it. Raises KeyError
    where it has not."""
    return sys.modules[name]


def framework_of(array: Any) -> str | None:
    """The framework that an array is of, "torch" or "jax"; None for any other value."""
    for name, (kind, _) in ARRAYS.items():
        framework = imported(name)
        if framework is not None and isinstance(array, getattr(framework, kind)):
            return name
    return None


@functools.cache  # asked for with every array
def arrays_of(framework: str) -> ModuleType:
    """The module of backtape that makes shards of this framework's arrays."""
    return load(ARRAYS[framework][1])


def load(name: str) -> ModuleType:
    """Imports a module that is a framework, or that imports one at its top. Raises ImportError where
    the framework is not installed."""
    return importlib.import_module(name)
