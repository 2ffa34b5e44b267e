"""The line of the loss head: every contender in torch, XLA in a process of its own, and then the f64
reference of backtape on the device, which stands beside the card's dgemm and not beside bf16."""

import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from . import losses, table
from .card import Ceilings
from .children import Child, objects
from .head import Expected, Head, Policy, Result, Shape, check
from .losses import Bench, refused
from .timing import Contender, Unmeasured, interleaved

XLA = "XLA (jax)"
# Products over the token x class plane that a forward and a backward pass cannot do without.
PRODUCTS = 3


def write_head(path: Path, head: Head, right: Expected) -> None:
    """A head as a file that jax reads: bf16 as its bits."""
    bits = {key: getattr(head, key).view(torch.uint16).cpu().numpy() for key in ("q", "k")}
    rows = {"tokens": right.tokens.cpu().numpy(), "classes": right.classes.cpu().numpy()}
    np.savez(path, labels=head.labels.cpu().numpy(), **bits, **rows)


def read_result(path: Path, right: Expected) -> Result:
    with np.load(path) as file:
        dq, dk = torch.from_numpy(file["dq"]), torch.from_numpy(file["dk"])
        return Result(float(file["loss"]), dq, dk, right.tokens, right.classes)


def xla(bench: Bench, child: Child, folder: Path) -> Contender:
    """jax' program, once it agrees at both shapes."""
    try:
        child.ask(do="about")
        for name, head in (("small", bench.small), ("timed", bench.head)):
            right = bench.right(head, 0.0)
            losses.release(head.q.device)
            write_head(folder / f"{name}.npz", head, right)
            child.ask(do="check", head=name)
            check(read_result(folder / f"{name}-result.npz", right), right, Policy())
    except Exception as error:
        return refused(error)
    return child.turn


def start_xla(python: str | None, folder: Path, platform: str = "cuda") -> Child:
    """The program in its own environment; its memory is taken as it is needed."""
    if python is None or not shutil.which(python):
        raise Unmeasured(f"there is no environment with jax at {python or '--xla-python'}")
    command = [python, "-m", "gpu.xla", str(folder), platform]
    path = {"PYTHONPATH": str(Path(__file__).parents[1])}
    return Child(XLA, command, path | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})


def measure(
    shape: Shape,
    seed: int,
    rounds: int,
    wanted: Callable[[str], bool],
    python: str | None,
    device: str = "cuda",
) -> dict[str, table.Outcome]:
    """All bf16 contenders at one shape, in turns."""
    bench = Bench.of(shape, device, seed)
    contenders = losses.contenders(bench, wanted)
    child = None
    with tempfile.TemporaryDirectory(prefix="backtape-bench-") as kept:
        folder = Path(kept)
        if wanted(XLA):
            try:
                child = start_xla(python, folder)
                contenders[XLA] = xla(bench, child, folder)
            except Unmeasured as error:
                contenders[XLA] = refused(error)
        try:
            outcomes = interleaved(contenders, rounds)
        finally:
            if child is not None:
                child.close()
    for name, outcome in outcomes.items():
        outcome.note = losses.CONTESTANTS[name].note if name in losses.CONTESTANTS else ""
    if XLA in outcomes:
        outcomes[XLA].note = "its launch is in its time"
    return outcomes


def report(shape: Shape, outcomes: dict[str, table.Outcome], ceilings: Ceilings) -> list[str]:
    """The table; a share is that of the three products at the card's bf16 GEMM rate."""
    flop = PRODUCTS * 2.0 * shape.tokens * shape.vocab * shape.depth
    needed = None if ceilings.bf16_gemm is None else flop / ceilings.bf16_gemm / 1e9
    title = f"cross-entropy forward and backward, bf16, {shape}"
    return [title, *table.rendered(outcomes, "torch, eager", ceiling=needed, of="of the GEMM ceiling")]


def reference(rounds: int, seed: int, shape: Shape, command: Sequence[str]) -> list[dict[str, Any]]:
    """What `cargo bench --bench device` says; Unmeasured where it says nothing."""
    sizes = f"{shape.tokens},{shape.vocab},{shape.depth}"
    asked = [*command, "--rounds", str(rounds), "--seed", str(seed), "--shape", sizes]
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


def reference_lines(found: list[dict[str, Any]], eager: table.Outcome | None, shape: Shape) -> list[str]:
    """The f64 reference beside its own dgemm; and how many times the bf16 step of torch it takes."""
    lines = []
    for line in found:
        if line["line"] == "card":
            lines.append(f"backtape's f64 reference on {line['name']}; {line['products']}; seed {line['seed']}")
        elif line["line"] == "agreement":
            lines.append(f"  {line['part']}: off by {line['worst']:.1e} of a row, {line['allowed']:.1e} allowed")
        elif line["line"] == "failed":
            lines.append(table.row("reference", note=f"not measured: {line['why']}"))
        elif line["line"] == "pass":
            lines.append(pass_row(line))
    passes = {line["pass"]: line for line in found if line["line"] == "pass"}
    if eager is not None and eager.measured and {"forward", "backward"} <= set(passes):
        both = sum(table.spread(passes[name]["milliseconds"])[0] for name in ("forward", "backward"))
        times = both / table.spread(eager.milliseconds)[0]
        lines.append(f"  forward and walk in f64: {times:.1f}x the time of torch, eager in bf16 "
                     f"(medians, one after the other) at {shape}")  # fmt: skip
    return lines


def pass_row(line: dict[str, Any]) -> str:
    """One pass: its time, its rate and its share of the dgemm's."""
    median, least, most = table.spread(line["milliseconds"])
    columns = [f"{median:.2f} ms", f"({least:.1f}, {most:.1f})", f"{line['teraflops']:.2f} TF/s"]
    columns.append(f"{100 * line['of_gemm']:.1f} %")
    return table.row(f"f64 {line['pass']}", *columns, table.size(line["peak_bytes"]), note="of its dgemm")
