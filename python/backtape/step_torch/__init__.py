"""Records what happens to the gradients of a torch model in one step, from `.grad` to new parameters.

    with recorder.step(step) as tape:
        backtape.torch.step_algebra(tape, model, optimizer)
        for i, batch in enumerate(batches):
            (loss(model, batch) / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

docs/step-format.md says what is recorded, under which names. Nothing of the job is changed: hooks of
tensors, modules and optimizers, and functions of torch that are replaced while the tape is open,
look at what passes and hand it on. No collective runs that the job does not run itself.

    parts.py         the parameters, and what this rank holds of each
    choice.py        which parameters are recorded, and which elements of them
    capture.py       what has been taken of which parameter
    backward.py      gradients of each microbatch, before communication
    moves.py         values that are others where they should be the same
    clipping.py      norms and clipping
    scaler.py        the loss scale
    scales.py        that of each backward pass
    own_clipping.py  clipping that nothing declares
    own_scaling.py   other multiplications of gradients by the job
    optimizers.py    the optimizer's step
    copies.py        copies of more bits that the job keeps by hand
    outer.py         optimizers of frameworks that are around one of torch
    deepspeed.py     those of DeepSpeed
    megatron.py      those of Megatron-LM
    reduction.py     over which ranks a gradient is reduced, and how
    declaration.py   what the rank declares
    patches.py       functions of torch that are replaced and put back
"""

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from backtape import rule_declared
from backtape.failopen import CAUGHT, describe
from backtape.sampling import sampling_of
from backtape.step_torch import (
    backward,
    clipping,
    copies,
    declaration,
    deepspeed,
    megatron,
    optimizers,
    own_scaling,
    scaler,
)
from backtape.step_torch.capture import Capture, Said
from backtape.step_torch.choice import choose
from backtape.step_torch.own_clipping import Kept
from backtape.step_torch.reduction import checked
from backtape.tape import Tape


