"""What the card reaches in this run: copies, reads and products. Ceilings, measured, not from a data
sheet: a share of them says how much a better kernel could still gain."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from .table import row, spread
from .timing import between_events

# Large enough that a launch is nothing, and far beyond any cache.
BYTES = 1 << 30
# Rows and columns of the square product in bf16.
SQUARE = 8192


@dataclass
class Ceilings:
    """Medians: bytes a millisecond, and TFLOP/s. None where nothing was measured."""

    # On the device; what is read and what is written both count.
    copy: float | None = None
    read: float | None = None
    # Between the device and pinned memory of the host.
    to_host: float | None = None
    to_device: float | None = None
    # 10^12 operations a second.
    bf16_gemm: float | None = None


def rate(amount: float, run: Callable[[], object], rounds: int) -> float:
    """`amount` a millisecond, of the median; the first run warms up."""
    run()
    return amount / spread([between_events(run) for _ in range(rounds)])[0]


def ceilings(rounds: int, bytes: int = BYTES, square: int = SQUARE) -> Ceilings:
    """Measures them all on the current device."""
    found = Ceilings()
    one = torch.rand(bytes // 4, device="cuda")
    other, host = torch.empty_like(one), torch.empty(bytes // 4, pin_memory=True)
    found.copy = rate(2 * bytes, lambda: other.copy_(one), rounds)
    # Which reduction comes nearest to the memory's rate differs from card to card.
    reads = (lambda: torch.sum(one), lambda: torch.amax(one), lambda: torch.count_nonzero(one))
    found.read = max(rate(bytes, read, rounds) for read in reads)
    found.to_host = rate(bytes, lambda: host.copy_(one, non_blocking=True), rounds)
    found.to_device = rate(bytes, lambda: one.copy_(host, non_blocking=True), rounds)
    del one, other, host
    lhs, rhs = (torch.randn(square, square, device="cuda").bfloat16() for _ in range(2))
    found.bf16_gemm = rate(2.0 * square**3, lambda: lhs @ rhs, rounds) / 1e9
    del lhs, rhs
    torch.cuda.empty_cache()
    return found


def about() -> str:
    """The card and what drives it."""
    card = torch.cuda.get_device_properties(0)
    return (f"{card.name}, compute capability {card.major}.{card.minor}, "
            f"{card.total_memory / 2**30:.0f} GiB; torch {torch.__version__}, CUDA {torch.version.cuda}")  # fmt: skip


def lines(found: Ceilings) -> list[str]:
    """The ceilings, in the units of data sheets."""
    gigabytes = lambda rate: "not measured" if rate is None else f"{rate / 1e6:.0f} GB/s"
    tera = found.bf16_gemm
    return [
        "ceilings of this card, measured",
        row("copy on the device", gigabytes(found.copy), note="bytes read and written"),
        row("read on the device", gigabytes(found.read), note="the best of three reductions"),
        row("device to pinned memory", gigabytes(found.to_host)),
        row("pinned memory to device", gigabytes(found.to_device)),
        row("bf16 GEMM", "not measured" if tera is None else f"{tera:.0f} TFLOP/s"),
    ]


def needed(bytes: int, rate: float | None) -> float | None:
    """Milliseconds for so many bytes at a ceiling."""
    return None if rate is None or not math.isfinite(rate) or rate <= 0 else bytes / rate
