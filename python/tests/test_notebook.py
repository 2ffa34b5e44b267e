"""examples/post_mortem.ipynb, executed on two runs of a real job."""

import json
import os
import re
from pathlib import Path

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples/post_mortem.ipynb"


@pytest.fixture(scope="module")
def executed(dumps):
    """The notebook with its outputs, as Jupyter would have them."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}})
    # The kernel is a process of its own: it has this environment, not this interpreter's state.
    before, os.environ["BACKTAPE_DUMPS"] = os.environ.get("BACKTAPE_DUMPS"), str(dumps)
    try:
        return client.execute()
    finally:
        if before is None:
            del os.environ["BACKTAPE_DUMPS"]
        else:
            os.environ["BACKTAPE_DUMPS"] = before


def printed(notebook):
    outputs = (output for cell in notebook.cells for output in cell.get("outputs", []))
    return "".join(output.get("text", "") for output in outputs)


def test_it_runs_from_top_to_bottom_and_finds_what_the_command_line_finds(executed):
    text = printed(executed)
    assert "diverged at dk_label" in text, text
    assert "label-scatter-low-precision: explains 100.0 %" in text.replace("100.0%", "100.0 %"), text
    assert "agreed passed" in text, text


def test_what_it_shows_by_hand_is_the_error_that_it_explains(executed):
    text = printed(executed)
    hits = [int(found) for found in re.findall(r"label of +(\d+) tokens", text)]
    assert len(hits) == 5 and hits[0] > 50 and min(hits[:2]) > 16, text
    captured = float(re.search(r"^captured +(\S+)$", text, re.M)[1])
    emulated = float(re.search(r"^'.*' +(\S+)$", text, re.M)[1])
    assert captured > 4 * emulated, text


def test_a_report_shows_itself_as_html(executed):
    shown = [
        output["data"]["text/html"]
        for cell in executed.cells
        for output in cell.get("outputs", [])
        if output.output_type == "execute_result" and "text/html" in output["data"]
    ]
    assert len(shown) == 2
    diverged = shown[0]
    assert "dk_label" in diverged and "label-scatter-low-precision" in diverged
    assert "http://" not in diverged.replace("http://www.w3.org", "") and "<script src" not in diverged


def test_the_notebook_in_the_repository_has_no_outputs_of_somebodys_machine():
    notebook = json.loads(NOTEBOOK.read_text())
    for cell in notebook["cells"]:
        assert not cell.get("outputs") and cell.get("execution_count") is None
    nbformat.validate(nbformat.read(NOTEBOOK, as_version=4))
