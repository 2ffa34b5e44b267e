"""The step in a report: every parameter in the JSON and in Python, and on the page."""

import json

import numpy as np
import optax
import pytest
from pages import Page
from test_step_replay import replayed, scaled_gradient
from test_step_algebra_jax import taken

import backtape

NAMES = [f"params.layer_{i}.{kind}" for i in range(2) for kind in ("bias", "kernel")]
STAGES = ["accumulate", "norm", "clip", "state", "update"]


@pytest.fixture(scope="module")
def dumped(tmp_path_factory):
    """A run in which the gradient of one layer is three times what it should be, and its report."""
    transform = optax.adam(1e-3)
    directory = tmp_path_factory.mktemp("step") / "run"
    step = scaled_gradient(taken(transform), transform)
    return directory, replayed(directory, step, optimizer={"name": "adam", "lr": 1e-3})


def test_the_json_has_every_parameter_with_all_that_is_known_of_each_stage(dumped):
    _, report = dumped
    table = report.json["algebra"]["table"]
    assert [row["name"] for row in table] == [*NAMES, "norm 0"]
    kernel = table[3]
    assert (kernel["shape"], kernel["elements"]) == ([8, 8], 64)
    fates = {fate["stage"]: fate for fate in kernel["stages"]}
    assert list(fates) == [stage for stage in STAGES if stage != "norm"]
    wrong = fates["accumulate"]
    assert (wrong["status"], wrong["ranks"], wrong["cause"]) == ("diverged", [0], "gradient-scaled")
    assert wrong["factor"] == pytest.approx(3) and wrong["error"] == pytest.approx(2)
    assert 0 < wrong["floor"] < 1e-6 and wrong["why"] and wrong["tensor"] == f"step.reduced:{NAMES[3]}"
    right = fates["clip"]
    assert right["status"] == "agreed" and right["error"] <= 6 * right["floor"] and right["seen_from"] > 0
    assert [fate["stage"] for fate in table[4]["stages"]] == ["norm"]


def test_python_gives_a_row_for_each_parameter_and_stage(dumped):
    _, report = dumped
    rows = report.parameters()
    assert len(rows) == 4 * 4 + 1 and len({tuple(row) for row in rows}) == 1
    failing = report.parameters(status="diverged")
    assert [(row["name"], row["stage"]) for row in failing] == [(name, "accumulate") for name in NAMES[2:]]
    assert all(row["over"] > 1e6 for row in failing)
    some = report.parameters("*.bias", stage="update")
    assert [row["name"] for row in some] == [NAMES[0], NAMES[2]]
    assert some[0]["cause"] is None and some[0]["status"] == "agreed"
    for wrong in ({"stage": "reduced"}, {"status": "pass"}):
        with pytest.raises(ValueError, match="is none of"):
            report.parameters(**wrong)
    assert report.algebra.table[0].stages[0].status == "agreed"


def test_without_a_step_there_are_no_rows(tmp_path):
    with backtape.Recorder(tmp_path / "run") as recorder, recorder.step(0) as tape:
        tape.record("x", np.zeros(3))
    assert backtape.replay(tmp_path / "run", step=0, compare=["step"]).parameters() == []


def test_a_notebook_shows_the_section_and_its_tables_say_what_the_json_says(dumped):
    _, report = dumped
    shown = report._repr_html_()
    page = Page(shown)
    sums = {row[0]: row[1:5] for row in page.tables["bt-sums"][1:]}
    assert sums == {
        "accumulate": ["✕", "2", "2", "0"], "norm": ["✓", "1", "0", "0"], "clip": ["✓", "4", "0", "0"],
        "state": ["✓", "4", "0", "0"], "update": ["✓", "4", "0", "0"],
    }  # fmt: skip
    heads, *rows = page.tables["bt-parameters"]
    assert heads == ["parameter", "shape", "elements", "group", *STAGES]
    marks = {"agreed": "✓", "diverged": "✕"}
    for row, told in zip(rows, report.json["algebra"]["table"], strict=True):
        wanted = {fate["stage"]: marks[fate["status"]] for fate in told["stages"]}
        assert row[0] == told["name"] and [cell[0] for cell in row[4:]] == [wanted.get(s, "–") for s in STAGES]
    assert [row[0] for row in page.tables["bt-kinds"][1:]] == [*NAMES, "norm 0"]
    assert "Cause: <strong>gradient-scaled</strong>" in shown and "To do:</strong> look at" in shown
    assert "had every sum been right" in shown


@pytest.fixture
def opened(browser, dumped, tmp_path):
    """The page of the run in a browser."""
    page = tmp_path / "out.html"
    backtape.replay(dumped[0], step=0, compare=["step"], report=page)
    browser.open(page)
    assert browser.console() == []
    return browser


def shown(browser):
    """The names that the table shows, in their order."""
    return json.loads(
        browser.run(
            "return JSON.stringify([...document.querySelectorAll('.bt-parameters tbody tr')]"
            ".filter(row => !row.hidden).map(row => row.cells[0].textContent))"
        )
    )


def chosen(browser, by, value):
    browser.run(
        "const of = document.querySelector(arguments[0]); of.value = arguments[1];"
        "of.dispatchEvent(new Event('input'))", f".bt-by-{by}", value,
    )  # fmt: skip


def test_the_table_is_filtered_by_name_stage_and_status_and_sorted(opened):
    assert shown(opened) == [*NAMES, "norm 0"]
    chosen(opened, "name", "*.bias")
    assert shown(opened) == [NAMES[0], NAMES[2]] and opened.text(".bt-count") == "2 of 5 rows"
    chosen(opened, "status", "✕")
    assert shown(opened) == [NAMES[2]]
    chosen(opened, "stage", "clip")
    assert shown(opened) == []
    opened.click(".bt-all")
    opened.click(".bt-parameters th:nth-child(5) button")
    assert set(shown(opened)[:2]) == set(NAMES[2:]), "what fails first"
    opened.click(".bt-kinds tbody tr:nth-child(2) button")
    assert shown(opened) == [NAMES[1]]


@pytest.mark.parametrize("width", [390, 768, 1280, 1920])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_no_window_is_too_narrow_for_the_step(opened, width, theme):
    opened.emulate(prefers_color_scheme=theme)
    opened.resize(width, 900)
    try:
        wide = opened.run("return document.documentElement.scrollWidth <= innerWidth")
        assert wide and opened.screenshot().startswith(b"\x89PNG")
    finally:
        opened.devtools("Emulation.clearDeviceMetricsOverride")
        opened.emulate(prefers_color_scheme="")
