"""Writes what is said of the options of `tape.head`: `python python/docs/options.py` after a change of them.

They stand once, in src/head/options.rs. From there come their types (python/backtape/options.py), the
docstring of `Tape.head`, and the two tables of docs/heads.md. A test keeps all of them equal to what
this makes. It needs the package as it is built from the source (`make .venv/.installed-dev`).
"""

import re
import textwrap
from pathlib import Path

from backtape._native import head_options

ROOT = Path(__file__).resolve().parents[2]
TYPES = ROOT / "python/backtape/options.py"
TAPE = ROOT / "python/backtape/tape.py"
HEADS = ROOT / "docs/heads.md"
WIDTH = 100

TYPES_HEAD = '''\
"""The options of `tape.head`, as types: made by python/docs/options.py, change them in src/head/options.rs."""

from typing import Any, Literal, TypedDict

__all__ = ["GrpoOptions", "HeadOptions"]
'''


# Types beside words, and how the docs call them.
NAMED = [
    ("int", "number"), ("float", "number"), ("str", "a name"), ("dict[str, Any]", "{...}"), ("dict[str, int]", "{...}"),
    ("GrpoOptions", "{...}"),
]  # fmt: skip


def needed(wanted):
    """A sentence on what a value must be; nothing where the type says all."""
    return f" Needed: {wanted}." if wanted else ""


def typed(name, about, options):
    """A TypedDict: each option with its type, default and meaning."""
    lines = [f"class {name}(TypedDict, total=False):", f'    """{about}"""']
    for option, kind, default, meaning, wanted in options:
        told = f'"""Default: {default}. {meaning}{needed(wanted)}"""'
        lines += ["", f"    {option}: {kind}"]
        lines += textwrap.wrap(told, WIDTH, initial_indent="    ", subsequent_indent="    ", break_on_hyphens=False)
    return "\n".join(lines) + "\n"


def types():
    """The text of python/backtape/options.py."""
    head, grpo = head_options()
    parts = [
        TYPES_HEAD,
        typed("GrpoOptions", "The options of a policy loss: `tape.head(loss=\"grpo\", grpo=...)`.", grpo),
        typed("HeadOptions", "The options of `tape.head`.", head),
    ]
    return "\n\n".join(parts)


def choices(kind, default):
    """What an option may be, the default first: `"mean" | "sum"`, `None | number`."""
    words = re.findall(r'"[^"]*"', kind)
    others = {part.strip() for part in re.sub(r"Literal\[.*?\]", "", kind).split("|")}
    named = [said for part, said in NAMED if part in others and default in ("None", '"valid"', '"fused"', '"global"')]
    flags = {"True": ["False"], "False": ["True"]}.get(default, [])
    return list(dict.fromkeys([default, *words, *named, *flags]))


def listed():
    """The lines of `Tape.head`'s docstring that list the options."""
    head, _ = head_options()
    texts = [f"{name}={' | '.join(choices(kind, default))}" for name, kind, default, *_ in head]
    return textwrap.fill(
        ", ".join(text.replace(" ", "\0") for text in texts), WIDTH, initial_indent=" " * 12, subsequent_indent=" " * 12,
        break_long_words=False, break_on_hyphens=False,
    ).replace("\0", " ")  # fmt: skip


def table(options):
    """A table of docs/heads.md."""
    rows = ["| option | default | or | meaning |", "|---|---|---|---|"]
    placeholders = {said for _, said in NAMED}
    shown = lambda choice: f"*{choice}*" if choice in placeholders else f"`{choice}`"
    for name, kind, default, meaning, wanted in options:
        others = ", ".join(shown(choice) for choice in choices(kind, default)[1:])
        rows.append(f"| `{name}` | `{default}` | {others} | {meaning}{needed(wanted)} |")
    return "\n".join(rows)


def between(text, start, end, middle):
    """The text with what stands between two marks replaced."""
    before, rest = text.split(start, 1)
    _, after = rest.split(end, 1)
    return f"{before}{start}{middle}{end}{after}"


def pages():
    """Every file that tells of the options, with its text."""
    head, grpo = head_options()
    tape = between(
        TAPE.read_text(), "the first of several.\n\n", "\n\n        docs/heads.md has the formula", listed()
    )
    heads = HEADS.read_text()
    for mark, options in (("options", head), ("grpo options", grpo)):
        heads = between(heads, f"<!-- {mark} -->\n", f"\n<!-- end of {mark} -->", table(options))
    return {TYPES: types(), TAPE: tape, HEADS: heads}


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)
