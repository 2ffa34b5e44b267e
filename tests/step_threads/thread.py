"""A public thread, and what the replay must say of the job that is wrong as the thread says."""

import fnmatch
from dataclasses import dataclass


@dataclass(frozen=True)
class Thread:
    """One thread; the job of the same name is in one of the modules of `jobs.py`.

    stages: those of which the report may name one as the first.
    causes: the names that are right, whether or not the catalogue has them; none where what went wrong
        has no name, so that `unknown` is the right answer.
    group: globs of the parameters that are concerned.
    factor: captured / right, where that is one number.
    step: the step that is recorded.
    """

    case: str
    url: str
    title: str
    wrong: str
    stages: tuple[str, ...]
    causes: tuple[str, ...]
    group: str
    factor: float | None = None
    world: int = 2
    step: int = 0
    framework: str = "torch"

    @property
    def source(self):
        """Repository and number, as people cite it."""
        _, _, _, owner, name, _, number = self.url.split("/")
        return f"{owner}/{name} {number}"

    def concerns(self, names):
        """Those of these parameters that are concerned."""
        globs = self.group.split()
        return {name for name in names if any(fnmatch.fnmatchcase(name, glob) for glob in globs)}


@dataclass(frozen=True)
class Elsewhere:
    """A thread that is no case here, and why."""

    source: str
    why: str
