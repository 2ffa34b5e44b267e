"""The line of the loss head: every contender in torch, and XLA in a process of its own."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from . import losses, table
from .card import Ceilings
from .children import Child, search_path
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


def start_xla(python: str | None, folder: Path, platform: str) -> Child:
    """The program in its own environment; its memory is taken as it is needed."""
    if python is None or not shutil.which(python):
        raise Unmeasured(f"there is no environment with jax at {python or '--xla-python'}")
    command = [python, "-m", "gpu.xla", str(folder), platform]
    return Child(XLA, command, search_path() | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"})


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
                child = start_xla(python, folder, device)
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
