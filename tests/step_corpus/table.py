"""Outcomes as a table: what was detected, where, and what the report says of the cause."""

import json
from collections import defaultdict
from dataclasses import dataclass, field

from step_corpus.faults import FAULTS

# In units of rounding: what a fault changes is seen for sure above `CLEAR`, and may be above nothing.
CLEAR = 4.0
ABOUT = {
    "develop": "rules were tuned on jobs of these ranges",
    "held-out": "other models and ranges, on which nothing was tuned",
}
# Where the fault acts, by the first stage that it may show at: what follows is of other precisions.
MEASURED = {
    "accumulate": {"gradient", "grads", "unscaled"},
    "reduce": {"gradient", "grads", "unscaled"},
    "unscale": {"gradient", "unscaled"},
    "norm": {"norm"},
    "clip": {"taken", "clipped"},
}
NO_STATE = {"gradient", "grads", "unscaled", "norm", "taken", "clipped"}
# A working copy is its master rounded, and copies are the same: there any difference counts.
EXACT = {"param"}
# Of a norm nobody has to name all parameters that enter it.
WHOLE_STAGES = {"norm"}


@dataclass
class Outcome:
    """What the replay said of one dump, beside what is right."""

    case: str
    fault: str
    fixed: bool
    job: dict
    verdict: str = ""
    reason: str = ""
    stage: str | None = None
    parameters: list[str] = field(default_factory=list)
    causes: list[str] = field(default_factory=list)
    words: str = ""
    factor: float | None = None
    expected: float | None = None  # what the factor must be
    entries: int = 0  # of the first stage
    together: list[str] = field(
        default_factory=list
    )  # parameters of all entries of the first stage
    more: list[str] = field(default_factory=list)  # causes of the other entries of the first stage
    clear: list[str] = field(default_factory=list)  # parameters that the fault changes for sure
    weak: list[str] = field(default_factory=list)  # those that it changes by little
    concerned: list[str] = field(default_factory=list)  # those that it was planted in
    standing: str = "clear"

    def read(self, done, report):
        """Takes over what a replay has written."""
        if not report.exists():
            self.verdict = f"exit {done.returncode}"
            self.reason = (done.stderr.strip().splitlines() or [""])[-1][:300]
            return
        told = json.loads(report.read_text())
        algebra = told.get("algebra") or {}
        diverged = algebra.get("diverged") or []
        quiet = {0: "agreed", 3: "incomplete"}
        self.verdict = f"diverged ({done.returncode})"
        if not diverged:
            self.verdict = quiet.get(done.returncode, self.verdict)
        if diverged:
            first = diverged[0]
            reading = first.get("reading") or {}
            self.stage, self.parameters = first.get("stage"), sorted(first.get("parameters") or [])
            cause = reading.get("cause")
            self.causes = [cause] if isinstance(cause, str) else list(cause or [])
            same = [one for one in diverged if one.get("stage") == self.stage]
            self.entries = len(same)
            self.together = sorted({name for one in same for name in one.get("parameters") or []})
            self.more = sorted(
                {str((one.get("reading") or {}).get("cause")) for one in same[1:]}
                - set(self.causes)
            )
            self.words, self.factor = str(reading.get("words", "")), first.get("factor")
        elif done.returncode:
            self.reason = (
                done.stderr.strip().splitlines() or done.stdout.strip().splitlines() or [""]
            )[-1][:300]


def add_effects(outcome, folder):
    """Adds what the fault changes: which parameters, by how much."""
    largest, concerned = defaultdict(float), set()
    stage = FAULTS[outcome.fault].stages[0]
    for path in sorted(folder.glob("effects-*.json")):
        told = json.loads(path.read_text())
        concerned |= set(told["concerned"])
        for key, effect in told["effects"].items():
            kind, _, name = key.partition(":")
            measured = kind in MEASURED[stage] if stage in MEASURED else kind not in NO_STATE
            if measured:
                largest[name] = max(largest[name], effect)
    enough = 1e-9 if stage in EXACT else CLEAR
    outcome.clear = sorted(n for n in concerned if largest.get(n, 0) >= enough)
    outcome.weak = sorted(n for n in concerned if 0 < largest.get(n, 0) < enough)
    outcome.concerned = sorted(concerned)
    most = max(largest.values(), default=0.0)
    outcome.standing = "clear" if most >= enough else "weak" if most > 0 else "identical"


def detected(o):
    return o.verdict.startswith("diverged")


def false_alarm(o):
    return o.fixed and o.verdict not in ("agreed", "incomplete", "not run")


def stage_right(o):
    return detected(o) and o.stage in FAULTS[o.fault].stages


def parameters_right(o):
    """Whether the first entry names the parameters of the fault: all that it changes, and no other."""
    if not stage_right(o):
        return False
    if o.stage in WHOLE_STAGES:
        return True
    said = set(o.parameters)
    return set(o.clear) <= said <= set(o.clear) | set(o.weak)


