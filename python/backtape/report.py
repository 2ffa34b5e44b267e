"""The report of a replay, of the checks or of a look at the trajectory."""

import fnmatch
import json
import math
from types import SimpleNamespace
from typing import Any

from backtape import _native, frameworks


STAGES = ("accumulate", "reduce", "unscale", "norm", "clip", "state", "update", "param")
STATUSES = ("agreed", "diverged", "unchecked")
# What is told of a parameter at a stage.
FATE = (
    "stage", "status", "ranks", "tensor", "error", "floor", "over", "factor", "seen_from", "cause", "why",
)  # fmt: skip


def _over(fate: dict[str, Any]) -> float | None:
    """Error over what rounding explains; None where either is no number."""
    error, floor = fate["error"], fate["floor"]
    if error is None or floor is None:
        return None
    if error == 0:
        return 0.0
    return error / floor if floor else math.inf


class Report:
    """What was found: the fields of the schema as attributes, `json` as plain data, str() as text.

    Of a replay it is backtape.report/1, of checks backtape.checks/1, of a trajectory
    backtape.trajectory/1 (docs/report.md). In a notebook it shows itself.
    """

    verdict: str
    """Of a replay agreed, diverged, misdeclared, incomplete or differs; of checks passed, failed or
    incomplete; of a trajectory clear, flagged or incomplete."""
    findings: list[Any]
    """What was found, most severe first where findings have a severity."""
    not_checked: list[Any]
    """What was not looked at, and why."""

    def __init__(self, native: _native.Report) -> None:
        self._native = native
        data = native.json()
        self.json: dict[str, Any] = json.loads(data)
        fields = json.loads(data, object_hook=lambda fields: SimpleNamespace(**fields))
        self.__dict__.update(fields.__dict__)

    def __getattr__(self, name: str) -> Any:
        """A field that only some schemas have: stages, causes, grad_norm, ... Raises AttributeError,
        which names the fields that there are, for any other."""
        known = self.__dict__.get("json")
        if known is None:
            raise AttributeError(name)
        raise AttributeError(f"a {known['schema']} has no {name!r}: it has {', '.join(known)}")

    def parameters(
        self, name: str = "*", *, stage: str | None = None, status: str | None = None
    ) -> list[dict[str, Any]]:
        """What became of parameters at each stage of the step, in the order of the model: a dict for
        each parameter and stage, all with the same keys, as `pandas.DataFrame` takes them.

        Keys: name, shape, elements, optimizer and group (its place in the declared optimizers), stage,
        status, ranks on which it is that, tensor (the one furthest off), error (relative, in the
        Frobenius norm), floor (the error that rounding explains), over (error over floor), factor
        (captured over reference), seen_from (the smallest factor that would have been seen), cause, why.
        None where there is no such thing. Norms follow the parameters, as `norm 0`.

        name: a pattern of names, as `layers.*.weight`.
        stage: one of accumulate, reduce, unscale, norm, clip, state, update, param.
        status: agreed, diverged or unchecked.

        Empty where no step was recorded or asked for. Raises ValueError for a stage or a status that
        there is not.
        """
        for word, known in ((stage, STAGES), (status, STATUSES)):
            if word is not None and word not in known:
                raise ValueError(f"{word!r} is none of {', '.join(known)}")
        found = []
        for row in (self.json.get("algebra") or {}).get("table", []):
            if not fnmatch.fnmatchcase(row["name"], name):
                continue
            place = {key: row[key] for key in ("name", "shape", "elements", "optimizer", "group")}
            for fate in row["stages"]:
                if stage in (None, fate["stage"]) and status in (None, fate["status"]):
                    found.append(place | dict.fromkeys(FATE) | fate | {"over": _over(fate)})
        return found

    def __str__(self) -> str:
        return self._native.text()

    def __repr__(self) -> str:
        return f"<backtape.Report {self.json['schema']}: {self.verdict}>"

    def _repr_html_(self) -> str:
        """The report as a notebook shows it: a fragment that needs nothing from the network."""
        return self._native.html()


def shows_itself() -> bool:
    """True in IPython and its notebooks, which draw a report that is the last value of a cell. What a
    drawing needs is gathered during the comparison, so this is asked before."""
    ipython = frameworks.imported("IPython")
    return ipython is not None and ipython.get_ipython() is not None
