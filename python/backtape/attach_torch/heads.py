"""What is recorded of the loss heads that a job calls, and what is declared of them.

A call of a loss is only noted. What it was computed of is recorded when a backward pass reaches it: so a
loss for the log alone is not recorded, and a parameter that FSDP frees after the forward is there again.

Each call that a backward pass reaches is a microbatch of the head, as it has tokens, a denominator and
gradients of its own: a loss that is computed chunk by chunk has as many as chunks.
"""

import functools
import threading
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from backtape.attach_torch import declared, inputs, sharing
from backtape.attach_torch.calls import Call
from backtape.attach_torch.declared import Said
from backtape.attach_torch.graph import (
    Product,
    Unfollowed,
    between,
    is_packed,
    leaf_of,
    node_into,
    product_of,
    softmax_of,
    takers,
)
from backtape.tape import Tape

FROZEN = "autograd does not keep it, as the other operand of the product takes no gradient"
CHECKPOINTED = "activation checkpointing or offloading has it until the backward pass takes it"


NOT_CALLED = (
    "losses= names {}, and no backward pass came from a call of it: is the name that of the module in which the "
    "function stands?"
)
UNKNOWN = (
    "no backward pass came from a loss that backtape knows; name yours: "
    "attach(losses={'module:function': {'q': ..., 'k': ..., 'labels': ...}})"
)
AGAIN = "is reached by several backward passes, of which the first is recorded"
MIXED = (
    "something else than the loss takes the logits too and gives them a gradient, as a z-loss or label smoothing "
    "by hand does: no head is declared"
)


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

    def release(self) -> None:
        """Lets go of autograd's graph, once its gradients are recorded."""
        self.is_open = False
        for handle in self.handles:
            handle.remove()
        self.handles, self.path, self.takers, self.ids = [], (), {}, None
        self.node, self.product, self.fused = None, None, None


