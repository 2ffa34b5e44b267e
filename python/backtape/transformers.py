"""A callback for the `Trainer` of transformers, and for the trainers that are made of it, as those of trl.

    from backtape.transformers import BacktapeCallback

    trainer = Trainer(model, args, train_dataset=dataset, callbacks=[BacktapeCallback(steps="0", dir="dumps/run-a")])
"""

import functools
import os
from typing import Any

import transformers

from backtape.attach_framework import Training


class BacktapeCallback(transformers.TrainerCallback):
    """Records steps of a `transformers.Trainer`, or of one of trl's trainers, and says on rank 0 what was recorded
    when the training ends, with an exception, too.

    steps: which, as "0" or "0,100-110", counted as the trainer does (`state.global_step`), so also after it goes on
        from a checkpoint.
    dir: where they are recorded; "dumps" by default.
    options: of `backtape.torch.attach`, as losses= or sample=.

    The variables BACKTAPE_STEPS and BACKTAPE_DIR, which `backtape run` sets, go before `steps` and `dir`. Without
    steps from either it does nothing. Each training records into an attempt of its own.
    """

    def __init__(
        self, steps: str | int | None = None, dir: str | os.PathLike[str] | None = None, **options: Any
    ) -> None:
        self._training = Training(steps, dir, options)
        _see_trainings()

    def on_train_begin(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Called by the trainer, once its model and its optimizer are made."""
        self._training.begin(given["model"], given.get("optimizer"), state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        """Called by the trainer."""
        self._training.end(None)

    def on_train_failed(self, error: BaseException) -> None:
        """Called where the trainer's `train` raises, which trainers tell no callback."""
        self._training.end(type(error))


@functools.cache
def _see_trainings() -> None:
    """Has callbacks told where a `train` raises."""
    train = transformers.Trainer.train

    @functools.wraps(train)
    def seen(trainer: Any, *args: Any, **options: Any) -> Any:
        try:
            return train(trainer, *args, **options)
        except BaseException as error:
            for callback in trainer.callback_handler.callbacks:
                if isinstance(callback, BacktapeCallback):
                    callback.on_train_failed(error)
            raise

    transformers.Trainer.train = seen
