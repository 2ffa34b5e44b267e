"""What was measured, as a table: medians, spreads, ratios, and the reason of whoever is missing."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

# A name, then columns of this width.
NAME, COLUMN = 34, 14


@dataclass
class Outcome:
    """One contender's rounds, or why it has none.

    `milliseconds` has one number a round, of the same round as its neighbours' in their lists.
    """

    milliseconds: list[float] = field(default_factory=list)
    reason: str | None = None
    peak_bytes: int | None = None
    note: str = ""

    @property
    def measured(self) -> bool:
        return self.reason is None and bool(self.milliseconds)


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, least and most."""
    return statistics.median(values), min(values), max(values)


def ratio(of: Outcome, over: Outcome) -> tuple[float, float, float]:
    """Median, least and most of the ratios of two contenders, each within a round."""
    pairs = list(zip(of.milliseconds, over.milliseconds, strict=True))
    return spread([one / other for one, other in pairs])


def base_of(outcomes: Mapping[str, Outcome], wanted: str) -> str | None:
    """Whom the ratios are over: the one that is wanted, else the first that was measured."""
    if wanted in outcomes and outcomes[wanted].measured:
        return wanted
    return next((name for name, outcome in outcomes.items() if outcome.measured), None)


def size(count: int | None) -> str:
    """Bytes as GiB, where they are known."""
    return "" if count is None else f"{count / 2**30:.2f} GiB"


def row(name: str, *columns: str, note: str = "") -> str:
    """One line; its last column is as long as it is."""
    cells = "".join(f" {column:>{COLUMN}}" for column in columns)
    return f"  {name:<{NAME}}{cells}{'  ' + note if note else ''}".rstrip()


def rendered(
    outcomes: Mapping[str, Outcome],
    over: str,
    *,
    ceiling: float | None = None,
    of: str = "of the ceiling",
    times: bool = True,
) -> list[str]:
    """The lines of a table.

    `ceiling` is the milliseconds that the card itself would need: a share is that over the
    contender's median. `times` is off where the clock was the host's: ratios alone hold then.
    """
    base = base_of(outcomes, over)
    lines = []
    if base is None:
        lines.append("  nothing was measured")
    else:
        why = "" if base == over else f", as {over} was not measured"
        lines.append(f"  time over that of {base}{why}")
        lines.append(header(ceiling is not None, of, times))
    for name, outcome in outcomes.items():
        if outcome.measured and base is not None:
            lines.append(measured_row(name, outcome, outcomes[base], ceiling, times))
        else:
            lines.append(row(name, note=f"not measured: {outcome.reason or 'it has no rounds'}"))
    return lines


def header(shares: bool, of: str, times: bool) -> str:
    """The names of the columns."""
    columns = ["ratio", "(least, most)"]
    columns += ["device ms", "(least, most)"] if times else []
    columns += ["share"] if shares else []
    return row("", *columns, "peak memory" if times else "", note=f"share: {of}" if shares else "")


def measured_row(
    name: str, outcome: Outcome, base: Outcome, ceiling: float | None, times: bool
) -> str:
    """The line of one that was measured."""
    median, least, most = ratio(outcome, base)
    columns = [f"{median:.3f}x", f"({least:.2f}, {most:.2f})"]
    taken, fastest, slowest = spread(outcome.milliseconds)
    if times:
        columns += [f"{taken:.3f}", f"({fastest:.2f}, {slowest:.2f})"]
    if ceiling is not None:
        columns.append(f"{100 * ceiling / taken:.1f} %")
    return row(name, *columns, size(outcome.peak_bytes), note=outcome.note)
