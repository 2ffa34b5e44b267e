"""Outcomes as tables: what was detected, what was said, and how sure that makes one."""

from collections import Counter, defaultdict

# Confidence of every upper bound.
CONFIDENCE = 0.95


def answer(outcome):
    """What the report said of the cause: right, tied, unknown, WRONG or nothing."""
    named = {c["id"] for c in outcome.said if c["standing"] == "named"}
    tied = {c["id"] for c in outcome.said if c["standing"] == "tied"}
    unknown = any(c["standing"] == "unknown" for c in outcome.said)
    accept = [set(ids) for ids in outcome.accept]
    if outcome.fixed or outcome.kind == "clean":
        return "WRONG" if named or tied else "nothing"
    if outcome.kind == "unknown":
        return "WRONG" if named or tied else "unknown" if unknown else "nothing"
    if not named and not tied:
        return "tied" if unknown and outcome.unknown_too else "unknown" if unknown else "nothing"
    if named in accept and not tied:
        return "right"
    whole = set().union(*accept)
    if not named <= whole:
        return "WRONG"
    if tied:
        return "tied" if tied & whole else "WRONG"
    return "part" if named else "WRONG"


def detected(outcome):
    return outcome.verdict != "agreed"


def above(outcome):
    """True where the fault is clearly more than a right program under this declaration errs by."""
    return outcome.standing == "clear" and outcome.kind != "clean"


def false_alarm(outcome):
    return (outcome.fixed or outcome.kind == "clean") and detected(outcome)


def stage_right(outcome):
    return detected(outcome) and (not outcome.stages or outcome.first in outcome.stages)


def line(o):
    """One case, as it is judged."""
    said = ", ".join(f"{c['id']} ({c['standing']})" for c in o.said) or "-"
    if o.fixed or o.kind == "clean":
        note = "FALSE ALARM" if detected(o) else "ok"
    elif not detected(o):
        note = "MISSED" if above(o) else "weak, unseen" if o.standing == "weak" else "below the floor"
    else:
        note = "ok" if stage_right(o) else f"STAGE, not {'/'.join(o.stages)}"
    return (
        f"{o.case:44} {o.standing:9} {o.verdict:10} {o.first or '-':13} {note:16} {said}"
        f"  [{o.generate_s:.1f} + {o.replay_s:.1f} s]"
    )


COLUMNS = (
    "cause", "cases", "below", "weak", "seen weak", "clear", "detected", "stage", "right", "tied", "part", "unknown", "nothing",
    "WRONG", "twins", "false alarms", "s/case",
)  # fmt: skip


def rows(found):
    """A row of counts for each cause, and one of totals."""
    groups = defaultdict(list)
    for o in found:
        groups[o.cause].append(o)
    table = [counts(cause, group) for cause, group in groups.items()]
    return [*table, counts("all", found)]


def counts(name, group):
    faulty = [o for o in group if not o.fixed and o.kind not in ("clean", "checks")]
    below = [o for o in faulty if o.standing in ("below", "identical")]
    weak = [o for o in faulty if o.standing == "weak"]
    visible = [o for o in faulty if above(o)]
    clean = [o for o in group if o not in faulty]
    said = Counter(answer(o) for o in visible)
    wrong = sum(answer(o) == "WRONG" for o in group)
    seconds = sum(o.generate_s + o.replay_s for o in group) / max(len(group), 1)
    return (
        name, len(faulty), len(below), len(weak), sum(map(detected, weak)), len(visible),
        sum(map(detected, visible)),
        sum(map(stage_right, visible)), said["right"], said["tied"], said["part"], said["unknown"],
        said["nothing"], wrong, len(clean), sum(map(false_alarm, clean)), f"{seconds:.1f}",
    )  # fmt: skip


def grid(columns, lines):
    """Text columns."""
    cells = [[str(c) for c in row] for row in [columns, *lines]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    pad = lambda row: "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths)))
    return "\n".join(map(pad, cells))


def pipes(columns, lines):
    """The same in markdown."""
    rule = ["---"] + ["---:"] * (len(columns) - 1)
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [columns, rule, *lines])


def upper_bound(count, n, confidence=CONFIDENCE):
    """Clopper-Pearson: the rate at which no more than `count` of `n` are seen with probability
    1 - confidence only."""
    if count >= n:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if at_most(count, n, middle) > 1 - confidence else (low, middle)
    return high


def at_most(count, n, rate):
    term, total = (1 - rate) ** n, 0.0
    for i in range(count + 1):
        total += term
        term *= (n - i) / (i + 1) * rate / (1 - rate)
    return total


