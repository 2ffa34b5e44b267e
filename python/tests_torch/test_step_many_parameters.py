"""The step of a model of 413 parameters, two kinds of which are wrong: one screen of text, and a page
with all of them."""

import subprocess
import sys
from pathlib import Path

import pytest
from pages import Page
from processes import free_port, run_ranks

import backtape

PROGRAM = Path(__file__).with_name("many_parameters.py")
STAGES = ["reduce", "norm", "clip", "state", "update", "param"]
# Lines of a terminal.
SCREEN = 30


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("many")
    run_ranks(PROGRAM, 2, free_port(), directory, "one", "two")
    return directory


@pytest.fixture(scope="module")
def run(runs):
    return runs / "two"


@pytest.fixture(scope="module")
def report(run):
    return backtape.replay(run, step=1, compare=["step"])


def test_a_fault_of_one_group_of_413_parameters_is_told_on_one_screen(runs):
    text = str(backtape.replay(runs / "one", step=1, compare=["step"]))
    assert len(text.rstrip("\n").split("\n")) <= SCREEN, text
    assert "DIVERGED at reduce, the sum over ranks: layers.*.up.weight (24 parameters)" in text, text


def test_two_faults_are_told_by_the_patterns_of_their_parameters(report):
    text = str(report)
    told = " ".join(text.split())
    assert "layers.*.up.weight (24 parameters): captured = 2.0000000 x reference" in told, text
    assert "*.norm1.* and *.norm2.* (96 parameters): the parameter decays by 0.1000" in told, text
    assert "cause: reduce-sum-for-mean; look at" in told and "cause: decay-on-excluded; look at" in told
    assert "100.0 % from layers.*.up.weight (24 parameters)" in told, text
    assert "step.declared" not in told and "tensors of the step: the box is the job's own" in told, text


def test_the_table_follows_the_model_and_has_every_stage_of_every_parameter(report):
    rows = report.parameters()
    names = list(dict.fromkeys(row["name"] for row in rows))
    assert len(names) == 414 and names[:2] == ["embed.weight", "places.weight"]
    assert names[-2:] == ["head.weight", "norm 0"] and names[2].startswith("layers.0.")
    assert names.index("layers.10.scale") > names.index("layers.9.scale"), "not as words are sorted"
    wrong = {(row["stage"], row["cause"]): 0 for row in report.parameters(status="diverged")}
    for row in report.parameters(status="diverged"):
        wrong[row["stage"], row["cause"]] += 1
        assert row["ranks"] == [0, 1] and row["over"] > 10, row
    assert wrong == {("reduce", "reduce-sum-for-mean"): 24, ("update", "decay-on-excluded"): 96}
    assert len(report.parameters("layers.*", stage="clip", status="agreed")) == 24 * 17


def test_the_page_shows_which_kinds_of_parameters_fail_where(run, tmp_path, report):
    file = tmp_path / "out.html"
    backtape.replay(run, step=1, compare=["step"], report=file)
    page = Page(file.read_text())
    heads, *kinds = page.tables["bt-kinds"]
    assert heads == ["parameters", *STAGES]
    cells = {row[0]: row[1:] for row in kinds}
    # Five parameters outside of the layers, 17 kinds of them in the layers, and the norm.
    assert len(cells) == 5 + 17 + 1, list(cells)
    assert cells["layers.*.up.weight 24"] == ["✕ 24", "–", "✓ 24", "✓ 24", "✓ 24", "✓ 24"]
    assert cells["layers.*.norm1.bias 24"] == ["✓ 24", "–", "✓ 24", "✓ 24", "✕ 24", "✓ 24"]
    assert cells["norm.weight"] == ["✓ 1", "–", "✓ 1", "✓ 1", "✓ 1", "✓ 1"]
    assert cells["norm 0"] == ["–", "✓ 1", "–", "–", "–", "–"]
    _, *rows = page.tables["bt-parameters"]
    assert [row[0] for row in rows] == [row["name"] for row in report.json["algebra"]["table"]]
    sums = {row[0]: row[1:5] for row in page.tables["bt-sums"][1:]}
    assert sums["reduce"] == ["✕", "389", "24", "0"] and sums["update"] == ["✕", "317", "96", "0"]


def test_the_checks_say_where_the_copies_of_the_step_are_judged(run):
    checked = backtape.checks(run, 1)
    told = " ".join(str(checked).split())
    assert "`replay --compare step`" in told and "no box of a tensor was held by two ranks" not in told, told


def test_the_command_prints_what_python_does(run, report):
    command = [sys.executable, "-c", "from backtape.command import replay; replay()"]
    words = ["--dump", run, "--step", "1", "--compare", "step"]
    ended = subprocess.run([*command, *map(str, words)], capture_output=True, text=True, timeout=300)
    assert (ended.returncode, ended.stdout) == (1, str(report)), ended.stderr
