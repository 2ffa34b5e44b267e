"""One attachment: where steps begin and end, and what is recorded of those that are asked for.

A step begins with the first forward of the model in training, and ends where the next one begins, once
every optimizer has stepped. Outside of recorded steps nothing is watched but the optimizers' steps,
which are counted.
"""

import atexit
import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, Self

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from backtape.attach_torch import finding, losses
from backtape.attach_torch.heads import Heads
from backtape.failopen import CAUGHT, Faults, describe
from backtape.recorder import Recorder
from backtape.settings import rank_and_world_size
from backtape.step_torch import optimizers, step_algebra
from backtape.step_torch.patches import Patches


# Up to how many elements of all parameters together they are recorded whole, and how many of each
# parameter otherwise.
WHOLE, SAMPLE = 1 << 26, 1 << 16


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
        is_active: bool = True,
    ) -> None:
        self._given = (list(models), list(owners))
        self._recorder = recorder
        self._first, self._step = first_step, first_step
        self._named, self._options = named or {}, options or {}
        self._head_bytes = head_bytes
        self._process = os.getpid()
        self._counts: Counter[int] = Counter()  # steps of each optimizer, by its id
        self._hooks: list[Any] = []
        self._waiting: Any = None  # the hook that waits for the first forward of a step
        self._open: _OpenStep | None = None
        self._closed = not is_active
        self._is_begun = False
        if is_active:
            self._faults = Faults(False, rank_and_world_size(os.environ)[0])
            self._hooks.append(register_optimizer_step_pre_hook(self._stepping))
            self._hooks.append(register_optimizer_step_post_hook(self._stepped))
            self._wait()

    @property
    def recorder(self) -> Recorder | None:
        """The recorder, once the first step has begun: for `scalars` and `watch`."""
        return self._recorder

    def close(self) -> None:
        """Ends the step that is open, waits until what was recorded is durable, and says on rank 0 what that
        is. It is called when the process ends; calling it again does nothing."""
        if self._closed or self._process != os.getpid():
            return
        self._closed = True
        self._end(getattr(sys, "last_type", None))
        for handle in (*self._hooks, *([self._waiting] if self._waiting is not None else ())):
            handle.remove()
        summary = None if self._recorder is None else self._recorder.close()
        if summary is not None and rank_and_world_size(os.environ)[0] == 0:
            print(f"backtape: {_said(summary)}", file=sys.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self) -> None:
        """Has the next forward of the model in training begin a step."""
        if self._waiting is None:
            self._waiting = register_module_forward_pre_hook(self._called)

    def _called(self, module: torch.nn.Module, _: Any) -> None:
        """A hook of all modules, before a forward."""
        if not module.training or not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        with self._faults.guard("attach"):
            models = self._given[0] or finding.models_of_optimizers()
            if any(module is own for model in models for own in model.modules()):
                self._waiting.remove()
                self._waiting = None
                self._begin(models)

    def _begin(self, models: list[torch.nn.Module]) -> None:
        """Begins a step, if it is to be recorded."""
        if self._recorder is None:
            self._recorder = Recorder.from_env(mesh=finding.mesh_of(models))
        if not self._is_begun:
            # After the recorder has had itself closed at the exit: what was registered last runs first.
            atexit.register(self._close_at_exit)
            self._is_begun = True
        if not self._recorder.wants(self._step):
            return
        owners = self._given[1] or finding.optimizers_of(models)
        again = functools.partial(self._called_again, models)
        self._open = _OpenStep(self._recorder, self._step, models, owners, again)
        self._open.start(self._seen, self._named, self._options, self._head_bytes)

    def _seen(self, call: losses.Call) -> None:
        """A loss was called, which may be the first thing of the next step that is seen."""
        if self._open is not None:
            self._called_again(self._open.models)
        if self._open is not None:
            self._open.seen(call)

    def _called_again(self, models: list[torch.nn.Module], *_: Any) -> None:
        """A hook of the models, before a forward, and of losses: where the step is complete, the next one
        begins."""
        if self._open is not None and self._open.is_complete() and torch.is_grad_enabled():
            with self._faults.guard("attach"):
                self._end(None)
                self._begin(models)

    def _stepping(self, optimizer: Any, *_: Any) -> None:
        """A hook of all optimizers, before a step: a second one of the same is of the next step."""
        if self._open is not None and id(optimizer) in self._open.stepped:
            with self._faults.guard("attach"):
                self._end(None)

    def _stepped(self, optimizer: Any, *_: Any) -> None:
        """A hook of all optimizers, after a step."""
        self._counts[id(optimizer)] += 1
        if self._open is not None:
            self._open.stepped.add(id(optimizer))
            return
        self._step = max(self._step, self._first + max(self._counts.values()))
        if self._recorder is not None and self._recorder.wants(self._step):
            self._wait()

    def _close_at_exit(self) -> None:
        """Closes the attachment when the process ends. Raises nothing, as the job is over."""
        try:
            self.close()
        except CAUGHT as error:
            self._faults.tell("close", "", error, describe(error))

    def _end(self, raised: type[BaseException] | None) -> None:
        """Ends the step that is open. raised: what has ended the job."""
        step, self._open = self._open, None
        if step is None:
            return
        self._step += 1
        step.end(raised)
        self._wait()


