"""A z-loss that a job adds by hand: the square of `torch.logsumexp` of the logits, beside their cross-entropy.

Autograd's graph says that only these two take the logits. What the z-loss is multiplied by is measured: the gradient
that arrives at each logsumexp against that which arrives at the loss.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from backtape.attach_torch.declared import by_token
from backtape.attach_torch.graph import Product, product_of
from backtape.attach_torch.rows import Unfollowed, kind_of
from backtape.torch_arrays import PLAIN

# How many logsumexp of logits are kept until a backward pass.
MOST = 64

# How much a factor may differ between tokens, in steps of the format of the logsumexp.
STEPS = 64


@dataclass(eq=False)
class Normaliser:
    """One logsumexp of logits. It does not keep the logits."""

    product: Product
    node: Any  # of autograd, that makes it
    value: torch.Tensor  # [rows of the logits]
    arrived: torch.Tensor | None = None  # the gradient that came, of the same shape

    def note(self, gradient: torch.Tensor) -> None:
        """A hook of the logsumexp: its gradient has come."""
        self.arrived = gradient.detach() if self.arrived is None else self.arrived + gradient.detach()


class Normalisers:
    """Those of a step."""

    def __init__(self) -> None:
        self._found: list[Normaliser] = []

    def seen(self, logits: torch.Tensor, dimension: int, result: torch.Tensor) -> None:
        """Notes a logsumexp; of anything but logits none, nor of logits that ranks share."""
        if type(result) not in PLAIN:
            return
        try:
            product = product_of(logits, dimension % logits.dim())
        except Unfollowed:
            return
        own = Normaliser(product, result.grad_fn, result.detach().reshape(-1))
        result.register_hook(functools.partial(Normaliser.note, own))
        self._found.append(own)
        del self._found[:-MOST]

    def beside(
        self, product: Product, path: Sequence[Any], own: Mapping[Any, int], taken: Mapping[Any, int]
    ) -> Normaliser | None:
        """The one that takes the logits of a head beside its loss, if nothing else does; None otherwise.

        path: from the loss back to the product; own: how often the loss takes each result there; taken: how often
        a backward pass does.
        """
        for one in self._found:
            if one.product.node is not product.node or one.product.head != product.head:
                continue
            more = takers_beside(one.node, path)
            joined = [number for number, node in enumerate(path) if more[node]]
            # Where gradients of few bits are added up, the sum is rounded once more than a head says.
            is_wide = product.dtype in (torch.float32, torch.float64)
            is_exact = is_wide or any(kind_of(node) == "ToCopy" for node in path[joined[0] :] if joined)
            if is_exact and {node: own[node] + more[node] for node in path} == dict(taken):
                return one
        return None

    def clear(self) -> None:
        """Lets go of autograd's graph."""
        self._found.clear()


def takers_beside(node: Any, path: Sequence[Any]) -> dict[Any, int]:
    """How often each node of a path is taken on the way back from a node that is not on it, up to the path."""
    counts = dict.fromkeys(path, 0)
    waiting, visited = [node], set()
    while waiting:
        one = waiting.pop()
        if one is None or one in visited:
            continue
        visited.add(one)
        for function, _ in one.next_functions:
            if function in counts:
                counts[function] += 1
            else:
                waiting.append(function)
    return counts


def factor(one: Normaliser, weights: torch.Tensor) -> float | None:
    """What the square of each token's logsumexp has been multiplied by, against the token's own loss; None where it is
    no single number, or where tokens have it that the loss does not count.

    weights: the gradient that arrived at each token's cross-entropy, [T].
    """
    if one.arrived is None:
        return None
    values = [by_token(x.reshape(-1).double(), one.product, 0) for x in (one.value, one.arrived)]
    lse, arrived = values
    slope = 2 * lse * weights.double()
    if not bool(slope.any()):
        return None
    found = float((arrived * slope).sum() / slope.square().sum())
    allowed = STEPS * torch.finfo(one.value.dtype).eps * abs(found) * slope.abs()
    if not bool(((arrived - found * slope).abs() <= allowed).all()) or found < 0:
        return None
    # A setting has few digits, and the measure more than seven of them.
    short = float(f"{found:.4g}")
    return short if abs(short - found) <= 1e-5 * found else found