class Heads:
    """The heads of one step.

    tokens, addends: where a rank's tokens and its gradients lie, as `placement` of `Tape.record`; empty
        in a job of one rank.
    most: how many bytes of unembeddings and their gradients this rank records of a step; the first call
        of a loss is recorded in any case.
    named: the losses that the user has named.
    shared: the axes along which ranks share tokens, with their sizes.
    """

    def __init__(
        self,
        tape: Tape,
        tokens: Mapping[str, Any],
        addends: Mapping[str, Any],
        most: int,
        named: Sequence[str] = (),
        shared: Mapping[str, int] = {},
    ) -> None:
        self._tape, self._shared = tape, shared
        self._named = named
        self._most = most
        self._tokens, self._addends = dict(tokens), dict(addends)
        self._lock = threading.Lock()
        self._waiting: list[Head] = []
        self._weight: Any = None  # the unembedding that is recorded
        self._declared: dict[str, Any] | None = None
        self._heads: list[Head] = []  # those whose gradients have not come yet
        self._is_mixed = False  # something else than the loss gives gradients to the logits, too
        self._is_counted = True  # the backward pass that runs fills `.grad`
        self._lacks_q, self._has_k = False, False
        self._is_given_up = False
        self._version: int | None = None  # of the unembedding
        self.count = 0  # of microbatches
        self.reasons: list[str] = []  # why something is not recorded

    def seen(self, call: Call) -> None:
        """Notes a call of a loss."""
        try:
            head = _found(call)
            if head.product is not None:
                sharing.check(head.product, self._shared)
            elif self._shared:
                raise Unfollowed(sharing.NOT_SHARED)
        except Unfollowed as error:
            self.refuse(f"{call.function}: {error}")
            return
        with self._tape.guarded("head", "input tokens"):
            head.ids = inputs.of_head(call.reads, head.said.labels.numel(), head.classes)
        hooks = [
            (call.result.register_hook, self._reached),
            (head.node.register_prehook, self._before),
            (head.node.register_hook, self._after),
        ]
        self._waiting.append(head)
        self._heads.append(head)
        head.handles = [register(functools.partial(hook, head)) for register, hook in hooks]

    def backward(
        self, roots: Any, *_: Any, accumulate_grad: bool = False, **__: Any
    ) -> Generator[None, Any, None]:
        """Looks at a backward pass, which begins at the roots."""
        before, self._is_counted = self._is_counted, accumulate_grad
        for head in list(self._waiting) if accumulate_grad else ():
            taken = takers(roots, head.path) if head.path else {}
            # Of a head that this pass does not reach nothing is taken.
            if any(taken.values()) and taken != head.takers:
                self._waiting.remove(head)
                self._is_mixed = True
        try:
            yield
        finally:
            self._is_counted = before

    def refuse(self, reason: str) -> None:
        """Notes why a head is not recorded, or not all of it."""
        with self._lock:
            if reason not in self.reasons:
                self.reasons.append(reason)

    def give_up(self, reason: str) -> None:
        """Has no head declared."""
        self._is_given_up = True
        self.refuse(reason)

    def finish(self, _: str | None = None) -> None:
        """Takes the hooks away and declares the head."""
        for head in self._heads:
            head.release()
        self._heads.clear()
        self._waiting.clear()
        if self._is_mixed:
            self.refuse(MIXED)
        is_whole = self._has_k and not self._lacks_q and not self._is_given_up
        if self._declared is not None and is_whole:
            self._tape.head(**self._declared, microbatches=self.count)
        elif not self.reasons:
            self.refuse(NOT_CALLED.format(", ".join(self._named)) if self._named else UNKNOWN)
        for reason in self.reasons:
            self._tape.leave_out("loss" if reason == UNKNOWN else "head", None, reason)

    def _reached(self, head: Head, arrived: torch.Tensor) -> None:
        """A hook of the loss: its gradient has come."""
        if not self._is_counted:
            return
        if not head.is_open:
            if head.microbatch is not None:
                self.refuse(f"{head.function} {AGAIN}")
            return
        with self._tape.guarded("head", head.function):
            refused = self._counted(head)
            if refused is not None:
                head.is_open = False
                if refused:
                    self.refuse(f"{head.function} {refused}")
                return
            said, product = head.said, head.product
            record = functools.partial(
                self._tape.record, microbatch=head.microbatch, placement=self._tokens
            )
            record("labels", said.labels)
            record("cotangent", declared.cotangents(said, product, arrived))
            if head.ids is not None:
                # Ranks may have sequences of unequal lengths.
                record("input_tokens", head.ids.reshape(-1) if self._tokens else head.ids)
            if said.weights is not None:
                record("weights", said.weights)
            where = {} if said.value.dim() else {"placement": self._addends}
            record("loss", said.value, **where)

    def _counted(self, head: Head) -> str | None:
        """Counts a head that a backward pass has reached, or says why it is not recorded; nothing where that
        is told at the end."""
        options = head.said.options
        with self._lock:
            if head not in self._waiting:
                return ""
            if self._weight is None:
                self._weight = max(self._waiting, key=lambda waiting: waiting.size).weight
            self._waiting.remove(head)
            if self.count and 2 * head.stored * self.count > self._most:
                return f"is recorded {self.count} times, as its unembedding is large (head_bytes=)"
            if head.weight != self._weight:
                return "is called with another unembedding too, which is not recorded"
            if self._version not in (None, head.version):
                return "is called again after the unembedding was changed, which is not recorded"
            self._version = head.version
            if self._declared not in (None, options):
                return "is called with other options too, and those calls are not recorded"
            self._declared = options
            head.microbatch, self.count = self.count, self.count + 1
            return None

    def _before(self, head: Head, arrived: tuple[Any, ...]) -> None:
        """A hook of the product, before its backward: what it was computed of."""
        if not self._is_counted or head.microbatch is None or not head.is_open:
            return
        with self._tape.guarded("head", "q and k"):
            if any(gradient is not None for gradient in arrived[1:]):
                self._is_mixed = True
            for name, value in zip(("q", "k"), _operands(head)):
                if isinstance(value, str):
                    self._lacks_q = self._lacks_q or name == "q"
                    if name == "q" or not self._has_k:
                        self._leave_out(name, head, value)
                elif name == "q":
                    self._record("q", head, value, self._tokens)
                elif not self._has_k:
                    self._has_k = True
                    own, words = sharing.part_of(value)
                    self._tape.record("k", own, placement=words | _place(head, "k"))
                    bias = head.product.bias if head.product is not None else head.fused.bias  # type: ignore[union-attr]
                    if bias is not None:
                        own, words = sharing.part_of(bias.detach())
                        self._tape.record("bias", own, placement=words | _place(head, "bias"))

    def _after(self, head: Head, gradients: tuple[Any, ...], _: Any) -> None:
        """A hook of the product, after its backward: what it gives to q and k."""
        if not self._is_counted or head.microbatch is None or not head.is_open:
            return
        product = head.product
        with self._tape.guarded("head", "dq and dk"):
            dq, dk = (gradients[at] if at >= 0 else None for at in (head.q, head.k))
            if dq is None:
                self._leave_out("dq", head, "q takes no gradient")
            else:
                self._record("dq", head, dq.detach().reshape(-1, dq.shape[-1]), self._tokens)
            if dk is None:
                self._leave_out("dk", head, "k takes no gradient")
            else:
                is_transposed = product is not None and product.is_transposed
                own = dk.detach().t() if is_transposed else dk.detach()
                more: dict[str, Any] = {"when": "pre_reduce"} if self._addends else {}
                self._record("dk", head, own, self._addends, **more)
        head.release()
        with self._lock:
            self._heads.remove(head)

    def _record(
        self, name: str, head: Head, value: torch.Tensor, place: Mapping[str, Any], **more: Any
    ) -> None:
        own, words = sharing.part_of(value)
        placement = {**place, **words, **_place(head, name)}
        self._tape.record(name, own, microbatch=head.microbatch, placement=placement, **more)

    def _leave_out(self, name: str, head: Head, reason: str) -> None:
        self._tape.leave_out(name, head.microbatch, reason)
        self.refuse(f"{name} is not recorded: {reason}")


def _found(call: Call) -> Head:
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


def _place(head: Head, name: str) -> dict[str, int | str]:
    """Where a rank's part of a tensor of the head lies, as far as the product says it."""
    places = head.product.places if head.product is not None else None
    return (places or {}).get(name, {})


def _operands(head: Head) -> tuple[torch.Tensor | str, torch.Tensor | str]:
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
