"""One call of a loss as a head: where it is in autograd's graph, and what can be read there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from backtape.attach_torch import declared
from backtape.attach_torch.calls import Call
from backtape.attach_torch.declared import Said
from backtape.attach_torch.graph import (
    Product,
    between,
    leaf_of,
    node_into,
    product_of,
    softmax_of,
    takers,
)
from backtape.attach_torch.rows import Unfollowed, is_packed
from backtape.attach_torch.z_loss import Normaliser

FROZEN = "autograd does not keep it, as the other operand of the product takes no gradient"
CHECKPOINTED = "activation checkpointing or offloading has it until the backward pass takes it"


@dataclass
class Fused:
    """What a fused loss was called with."""

    q: torch.Tensor
    k: torch.Tensor
    bias: torch.Tensor | None
    versions: tuple[int, ...]  # of q and k then


@dataclass(eq=False)
class Head:
    """One call of a loss, and where its gradients come out of autograd's graph. It keeps neither logits nor
    loss: they would live until the step ends."""

    function: str
    said: Said
    product: Product | None  # None: the loss is fused
    node: Any
    q: int  # which input of the node q is; -1 where it takes no gradient
    k: int
    weight: Any  # what tells its unembedding from another
    size: int  # how many logits it has
    classes: int
    stored: int  # bytes of its unembedding, and of the gradient
    fused: Fused | None = None
    path: Sequence[Any] = ()  # the operations from the loss back to the product
    takers: Mapping[Any, int] = field(default_factory=dict)  # how often the loss takes each result there
    microbatch: int | None = None  # once a backward pass has reached it
    version: int | None = None  # of its unembedding when it was called
    is_open: bool = True  # it is still to be recorded
    handles: list[Any] = field(default_factory=list)
    ids: torch.Tensor | None = None  # what the model has read at each token
    normaliser: Normaliser | None = None  # of a z-loss beside it
    arrived: torch.Tensor | None = None  # the gradient of the loss, of each token

    def release(self) -> None:
        """Lets go of autograd's graph, once its gradients are recorded."""
        self.is_open = False
        for handle in self.handles:
            handle.remove()
        self.handles, self.path, self.takers, self.ids = [], (), {}, None
        self.node, self.product, self.fused = None, None, None
        self.normaliser, self.arrived = None, None


def is_reached(head: Head, taken: Mapping[Any, int]) -> bool:
    """Whether a backward pass reaches the loss of a head, or its logits alone by another loss."""
    first = head.path[0]
    return taken[first] > 0 or head.takers[first] == 0


def found(call: Call) -> Head:
    """Where the gradients of a call come out of the graph. Raises Unfollowed."""
    if call.problem is not None:
        raise Unfollowed(call.problem)
    if call.logits is None:
        return _fused(call)
    product = product_of(call.logits, call.classes % call.logits.dim(), call.are_logs)
    entry = call.entry or softmax_of(call.result)
    nodes = [*between(entry, product), product.node]
    if entry is call.result.grad_fn:
        nodes.pop(0)  # It gives the loss, which a job may take as often as it likes.
    weight, version = leaf_of(product.node, product.k)
    return Head(
        call.function,
        declared.of_call(call, product),
        product,
        product.node,
        product.q,
        product.k,
        weight,
        size=product.tokens * product.vocabulary,
        classes=product.vocabulary,
        stored=product.vocabulary * product.width * product.dtype.itemsize,
        path=nodes,
        takers=takers([call.result], nodes, is_whole=False),
        version=version,
    )


def _fused(call: Call) -> Head:
    q, k = call.q, call.k
    assert q is not None and k is not None
    node, at_q, at_k = node_into(call.result, q, k)
    weight, version = (k.data_ptr(), k._version) if at_k < 0 else leaf_of(node, at_k)
    return Head(
        call.function,
        declared.of_call(call, None),
        None,
        node,
        at_q,
        at_k,
        weight,
        size=q.numel() // q.shape[-1] * k.shape[0],
        classes=k.shape[0],
        stored=k.nbytes,
        fused=Fused(q, k, call.bias, (q._version, k._version)),
        version=version,
    )


def place_of(head: Head, name: str) -> dict[str, int | str]:
    """Where a rank's part of a tensor of the head lies, as far as the product says it."""
    places = head.product.places if head.product is not None else None
    return (places or {}).get(name, {})


def operands(head: Head) -> tuple[torch.Tensor | str, torch.Tensor | str]:
    """q, [T, D], and k, [V, D], as the product has them, or why one cannot be read."""
    if head.product is not None and not head.product.saved:
        q, k = (value.detach() for value in head.node.saved_tensors[:2])
        return q.reshape(-1, q.shape[-1]), k
    if head.product is not None:
        q, k = (_saved(head.node, name) for name in head.product.saved)
        return q, k if isinstance(k, str) else k.t()
    fused = head.fused
    assert fused is not None
    if (fused.q._version, fused.k._version) != fused.versions:
        changed = "q or k was changed between forward and backward"
        return changed, changed
    return fused.q.detach().reshape(-1, fused.q.shape[-1]), fused.k.detach()


def _saved(node: Any, name: str) -> torch.Tensor | str:
    """A tensor that autograd keeps, or why it has none."""
    if is_packed(getattr(node, f"_raw_saved_{name}")):
        return CHECKPOINTED
    value = getattr(node, f"_saved_{name}")
    return FROZEN if value is None else value.detach()
