"""What an attachment says when the job ends: one line."""

import os
from typing import Any


def said(summary: Any, last: int, hidden: str) -> str:
    """What was recorded, and what to do next. last: the job's last step; hidden: which steps are not seen."""
    steps = [*summary.steps_committed, *summary.steps_partial]
    if not steps:
        return f"recorded no step: none that is asked for was seen to begin, up to step {last} ({hidden})"
    state = "committed" if not summary.steps_partial else "not committed"
    named = ", ".join(map(str, sorted(steps)))
    size = summary.bytes / 2**20
    text = f"recorded step {named}: {summary.shards} shards of this rank, {size:.1f} MiB, {state}."
    if summary.omissions:
        more = len(summary.omissions) - 1
        text += f" Left out: {summary.omissions[0]}{f', and {more} more' if more else ''}."
    place, attempt = summary.directory, ""
    if summary.attempt:
        place, attempt = place.parent, f" --attempt {summary.attempt}"
    return f"{text} Next: replay --dump {_near(str(place))}{attempt} --step {min(steps)}"


def _near(directory: str) -> str:
    """A directory as one would type it here."""
    here = os.path.relpath(directory)
    return directory if here.startswith("..") else here
