"""Draws docs/pictures/CAUSE.svg: what each cause of the catalogue looks like in the captured tensor.

    python python/docs/pictures.py [CAUSE ...]          # or: make pictures
    python python/docs/pictures.py --missing            # those that are not there yet

Every picture is a run of the planted-fault corpus (tests/corpus), recorded and replayed: left the job
with the fault, right its fixed twin. A cell is a part of the first tensor that shows the fault,
and its colour the largest error in it, over the root mean square of what should be there: captured by
the job, against the stage recomputed in f64. The same seed draws the same picture.
"""

import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from corpus import bench  # noqa: E402
from corpus.case import PLANTS  # noqa: E402

import backtape  # noqa: E402

FOLDER = ROOT / "docs/pictures"
SEED = 20261121
# Draws that are looked at for one whose fault is clear to see and named.
DRAWS = 6

ROWS, COLUMNS, SIZE = 40, 28, 6
# Elements of a stage that is worth a picture.
FEWEST = 500
# Largest error over the root mean square of the reference, from which on a cell has this colour;
# last, what is no number.
LEVELS = [(1e-3, "#dbe7f3"), (4e-3, "#a9c7e3"), (1.6e-2, "#6d9fcb"), (6.3e-2, "#f2b35c"), (0.25, "#dd6b3a"), (1.0, "#a02020")]
NO_NUMBER = "#000000"

# Stages that are sums of another, and the tensor that holds them.
SUMS = {"accumulate": ("dk", "pre_reduce"), "reduce": ("dk", "post_reduce")}


def tensors(dump, first):
    """What was captured at a stage and what should be there, both as matrices, and the axes' names."""
    step = backtape.open(dump).step(0)
    name, when = SUMS.get(first.stage, (first.stage, None))
    held = [key for key in step.keys() if key[0] == name and key[1] == first.microbatch]
    held = [key for key in held if when is None or key[2] in (when, None)] or held
    (_, microbatch, moment) = held[0]
    captured = step.tensor(name, microbatch, when=moment, rank=first.rank).astype(np.float64)
    addend = first.rank if first.stage in ("dk", "dk_lse", "dk_label", "dbias", "accumulate") else None
    stage = step.stage(first.stage, None if first.stage in SUMS else microbatch, rank=addend)
    columns = captured.shape[-1] if captured.ndim > 1 else 1
    of_k = first.stage.startswith(("dk", "dbias")) or first.stage in SUMS
    return (captured.reshape(-1, columns), stage.reshape(captured.shape).reshape(-1, columns)), of_k