def statements(found):
    """What the counts allow to be said."""
    clean = [o for o in found if o.fixed or o.kind in ("clean", "checks")]
    faulty = [o for o in found if o not in clean]
    visible = [o for o in faulty if above(o)]
    wrong = [o for o in found if answer(o) == "WRONG"]
    alarms = [o for o in clean if false_alarm(o)]
    lines = [f"{len(found)} cases: {len(visible)} faults above the floor, {len(faulty) - len(visible)} at or below it, {len(clean)} clean"]
    for what, bad, of in (("wrong causes", wrong, found), ("false alarms", alarms, clean)):
        if of:
            bound = upper_bound(len(bad), len(of))
            lines.append(f"{len(bad)} {what} in {len(of)}: a rate of at most {bound:.2%} at {CONFIDENCE:.0%} confidence (Clopper-Pearson)")
    missed = [o for o in visible if not detected(o)]
    warned = [o for o in clean if o.warned]
    lines.append(
        f"{len(missed)} of {len(visible)} faults above the floor are not detected, {sum(bool(o.warned) for o in missed)} of them with a "
        f"warning that a stage passes only for want of a declaration; {len(warned)} of {len(clean)} clean cases have one"
    )
    return lines


def confusion(found):
    """(wanted, said) -> how often, over faults above the floor."""
    said = Counter()
    for o in found:
        if not o.fixed and above(o):
            ids = " + ".join(sorted(f"{c['id']}" + (" (tied)" if c["standing"] == "tied" else "") for c in o.said))
            said[o.cause, ids or "nothing"] += 1
    return [(wanted, what, n) for (wanted, what), n in sorted(said.items())]


def failures(found):
    """Every case that is not as it should be."""
    bad = []
    for o in found:
        clean = o.fixed or o.kind in ("clean", "checks")
        if false_alarm(o):
            bad.append((o.case, "false alarm", f"{o.verdict} at {o.first}: {o.reason}"))
        elif not clean and above(o) and not detected(o):
            worst = max(o.effect.values(), key=lambda e: e["seen"])
            note = f", but warned of {' and '.join(o.warned)}" if o.warned else ""
            bad.append((o.case, f"missed ({o.standing}){note}", f"{worst['stage']}: change {worst['change']:.1e}, rounding {worst['rounding']:.1e}, ratio {worst['ratio']:.2f}; {o.parameters}"))
        elif not clean and above(o) and not stage_right(o):
            bad.append((o.case, "stage", f"{o.first}, not {'/'.join(o.stages)}: {o.reason}"))
        if answer(o) in ("WRONG", "part"):
            bad.append((o.case, answer(o), f"{[(c['id'], c['standing']) for c in o.said]}, not {o.accept}"))
    return bad


def hidden(found):
    """The faults below the floor, and what shows that nobody could see them."""
    lines = []
    for o in found:
        if o.fixed or o.kind in ("clean", "checks") or o.standing not in ("below", "identical"):
            continue
        worst = max(o.effect.values(), key=lambda e: e["seen"], default=None)
        why = "every recorded tensor is bit-identical to the twin's"
        if worst and worst["change"]:
            why = (
                f"{worst['stage']} changes by {worst['change']:.1e}, rounding by {worst['rounding']:.1e}; its error is "
                f"{worst['ratio']:.2f} times the twin's, its energy and slope {worst['seen']:.1f} deviations off the twin's"
            )
        lines.append((o.case, why))
    return lines


def text(found):
    parts = [grid(COLUMNS, rows(found)), "\n".join(statements(found))]
    if matrix := confusion(found):
        parts.append(grid(("planted", "said", "cases"), matrix))
    if bad := failures(found):
        parts.append("failures (rerun one with --only CASE --keep DIR):\n" + "\n".join(f"  {n}  {what}: {why}" for n, what, why in bad))
    if below := hidden(found):
        parts.append("below the floor:\n" + "\n".join(f"  {name}  {why}" for name, why in below))
    return "\n\n".join(parts)


# Where the table of each part is published.
PLACES = {"jax": "causes-table.md", "develop": "causes-develop.md", "held-out": "causes-held-out.md"}


def markdown(found, arguments):
    parts = [
        "# Planted faults and what the replay says of them",
        f"`make bench-causes PART={arguments.part}`, seed {arguments.seed}, {arguments.draws} draws of every cause and their fixed twins.",
        pipes(COLUMNS, rows(found)), "\n".join(f"- {s}" for s in statements(found)),
        "## What was said for what", pipes(("planted", "said", "cases"), confusion(found)),
        "## Failures", pipes(("case", "what", "why"), failures(found)) if failures(found) else "None.",
        "## Below the floor", pipes(("case", "why nobody could see it"), hidden(found)) if hidden(found) else "None.",
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def exit_code(found):
    """1 where something was wrong that must never be."""
    return int(any(false_alarm(o) or answer(o) == "WRONG" for o in found))
