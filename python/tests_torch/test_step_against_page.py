"""The steps of two real torch jobs on the page: which run is wrong, what differs, and every parameter of both."""

import json
import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
from pages import Page
from processes import free_port, run_ranks

import backtape

PROGRAM = Path(__file__).with_name("step_against_ranks.py")
REPLAY = os.environ.get("REPLAY") or Path(sys.executable).with_name("replay")
ONE_RANK = {
    "plain": {}, "kernels": {"model": "kernels"}, "other-lr": {"lr": 2e-3}, "no-step": {"fault": "not recorded"},
}  # fmt: skip
TWO_RANKS = {"reduced-twice": {"wrap": "ddp", "fault": "reduced twice"}}
KERNELS = "*.weight = dense_*.kernel.T\n*.bias = dense_*.b\n"
MARKS = {"equal": "✓", "rounding": "✓", "carried": "✓", "this_is_wrong": "✕", "other_is_wrong": "✕",
         "both_are_wrong": "✕", "declared": "≠", "differs": "≠"}  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    for world, jobs in ((1, ONE_RANK), (2, TWO_RANKS)):
        words = [f"{name}={json.dumps(options)}" for name, options in jobs.items()]
        run_ranks(PROGRAM, world, free_port(), directory, *words)
    return directory


class Drawn:
    """The page that `replay diff A B --report` writes, its JSON, and the tables of its sections."""

    def __init__(self, runs, one, other, mapping=None):
        page, written = runs / "out.html", runs / "report.json"
        command = [REPLAY, "diff", f"{runs / one}@0:0", f"{runs / other}@0:0", "--quiet", "--compare", "step"]
        command += ["--report", page, "--json", written]
        if mapping is not None:
            (runs / "mapping").write_text(mapping)
            command += ["--map", runs / "mapping"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        self.code, self.text, self.errors = done.returncode, " ".join(done.stdout.split()), done.stderr
        assert self.code in (0, 1, 3, 4), self.errors
        self.json = json.loads(written.read_text())
        self.step = (self.json["against"] or {}).get("step")
        self.html = page.read_text()
        # Reads all of it, so that every tag must be closed and every id stand once.
        Page(self.html)
        found = re.finditer(r'<section id="bt-([a-z-]+)".*?</section>', self.html, re.DOTALL)
        self.sections = {one[1]: one[0] for one in found}

    def tables(self, section):
        return Page(self.sections[section]).tables

    def words(self, section):
        return " ".join(unescape(re.sub(r"<[^>]*>", " ", self.sections[section])).split())


def test_the_page_says_which_run_is_wrong_in_words_numbers_and_a_map_of_both(runs):
    drawn = Drawn(runs, "plain", "reduced-twice")
    assert drawn.code == 1 and list(drawn.sections)[:3] == ["both-steps", "step", "other-step"]
    assert "against" not in drawn.sections, "there is no head that could be compared"
    for part in ("both-steps", "step", "other-step"):
        assert f'href="#bt-{part}"' in drawn.html.split("</header>")[0]
    said = drawn.words("both-steps")
    assert drawn.step["conclusion"][0].startswith("the other run is wrong at reduce: out.weight")
    for sentence in drawn.step["conclusion"]:
        assert " ".join(sentence.split()) in said
    assert "✕ reduce the other run is wrong" in said and "(reduce-sum-for-mean)" in said
    assert "1 rank, 1 microbatch" in said and "mean over data of 2" in said
    tables = drawn.tables("both-steps")
    counted = {row[0]: row[2:5] for row in tables["bt-places"][1:]}
    assert counted == {
        row["at"].replace("_", " "): [str(row[key]) for key in ("equal", "explained", "differ")]
        for row in drawn.step["stages"]
    }
    # What makes the gap of the norms is drawn with its number beside it.
    share = drawn.step["norm"]["shares"][0]
    assert f"{100 * share['share']:.1f} %" in drawn.sections["both-steps"]
    assert "out.weight at reduce of the other run" in drawn.sections["both-steps"]
    # The other run fails in its own map too; this one has one rank, and reduces nothing.
    both, this, other = (drawn.tables(part)["bt-kinds"] for part in ("both-steps", "step", "other-step"))
    rows = [{row[0]: dict(zip(table[0], row, strict=True)) for row in table[1:]} for table in (both, this, other)]
    assert [of["out.weight"].get("reduce", "–")[0] for of in rows] == ["✕", "–", "✕"], rows
    assert [of["q.weight"].get("reduce", "–")[0] for of in rows] == ["✓", "–", "✓"], rows
    assert rows[1]["out.weight"]["update"] == "✓ 1", "what this run does is right"


def test_the_table_of_both_runs_has_every_tensor_with_the_mark_and_the_number_that_the_json_has(runs):
    drawn = Drawn(runs, "plain", "reduced-twice")
    heads, *rows = drawn.tables("both-steps")["bt-parameters"]
    gravest = list(MARKS)
    held = {}
    for one in drawn.step["compared"]:
        held.setdefault((one["parameter"], one["at"].replace("_", " ")), []).append(one)
    assert len(rows) == 9 and len(held) == 9 * len(heads[2:])
    # In the order of the model.
    assert [row[0] for row in rows] == [row["name"] for row in drawn.json["algebra"]["table"] if row["elements"]]
    for row in rows:
        for at, cell in zip(heads[2:], row[2:], strict=True):
            of = held[row[0], at]
            worst = max(gravest.index(one["status"]) for one in of)
            mark, number = cell.split(" ")
            assert mark == MARKS[gravest[worst]], (row[0], at, cell)
            # Two digits are shown.
            assert any(float(number) == pytest.approx(one["difference"], rel=0.06) for one in of), (row[0], at, cell)


def test_names_of_the_other_run_are_beside_those_of_this_one_with_how_they_were_found(runs):
    for mapping, how in ((None, "by their values before the step"), (KERNELS, "by the mapping")):
        drawn = Drawn(runs, "plain", "kernels", mapping)
        assert drawn.code == 0, drawn.text
        said, (_, *rows) = drawn.words("both-steps"), drawn.tables("both-steps")["bt-parameters"]
        assert said.count(how) == len(drawn.step["found"]) > 0
        assert {row[0]: row[1] for row in rows}["out.weight"] == "dense_out.kernel.T"
        assert {row[0]: row[1] for row in rows}["norm.weight"] == "norm.weight"
        assert {cell[0] for row in rows for cell in row[2:]} == {"✓"} and "both runs take the same step" in said


def test_another_setting_is_a_line_of_a_table_and_a_run_without_a_step_has_no_section(runs):
    drawn = Drawn(runs, "plain", "other-lr")
    _, *settings = drawn.tables("both-steps")["bt-settings"]
    assert drawn.code == 4 and settings == [["lr", "0.001", "0.002", "all 9 parameters", "after"]]
    assert "≠ after the runs declare it differently" in drawn.words("both-steps")
    alone = Drawn(runs, "plain", "no-step")
    assert alone.code == 3 and "both-steps" not in alone.sections and "other-step" not in alone.sections


def test_a_notebook_shows_both_steps_and_names_in_them_are_text(runs):
    lines = KERNELS.splitlines()
    report = backtape.replay(runs / "plain", step=0, compare=["step"], against=runs / "kernels", map=lines)
    assert "The steps of both runs" not in repr(report)
    shown = report._repr_html_()
    assert "The steps of both runs" in shown and len(Page(shown).tables["bt-kinds"]) == 9 + 10 + 10 + 3