class StepAlgebra:
    """What `step_algebra` gives: for jobs that norm, reduce or clip gradients by code of their own.

    Outside a recorded step its methods do nothing.
    """

    def __init__(self, capture: Capture | None = None) -> None:
        self._capture = capture

    def reached(self) -> set[int]:
        """The optimizers, by id, that hold a parameter which has got a gradient in this step."""
        if self._capture is None:
            return set()
        steps = self._capture.steps
        return {id(step.optimizer) for step in steps if any(part.passes for part in step.parts())}

    def is_cleared(self) -> bool:
        """Whether gradients have come, no optimizer has stepped, and all of them are gone: the job leaves the
        step out by itself. Of gradients that lie elsewhere than in `.grad` it is not known."""
        if self._capture is None or any(step.count for step in self._capture.steps):
            return False
        parts = [part for part in self._capture.own if part.passes]
        elsewhere = ("sharded", "flat", "master", "summed")
        whole = all(getattr(part, name) is None for part in parts for name in elsewhere)
        holders = [part.holder() for part in parts]
        return bool(parts) and whole and all(held is None or held.grad is None for held in holders)

    def norm(
        self,
        value: Any,
        max_norm: float | None = None,
        *,
        kind: float | str = 2.0,
        epsilon: float | None = None,
        parameters: Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Says which norm the job has computed by itself, and that it clips by it if `max_norm` is there.

        value: the norm of the whole gradient, a number or a tensor of one element.
        kind: 2.0, or "inf".
        epsilon: what is added to the norm before `max_norm` is divided by it.
        parameters: those of which it is the norm; by default all.

        Call it after the gradients were reduced and before they are clipped.
        """
        if self._capture is not None:
            with self._capture.guarded("norm"):
                clipping.declared(self._capture, value, max_norm, kind, epsilon, parameters)

    def reduced(self) -> None:
        """Says that the gradients are reduced, and not clipped yet. backtape sees that by itself where
        the job calls GradScaler, a clip function of torch or, without clipping, `optimizer.step`."""
        if self._capture is not None:
            with self._capture.guarded("reduced"):
                self._capture.take("reduced", self._capture.parts)

    def clipped(self) -> None:
        """Says that code of the job's own has clipped the gradients: what the optimizer then takes is
        recorded as `step.clipped`."""
        if self._capture is not None:
            with self._capture.guarded("clipped"):
                self._capture.note_clipped(self._capture.parts)


def step_algebra(
    tape: Tape,
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: Any,
    *,
    names: str | Sequence[str] = "*",
    groups: int | str | Sequence[int | str] | None = None,
    sample: int | float | None = None,
    sample_seed: int = 0,
    reduce: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    rules: Mapping[str, str | Callable[..., Any]] | None = None,
    accumulation: str | None = None,
    loss_scale: float | None = None,
    own_clipping: bool = False,
) -> StepAlgebra:
    """Records every stage of the step from the gradient of a microbatch to the new parameters; one call
    before the first forward of the step.

    model: one module or a list: plain, or under DDP, FSDP1, FSDP2 or tensor parallelism; the engine of
        DeepSpeed, or the chunks of Megatron-LM.
    optimizer: one or a list; what `deepspeed.initialize` or `get_megatron_optimizer` gave.
    names: a glob or several; parameters of other names are not recorded.
    groups: indices of the optimizer's groups, or what they have as "name"; parameters of other
        groups are not recorded.
    sample: how many elements of each parameter are recorded, as 4096, or their share, as 0.01: the
        same blocks of neighbours on all ranks and in every stage, drawn from `sample_seed`. A
        smaller parameter is recorded whole. Norms are judged by sums of squares over all elements,
        which each rank then declares. docs/step.md says what is not seen.
    reduce: for gradients that the job reduces by code of its own, by globs of names the list of
        communications in their order: {"*": [{"axis": "data", "op": "mean", "ranks": [0, 1]}]}.
        `op` is "sum" or "mean". In place of `ranks` a process group may stand as `group`; without
        both, the axis is looked up in the recorder's mesh. `dtype` is what is sent, by default the
        gradient's; `divisor` what a sum is divided by, as the number of tokens of all ranks. It
        replaces what backtape reads off DDP and FSDP.
    rules: by which rule an optimizer is judged that no rule is known of, by the name of its class:
        {"MyAdam": "AdamW"}, the class of a known one, or {"Tiger": tiger}, a function
        `tiger(param, grad, state, hyper)` that returns the new parameter and a dict of what changes
        in the state; backtape.rule has the functions to write it with.
    accumulation: "mean" where the job divides the gradients themselves by the number of microbatches,
        after the backward passes and not by the loss of each. Without it they are summed.
    loss_scale: what the job multiplies the loss by and divides the gradients by, by code of its own;
        that of a GradScaler is seen.
    own_clipping: look for clipping by code of the job's own that nothing declares. It keeps a copy of all
        gradients that lie whole on this rank.

    A backward pass is a microbatch: the nth that reaches a model has index n. What a job does not
    do is left out; what it does and backtape cannot see is named in the declaration, with the
    reason. All is undone when the tape ends, whether or not the body raised. Where the step is not
    recorded, it does nothing.
    """
    if not tape.active:
        return StepAlgebra()
    with tape.guarded("step algebra of", type(model).__name__), named(tape):
        models = [model] if isinstance(model, torch.nn.Module) else list(model)
        owners = list(optimizer) if isinstance(optimizer, (list, tuple)) else [optimizer]
        sampling = sampling_of(sample, sample_seed)
        if accumulation not in (None, "sum", "mean"):
            raise ValueError(f"accumulation={accumulation!r}: it is 'sum' or 'mean'")
        rules = rule_declared.checked(rules)
        said = Said(checked(reduce, tape.mesh), rules, accumulation, loss_scale)
        capture = Capture(tape, models, owners, sampling, said)
        # Before anything is replaced, as it is refused where another call has been made.
        tape.at_end("step algebra", functools.partial(finish, capture))
        try:
            find_copies(capture)
            capture.sample()
            choose(capture.parts, optimizers.known(capture.owners), names, groups)
        except CAUGHT:
            capture.is_refused = True
            raise
        for start in (backward.start, own_scaling.start, clipping.start, scaler.start, optimizers.start):
            with capture.guarded(start.__module__.rsplit(".", 1)[-1]):
                start(capture)
        if own_clipping and "_engine_run_backward" in vars(torch.autograd):
            capture.own_clipping = Kept(capture)
            looked_at = capture.own_clipping.backward
            capture.patches.attribute(torch.autograd, "_engine_run_backward", looked_at)
        return StepAlgebra(capture)
    return StepAlgebra()


def find_copies(capture: Capture) -> None:
    """Finds what optimizers update in place of parameters."""
    is_known = True
    for framework in (deepspeed, megatron):
        with capture.guarded(framework.__name__.rsplit(".", 1)[-1]):
            try:
                framework.attach(capture)
            except CAUGHT as error:
                is_known = False
                capture.give_up(describe(error))
                raise
    # What a framework keeps is no copy by hand.
    with capture.guarded("copies of parameters"):
        if is_known:
            copies.attach(capture, optimizers.known(capture.owners))


@contextlib.contextmanager
def named(tape: Tape) -> Iterator[None]:
    """Names in the dump why nothing of the step's algebra is in it."""
    try:
        yield
    except CAUGHT as error:
        tape.leave_out("step", None, describe(error))
        raise


def finish(capture: Capture, ended_by: str | None) -> None:
    """Puts everything back and records the declaration. ended_by: the exception that ended the body."""
    capture.close()
    if capture.is_refused:
        return
    waiting = capture.not_stepped()
    if ended_by is None:
        # Where a framework sums gradients of its own, those of the parameter are not reduced.
        own = [part for part in waiting if part.master is None or part.master.follows]
        capture.take("reduced", own)
        with capture.guarded("values of parameters that no optimizer holds"):
            optimizers.take_unheld(capture, "after")
        with capture.guarded("copies of parameters"):
            copies.finish(capture)
    declaration.record(capture, ended_by)
