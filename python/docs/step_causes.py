"""Writes docs/step-causes.md below its introduction, and docs/pictures/step/CAUSE.svg.

    python python/docs/step_causes.py [CAUSE ...]       # or: make step-causes
    python python/docs/step_causes.py --check           # says where the page has another screen
    python python/docs/step_causes.py --words           # table and words anew, with the screens that are there

For each cause of replayer/src/algebra/causes.rs a small job in torch (step_job.py) is trained twice, with
its fault (step_plants.py) and without, and both dumps are replayed. The page shows the lines of the
job that differ, what `replay` printed, and a picture of the captured numbers. Where the fault is not named,
or the right job does not agree, that section stays as it was, and the exit code is 1. It needs torch, and
`replay` in the PATH or as $REPLAY.
"""

import argparse
import difflib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from step_plants import PLANTS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TABLE = ROOT / "replayer/src/algebra/causes.rs"
PAGE = ROOT / "docs/step-causes.md"
PICTURES = ROOT / "docs/pictures/step"
# Below this line all is made.
BEGIN = "## Causes\n"
# Seconds of all jobs of one number of ranks, or of one replay.
LONGEST = 500
# Lines of the job around those that differ.
CONTEXT = 3


@dataclass(frozen=True)
class Told:
    """What the table of the code says of a cause."""

    name: str
    meaning: str
    look: str


def causes():
    """The table of the code, in its order."""
    row = r'^    [A-Z_]+ = "(.*?)",\s+"(.*?)",\s+"(.*?)";'
    return [Told(*found) for found in re.findall(row, TABLE.read_text(), re.M | re.S)]


def train(names, directory):
    """Runs the jobs of these causes, those of one number of ranks in the same processes."""
    for name in names:
        for folder in (directory / name, directory / f"{name}-right"):
            shutil.rmtree(folder, ignore_errors=True)
    for world in sorted({PLANTS[name].ranks for name in names}):
        some = [name for name in names if PLANTS[name].ranks == world]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = lambda rank: [HERE / "step_job.py", rank, world, port, directory, *some]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("BACKTAPE_")}
        running = [
            subprocess.Popen(
                [sys.executable, *map(str, command(rank))], env=environment, text=True, stderr=subprocess.PIPE
            )
            for rank in range(world)
        ]
        try:
            said = [one.communicate(timeout=LONGEST)[1] for one in running]
        finally:
            for one in running:
                one.kill()
                one.wait()
        if broken := [text for one, text in zip(running, said) if one.returncode]:
            raise SystemExit(f"the jobs of {world} ranks ended: {broken[0]}")


def replay(dump, step):
    """Exit code, text and JSON of the replay of a dump."""
    binary = os.environ.get("REPLAY") or shutil.which("replay")
    if not binary:
        raise SystemExit("no replay in the PATH: install the package, or set REPLAY")
    told = dump.with_suffix(".json")
    command = [binary, "--dump", dump, "--step", step, "--compare", "step", "--json", told]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=LONGEST)
    return done.returncode, done.stdout + done.stderr, json.loads(told.read_text()) if told.exists() else {}


def excerpt(text, stage):
    """The lines of the first group that diverges at a stage, and what is said of grad_norm."""
    lines, kept, inside = text.splitlines(), [], False
    for line in lines:
        if not line.startswith(" "):
            is_first = line.startswith(f"{stage} ") and "FAIL on" in line and not kept
            inside = is_first or (line.startswith("grad_norm  ") and bool(kept))
        if inside:
            kept.append(line.rstrip())
    return kept


def fix(plant):
    """The right lines against the faulty ones, as a diff with the lines around."""
    before, after = plant.wrong.splitlines(), plant.right.splitlines()
    lines = difflib.unified_diff(before, after, n=CONTEXT, lineterm="")
    return ["..." if line.startswith("@@") else line for line in list(lines)[3:]]


def section(plant, printed):
    """The part of the page on one cause."""
    lines = [
        f"### {plant.cause}",
        "",
        f"![{plant.cause}: captured, and as it should be](pictures/step/{plant.cause}.svg)",
        "",
        plant.about,
        "",
        "```diff",
        *fix(plant),
        "```",
        "",
        "```text",
        *printed,
        "```",
        "",
    ]
    return lines + ([f"Seen in: {plant.threads}.", ""] if plant.threads else [])


def table():
    """All causes, each with what it is and what to look at."""
    lines = ["| cause | what the job does | what to look at |", "|---|---|---|"]
    for told in causes():
        lines.append(f"| [`{told.name}`](#{told.name}) | {told.meaning} | {told.look} |")
    return lines


