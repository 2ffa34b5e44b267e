"""A case: one head of one public repository at one commit."""

from collections.abc import Callable
from dataclasses import dataclass, field

from foreign.drawn import IGNORED

MEAN = {"reduction": "mean", "denominator": "valid", "ignore_label": IGNORED}
ALL = {"reduction": "mean", "denominator": "all"}

CASES: dict[str, "Case"] = {}


@dataclass(frozen=True)
class Case:
    """`head(root, drawn, dtype)` runs the source below `root` and gives the tensors of the step by name."""

    id: str
    repository: str
    commit: str
    head: Callable
    # What the job's author declares.
    declared: dict
    # Where the fault of that commit may show first, and which cause is right; none: the head is right.
    stages: tuple[str, ...] = ()
    causes: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("bf16", "f32")
    ignored: bool = True
    multiple: tuple[int, int, int] = (1, 1, 1)
    what: str = ""
    # What the adapter is told of this version.
    arguments: dict = field(default_factory=dict)

    @property
    def faulty(self):
        return bool(self.stages)


def head(repository, *versions, **common):
    """Registers a head at each of its versions: (id, commit) or (id, commit, what differs)."""

    def keep(run):
        for id, commit, *more in versions:
            CASES[id] = Case(id, repository, commit, run, **(common | (more[0] if more else {})))
        return run

    return keep


