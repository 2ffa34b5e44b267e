"""What the callbacks for trainers of other libraries share: attaching where a training begins, and closing where
it ends.

`backtape.transformers` and `backtape.lightning` import their library at their top, and are imported where the
job names them.
"""

import os
from typing import Any

import torch

from backtape.attach_torch import ASKED, attach, detach
from backtape.attach_torch.finding import mesh_of, with_wrappers
from backtape.attach_torch.session import Attachment
from backtape.failopen import Faults
from backtape.recorder import Recorder


class Training:
    """The trainings of one callback, one after the other."""

    def __init__(self, steps: str | int | None, dir: str | os.PathLike[str] | None, options: dict[str, Any]) -> None:
        self._steps, self._dir, self._options = steps, dir, options
        self._attachment: Attachment | None = None

    def begin(self, model: torch.nn.Module, optimizer: Any, first_step: int) -> None:
        """A training begins. What `backtape run` has attached to the process gives way to it."""
        self.end(None)
        asked = self._asked()
        if asked is None:
            return
        with Faults(False).guard("attach"):
            detach()
            recorder = Recorder.from_env(mesh=mesh_of(with_wrappers([model])), **asked)
            given = {"recorder": recorder, "first_step": first_step, **self._options}
            self._attachment = attach(model, optimizer, **given)

    def end(self, raised: type[BaseException] | None) -> None:
        """The training has ended. raised: the class of what has ended it, if something was raised."""
        ended, self._attachment = self._attachment, None
        if ended is not None:
            with Faults(False).guard("close"):
                ended.close(raised)

    def _asked(self) -> dict[str, Any] | None:
        """What goes before the environment, as options of `Recorder.from_env`: the callback's own steps where that
        asks for none, and its directory where that names none. None where neither asks for steps."""
        asked: dict[str, Any] = {}
        if not os.environ.get("BACKTAPE_DIR"):
            asked["dir"] = self._dir or "dumps"
        if not any(os.environ.get(f"BACKTAPE_{name}") for name in ASKED):
            if self._steps is None:
                return None
            asked["steps"] = str(self._steps)
        return asked
