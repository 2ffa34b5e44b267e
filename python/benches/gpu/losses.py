"""The contenders of the loss head that are torch: forward and backward, from q, k and labels to the
loss, dq and dk, all as their own pages say to call them."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from .head import SMALL, Expected, Head, Policy, Result, check, random_head, sampled, whole
from .timing import Contender, Unmeasured, on_device, reason_of

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]

# Rows of the smallest tiles that a kernel of a peer adds to a gradient in bf16.
TILE = 64
# CCE's own default for bf16: entries that bf16 does not see beside 1.
CCE_FILTER = torch.finfo(torch.bfloat16).eps / 32


@dataclass(frozen=True)
class Contestant:
    """How to get a loss, which raises where it is not to be had, and what it says of itself."""

    make: Callable[[], Loss]
    policy: Callable[[Any], Policy] = lambda shape: Policy()
    filter: float = 0.0
    note: str = ""


def imported(module: str, name: str) -> Any:
    """A name of a package, or why there is none."""
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # A peer may fail at import in its own ways.
        package = module.partition(".")[0]
        raise Unmeasured(f"{package} cannot be imported: {reason_of(error)}") from error


def eager(q: torch.Tensor, k: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """What a training script writes."""
    return F.cross_entropy((q @ k.T).float(), labels)


def linear_cross_entropy() -> Loss:
    """torch's own chunked one, with the options that keep it from making the whole plane."""
    if not hasattr(F, "linear_cross_entropy"):
        raise Unmeasured(f"torch {torch.__version__} has no linear_cross_entropy")
    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    if options is None:
        return F.linear_cross_entropy
    return lambda q, k, labels: F.linear_cross_entropy(q, k, labels, options=options())


def cce(implementation: str) -> Loss:
    call = imported("cut_cross_entropy", "linear_cross_entropy")
    return lambda q, k, labels: call(q, k, labels, impl=implementation)


def liger() -> Loss:
    module = imported("liger_kernel.transformers", "LigerFusedLinearCrossEntropyLoss")()
    return lambda q, k, labels: module(k, q, labels)


def by_tiles(shape: Any) -> Policy:
    """A gradient that every tile adds to in bf16."""
    return Policy(-(-shape.vocab // TILE), -(-shape.tokens // TILE))


def by_chunks(shape: Any) -> Policy:
    """dk that every chunk of tokens adds to in bf16; there are about V / D chunks."""
    return Policy(2, max(2, 2 * shape.vocab // shape.depth))


CONTESTANTS: Mapping[str, Contestant] = {
    "torch, eager": Contestant(lambda: eager),
    "torch.compile": Contestant(lambda: torch.compile(eager, fullgraph=True, dynamic=False)),
    "torch linear_cross_entropy": Contestant(linear_cross_entropy, by_chunks),
    "CCE": Contestant(
        lambda: cce("cce"), by_tiles, CCE_FILTER, f"leaves out entries below {CCE_FILTER:.1e}, by its design"
    ),
    "CCE, exact": Contestant(lambda: cce("cce_exact"), by_tiles),
    "Liger-Kernel": Contestant(liger, by_chunks),
}


def stepping(loss: Loss, head: Head) -> Callable[[], Result]:
    """Forward and backward once; nothing is kept from one to the next. All have the same q and k: one
    that wrote to them would make those checked behind it wrong, and be seen."""
    q, k = (matrix.detach().requires_grad_() for matrix in (head.q, head.k))

    def step() -> Result:
        value = loss(q, k, head.labels)
        return Result(value.detach(), *torch.autograd.grad(value, (q, k)))

    return step


@dataclass
class Bench:
    """A head that is timed, and what is right at samples of it and at a small one."""

    head: Head
    seed: int
    small: Head

    @classmethod
    def of(cls, shape: Any, device: str, seed: int) -> "Bench":
        return cls(random_head(shape, device, seed), seed, random_head(SMALL, device, seed))

    def right(self, head: Head, filter: float) -> Expected:
        """Computed anew for each contender: its matrices are as large as a contender's own."""
        return whole(head, filter) if head is self.small else sampled(head, self.seed, filter)

    def agree(self, step: Callable[[Head], Result], contestant: Contestant) -> None:
        """Raises Unmeasured where a contender is wrong, at the small shape or at the timed one."""
        for head in (self.small, self.head):
            right = self.right(head, contestant.filter)
            try:
                check(step(head), right, contestant.policy(head.shape))
            except Unmeasured as wrong:
                raise Unmeasured(f"{wrong} at {head.shape}") from wrong
            finally:
                release(head.q.device)


def release(device: torch.device) -> None:
    """Memory that torch keeps goes back to the card."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def refused(error: BaseException) -> Contender:
    """A contender that was out before its first turn."""

    def turn() -> Any:
        raise Unmeasured(reason_of(error))

    return turn


def contender(bench: Bench, contestant: Contestant) -> Contender:
    """One that is right; else one that says at its turn why it is not measured."""
    try:
        loss = contestant.make()
        bench.agree(lambda head: stepping(loss, head)(), contestant)
    except Exception as error:
        return refused(error)
    return on_device(stepping(loss, bench.head))


def contenders(bench: Bench, wanted: Callable[[str], bool]) -> dict[str, Contender]:
    """Those that were asked for, each checked before it is timed."""
    chosen = {name: one for name, one in CONTESTANTS.items() if wanted(name)}
    return {name: contender(bench, one) for name, one in chosen.items()}
