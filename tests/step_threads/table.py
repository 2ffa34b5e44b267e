"""What the replay said of each thread, beside what is right."""

import json
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import backtape
from step_corpus.table import Outcome, detected
from step_threads.thread import Thread

# What the first replay of each job said, judged by the expectations as they stood before it.
FIRST_RUN = json.loads(Path(__file__).with_name("first_run.json").read_text())


PAGE = """# Public threads, rebuilt

What `make bench-step-threads` said. {threads} public threads in which a gradient or an update was wrong are
rebuilt as {jobs} small jobs: gloo ranks in torch, or jax, on the CPU, with the mechanism that the thread
describes, and a twin without it. None of the threads' code is here. What is expected of each was written
down from its thread before its first replay (tests/step_threads/threads.py), and the table keeps what that first
replay came to. Until then it had been tried on the corpus of planted faults alone (`make bench-step-causes`).
"""

NOT_HERE = """
## Threads that are no case here
"""

NOTES = """
## What was changed after the first run

- Of Megatron-LM 7452, finding 8, the first run counts a second job: in the first one a norm took out what the sinks
  do, so that nothing was wrong in it.
- torchtune 2172 and 2436 and pytorch 160285 say what they are to be divided by, which no job could say before; of 2172
  the second name of the cause was added to the expectation then.
- optax 1170 could not be judged in the first run; its momentum is now corrected and scaled as optax does it.
- accelerate 3256 may be `param-not-in-optimizer` too, a cause that was named later.
- A stage of which nothing was judged makes a report incomplete; it was agreed.
- The replay was mended where a cause was wrong or a twin diverged, each time for all jobs of the kind (CHANGELOG.md).

## How to read it

- **stage, group, factor**: the first divergence of the report has one of the expected stages, exactly the
  parameters that are concerned, and captured / right where that is one number.
- **cause**: right, `unknown` although there is a name, or WRONG: one was named that is not what happened. Where
  what went wrong has no name, `unknown` is right.
- A job whose fault is in an optimizer that no rule is known of and none is declared for, in a gradient that comes in
  pieces, or in a number that the job itself declares cannot be detected; [step.md](step.md) says what is not seen.
"""


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
    def incomplete(self):
        """Whether the report says that something could not be judged."""
        return self.faulty.verdict == "incomplete"

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
        """Whether the mended job raises no alarm; what cannot be judged of it may leave it incomplete."""
        return self.fixed.verdict in ("agreed", "incomplete")


def said(answer):
    """What was said, in short."""
    if answer.verdict == "not run" or not detected(answer):
        return f"{answer.verdict} {answer.reason}".strip()
    factor = "" if answer.factor is None else f"x {answer.factor:.7g}"
    return f"{answer.stage} {'/'.join(answer.causes) or 'unknown'} {factor}".strip()


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


def cell(row):
    """What a row came to, in one cell of the page: what is not right of it."""
    if not row.detected:
        parts = ["incomplete" if row.incomplete else "not detected"]
    else:
        parts = [name for name in ("stage", "group", "factor") if getattr(row, name) is False]
        parts = [f"{name} not right" for name in parts]
        parts += {"right": [], "unknown": ["cause unknown"]}.get(row.cause, ["cause WRONG"])
    return ", ".join(parts + ([] if row.twin else ["twin DIVERGED"])) or "right"


def page(rows, elsewhere):
    """docs/step-threads.md."""
    of = lambda row: SimpleNamespace(thread=row.thread, incomplete=False, **FIRST_RUN[row.thread.case])
    first = [of(row) for row in rows]
    lines = [
        PAGE.format(threads=len({row.thread.url for row in rows}), jobs=len(rows)),
        f"- First run: {counts(first)}.",
        f"- Now: {counts(rows)}.",
        "",
        "| thread | what the job does | expected | first run | now | what the replay says |",
        "|---|---|---|---|---|---|",
    ]
    for row, before in zip(rows, first):
        thread = row.thread
        factor = "" if thread.factor is None else f", x {thread.factor:.4g}"
        cause = "/".join(f"`{name}`" for name in thread.causes) or "no name"
        expected = f"{'/'.join(thread.stages)}, {cause}{factor}"
        told = said(row.faulty) + (f": {row.faulty.words}" if row.faulty.words else "")
        source = f"[{thread.source}]({thread.url})"
        cells = (source, thread.wrong, expected, cell(before), cell(row), told.replace("|", "\\|"))
        lines.append(f"| {' | '.join(cells)} |")
    listed = (f"- {one.source}: {one.why}." for one in elsewhere)
    lines += [NOT_HERE, *(textwrap.fill(one, 118, subsequent_indent="  ") for one in listed), NOTES]
    return "\n".join(lines).rstrip() + "\n"


def exit_code(rows):
    """0 where every job ran, no cause is wrong and every twin agrees."""
    bad = [
        row
        for row in rows
        if "not run" in (row.faulty.verdict, row.fixed.verdict) or row.cause == "WRONG" or not row.twin
    ]
    return 1 if bad else 0
