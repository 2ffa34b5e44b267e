"""Draws docs/pictures/CAUSE.svg: what each cause of the catalogue looks like in the captured tensor.

    python python/docs/pictures.py [CAUSE ...]          # or: make pictures
    python python/docs/pictures.py --missing            # those that are not there yet

Every picture is a run of the planted-fault corpus (tests/corpus), recorded and replayed: left the job
with the fault, right its fixed twin. A cell is a part of the first tensor that shows the fault,
and its colour the largest error in it, over the root mean square of what should be there: captured by
the job, against the stage recomputed in f64. other_pictures.py has the causes that this would not show.
The same seed draws the same picture.
"""

import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from corpus import bench  # noqa: E402
from corpus.case import PLANTS  # noqa: E402

import backtape  # noqa: E402
import other_pictures as other  # noqa: E402
from drawing import cells, svg  # noqa: E402

FOLDER = ROOT / "docs/pictures"
SEED = 20261121
# Draws that are looked at for one whose fault is clear to see and named.
DRAWS = 6

# Elements of a stage that is worth a picture.
FEWEST = 500
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


def shown(report):
    """The first stage that fails and has enough elements to be a picture."""
    for stage in report.stages:
        if stage.status == "fail" and getattr(stage, "elements", 0) >= FEWEST:
            return SimpleNamespace(stage=stage.name, microbatch=stage.microbatch, rank=stage.rank)
    return None


def picture(cause, folder):
    """The picture of a cause, or why there is none."""
    last = "no draw of it diverges"
    planted = {cause: other.PLANTS.get(cause, PLANTS[cause])}
    for draw in range(DRAWS):
        made = bench.Bench([], folder, keep=True)
        with mock.patch.dict(PLANTS, planted):
            _, dump = made.generate(bench.Planned(cause, draw, False, SEED))
            _, twin = made.generate(bench.Planned(cause, draw, True, SEED))
        report = backtape.replay(dump, step=0)
        named = [found.id for found in report.causes if found.standing in ("named", "tied")]
        if report.verdict == "agreed" or cause not in named:
            last = f"draw {draw} is {report.verdict}, {', '.join(named) or 'no cause'}"
            continue
        try:
            drawn = other.DRAWN.get(cause, of_a_stage)(cause, report, dump, twin)
        except (KeyError, RuntimeError, IndexError) as error:
            last = f"draw {draw}: {error}"
            continue
        if drawn is None:
            last = f"draw {draw} shows in single numbers alone, or too faintly"
            continue
        (FOLDER / f"{cause}.svg").write_text(drawn)
        return None
    return last


def of_a_stage(cause, report, dump, twin):
    """The first stage that fails, cell by cell."""
    first = shown(report)
    if first is None:
        return None
    (faulty, of_k), (clean, _) = tensors(dump, first), tensors(twin, first)
    where, rows = described(first, of_k, faulty[0].shape)
    below, what = f"{where}; {rows} from top to bottom", "largest error in a cell, over the rms of the stage"
    return svg(cause, f"error of {where}", below, [cells(*faulty), cells(*clean)], what)


def described(first, of_k, shapes):
    """What the maps are of, and what their rows are."""
    rows = ("classes" if of_k else "tokens") if shapes[1] > 1 else ("classes" if of_k else "tokens") + " in lines"
    where = f"{first.stage}, {shapes[0]} x {shapes[1]}" if shapes[1] > 1 else f"{first.stage}, {shapes[0]} values"
    where += "" if first.microbatch is None else f", microbatch {first.microbatch}"
    where += "" if first.rank is None else f", rank {first.rank}"
    return where, rows


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