class _OpenStep:
    """A step that is being recorded."""

    def __init__(
        self,
        recorder: Recorder,
        step: int,
        models: list[torch.nn.Module],
        owners: list[Any],
        again: Callable[..., None],
    ) -> None:
        self._tape = recorder.step(step)
        self.models, self._owners = models, owners
        self._known = {id(optimizer) for optimizer in optimizers.known(owners)}
        self._patches = Patches(lambda what: self._tape.guarded(what, ""))
        self._hooks = [model.register_forward_pre_hook(again) for model in models]
        self.stepped: set[int] = set()  # the optimizers that have stepped
        self._skipped = False  # a GradScaler has ended the step
        self._heads: Heads | None = None

    def start(
        self,
        seen: losses.Seen,
        named: Mapping[str, Mapping[str, str]],
        options: Mapping[str, Any],
        head_bytes: int,
    ) -> None:
        """Opens the tape and watches for losses."""
        tape = self._tape.__enter__()
        if not self._owners:
            tape.leave_out("step", None, "no optimizer holds a parameter of the model")
        else:
            elements = sum(p.numel() for model in self.models for p in model.parameters())
            is_large = elements > WHOLE
            usual = {"sample": SAMPLE if is_large else None, "own_clipping": not is_large}
            step_algebra(tape, self.models, self._owners, **{**usual, **options})
        self._patches.attribute(torch.amp.GradScaler, "update", self._scaler_updated)
        with tape.guarded("head", ""):
            axes = finding.data_axes(self.models, finding.mesh_of(self.models))
            if axes is None:
                tape.leave_out("head", None, "the ranks share tokens by tensor parallelism")
                return
            tokens, addends = dict.fromkeys(axes, 0), dict.fromkeys(axes, "mean")
            self._heads = Heads(tape, tokens, addends, head_bytes)
            tape.at_end("head", self._heads.finish)
            losses.watch(self._patches, seen, named)
            if "_engine_run_backward" in vars(torch.autograd):
                looked_at = self._heads.backward
                self._patches.attribute(torch.autograd, "_engine_run_backward", looked_at)

    def seen(self, call: losses.Call) -> None:
        """A loss was called. After an optimizer's step it is no loss of this step."""
        if self._heads is not None and not self.stepped:
            self._heads.seen(call)

    def _scaler_updated(self, *_: Any, **__: Any) -> Generator[None, Any, None]:
        yield
        self._skipped = True

    def is_complete(self) -> bool:
        """Whether every optimizer has stepped, or a GradScaler had them leave the step out."""
        return self._skipped or bool(self._known) and self._known <= self.stepped

    def end(self, raised: type[BaseException] | None) -> None:
        """Closes the tape."""
        for hook in self._hooks:
            hook.remove()
        self._patches.undo()
        self._tape.__exit__(raised, None, None)


def _said(summary: Any) -> str:
    """What was recorded, and what to do next."""
    steps = [*summary.steps_committed, *summary.steps_partial]
    if not steps:
        return f"recorded no step; {summary}"
    state = "committed" if not summary.steps_partial else "not committed"
    named = ", ".join(map(str, sorted(steps)))
    size = summary.bytes / 2**20
    text = f"recorded step {named}: {summary.shards} shards of this rank, {size:.1f} MiB, {state}."
    if summary.omissions:
        more = len(summary.omissions) - 1
        text += f" Left out: {summary.omissions[0]}{f', and {more} more' if more else ''}."
    return f"{text} Next: replay --dump {_near(str(summary.directory))} --step {min(steps)}"


def _near(directory: str) -> str:
    """A directory as one would type it here."""
    here = os.path.relpath(directory)
    return directory if here.startswith("..") else here
