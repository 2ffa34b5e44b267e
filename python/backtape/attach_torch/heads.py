"""What is recorded of the loss heads that a job calls, and what is declared of them.

A call of a loss is only noted. What it was computed of is recorded when a backward pass reaches it: so a
loss for the log alone is not recorded, and a parameter that FSDP frees after the forward is there again.

Each call that a backward pass reaches is a microbatch of the head, as it has tokens, a denominator and
gradients of its own: a loss that is computed chunk by chunk has as many as chunks.
"""

import dataclasses
import functools
import threading
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch

from backtape.attach_torch import declared, inputs, sharing, z_loss
from backtape.attach_torch.calls import Call
from backtape.attach_torch.graph import takers
from backtape.attach_torch.head import Head, found, is_reached, operands, place_of
from backtape.attach_torch.rows import Unfollowed
from backtape.attach_torch.z_loss import Normalisers
from backtape.sources import DIVISION, MEASURED, Sourced, counts_by_microbatch, joined
from backtape.tape import Tape

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
    "something else than the loss takes the logits too and gives them a gradient, as label smoothing by hand, an "
    "entropy term, or a z-loss of other tokens than the loss does: no head is declared"
)
# How far apart, relative, two measured factors of one z-loss may be.
SAME = 1e-4
CHUNKS = (
    "how the loss is divided is declared by hand, and cannot be compared: the loss is computed in chunks, each of "
    "which counts its own tokens; declare scope='global', or no scope"
)