def together_right(o):
    """Whether all entries of the first stage together name the parameters of the fault."""
    if not stage_right(o):
        return False
    return o.stage in WHOLE_STAGES or set(o.clear) <= set(o.together) <= set(o.clear) | set(o.weak)


def factor_right(o):
    """Whether the factor is what was planted; of a fault that is no one factor nothing is asked."""
    if not stage_right(o):
        return False
    if o.expected is None:
        return True
    if o.factor is None:
        return False
    tolerance = 1e-3 if o.job["precision"] == "f32" else 3e-2
    return abs(o.factor - o.expected) <= tolerance * max(abs(o.expected), 1e-30)


def cause_right(o):
    return detected(o) and bool(set(o.causes) & set(FAULTS[o.fault].accepted))


def wrong(o):
    """A cause was named that is not what happened."""
    named = set(o.causes) - {"unknown"}
    if o.fixed:
        return bool(named)
    return bool(named) and not cause_right(o)


def line(o):
    """One case, as it is judged."""
    name = o.case + ("-fixed" if o.fixed else "")
    job = " ".join(f"{key}={value}" for key, value in o.job.items())
    if o.verdict == "not run":
        note = "NOT RUN"
    elif o.fixed:
        note = "FALSE ALARM" if false_alarm(o) else "ok"
    elif not detected(o):
        note = "MISSED" if o.standing == "clear" else o.standing
    else:
        faults = [
            "" if stage_right(o) else f"STAGE not {'/'.join(FAULTS[o.fault].stages)}",
            ""
            if parameters_right(o) or not stage_right(o)
            else "split"
            if together_right(o)
            else "PARAMETERS",
            ""
            if factor_right(o) or not stage_right(o)
            else f"FACTOR {o.factor} not {o.expected:.4g}",
            f"ALSO {'/'.join(o.more)}"
            if set(o.more) - {"None", "unknown", *FAULTS[o.fault].accepted}
            else "",
            "WRONG" if wrong(o) else "" if cause_right(o) else "no cause",
        ]
        note = ", ".join(filter(None, faults)) or "ok"
    said = f"{o.stage or '-'} {'/'.join(map(str, o.causes)) or '-'} {o.reason}".strip()
    return f"{note:28} {name:40} {o.verdict:13} {said}   [{job}]"


COLUMNS = (
    "fault",
    "cases",
    "weak",
    "detected",
    "stage",
    "parameters",
    "together",
    "factor",
    "cause",
    "no cause",
    "WRONG",
    "twins",
    "false alarms",
    "not run",
)


def counts(name, outcomes):
    ran = [o for o in outcomes if o.verdict != "not run"]
    faulty = [o for o in ran if not o.fixed]
    clear = [o for o in faulty if o.standing == "clear"]
    twins = [o for o in ran if o.fixed]
    count = lambda which, of: sum(map(which, of))
    named = count(cause_right, clear)
    return (
        name,
        len(clear),
        len(faulty) - len(clear),
        count(detected, clear),
        count(stage_right, clear),
        count(parameters_right, clear),
        count(together_right, clear),
        count(factor_right, clear),
        named,
        count(detected, clear) - named - count(wrong, clear),
        count(wrong, ran),
        len(twins),
        count(false_alarm, twins),
        len({o.case for o in outcomes if o.verdict == "not run"}),
    )


def rows(outcomes):
    groups = defaultdict(list)
    for outcome in outcomes:
        groups[outcome.fault].append(outcome)
    order = [name for name in FAULTS if name in groups]
    return [*(counts(name, groups[name]) for name in order), counts("all", outcomes)]


def text(outcomes, arguments):
    """The table, and what its columns are."""
    cells = [[str(cell) for cell in row] for row in [COLUMNS, *rows(outcomes)]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(COLUMNS))]
    pad = lambda row: "  ".join(
        c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))
    )
    return "\n".join(
        [
            "",
            f"{arguments.framework}, part {arguments.part}, seed {arguments.seed}; {ABOUT[arguments.part]}",
            *map(pad, cells),
            "",
            f"cases: those where the fault changes a tensor by {CLEAR:g} roundings or more; all columns",
            "up to `no cause` are of them. parameters: the first entry of the report has exactly those",
            "that the fault changes; together: all entries of that stage have. factor: it is what was",
            "planted, where that is one number. WRONG: a cause was named that is not what happened.",
        ]
    )


def exit_code(outcomes):
    """0 where nothing clear was missed, no cause is wrong and no twin gave an alarm."""
    bad = [
        o
        for o in outcomes
        if o.verdict == "not run"
        or false_alarm(o)
        or wrong(o)
        or (not o.fixed and o.standing == "clear" and not detected(o))
    ]
    return 1 if bad else 0
