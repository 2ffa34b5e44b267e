"""`replay --report` in a real browser: opened from disk, clicked, read by mouse and keys, and compared
with the JSON of the same run.

Without Chromium this is skipped with its reason; where CI is set that is a failure.
SCREENSHOTS=DIR keeps pictures of every state.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from browser import Browser

import backtape

# A run in such a directory must not become a tag of the page.
HOSTILE = "<img src=x onerror=document.title='owned'>"


TOKENS, VOCAB, WIDTH, MICROBATCHES = 300, 120, 16, 2


def one_microbatch(k: np.ndarray, seed: int, fault: str) -> dict[str, np.ndarray]:
    """A loss head in numpy with its gradients; `scatter`: the label part of dk is summed in bf16."""
    draw = np.random.default_rng(seed)
    q = draw.normal(size=(TOKENS, WIDTH)).astype(np.float32)
    labels = np.minimum(draw.zipf(1.5, TOKENS) - 1, VOCAB - 1).astype(np.int32)
    logits = q.astype(np.float64) @ k.T.astype(np.float64)
    lse = np.log(np.exp(logits).sum(1))
    g = 1 / (TOKENS * MICROBATCHES)
    dense = g * np.exp(logits - lse[:, None])
    narrow = ml_dtypes.bfloat16 if fault == "scatter" else np.float64
    of_labels = np.zeros((VOCAB, WIDTH), narrow)
    for token, label in enumerate(labels):
        of_labels[label] = of_labels[label] - (np.float32(g) * q[token]).astype(narrow)
    dq = dense @ k - g * k[labels]
    if fault == "nan":
        dq[7, 3] = np.nan
    found = {"q": q, "k": k, "lse": lse, "dq": dq, "dk": dense.T @ q + of_labels.astype(np.float64)}
    return {"labels": labels} | {name: values.astype(np.float32) for name, values in found.items()}


def dumped(directory: Path, fault: str) -> Path:
    """A run of one rank and two microbatches; made once."""
    path = directory / f"run-{fault}"
    if path.exists():
        return path
    k = (0.3 * np.random.default_rng(1).normal(size=(VOCAB, WIDTH))).astype(np.float32)
    parts = [one_microbatch(k, seed, fault) for seed in range(2, 2 + MICROBATCHES)]
    with backtape.Recorder(path, strict=True) as recorder, recorder.step(0) as tape:
        tape.head(
            loss="softmax_xent", path="fused", reduction="mean", microbatches=MICROBATCHES,
            microbatch_reduction="sum", dtypes={name: "f32" for name in ("logits", "lse", "dlogits", "label_scatter")},
        )  # fmt: skip
        for microbatch, tensors in enumerate(parts):
            for name, values in tensors.items():
                tape.record(name, values, microbatch=microbatch)
        dk = sum(part["dk"] for part in parts)
        tape.record("dk", dk, when="post_reduce")
        tape.record("grad_norm", np.float32(np.linalg.norm(dk.astype(np.float64))))
    return path


def replayed(dump: Path, page: Path, *more: str) -> dict:
    """Writes the page with the command; the JSON of the same run."""
    data = page.with_suffix(".json")
    words = ["--dump", dump, "--report", page, "--json", data, *more]
    command = [sys.executable, "-c", "from backtape.command import replay; replay()", *map(str, words)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode in (0, 1, 3), ended.stderr
    report = json.loads(data.read_text())
    report["text"] = ended.stdout
    return report


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Dumps, made once."""
    return tmp_path_factory.mktemp(HOSTILE)


@pytest.fixture(scope="module")
def diverged(runs):
    """The page of a run with the bf16 label scatter, and the JSON."""
    page = runs / "out.html"
    return page, replayed(dumped(runs, "scatter"), page)


def shot(browser: Browser, name: str, **how) -> bytes:
    """A picture, kept where somebody wants to look at it."""
    picture = browser.screenshot(**how)
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    if directory := os.environ.get("SCREENSHOTS"):
        (Path(directory) / f"{name}.png").write_bytes(picture)
    return picture


def stage(report: dict, name: str) -> dict:
    """One stage of the JSON."""
    return next(one for one in report["stages"] if one["name"] == name)


def status(browser: Browser, map_id: str) -> dict:
    """Indices and values under the cursor of a map, as numbers, and the line that says them."""
    found = browser.run(
        "const of = document.getElementById(arguments[0] + '-status');"
        "return {...of.dataset, words: of.textContent}", map_id,
    )  # fmt: skip
    words = found.pop("words")
    return {name: float(value) for name, value in found.items()} | {"words": words}


