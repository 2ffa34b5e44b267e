"""Python runs this when it starts, in every process of `backtape run`: it has backtape attach itself once
the job has imported torch.

It imports neither torch nor backtape by itself, and runs the sitecustomize that would have run without
it. Whatever goes wrong here is one line of stderr, and the job goes on.
"""

import importlib.abc
import importlib.machinery
import os
import sys
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as Python would, and has its loader attach backtape afterwards."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                attach()

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def attach() -> None:
    """Attaches backtape to this process."""
    try:
        import backtape.torch

        backtape.torch.attach()
    except Exception as error:  # the job must not notice
        print(f"backtape run: not attached: {type(error).__name__}: {error}", file=sys.stderr)


def run_next() -> None:
    """Runs the sitecustomize that this one stands before."""
    rest = [place for place in sys.path if os.path.abspath(place or ".") != HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", rest)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


sys.meta_path.insert(0, _AfterTorch())
run_next()
