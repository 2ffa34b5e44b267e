"""docs/pictures: each is of a cause of the catalogue, stands in docs/causes.md, and can be drawn anew."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PICTURES = sorted((ROOT / "docs/pictures").glob("*.svg"))
CATALOGUE = {path.stem.replace("_", "-") for path in (ROOT / "replayer/src/diagnose/causes").glob("*.rs")}


def test_every_picture_is_of_a_cause_and_is_shown_with_it():
    assert PICTURES, "make pictures"
    text = (ROOT / "docs/causes.md").read_text()
    shown = re.findall(r"^### (\S+)\n\n!\[.*\]\(pictures/(.*)\.svg\)$", text, re.M)
    assert [name for name, _ in shown] == [picture for _, picture in shown]
    assert {path.stem for path in PICTURES} == {picture for _, picture in shown} <= CATALOGUE
    assert "pictures/" not in re.sub(r"^!\[.*\n", "", text, flags=re.M)


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_is_small_and_asks_for_nothing(path):
    root = ElementTree.parse(path).getroot()
    text = path.read_text()
    assert root.tag.endswith("svg") and path.stat().st_size < 40_000
    assert "href" not in text and "script" not in text and root.find("{*}title").text.startswith(path.stem)


def coloured(text):
    """Cells of the two halves, by how far to the right they begin."""
    starts = [int(x) for d in re.findall(r'<path fill="[^"]*" d="([^"]*)"', text) for x in re.findall(r"M(\d+) ", d)]
    return sum(x < 200 for x in starts), sum(x >= 200 for x in starts)


def test_a_picture_drawn_anew_shows_the_fault_and_a_clean_twin(tmp_path):
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'python/docs')!r}); import pictures, pathlib;"
        f"pictures.FOLDER = pathlib.Path({str(tmp_path)!r});"
        "assert pictures.picture('rank-mean-vs-sum', pathlib.Path(sys.argv[1])) is None"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr
    faulty, clean = coloured((tmp_path / "rank-mean-vs-sum.svg").read_text())
    assert faulty > 0, "the fault is to be seen"