def map_of(browser: Browser, name: str) -> str:
    """The id of a stage's map."""
    label = f"heat map of {name}"
    return browser.run("return document.querySelector(`[aria-label='${arguments[0]}']`).id", label)


def middle(browser: Browser, selector: str) -> tuple[float, float]:
    """Where an element is in the window, once it is scrolled to."""
    return browser.run(
        "const of = document.querySelector(arguments[0]); of.scrollIntoView({block: 'center'});"
        "const box = of.getBoundingClientRect(); return [box.x + box.width / 2, box.y + box.height / 2]", selector,
    )  # fmt: skip


def test_it_opens_from_disk_asks_for_nothing_and_says_the_verdict_first(browser, diverged):
    page, report = diverged
    browser.open(page)
    # Local files are told from others by their scheme; the page itself is the only one.
    assert browser.requests() == [page.as_uri()]
    assert browser.console() == []
    sentence = " ".join(browser.text(".bt-verdict strong").split())
    assert sentence in " ".join(report["text"].split()) and sentence.startswith("DIVERGED at "), sentence
    assert browser.run("return document.title") == f"backtape: {report['dump']['run']} step 0"
    assert browser.run("return document.images.length") == 0
    # The path that the dump was read from is shown as it is.
    assert HOSTILE in browser.text(".bt-facts")
    assert page.stat().st_size < 3_000_000
    shot(browser, "light-1280x800")


def test_the_script_that_runs_is_the_one_that_its_policy_names(browser, diverged):
    browser.open(diverged[0])
    assert browser.run("return document.querySelector('.backtape').dataset.ready") == "yes"
    # What the page might be made to load or run is refused.
    browser.run(
        "const made = document.createElement('script'); made.textContent = 'window.owned = 1';"
        "document.body.append(made); document.body.append(Object.assign(new Image(), {src: 'http://a.example/x.png'}))"
    )
    assert browser.run("return window.owned") is None
    refused = browser.console()
    assert any("script-src" in line for line in refused) and any("default-src" in line for line in refused), refused


def test_the_graph_marks_the_first_divergence_and_leads_to_its_numbers(browser, diverged):
    page, report = diverged
    browser.open(page)
    first = report["first_divergence"]["stage"]
    marked = browser.run("return [...document.querySelectorAll('.bt-first')].map(of => of.parentNode.getAttribute('href'))")
    assert marked == [f"#bt-stage-{first}"]
    drawn = browser.run("return [...document.querySelectorAll('.bt-node .bt-name')].map(of => of.textContent)")
    compared = [one["name"] for one in report["stages"] if "error" in one]
    assert set(compared) <= set(drawn), (compared, drawn)
    browser.click(f".bt-node[href='#bt-stage-{first}']")
    assert browser.run("return location.hash") == f"#bt-stage-{first}"
    top = browser.run("return document.querySelector(':target').getBoundingClientRect().top")
    assert -5 <= top < 800
    card, found = browser.text(":target"), stage(report, first)
    row, column = found["worst_index"]
    for words in (f"[{row}, {column}]", f"{found['exceeding']:,}", found["reason"], found["source"]):
        assert words in card, (words, card)
    shot(browser, "stage-1280x800")


def test_every_stage_of_the_json_stands_in_the_table_with_its_numbers(browser, diverged):
    page, report = diverged
    browser.open(page)
    rows = browser.run("return [...document.querySelectorAll('.bt-stages tbody tr')].map(r => [...r.cells].map(c => c.innerText))")
    assert [row[0] for row in rows] == [one["name"] for one in report["stages"]]
    for cells, one in zip(rows, report["stages"]):
        assert one["status"] in cells[1].lower()
        if "error" in one:
            for shown, value in zip(cells[2:4], (one["error"], one["floor"])):
                assert abs(float(shown) - value) <= 0.06 * abs(value), (one["name"], shown, value)
            near = [float(cells[6]), float(cells[7])]
            for shown, value in zip(near, (one["worst_captured"], one["worst_reference"])):
                assert abs(shown - value) <= 1e-3 * abs(value), (one["name"], shown, value)