class Heads:
    """The heads of one step.

    tokens, addends: where a rank's tokens and its gradients lie, as `placement` of `Tape.record`; empty
        in a job of one rank.
    most: how many bytes of unembeddings and their gradients this rank records of a step; the first call
        of a loss is recorded in any case.
    named: the losses that the user has named.
    by_hand: what the user declares of the head, as options of `Tape.head`.
    shared: the axes along which ranks share tokens, with their sizes.
    names: the names of parameters, by their ids.
    """

    def __init__(
        self,
        tape: Tape,
        tokens: Mapping[str, Any],
        addends: Mapping[str, Any],
        most: int,
        named: Sequence[str] = (),
        by_hand: Mapping[str, Any] | None = None,
        shared: Mapping[str, int] | None = None,
        names: Mapping[int, str] | None = None,
    ) -> None:
        self._tape, self._shared, self._names = tape, shared or {}, names or {}
        self._named, self._by_hand = named, by_hand or {}
        self._most = most
        self._tokens, self._addends = dict(tokens), dict(addends)
        self._lock = threading.Lock()
        self._waiting: list[Head] = []
        self._weight: Any = None  # the unembedding that is recorded
        self._declared: Sourced | None = None
        self._heads: list[Head] = []  # those whose gradients have not come yet
        self._is_mixed = False  # something else than the loss gives gradients to the logits, too
        self._is_counted = True  # the backward pass that runs fills `.grad`
        self._lacks_q, self._has_k = False, False
        self._is_given_up = False
        self._version: int | None = None  # of the unembedding
        self._normalisers = Normalisers()
        self._z_losses: list[float] = []  # the factor of each microbatch's
        self.count = 0  # of microbatches
        self._passes = 0  # backward passes that have reached one
        # Of each microbatch, the backward pass that it came from, and the labels as the job holds them.
        self._batch_of: list[tuple[Any, ...]] = []
        self._running = 0  # backward passes that run, one inside of the other
        self.reasons: list[str] = []  # why something is not recorded

    def seen(self, call: Call) -> None:
        """Notes a call of a loss."""
        if call.is_normaliser:
            assert call.logits is not None
            self._normalisers.seen(call.logits, call.classes, call.result)
            return
        try:
            head = found(call)
            if head.product is not None:
                sharing.check(head.product, self._shared)
            elif self._shared:
                raise Unfollowed(sharing.NOT_SHARED)
        except Unfollowed as error:
            self.refuse(f"{call.function}: {error}")
            return
        with self._tape.guarded("head", "input tokens"):
            # Megatron-LM's ranks look up ids that are masked, and its logits have the sequence first.
            if head.product is None or head.product.places is None:
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
        counted = self.count
        for head in list(self._waiting) if accumulate_grad else ():
            taken = takers(roots, head.path) if head.path else {}
            # Of a head that this pass does not reach nothing is taken.
            if not any(taken.values()) or taken == head.takers or not is_reached(head, taken):
                continue
            if head.product is not None:
                head.normaliser = self._normalisers.beside(head.product, head.path, head.takers, taken)
            if head.normaliser is None:
                self._waiting.remove(head)
                self._is_mixed = True
        self._running += 1
        try:
            yield
        finally:
            self._is_counted = before
            self._running -= 1
            if self._running == 0:
                self._passes += self.count > counted
                # One that no backward pass goes through, as for a log, has the logits in its graph.
                if not self._waiting:
                    self._normalisers.clear()

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
        self._normalisers.clear()
        # Each microbatch has one, or none has.
        if len(self._z_losses) not in (0, self.count) or max(self._z_losses, default=0) > (1 + SAME) * min(self._z_losses, default=0):
            self._is_mixed = True
        if self._is_mixed:
            self.refuse(MIXED)
        is_whole = self._has_k and not self._lacks_q and not self._is_given_up and not self._is_mixed
        if self._declared is not None and is_whole:
            self._declare(self._declared)
        elif not self.reasons:
            self.refuse(NOT_CALLED.format(", ".join(self._named)) if self._named else UNKNOWN)
        for reason in self.reasons:
            self._tape.leave_out("loss" if reason == UNKNOWN else "head", None, reason)

    def _declare(self, found: Sourced) -> None:
        """Declares the head as it was found, with what the user declares of it."""
        own: dict[str, Any] = {"microbatches": self.count}
        if self._z_losses:
            own |= {"z_loss": self._z_losses[0], "z_loss_in_loss": False}
        sources = {**found.sources, **dict.fromkeys(own, MEASURED)}
        # Where each is of a batch of its own there is nothing to say.
        first = {batch: number for number, batch in reversed(list(enumerate(self._batch_of)))}
        batches = [first[batch] for batch in self._batch_of] if 0 < self._passes < self.count else []
        batches = batches if len(first) < self.count else []
        found = dataclasses.replace(found, options={**found.options, **own}, sources=sources, batches=batches)
        by_hand = dict(self._by_hand)
        if self._passes < self.count:
            # Each call of a chunk is a microbatch of the head, and not one that the user counts.
            by_hand.pop("microbatches", None)
            if counts_by_microbatch(by_hand):
                by_hand = {name: value for name, value in by_hand.items() if name not in DIVISION}
                self.refuse(CHUNKS)
        self._tape.head(_found=joined(found, by_hand))

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
            head.arrived = declared.cotangents(said, product, arrived)
            record("cotangent", head.arrived)
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
        found = head.said.head
        with self._lock:
            if head not in self._waiting:
                return ""
            if self._weight is None:
                self._weight = max(self._waiting, key=lambda waiting: waiting.size).weight
            self._waiting.remove(head)
            if self.count and 2 * head.stored * self.count > self._most:
                return f"is recorded {self.count} times, as its unembedding is large (head_bytes=)"
            if head.weight != self._weight:
                return f"is called with another unembedding too{self._both(head)}, which is not recorded"
            if self._version not in (None, head.version):
                return "is called again after the unembedding was changed, which is not recorded"
            self._version = head.version
            if self._declared not in (None, found):
                return "is called with other options too, and those calls are not recorded"
            self._declared = found
            head.microbatch, self.count = self.count, self.count + 1
            self._batch_of.append((self._passes, *head.said.held))
            return None

    def _both(self, head: Head) -> str:
        """The names of another unembedding and of the one that is recorded, as far as they are parameters."""
        name = lambda weight: self._names.get(weight[0]) if isinstance(weight, tuple) else None
        other, own = name(head.weight), name(self._weight)
        return f" ({other}, beside {own}, which is judged)" if other and own else ""

    def _before(self, head: Head, arrived: tuple[Any, ...]) -> None:
        """A hook of the product, before its backward: what it was computed of."""
        if not self._is_counted or head.microbatch is None or not head.is_open:
            return
        with self._tape.guarded("head", "q and k"):
            if any(gradient is not None for gradient in arrived[1:]):
                self._is_mixed = True
            if head.normaliser is not None and head.arrived is not None:
                factor = z_loss.factor(head.normaliser, declared.by_loss(head.said, head.arrived))
                if factor is None:
                    self._is_mixed = True
                else:
                    self._z_losses.append(factor)
            for name, value in zip(("q", "k"), operands(head)):
                if isinstance(value, str):
                    self._lacks_q = self._lacks_q or name == "q"
                    if name == "q" or not self._has_k:
                        self._leave_out(name, head, value)
                elif name == "q":
                    self._record("q", head, value, self._tokens)
                elif not self._has_k:
                    self._has_k = True
                    own, words = sharing.part_of(value)
                    self._tape.record("k", own, placement=words | place_of(head, "k"))
                    bias = head.product.bias if head.product is not None else head.fused.bias  # type: ignore[union-attr]
                    if bias is not None:
                        own, words = sharing.part_of(bias.detach())
                        self._tape.record("bias", own, placement=words | place_of(head, "bias"))

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
                own, place = dq.detach().reshape(-1, dq.shape[-1]), place_of(head, "dq")
                if "sum" in {*sharing.part_of(own)[1].values(), *place.values()}:
                    self._await_sum(head)
                else:
                    self._record("dq", head, own, self._tokens)
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

    def _await_sum(self, head: Head) -> None:
        """Has dq recorded where the job adds up what each rank has of it."""
        summing = sharing.summing(head.node, head.q)
        if summing is None:
            self._leave_out("dq", head, sharing.NOT_SUMMED)
            return
        microbatch = head.microbatch

        def came(gradients: tuple[Any, ...], _: Any) -> None:
            with self._tape.guarded("head", "dq"):
                handle.remove()
                own, words = sharing.part_of(gradients[0].detach())
                if words:
                    self._leave_out("dq", head, sharing.SCATTERED)
                else:
                    self._tape.record(
                        "dq", own.reshape(-1, own.shape[-1]), microbatch=microbatch, placement=self._tokens
                    )

        handle = summing.register_hook(came)

    def _record(
        self, name: str, head: Head, value: torch.Tensor, place: Mapping[str, Any], **more: Any
    ) -> None:
        own, words = sharing.part_of(value)
        placement = {**place, **words, **place_of(head, name)}
        self._tape.record(name, own, microbatch=head.microbatch, placement=placement, **more)

    def _leave_out(self, name: str, head: Head, reason: str) -> None:
        self._tape.leave_out(name, head.microbatch, reason)
        self.refuse(f"{name} is not recorded: {reason}")
