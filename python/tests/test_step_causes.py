"""docs/step-causes.md: every cause of the code's table has a section, made of lines that run.

That what stands there as printed is what a replay prints is held by tests_torch/test_step_causes.py.
"""

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "python/docs"))

import step_causes  # noqa: E402
from step_plants import PLANTS  # noqa: E402

NAMES = [told.name for told in step_causes.causes()]
SECTIONS = step_causes.old_sections()
# All of them lie in the repository.
MOST_BYTES = 400_000


def test_every_cause_of_the_code_has_a_plant_and_a_section_in_its_order():
    assert len(NAMES) > 40
    assert [name for name in PLANTS if name in NAMES] == NAMES
    assert list(SECTIONS) == list(PLANTS), "make step-causes"


@pytest.mark.parametrize("name", NAMES)
def test_a_section_has_the_lines_that_ran_and_a_screen_that_names_the_cause(name):
    plant, text = PLANTS[name], "\n".join(SECTIONS[name])
    blocks = re.findall(r"```(\w+)\n(.*?)\n```", text, re.S)
    assert [language for language, _ in blocks] == ["diff", "text"]
    assert blocks[0][1].splitlines() == step_causes.fix(plant), "make step-causes"
    assert plant.about in text and f"cause: {name}" in blocks[1][1]
    assert all(seen in text for seen in plant.threads.split(", "))


def test_the_fix_is_what_turns_the_faulty_lines_into_the_right_ones():
    for plant in PLANTS.values():
        lines = step_causes.fix(plant)
        removed = [line[1:] for line in lines if line.startswith("-")]
        added = [line[1:] for line in lines if line.startswith("+")]
        assert removed or added, plant.cause
        assert all(line in plant.wrong.splitlines() for line in removed), plant.cause
        assert all(line in plant.right.splitlines() for line in added), plant.cause


def test_the_pictures_are_small_and_each_is_of_a_cause():
    files = sorted(step_causes.PICTURES.glob("*.svg"))
    assert {path.stem for path in files} == set(PLANTS), "make step-causes"
    assert sum(path.stat().st_size for path in files) < MOST_BYTES
    for path in files:
        root, text = ElementTree.parse(path).getroot(), path.read_text()
        assert root.tag.endswith("svg") and "href" not in text and "script" not in text
        assert root.find("{*}title").text.startswith(path.stem)