def test_the_mouse_reads_both_values_of_a_block(browser, diverged):
    page, report = diverged
    browser.open(page)
    first = report["first_divergence"]["stage"]
    here = map_of(browser, first)
    x, y = middle(browser, f"#{here} .bt-ring")
    browser.point(x, y)
    read, found = status(browser, here), stage(report, first)
    # The ring is the worst of all comparisons; the JSON's worst is of the comparison of the largest ratio.
    blocks = browser.run(
        "return [...document.querySelector('#' + arguments[0]).closest('figure').querySelectorAll('tbody tr')]"
        ".map(row => [...row.cells].map(cell => cell.innerText))", here,
    )  # fmt: skip
    assert blocks[0][0] == f"[{read['row']:.0f}, {read['column']:.0f}]"
    if len(found["failing"]) == 1:
        assert [read["row"], read["column"]] == found["worst_index"]
        assert (read["captured"], read["reference"]) == (found["worst_captured"], found["worst_reference"])
    dump = backtape.open(report["dump"]["path"]).step(0)
    assert_dumped(dump, first, read)
    assert f"[{read['row']:.0f}, {read['column']:.0f}]" in read["words"] and "σ" in read["words"]
    shot(browser, "hover-1280x800")


def assert_dumped(dump, name: str, read: dict) -> None:
    """The captured value is the one in the dump, at that index, of one of its captures."""
    at = int(read["row"]), int(read["column"])
    held = []
    for key in dump.keys():
        if key[0] != name:
            continue
        for rank in [None, *range(8)]:
            try:
                tensor = dump.tensor(name, key[1], when=key[2], rank=rank)
            except (RuntimeError, KeyError, ValueError):
                continue
            # k may lie transposed in the job.
            for values in (tensor.reshape(-1, tensor.shape[-1]), tensor.T):
                if at[0] < values.shape[0] and at[1] < values.shape[1]:
                    held.append(float(values[at]))
    assert read["captured"] in held, (name, read, held)


def test_the_keys_walk_over_a_map_and_the_line_follows(browser, diverged):
    page, report = diverged
    browser.open(page)
    here = map_of(browser, report["first_divergence"]["stage"])
    selector = f"#{here}"
    # To the first block: of its band, then of the map.
    browser.press(selector, "home", *["page up"] * 20)
    seen = [status(browser, here)]
    for key in ("right", "down", "left", "up"):
        browser.press(selector, key)
        seen.append(status(browser, here))
    places = [(of["row"], of["column"]) for of in seen]
    assert places[0] == places[4] and len(set(places[:4])) == 4, places
    assert seen[1]["column"] > seen[0]["column"] and seen[2]["row"] > seen[1]["row"]
    browser.press(selector, "w")
    worst = status(browser, here)
    row = browser.run("return document.querySelector(arguments[0] + ' .bt-ring').getAttribute('y')", selector)
    active = browser.run(
        "const of = document.querySelector(arguments[0]), cell = document.getElementById(of.getAttribute('aria-activedescendant'));"
        "return [document.activeElement === of, cell.textContent, cell.parentElement.getAttribute('aria-rowindex')]", selector,
    )  # fmt: skip
    assert active == [True, worst["words"], str(int(row) + 1)]
    width = browser.run("return document.querySelector(arguments[0] + ' svg').getBoundingClientRect().width", selector)
    browser.press(selector, "+")
    grown = browser.run("return document.querySelector(arguments[0] + ' svg').getBoundingClientRect().width", selector)
    assert grown > 1.2 * width


def test_everything_that_can_be_read_with_a_mouse_can_be_reached_with_tab(browser, diverged):
    browser.open(diverged[0])
    reached = browser.run(
        "const of = [...document.querySelectorAll('a[href], button, [tabindex=\"0\"]')].filter(e => !e.hidden);"
        "return [of.length, document.querySelectorAll('.bt-node').length, document.querySelectorAll('.bt-grid').length,"
        " of.filter(e => e.tabIndex === 0).length]"
    )
    assert reached[0] == reached[3] and reached[1] > 8 and reached[2] >= 3, reached


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_themes_follow_the_system_and_the_button_and_colours_grow_in_luminance(browser, diverged, theme):
    browser.emulate(prefers_color_scheme=theme)
    try:
        browser.open(diverged[0])
        back = "return getComputedStyle(document.querySelector('.backtape')).backgroundColor"
        own = browser.run(back)
        shot(browser, f"{theme}-theme-1280x800")
        shot(browser, f"{theme}-whole", whole=True)
        # The order of the classes shows in their luminance alone, as on grey paper.
        ramp = browser.run(
            "return [...document.querySelectorAll('.bt-legend path')].map(of => getComputedStyle(of).stroke)"
        )
        grey = [luminance(colour) for colour in ramp]
        assert len(grey) == 9
        falls = theme == "light"
        assert all((a > b) == falls and abs(a - b) > 0.01 for a, b in zip(grey, grey[1:])), grey
        for wanted in ("light", "dark", "system"):
            browser.click(".bt-theme")
            assert browser.text(".bt-theme") == f"theme: {wanted}"
            shown = browser.run(back)
            assert (shown == own) == (wanted in (theme, "system")), (wanted, shown, own)
        contrast = browser.run(
            "const of = getComputedStyle(document.querySelector('.bt-verdict strong')); return of.color"
        )
        assert abs(luminance(contrast) - luminance(own)) > 0.6
    finally:
        browser.emulate(prefers_color_scheme="")