def cells(captured, reference):
    """The largest error of each cell over the reference's root mean square; NaN stays NaN."""
    scale = np.sqrt(np.nanmean(np.where(np.isfinite(reference), reference, np.nan) ** 2)) or 1.0
    error = np.abs(captured - reference) / scale
    error = np.where(np.isfinite(captured), error, np.nan)
    if error.shape[1] == 1:  # One number a token: in lines of a page.
        error = np.resize(np.append(error[:, 0], np.zeros(-len(error) % COLUMNS)), (-(-len(error) // COLUMNS), COLUMNS))
    rows, columns = min(ROWS, error.shape[0]), min(COLUMNS, error.shape[1])
    cuts = [np.linspace(0, size, parts + 1).astype(int) for size, parts in zip(error.shape, (rows, columns))]
    largest = np.full((rows, columns), np.nan)
    for i in range(rows):
        for j in range(columns):
            cell = error[cuts[0][i] : cuts[0][i + 1], cuts[1][j] : cuts[1][j + 1]]
            largest[i, j] = cell.max() if np.isfinite(cell).all() else np.nan
    return largest


def paths(largest, left, top):
    """One path a colour; neighbours in a row are one rectangle."""
    level = np.searchsorted([bound for bound, _ in LEVELS], np.nan_to_num(largest, nan=-1.0), side="right")
    level = np.where(np.isfinite(largest), level, len(LEVELS) + 1)
    found = []
    for index, colour in enumerate([*(colour for _, colour in LEVELS), NO_NUMBER], 1):
        words = []
        for i, row in enumerate(level == index):
            j = 0
            while j < len(row):
                end = j
                while end < len(row) and row[end]:
                    end += 1
                if end > j:
                    words.append(f"M{left + j * SIZE} {top + i * SIZE}h{(end - j) * SIZE}v{SIZE}h-{(end - j) * SIZE}z")
                j = max(end, j + 1)
        if words:
            found.append(f'<path fill="{colour}" d="{"".join(words)}"/>')
    return found


def svg(cause, first, of_k, pair, shapes):
    """The whole picture."""
    width, height = COLUMNS * SIZE, max(part.shape[0] for part in pair) * SIZE
    gap, top = 24, 52
    rows = ("classes" if of_k else "tokens") if shapes[1] > 1 else ("classes" if of_k else "tokens") + " in lines"
    where = f"{first.stage}, {shapes[0]} x {shapes[1]}" if shapes[1] > 1 else f"{first.stage}, {shapes[0]} values"
    where += "" if first.microbatch is None else f", microbatch {first.microbatch}"
    where += "" if first.rank is None else f", rank {first.rank}"
    text = 'font-family="sans-serif" font-size="11" fill="#333"'
    small = text.replace('"11"', '"9"')
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * width + gap + 40}" height="{top + height + 46}">',
        f"<title>{cause}: error of {where}</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="20" y="18" {text} font-weight="bold">{cause}</text>',
        f'<text x="20" y="34" {text}>{where}; {rows} from top to bottom</text>',
    ]
    for index, (title, largest) in enumerate(zip(("with the fault", "without"), pair)):
        left = 20 + index * (width + gap)
        out.append(f'<text x="{left}" y="{top - 4}" {text}>{title}</text>')
        box = f'width="{largest.shape[1] * SIZE}" height="{largest.shape[0] * SIZE}"'
        out.append(f'<rect x="{left}" y="{top}" {box} fill="#f7f7f7" stroke="#999"/>')
        out += paths(largest, left, top)
    x, y = 20, top + height + 14
    for bound, colour in [*LEVELS, (None, NO_NUMBER)]:
        label = "NaN" if bound is None else f"{bound:g}"
        out.append(f'<rect x="{x}" y="{y}" width="10" height="10" fill="{colour}"/>')
        out.append(f'<text x="{x + 13}" y="{y + 9}" {small}>{label}</text>')
        x += 48
    out.append(f'<text x="20" y="{y + 24}" {small}>largest error in a cell, over the rms of the stage, from</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def shown(report):
    """The first stage that fails and has enough elements to be a picture."""
    for stage in report.stages:
        if stage.status == "fail" and getattr(stage, "elements", 0) >= FEWEST:
            return SimpleNamespace(stage=stage.name, microbatch=stage.microbatch, rank=stage.rank)
    return None


def picture(cause, folder):
    """The picture of a cause, or why there is none."""
    last = "no draw of it diverges"
    for draw in range(DRAWS):
        made = bench.Bench([], folder, keep=True)
        _, dump = made.generate(bench.Planned(cause, draw, False, SEED))
        report = backtape.replay(dump, step=0)
        named = [found.id for found in report.causes if found.standing in ("named", "tied")]
        if report.verdict != "diverged" or cause not in named:
            last = f"draw {draw} is {report.verdict}, {', '.join(named) or 'no cause'}"
            continue
        _, twin = made.generate(bench.Planned(cause, draw, True, SEED))
        first = shown(report)
        if first is None:
            last = f"draw {draw} shows in single numbers alone"
            continue
        try:
            (faulty, of_k), (clean, _) = tensors(dump, first), tensors(twin, first)
        except (KeyError, RuntimeError, IndexError) as error:
            last = f"draw {draw}: {error}"
            continue
        pair = [cells(*faulty), cells(*clean)]
        (FOLDER / f"{cause}.svg").write_text(svg(cause, first, of_k, pair, faulty[0].shape))
        return None
    return last


def link():
    """Puts each picture below its heading in docs/causes.md, once."""
    page = ROOT / "docs/causes.md"
    lines = []
    for line in page.read_text().splitlines():
        if line.startswith("![") and "](pictures/" in line:
            if lines[-1] == "":
                lines.pop()
            continue
        lines.append(line)
        cause = line.removeprefix("### ")
        if line.startswith("### ") and (FOLDER / f"{cause}.svg").exists():
            lines += ["", f"![{cause}: the error with the fault and without](pictures/{cause}.svg)"]
    page.write_text("\n".join(lines) + "\n")


def main(causes):
    """Draws them; the exit code is 1 when some cause that was asked for has none."""
    FOLDER.mkdir(exist_ok=True)
    planted = [cause for cause in PLANTS if cause not in bench.ALONE]
    known = {path.stem.replace("_", "-") for path in (ROOT / "replayer/src/diagnose/causes").glob("*.rs")}
    missing = 0
    drawn = {path.stem for path in FOLDER.glob("*.svg")} if causes == ["--missing"] else set()
    causes = [] if causes == ["--missing"] else causes
    for cause in causes or [cause for cause in planted if cause in known - drawn]:
        with tempfile.TemporaryDirectory() as folder:
            why = picture(cause, Path(folder))
        missing += why is not None
        print(f"{cause}: {why or 'drawn'}", flush=True)
    link()
    return 1 if missing and causes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
