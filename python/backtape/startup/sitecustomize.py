"""Python runs this when it starts, in every process of `backtape run`: it has backtape attach itself once
the job has imported torch.

It imports neither torch nor backtape by itself, and runs the sitecustomize that would have run without
it. Whatever goes wrong here is one line of stderr, and the job goes on.
"""

import importlib.machinery
import importlib.util
import os
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


class AfterTorch:
    """A finder of modules that finds torch as the others do, and has its loader attach backtape afterwards. To
    look for torch without importing it changes nothing."""

    looks = False

    def find_spec(self, name, path=None, target=None):
        if name != "torch" or self.looks:
            return None
        self.looks = True
        try:
            spec = next(filter(None, (found(name, path, target) for found in self.others())), None)
        finally:
            self.looks = False
        execute = getattr(getattr(spec, "loader", None), "exec_module", None)
        if execute is None:
            return spec

        def exec_module(module):
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                attach()

        spec.loader.exec_module = exec_module
        return spec

    def others(self):
        """How the other finders look for a module."""
        finders = [finder for finder in sys.meta_path if finder is not self]
        return [finder.find_spec for finder in finders if hasattr(finder, "find_spec")]


def attach():
    """Attaches backtape to this process."""
    try:
        import backtape.torch

        backtape.torch.attach()
    except Exception as error:  # the job must not notice
        print(f"backtape run: not attached: {type(error).__name__}: {error}", file=sys.stderr)


def next_one():
    """The sitecustomize that this one stands before; None where there is none."""
    rest = [place for place in sys.path if os.path.abspath(place or ".") != HERE]
    return importlib.machinery.PathFinder.find_spec("sitecustomize", rest)


sys.meta_path.insert(0, AfterTorch())
if (spec := next_one()) is not None and spec.loader is not None:
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
