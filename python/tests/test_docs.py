"""Every command in the docs runs: in a prepared directory, or it is in a list with the reason.

Method: each fenced `sh` block of README.md and docs/*.md is run from top to bottom in a directory
with real dumps, coordinators and jobs on loopback; of each transcript (`$ command` and what it
printed) the commands are run too, and what they print is compared but for numbers.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import TRAIN
from docs_site.pages import PAGES, Site, blocks, masked, reason_elsewhere, same

BLOCKS = blocks()
SHELL = [block for block in BLOCKS if block.language in ("sh", "bash", "shell")]
TRANSCRIPTS = [block for block in BLOCKS if block.is_transcript]

# The guide's job is the one that the fixture `dumps` has run, word for word.
TRAINED = {
    f"BACKTAPE_STEPS=0 BACKTAPE_DIR=dumps/{name} python {TRAIN} --label-gather {dtype}"
    for name, dtype in (("new", "bf16"), ("old", "f32"))
}


def page_id(page):
    return f"{page.parent.name}/{page.name}" if page.parent.name == "docs" else page.name


def test_blocks_of_commands_are_found():
    assert len(SHELL) > 8 and len(TRANSCRIPTS) > 4
    assert not [block.name for block in BLOCKS if block.language in ("bash", "shell", "console")], "call it sh"
    bare = [block.name for block in BLOCKS if block.language == "" and not block.is_transcript]
    assert not [name for name in bare], f"say what these blocks are (sh, text, python, toml, json): {bare}"


def record(directory, steps, microbatches, fault):
    """A run of docs_site/train.py."""
    environment = {"BACKTAPE_STEPS": steps, "BACKTAPE_DIR": str(directory), "BACKTAPE_STRICT": "1"}
    environment |= {"FAULT": fault, "MICROBATCHES": microbatches}
    script = Path(__file__).parent / "docs_site/train.py"
    ended = subprocess.run(
        [sys.executable, script], env=os.environ | environment, capture_output=True, text=True, timeout=400
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return directory


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """Runs by name, as the pages take them to be: one step of one microbatch, of several, several steps."""
    store = tmp_path_factory.mktemp("recorded")
    kinds = {"plain": ("0", "1"), "microbatches": ("0", "2"), "steps": ("0,1", "2")}
    faults = (("run-a", ""), ("run-b", "label-gather"))
    return {
        kind: {name: record(store / kind / name, *what, fault) for name, fault in faults}
        for kind, what in kinds.items()
    }


@pytest.fixture
def site_of(tmp_path, recorded, request):
    """Makes the directory for a page; what was started in it is ended."""
    made = []

    def runs_of(page):
        if page.name == "guide.md":
            dumps = request.getfixturevalue("dumps")
            return {"new": dumps / "new", "old": dumps / "old"}
        if page.name == "terminal.md":
            return recorded["steps"]
        one = recorded["microbatches" if page.name == "reading.md" else "plain"]
        runs = one | {"plain": one["run-a"]}
        # The first command of README.md makes the run `fused`.
        return runs if page.name == "README.md" and page.parent.name != "docs" else runs | {"fused": one["run-b"]}

    def make(page):
        made.append(Site(tmp_path / f"site-{len(made)}", runs_of(page)))
        return made[-1]

    yield make
    for site in made:
        site.stop()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_command_of_a_page_runs(page, site_of):
    mine = [block for block in SHELL if block.page == page]
    site, wrong = None, []
    for block in mine:
        for command in block.commands():
            if command in TRAINED or reason_elsewhere(command):
                continue
            site = site or site_of(page)
            if trouble := site.obey(command):
                wrong.append(f"{block.name}: {trouble}")
        if site:
            site.stop()
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", sorted({block.page for block in TRANSCRIPTS}), ids=page_id)
def test_transcripts_are_what_is_printed(page, site_of):
    site = None
    for block in (block for block in TRANSCRIPTS if block.page == page):
        for command, expected in block.transcript():
            if command in TRAINED or reason_elsewhere(command):
                continue
            site = site or site_of(page)
            given = site.local(command)
            ended = site.run(given)
            printed = ended.stdout + ended.stderr
            assert same(expected, printed), f"{block.name}: $ {given}\n{printed}\n--- masked\n{masked(printed)}\n{masked(expected)}"


def test_the_python_of_the_page_on_reading_runs(site_of):
    page = next(page for page in PAGES if page.name == "reading.md")
    program = "\n".join(line for block in BLOCKS if block.page == page and block.language == "python" for line in block.lines)
    site = site_of(page)
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=site.path, env=site.environment(), capture_output=True, text=True, timeout=400
    )
    assert ended.returncode == 0, ended.stderr
    steps, first, *_, last = ended.stdout.strip().splitlines()
    assert steps == "(0,)" and first.startswith("True [('") and last.split()[0] in ("passed", "failed", "incomplete"), ended.stdout


def test_every_link_between_the_pages_leads_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([\w./-]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
        for target in re.findall(r"(?<![\w/])docs/[\w-]+\.md", page.read_text()):
            assert (PAGES[0].parent / target).exists(), f"{page.name}: {target}"


def test_a_new_command_that_does_not_run_is_found(site_of):
    site = site_of(PAGES[0])
    assert site.obey("replay --dump dumps/run-a --no-such-option") is not None
    assert site.obey("replay verify --dump dumps/run-a") is None
    assert site.obey("replay verify --dump dumps/run-c") is not None
    assert not same("run-a # ranks", "run-b 3 ranks") and same("a 1\n...\nb 2.5e-3", "a 7\nx\nb 9")
