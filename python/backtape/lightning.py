"""A callback for the `Trainer` of Lightning.

    from backtape.lightning import BacktapeCallback

    trainer = lightning.Trainer(callbacks=[BacktapeCallback(steps="0", dir="dumps/run-a")])
"""

import os
from typing import Any

from backtape import frameworks
from backtape.attach_framework import Training

# Lightning has two packages of the same classes, and a job uses one of them.
_NAME = "pytorch_lightning" if frameworks.imported("pytorch_lightning") else "lightning.pytorch"
_Callback: Any = frameworks.load(_NAME).Callback


class BacktapeCallback(_Callback):
    """Records steps of a Lightning `Trainer`, and says on rank 0 what was recorded when the fit ends, with an
    exception, too.

    steps: which, as "0" or "0,100-110", counted in steps of the optimizers (`trainer.global_step`, with several
        optimizers divided by their number), so also after the trainer goes on from a checkpoint.
    dir: where they are recorded; "dumps" by default.
    options: of `backtape.torch.attach`, as losses= or sample=.

    The variables BACKTAPE_STEPS and BACKTAPE_DIR, which `backtape run` sets, go before `steps` and `dir`. Without
    steps from either it does nothing. Each fit records into an attempt of its own.
    """

    def __init__(
        self, steps: str | int | None = None, dir: str | os.PathLike[str] | None = None, **options: Any
    ) -> None:
        super().__init__()
        self._training = Training(steps, dir, options)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Called by the trainer, once its optimizers are made."""
        optimizers = list(trainer.optimizers)
        self._training.begin(pl_module, optimizers, trainer.global_step // max(1, len(optimizers)))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Called by the trainer."""
        self._training.end(None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Called by the trainer where a fit raises."""
        self._training.end(type(exception))
