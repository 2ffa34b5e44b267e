"""Taps of torch code for values and gradients, and whole modules at once.

    q = backtape.torch.tap("q", q, microbatch=i)                    # the value, and
    q = backtape.torch.tap_grad("dq", q, microbatch=i)              # its gradient, in the backward
    k = backtape.torch.tap_grad("dk", weight, microbatch=i, partial="mean", when="pre_reduce")

Both do nothing outside a recorded step. In code under torch.compile they break the graph whether or
not the step is recorded, so that the compiled arithmetic is the same either way. A tensor is copied
at once (backtape/torch_arrays.py), so the job may change it afterwards.
"""

import contextlib
import fnmatch
import functools
import threading
from collections.abc import Iterator
from typing import Any

import torch

from backtape.attach_torch import Attachment, attach
from backtape.step_torch import StepAlgebra, step_algebra
from backtape.tape import Tape, open_tape
from backtape.torch_arrays import is_dtensor
from backtape.torch_parameters import in_backward, parts_of, plain_name


def tap(name: str, x: torch.Tensor, **key: Any) -> torch.Tensor:
    """Records `x` in the step that is open, and returns it; `key` takes the options of `Tape.record`.

    A forward that activation checkpointing runs again in the backward pass is recorded with
    when="recompute".
    """
    _tap(name, x, torch.compiler.is_compiling(), key)
    return x


def _tap(name: str, x: torch.Tensor, compiled: bool, key: dict[str, Any]) -> None:
    tape = open_tape()
    if tape is None:
        return
    if in_backward():
        key = key | {"when": "recompute"}
    record = uncompiled(_record) if compiled else _record
    record(tape, name, x, compiled, key)


def _record(tape: Tape, name: str, x: Any, compiled: bool, key: dict[str, Any]) -> None:
    tape.record_compiled(name, x, compiled, **key)


def tap_grad(name: str, x: torch.Tensor, **key: Any) -> torch.Tensor:
    """Returns a view of `x` whose gradient, as the backward computes it, is recorded under `name`.
    For a weight, that is the part that flows through this use of it. `key` takes the options of
    `Tape.record`. Where no gradient can come or none has come when the step ends, the dump says
    so."""
    return _tap_grad(name, x, torch.compiler.is_compiling(), key)


def _tap_grad(name: str, x: torch.Tensor, compiled: bool, key: dict[str, Any]) -> torch.Tensor:
    tape = open_tape()
    # Without grad mode there is no backward; reentrant checkpointing runs its first forward so.
    if tape is None or not torch.is_grad_enabled():
        return x
    if not x.requires_grad:
        tape.leave_out(name, key.get("microbatch"), "the tapped tensor does not require a gradient")
        return x
    tape.expect(name, key.get("microbatch"))
    apply = uncompiled(_TapGrad.apply) if compiled else _TapGrad.apply
    return apply(x, tape, name, compiled, key)


@functools.cache
def uncompiled(call: Any) -> Any:
    """`call`, in which dynamo compiles nothing. Used in compiled code only, as this imports all of
    torch._dynamo."""
    return torch.compiler.disable(call)


# At calls of these two dynamo breaks the graph and does not trace into them.
_tap._torchdynamo_disable = True  # type: ignore[attr-defined]
_tap_grad._torchdynamo_disable = True  # type: ignore[attr-defined]


class _TapGrad(torch.autograd.Function):
    """The identity, whose backward records what flows through it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tape: Tape, name: str, compiled: bool, key: dict) -> Any:
        ctx.set_materialize_grads(False)
        ctx.call = (tape, name, compiled, key)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        tape, name, compiled, key = ctx.call
        if grad is not None:
            tape.arrived(name, key.get("microbatch"))
            record = uncompiled(_record) if compiled else _record
            record(tape, name, grad, compiled, key)
        return grad, None, None, None, None


def record_parameters(
    tape: Tape, module: torch.nn.Module, *, names: str = "*", prefix: str = "", **key: Any
) -> None:
    """Records the parameters whose names match the glob `names`, each under `prefix` + its own
    name.

    key: options of `Tape.record`.

    It takes plain modules and those of DDP, FSDP1 and FSDP2; the flat parameters of FSDP1 are
    recorded as the parameters that they were made of. Every rank records what it holds.
    """
    _record_each(tape, module, names, prefix, "value", key)


def record_gradients(
    tape: Tape, module: torch.nn.Module, *, names: str = "*", prefix: str = "grad.", **key: Any
) -> None:
    """Records `.grad` of the parameters whose names match the glob `names`, each under `prefix` + its
    own name.

    key: options of `Tape.record`.

    After the last backward of a step that is the reduced gradient under DDP and FSDP
    (when="post_reduce"), and this rank's own under no_sync.
    """
    _record_each(tape, module, names, prefix, "grad", key)


def _record_each(
    tape: Tape, module: torch.nn.Module, names: str, prefix: str, what: str, key: dict[str, Any]
) -> None:
    if not tape.active:
        return
    with tape.guarded(f"record {what}s of", type(module).__name__):
        for name, held, where in parts_of(module, what):
            if not fnmatch.fnmatchcase(name, names):
                continue
            if held is None:
                tape.leave_out(prefix + name, key.get("microbatch"), f"it has no {what}")
            else:
                tape.record(prefix + name, held, **key, **where)


@contextlib.contextmanager
def gradients(
    tape: Tape, module: torch.nn.Module, *, names: str = "*", prefix: str = "grad.", **key: Any
) -> Iterator[None]:
    """A context for one `backward()`: records the gradient of each matching parameter as this
    backward computes it, before it is added to `.grad` and before DDP reduces it.

        with backtape.torch.gradients(tape, model, microbatch=i, partial="mean", when="pre_reduce"):
            loss.backward()

    names, prefix, key: as in `record_gradients`.

    Under FSDP the hook of a sharded parameter does not fire, and the dump says so: use `tap_grad`
    in the forward.
    """
    handles = []
    seen: set[str] = set()
    lock = threading.Lock()

    def hook(name: str, grad: torch.Tensor) -> None:
        with lock:
            seen.add(name)
        tape.record(prefix + name, grad, **key)

    watched = []
    if tape.active:
        with tape.guarded("gradients of", type(module).__name__):
            sharded = {name for name, held, where in parts_of(module, "value") if where or is_dtensor(held)}
            for name, parameter in module.named_parameters():
                name = plain_name(name, module)
                if not parameter.requires_grad or not fnmatch.fnmatchcase(name, names):
                    continue
                watched.append(name)
                if name not in sharded:
                    handles.append(parameter.register_hook(functools.partial(hook, name)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for name in watched:
            if name not in seen:
                reason = "its hook did not fire in this backward: under FSDP use tap_grad"
                tape.leave_out(prefix + name, key.get("microbatch"), reason)