def luminance(colour: str) -> float:
    """Relative luminance of `rgb(r, g, b)`."""
    channels = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return sum(share * c for share, c in zip((0.2126, 0.7152, 0.0722), linear))


@pytest.mark.parametrize("width", [390, 820, 1280])
def test_no_window_is_too_narrow(browser, diverged, width):
    browser.resize(width, 800)
    try:
        browser.open(diverged[0])
        of = browser.run("const of = document.documentElement; return [innerWidth, of.clientWidth, of.scrollWidth]")
        assert of[0] == width and of[2] <= of[1], of
        shot(browser, f"width-{width}", whole=True)
    finally:
        browser.devtools("Emulation.clearDeviceMetricsOverride")


def test_it_prints(browser, diverged):
    browser.emulate(prefers_color_scheme="dark")
    try:
        browser.open(diverged[0])
        paper = browser.printed()
    finally:
        browser.emulate(prefers_color_scheme="")
    assert paper.startswith(b"%PDF") and paper.count(b"/Type /Page\n") + paper.count(b"/Type /Page ") >= 2
    if directory := os.environ.get("SCREENSHOTS"):
        (Path(directory) / "printed.pdf").write_bytes(paper)


def test_two_runs_stand_beside_each_other(browser, runs, diverged):
    page = runs / "two.html"
    report = replayed(dumped(runs, "scatter"), page, "--against", str(dumped(runs, "none")))
    browser.open(page)
    assert browser.console() == []
    rows = browser.run("return [...document.querySelectorAll('.bt-pairs tbody tr')].map(r => r.cells[0].innerText)")
    assert rows == [one["stage"] for one in report["against"]["differences"]]
    assert report["against"]["dump"]["run"] in browser.text(".bt-facts")
    shot(browser, "two-runs", whole=True)


def test_values_that_are_no_numbers_are_read_as_that(browser, runs):
    page = runs / "nan.html"
    report = replayed(dumped(runs, "nan"), page)
    browser.open(page)
    assert report["verdict"] == "diverged" and browser.console() == []
    here = map_of(browser, "dq")
    assert browser.run("return document.querySelectorAll('#' + arguments[0] + ' .bt-crosses').length", here) == 1
    browser.press(f"#{here}", "w")
    read = status(browser, here)
    assert (read["row"], read["column"]) == (7, 3) and math.isnan(read["captured"]) and math.isfinite(read["reference"])
    assert "not finite" in read["words"] and "captured NaN" in read["words"]


def test_the_cause_and_the_gap_are_drawn_from_the_numbers_of_the_json(browser, diverged):
    page, report = diverged
    browser.open(page)
    assert [cause["id"] for cause in report["causes"]] == ["label-scatter-low-precision"], report["text"]
    values = "return [...document.querySelectorAll(arguments[0] + ' .bt-value')].map(of => of.textContent)"
    left = [side for one in report["causes"][0]["residuals"] for side in (one["before"], one["after"])]
    shown = [float(text.split(":")[0]) for text in browser.run(values, ".bt-cause .bt-bars")]
    assert len(left) >= 2 and all(abs(a - b) <= 0.06 * b for a, b in zip(shown, left, strict=True)), (shown, left)
    # From the norm with the reference to the norm as reported, and the steps between are the gap.
    norm = report["grad_norm"]
    steps = browser.run(values, "#bt-norm .bt-card:first-child .bt-bars")
    ends, gaps = (float(steps[0]), float(steps[-1])), [float(text.split(" ")[0]) for text in steps[1:-1]]
    assert abs(ends[0] - norm["reference"]) < 1e-6 and abs(ends[1] - norm["captured"]) < 1e-6
    assert abs(sum(gaps) - norm["gap"]) <= 1e-2 * abs(norm["gap"])


def test_python_writes_the_same_page_as_the_command(runs):
    dump, page, own = dumped(runs, "nan"), runs / "command.html", runs / "python.html"
    replayed(dump, page)
    assert backtape.replay(dump, report=own).verdict == "diverged"
    assert own.read_text() == page.read_text()
    with pytest.raises(RuntimeError, match="choose another file for --report"):
        backtape.replay(dump, report=runs / "absent" / "out.html")
