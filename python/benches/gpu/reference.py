"""The line of backtape's f64 reference on the device, forward and the backward walk: what
`replayer/benches/device.rs` prints. It stands beside the card's dgemm; beside bf16 only for scale."""

import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from . import table
from .children import objects
from .timing import Unmeasured

# T, V, D of a smaller model's head, beside the one that is asked for.
SMALLER = (8192, 32_768, 2048)


def measure(rounds: int, seed: int, shape: Sequence[int], command: Sequence[str]) -> list[dict[str, Any]]:
    """What `cargo bench --bench device` says; Unmeasured where it says nothing."""
    asked = [*command, "--rounds", str(rounds), "--seed", str(seed)]
    for sizes in (shape, SMALLER):
        asked += ["--shape", ",".join(map(str, sizes))]
    try:
        ended = subprocess.run(asked, capture_output=True, text=True)
    except OSError as error:
        raise Unmeasured(f"{command[0]} does not start: {error}") from error
    found = objects(ended.stdout)
    absent = [line["why"] for line in found if line.get("line") == "absent"]
    if absent:
        raise Unmeasured(absent[0])
    if ended.returncode or not found:
        said = [line.strip() for line in ended.stderr.splitlines() if line.strip()]
        raise Unmeasured(said[-1] if said else f"it ended with code {ended.returncode}")
    return found


# What the passes of the first shape are beside, where these were measured before in the same run.
BESIDE = ("torch, eager", "CCE", "Liger-Kernel")
BOTH = {
    "forward and walk in f64": ("forward", "backward"),
    "forward and backward of the emulated fused policy": ("fused bf16, forward", "fused bf16, backward"),
}


def lines(found: list[dict[str, Any]], outcomes: Mapping[str, table.Outcome]) -> list[str]:
    """The f64 reference and an emulated policy beside their dgemm; and how many times the bf16 steps of
    others they take."""
    told = []
    for line in found:
        if line["line"] == "card":
            told.append(f"backtape's f64 reference on {line['name']}; {line['products']}; seed {line['seed']}")
        elif line["line"] == "agreement":
            told.append(f"  {line['part']}: off by {line['worst']:.1e} of a row, {line['allowed']:.1e} allowed")
        elif line["line"] == "failed":
            told.append(table.row(f"f64 at {sizes_of(line)}", note=f"not measured: {line['why']}"))
        elif line["line"] == "pass":
            told.append(pass_row(line))
    # Of the first shape, which is that of the bf16 contenders.
    passes: dict[str, dict[str, Any]] = {}
    for line in found:
        if line["line"] == "pass":
            passes.setdefault(line["pass"], line)
    for what, names in BOTH.items():
        for other in BESIDE:
            outcome = outcomes.get(other)
            if outcome is not None and outcome.measured and set(names) <= set(passes):
                both = sum(table.spread(passes[name]["milliseconds"])[0] for name in names)
                times = both / table.spread(outcome.milliseconds)[0]
                told.append(f"  {what} take {times:.2f}x the time of {other} in bf16; medians, one after the other")
    return told


def sizes_of(line: dict[str, Any]) -> str:
    return f"T{line['tokens']} V{line['vocab']} D{line['depth']}"


def pass_row(line: dict[str, Any]) -> str:
    """One pass: its time, its rate and its share of the dgemm's."""
    median, least, most = table.spread(line["milliseconds"])
    columns = [f"{median:.2f} ms", f"({least:.1f}, {most:.1f})", f"{line['teraflops']:.2f} TF/s"]
    columns.append(f"{100 * line['of_gemm']:.1f} %")
    return table.row(f"{line['pass']} {sizes_of(line)}", *columns, table.size(line["peak_bytes"]), note="of its dgemm")
