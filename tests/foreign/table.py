"""The table of what the replay said of public codes, as text and as a page of the docs."""


def summary(answers):
    ran = [a for a in answers if a.verdict != "not run"]
    faulty, clean = [a for a in ran if a.case.faulty], [a for a in ran if not a.case.faulty]
    count = lambda which, of: f"{sum(map(which, of))} of {len(of)}"
    return "\n".join([
        f"{len(ran)} runs of {len({a.case.repository for a in ran})} repositories; "
        f"{len(answers) - len(ran)} could not be run",
        f"right heads that agree: {count(lambda a: a.named, clean)}",
        f"faulty heads detected: {count(lambda a: a.detected, faulty)}, first stage right: "
        f"{count(lambda a: a.placed, faulty)}, cause named or tied: {count(lambda a: a.named, faulty)}, "
        f"wrong cause: {count(lambda a: a.wrong, ran)}",
    ])  # fmt: skip


def page(answers, asked):
    lines = [
        "# Heads of public training codes",
        "",
        f"What `python tests/foreign/run.py --sources DIR --draws {asked.draws} --seed {asked.seed} --publish` said. The",
        "repositories are got from outside and none of their code is here; an adapter of a few lines in",
        "`tests/foreign` calls each head with tensors drawn by a seed, records the step and replays it. The faults",
        "were known while the replay was written: the table shows that it holds on real code, not how often.",
        "",
        "trl's chunked head counts as right. In bf16, autograd adds the gradients of its chunks in bf16, which a",
        "replay calls `chunk-accumulator-low-precision` on those draws where the sum's bits prove it.",
        "",
        *summary(answers).splitlines(),
        "",
        "| repository | commit | case | dtype | declared | what was wrong there | verdict | first stage | cause |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for a in answers:
        declared = ", ".join(f"{name}={value}" for name, value in a.case.declared.items())
        cells = (
            a.case.repository, f"`{a.case.commit}`", a.case.id, a.dtype, declared, a.case.what or "nothing",
            a.verdict, a.stage or "none", ", ".join(a.causes) or a.note or "none",
        )  # fmt: skip
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
