"""One attachment: where steps begin and end, and what is recorded of those that are asked for.

A step begins with the first forward of the model in training, or where none is seen with the first
backward pass, and ends where the next one begins. Outside of recorded steps nothing is watched but the
optimizers' steps, which are counted.
"""

import atexit
import multiprocessing.util
import os
import sys
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Self

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from backtape.attach_said import said
from backtape.attach_torch import finding, losses
from backtape.attach_torch.calls import Call
from backtape.attach_torch.open_step import CLEARED, SKIPPED, OpenStep
from backtape.attach_torch.steps import Steps
from backtape.failopen import CAUGHT, Faults, describe
from backtape.recorder import Recorder
from backtape.settings import rank_and_world_size
from backtape.step_torch.patches import Patches

NOTHING = (
    "recorded nothing: optimizers stepped in this process, but no step of a model in training was seen that "
    "BACKTAPE_STEPS asks for"
)

HIDDEN = "a forward or an optimizer's step that is compiled as a whole is not seen"


class Attachment:
    """What `backtape.torch.attach` gives. Where nothing is to be recorded, it does nothing."""

    def __init__(
        self,
        models: Sequence[torch.nn.Module] = (),
        owners: Sequence[Any] = (),
        recorder: Recorder | None = None,
        first_step: int = 0,
        named: Mapping[str, Mapping[str, str]] | None = None,
        options: Mapping[str, Any] | None = None,
        head_bytes: int = 0,
        by_hand: Mapping[str, Any] | None = None,
        is_active: bool = True,
    ) -> None:
        self._given = (list(models), list(owners))
        self._recorder = recorder
        self._steps = Steps(first_step)
        self._named, self._options = named or {}, options or {}
        self._head_bytes, self._by_hand = head_bytes, by_hand or {}
        self._process = os.getpid()
        self._handles: list[Any] = []
        self._forward: Any = None  # the hook that sees forwards
        self._losses = losses.Watched()
        self._strangers: set[int] = set()  # modules that are of no model that is trained
        self._open: OpenStep | None = None
        self._error: Any = None  # the last one that Python had told when the step began
        self._is_begun, self._closed = False, not is_active
        if is_active:
            self._faults = Faults(False, rank_and_world_size(os.environ)[0])
            self._patches = Patches(lambda what: self._faults.guard("attach", what))
            self._handles.append(register_optimizer_step_pre_hook(self._stepping))
            self._handles.append(register_optimizer_step_post_hook(self._stepped))
            self._patches.attribute(torch.optim.Optimizer, "__init__", self._optimizer_made)
            self._patches.attribute(torch.amp.GradScaler, "update", self._scaler_updated)
            self._watch()
            atexit.register(self._close_at_exit)

    @property
    def is_waiting(self) -> bool:
        """Whether it is attached, and no step has begun yet."""
        return not self._closed and not self._is_begun and self._process == os.getpid()

    @property
    def recorder(self) -> Recorder | None:
        """The recorder, once the first step has begun: for `scalars` and `watch`."""
        return self._recorder

    def close(self, raised: type[BaseException] | None = None) -> None:
        """Ends the step that is open, waits until what was recorded is durable, and says on rank 0 what that
        is. It is called when the process ends; calling it again does nothing.

        raised: the class of the exception that has ended the training, if one has."""
        if self._closed or self._process != os.getpid():
            return
        self._closed = True
        self._strangers.clear()
        last = getattr(sys, "last_value", None)
        self._end(raised or (None if last is self._error else type(last)))
        self._unwatch()
        for handle in self._handles:
            handle.remove()
        self._patches.undo()
        self._given = ([], [])
        is_first = rank_and_world_size(os.environ)[0] == 0
        summary = None if self._recorder is None else self._recorder.close()
        if is_first and summary is not None:
            print(f"backtape: {said(summary, self._steps.current, HIDDEN)}", file=sys.stderr)
        elif is_first and self._steps.has_any:
            print(f"backtape: {NOTHING}", file=sys.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, raised: type[BaseException] | None, *_: object) -> None:
        self.close(raised)

    def _watch(self) -> None:
        """Has forwards seen, backward passes, and losses: a job may look one up before it calls its model."""
        if self._forward is None:
            self._forward = register_module_forward_pre_hook(self._called)
            self._watched = Patches(lambda what: self._faults.guard("attach", what))
            if "_engine_run_backward" in vars(torch.autograd):
                self._watched.attribute(torch.autograd, "_engine_run_backward", self._backward)
            self._losses = losses.Watched()
            self._watch_losses()

    def _watch_losses(self) -> None:
        with self._faults.guard("attach", "losses"):
            losses.watch(self._watched, self._seen, self._named, self._losses)

    def _unwatch(self) -> None:
        if self._forward is not None:
            self._forward.remove()
            self._forward = None
            self._watched.undo()

    def _optimizer_made(self, *_: Any, **__: Any) -> Generator[None, Any, None]:
        """An optimizer is made: models that were nobody's may be its."""
        yield
        self._strangers.clear()

    def _called(self, module: torch.nn.Module, _: Any) -> None:
        """A hook of all modules, before a forward. It is one for all and none of the model's own, which the
        job may copy or save within a step."""
        # In a compiled model it is traced: nothing of it may depend on what happens.
        if torch.compiler.is_compiling():
            return
        if torch.is_grad_enabled() and not self._steps.is_inside:
            with self._faults.guard("attach"):
                if self._open is None:
                    self._begin_by(module if module.training else None)
                elif self._open.holds(module):
                    if not self._steps.has_begun and self._open.is_cleared():
                        self._open.left_out = CLEARED
                        self._steps.left_out()
                    self._next()

    def _backward(
        self, *_: Any, accumulate_grad: bool = False, **__: Any
    ) -> Generator[None, Any, None]:
        """Sees a run of autograd's engine: where compiled code or a model in eval() has hidden the forward,
        the step begins here."""
        if accumulate_grad and self._open is None and not self._steps.is_inside:
            models = self._given[0] or finding.models_of_optimizers()
            if models:
                self._begin(models)
        yield

    def _begin_by(self, module: torch.nn.Module | None) -> None:
        """Begins a step if this is a module of a model that is trained."""
        if module is None or id(module) in self._strangers or self._is_in_step():
            return
        models = self._given[0] or self._models_around(module)
        if any(module is own for model in models for own in model.modules()):
            self._begin(models)
        else:
            # To look for models takes as long as the process is large: once for each.
            self._strangers.update(id(own) for own in module.modules())

    def _is_in_step(self) -> bool:
        """Whether a step that is not recorded has begun and is not over."""
        return self._steps.has_begun and not self._steps.is_over(set())

    def _models_around(self, module: torch.nn.Module) -> list[torch.nn.Module]:
        """The models of a job that has given none: those of all optimizers, but in a training that follows
        another one in the same process that of its own."""
        models = finding.models_of_optimizers()
        around = [model for model in models if any(module is own for own in model.modules())]
        is_another = self._steps.has_any and not self._steps.knows(finding.optimizers_of(around))
        return around if is_another else models

    def _begin(self, models: list[torch.nn.Module]) -> None:
        """Begins a step, if it is to be recorded."""
        if self._is_in_step():
            return
        if self._steps.is_over(set()):
            self._steps.advance()
        if self._recorder is None:
            self._recorder = Recorder.from_env(mesh=finding.mesh_of(models))
        if not self._is_begun:
            self._is_begun, self._process = True, os.getpid()
            # After the recorder has had itself closed at the exit: what was registered last runs first.
            atexit.register(self._close_at_exit)
            # Processes of multiprocessing end without atexit.
            multiprocessing.util.Finalize(None, self._close_at_exit, exitpriority=100)
        if not self._recorder.wants(self._steps.current):
            self._unwatch()
            return
        self._watch_losses()
        models = finding.with_wrappers(models)
        owners = self._given[1] or finding.optimizers_of(models)
        self._error = getattr(sys, "last_value", None)
        self._open = OpenStep(self._recorder.step(self._steps.current), models, owners)
        self._open.start(self._options, self._head_bytes, self._named, self._by_hand)

    def _seen(self, call: Call) -> None:
        """A loss was called, which may be the first thing of the next step that is seen."""
        if not self._steps.is_inside and not call.is_normaliser:
            self._next()
        if self._open is not None and not self._steps.has_begun:
            self._open.seen(call)

    def _next(self) -> None:
        """Where the step is over, ends it and begins the next one."""
        step = self._open
        if step is not None and self._steps.is_over(step.due()):
            self._end(None)
            self._begin(step.models)

    def _stepping(self, optimizer: Any, args: Any, options: Any) -> None:
        """A hook of all optimizers, before a step: a second one of the same is of the next step."""
        if torch.compiler.is_compiling():
            return  # A step that is compiled is neither seen nor changed.
        with self._faults.guard("attach"):
            if self._steps.begins_next(optimizer):
                self._end(None)
                self._steps.advance()
            has_closure = any(callable(given) for given in (*args[1:], *options.values()))
            if has_closure and self._open is None and self._forward is not None:
                models = self._given[0] or finding.models_of_optimizers()
                self._begin(models)
        self._steps.entered(optimizer)

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        """A hook of all optimizers, after a step."""
        if torch.compiler.is_compiling():
            return
        with self._faults.guard("attach"):
            self._steps.stepped(optimizer)
            self._look_ahead()

    def _scaler_updated(self, *_: Any, **__: Any) -> Generator[None, Any, None]:
        yield
        if self._steps.scaler_updated() and self._open is not None:
            self._open.left_out = SKIPPED
        self._look_ahead()

    def _look_ahead(self) -> None:
        """Between recorded steps: has the beginning of the next one seen, if it is to be recorded."""
        if self._open is None and self._recorder is not None and self._forward is None:
            if self._recorder.wants(self._steps.current + 1):
                self._watch()

    def _close_at_exit(self) -> None:
        """Closes the attachment when the process ends. Raises nothing, as the job is over."""
        try:
            self.close()
        except CAUGHT as error:
            self._faults.tell("close", "", error, describe(error))

    def _end(self, raised: type[BaseException] | None) -> None:
        """Ends the recording of the step that is open. raised: what has ended the job, which may have been after
        the optimizers' steps: then all of the step was recorded."""
        step, self._open = self._open, None
        if step is not None:
            step.end(None if self._steps.is_over(step.due()) else raised)
