"""The report of a replay, of the checks or of a look at the trajectory."""

import json
from types import SimpleNamespace
from typing import Any

from backtape import _native, frameworks


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
