"""A step that is being recorded: its tape, its heads and its algebra."""

from collections.abc import Mapping
from typing import Any

import torch

from backtape.attach_torch import finding
from backtape.attach_torch.calls import Call
from backtape.attach_torch.heads import Heads
from backtape.step_torch import StepAlgebra, optimizers, step_algebra
from backtape.step_torch.patches import Patches
from backtape.tape import Tape

# Up to how many elements of all parameters together they are recorded whole, and how many of each
# parameter otherwise.
WHOLE, SAMPLE = 1 << 26, 1 << 16

SKIPPED = "GradScaler left the step out, as gradients were not finite"
CLEARED = (
    "the job cleared the gradients without an optimizer's step: it left the step out, or it adds gradients up in buffers "
    "of its own, which is recorded by step_algebra in a step that the job opens"
)


class OpenStep:
    """A step that is being recorded, of these models and optimizers."""

    def __init__(self, tape: Tape, models: list[torch.nn.Module], owners: list[Any]) -> None:
        self._tape = tape
        self.models, self._owners = models, owners
        self._modules = {id(module) for model in models for module in model.modules()}
        self._known = {id(optimizer) for optimizer in optimizers.known(owners)}
        self._patches = Patches(lambda what: tape.guarded(what, ""))
        self._algebra = StepAlgebra()
        self._heads: Heads | None = None
        self._versions = self._versions_now()
        self.left_out: str | None = None  # why no optimizer steps in it

    def start(
        self,
        options: Mapping[str, Any],
        head_bytes: int,
        named: Mapping[str, Any],
        by_hand: Mapping[str, Any],
    ) -> None:
        """Opens the tape. named: the losses that the user has named; by_hand: what the user declares of the
        head."""
        tape = self._tape.__enter__()
        if not self._owners:
            tape.leave_out("step", None, "no optimizer holds a parameter of the model")
        else:
            elements = sum(p.numel() for model in self.models for p in model.parameters())
            is_large = elements > WHOLE
            usual = {"sample": SAMPLE if is_large else None, "own_clipping": not is_large}
            given = {**usual, **options}
            self._algebra = step_algebra(tape, self.models, self._owners, **given)
        with tape.guarded("head", ""):
            if not finding.has_loss():
                return
            axes, shared = finding.axes_of(self.models, finding.mesh_of(self.models))
            tokens, addends = dict.fromkeys(axes, 0), dict.fromkeys(axes, "mean")
            names = {id(own): name for model in self.models for name, own in model.named_parameters()}
            self._heads = Heads(tape, tokens, addends, head_bytes, list(named), by_hand, shared, names)
            tape.at_end("head", self._heads.finish)
            if "_engine_run_backward" in vars(torch.autograd):
                looked_at = self._heads.backward
                self._patches.attribute(torch.autograd, "_engine_run_backward", looked_at)

    def seen(self, call: Call) -> None:
        """A loss was called."""
        if self._heads is not None:
            self._heads.seen(call)

    def holds(self, module: torch.nn.Module) -> bool:
        """Whether a module is one of the models', or a part of one."""
        return id(module) in self._modules

    def due(self) -> set[int]:
        """The optimizers whose parameters have got a gradient."""
        return self._algebra.reached() or self._known

    def is_cleared(self) -> bool:
        """Whether the job has cleared all gradients of the step without an optimizer's step. Where parameters
        have changed, as SAM moves them, there is more to come."""
        unchanged = self.left_out is None and self._versions == self._versions_now()
        return unchanged and self._algebra.is_cleared()

    def _versions_now(self) -> int:
        """How often the parameters were changed, all together."""
        return sum(p._version for model in self.models for p in model.parameters())

    def end(self, raised: type[BaseException] | None) -> None:
        """Closes the tape."""
        self._patches.undo()
        if self.left_out is not None and self._heads is not None:
            self._heads.give_up(self.left_out)
        self._tape.__exit__(raised, None, None)