def shown(name, directory):
    """The screen and the picture of one cause; or, as text, why there is none."""
    from step_drawing import Dump, picture

    plant, dumps = PLANTS[name], [directory / name, directory / f"{name}-right"]
    code, text, told = replay(dumps[0], plant.step)
    groups = (told.get("algebra") or {}).get("diverged") or []
    reading = (groups[0].get("reading") or {}) if groups else {}
    if code != 1 or reading.get("cause", "unknown") != name:
        return f"{name}: exit code {code}, {reading.get('cause')}\n{text}"
    right, clean, _ = replay(dumps[1], plant.step)
    if right != 0:
        return f"{name}: the right job has exit code {right}\n{clean}"
    first = groups[0]
    drawn = [Dump(dump, plant.step) for dump in dumps]
    rank = first["ranks"][0]
    # Of the right job: a rank with a fault may have recorded no parameter.
    size = lambda one: drawn[1].tensor(f"step.before:{one}", rank).size
    sizes = {one: size(one) for one in first["parameters"]}
    largest = max(sizes, key=sizes.get, default=None)
    where = {"stage": first["stage"], "parameter": largest, "rank": rank}
    return excerpt(text, first["stage"]), picture(plant, where, drawn)


def write(sections, pictures):
    """The page below its introduction, and the pictures."""
    written = [line for name in PLANTS for line in [*sections.get(name, []), ""]]
    head = PAGE.read_text().partition(BEGIN)[0]
    body = "\n".join([BEGIN, *table(), "", "## One by one", "", *written])
    PAGE.write_text(re.sub(r"\n{3,}", "\n\n", head + body).rstrip() + "\n")
    PICTURES.mkdir(parents=True, exist_ok=True)
    for name, drawn in pictures.items():
        (PICTURES / f"{name}.svg").write_text(drawn)


def masked(lines):
    """Lines without what differs between machines: digits of results, and how lines are broken."""
    return " ".join(re.sub(r"[-+]?\d+\.[\d,.]*(?:e[-+]?\d+)?", "#", " ".join(lines)).split())


def old_sections():
    """The sections that the page has, by cause."""
    parts = re.split(r"(?m)^### ", PAGE.read_text().partition(BEGIN)[2])
    return {part.split("\n", 1)[0]: ("### " + part).rstrip().splitlines() for part in parts[1:]}


def screen(lines):
    """What a section shows as printed."""
    begin = lines.index("```text") + 1
    return lines[begin : lines.index("```", begin)]


def main(argv):
    parser = argparse.ArgumentParser(description="The page on the causes of a step.")
    parser.add_argument("cause", nargs="*", help="only these")
    parser.add_argument("--check", action="store_true", help="compare with the page; write nothing")
    parser.add_argument("--keep", metavar="DIR", help="keep the dumps here")
    parser.add_argument("--jobs", type=int, default=2, help="replays at a time")
    parser.add_argument("--again", action="store_true", help="replay what --keep DIR holds")
    parser.add_argument("--words", action="store_true", help="write table and words, run nothing")
    arguments = parser.parse_args(argv)
    if arguments.words:
        write({name: section(PLANTS[name], screen(old)) for name, old in old_sections().items()}, {})
        return 0
    known = causes()
    if missing := [told.name for told in known if told.name not in PLANTS]:
        raise SystemExit(f"step_plants.py has no plant of {', '.join(missing)}")
    names = [told.name for told in known if not arguments.cause or told.name in arguments.cause]
    directory = Path(arguments.keep or tempfile.mkdtemp(prefix="step-causes-")).resolve()
    try:
        if not arguments.again:
            train(names, directory)
        with ThreadPoolExecutor(arguments.jobs) as pool:
            found = dict(zip(names, pool.map(lambda name: shown(name, directory), names)))
    finally:
        if not arguments.keep:
            shutil.rmtree(directory, ignore_errors=True)
    right = {name: made for name, made in found.items() if not isinstance(made, str)}
    wrong = [told for told in found.values() if isinstance(told, str)]
    sections = old_sections()
    made = {name: section(PLANTS[name], printed) for name, (printed, _) in right.items()}
    if arguments.check:
        other = [name for name in made if masked(made[name]) != masked(sections.get(name, []))]
        wrong += ["\n".join([f"{name}: the page has another screen:", *made[name]]) for name in other]
    else:
        write(sections | made, {name: drawn for name, (_, drawn) in right.items()})
    print("\n".join(wrong) or f"{len(names)} causes are named")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
