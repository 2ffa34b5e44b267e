"""What the replay said of each thread, beside what is right."""

from dataclasses import dataclass, field

import backtape
from step_corpus.table import Outcome, detected
from step_threads.thread import Thread


@dataclass
class Answer(Outcome):
    """What the replay said of one dump, and the parameters that the dump has."""

    names: set[str] = field(default_factory=set)

    def look(self, dump, step):
        """Reads the names of the parameters."""
        stages = [key[0].removeprefix("step.").partition(":") for key in backtape.open(dump).step(step).keys()]
        self.names = {name for stage, _, name in stages if stage not in ("declared", "")}


@dataclass
class Row:
    """A thread, and what the replay said of the job that is wrong and of the one that is mended."""

    thread: Thread
    faulty: Answer
    fixed: Answer

    @property
    def detected(self):
        return detected(self.faulty)

    @property
    def stage(self):
        return self.detected and self.faulty.stage in self.thread.stages

    @property
    def group(self):
        """Whether the first stage names the parameters that are concerned. A norm is of all parameters:
        there the words say which."""
        if not self.stage:
            return False
        concerned = self.thread.concerns(self.faulty.names)
        if self.faulty.stage == "norm":
            words = {glob.strip("*.") for glob in self.thread.group.split()}
            return all(word in self.faulty.words for word in words)
        return set(self.faulty.together) == concerned

    @property
    def factor(self):
        """Whether the factor is right, where it is one number; None where nothing is asked."""
        if self.thread.factor is None:
            return None
        told = self.faulty.factor
        right = self.stage and told is not None
        return right and abs(told - self.thread.factor) <= 1e-3 * self.thread.factor

    @property
    def cause(self):
        """`right`, `unknown` or `WRONG`; `-` where nothing was detected."""
        if not self.detected:
            return "-"
        named = set(self.faulty.causes) - {"unknown"}
        if not named:
            return "unknown" if self.thread.causes else "right"
        return "right" if named & set(self.thread.causes) else "WRONG"

    @property
    def twin(self):
        return self.fixed.verdict == "agreed"


def said(answer):
    """What was said, in short."""
    if answer.verdict == "not run" or not detected(answer):
        return f"{answer.verdict} {answer.reason}".strip()
    return f"{answer.stage} {'/'.join(answer.causes) or '-'} {answer.factor or ''}".strip()


def mark(value):
    return {None: "", True: "yes", False: "NO"}.get(value, value)


COLUMNS = ("detected", "stage", "group", "factor", "cause", "twin")


def line(row):
    """One thread, as it is judged."""
    cells = [f"{name}={mark(getattr(row, name))}" for name in COLUMNS if mark(getattr(row, name))]
    twin = "" if row.twin else f" | mended: {said(row.fixed)} {row.fixed.words}"
    words = f"{said(row.faulty)}: {row.faulty.words}{twin}"
    return f"{row.thread.case:22} {' '.join(cells):66} {words}"


def counts(rows):
    """How many of all are right, by column."""
    told = []
    for name in COLUMNS:
        values = [getattr(row, name) for row in rows if getattr(row, name) is not None]
        right = sum(value is True or value == "right" for value in values)
        told.append(f"{name} {right} of {len(values)}")
    wrong = sum(row.cause == "WRONG" for row in rows)
    unknown = sum(row.cause == "unknown" for row in rows)
    return f"{', '.join(told)}; cause unknown {unknown}, cause WRONG {wrong}"


def summary(rows):
    threads = len({row.thread.url for row in rows})
    return f"\n{len(rows)} jobs of {threads} threads: {counts(rows)}"


def exit_code(rows):
    """0 where every job ran, no cause is wrong and every twin agrees."""
    bad = [
        row
        for row in rows
        if "not run" in (row.faulty.verdict, row.fixed.verdict) or row.cause == "WRONG" or not row.twin
    ]
    return 1 if bad else 0
