"""Which step of the job it is, told by its optimizers alone.

A step is over once every optimizer that stepped in the one before has stepped again, or has done so in
the first step where it had gradients to take; or once a GradScaler has had them leave the step out. An
optimizer that steps once more begins the next one.
"""

from typing import Any


class Steps:
    """Counts the steps of a job."""

    def __init__(self, first: int) -> None:
        self.current = first  # the step that goes on, or that has just ended
        self._stepped: set[int] = set()  # the optimizers that have stepped in it, by id
        self._is_skipped = False
        self._before: set[int] = set()  # those that stepped in the step before
        # The optimizers whose step runs. One that raises leaves it when it steps the next time.
        self._inside: set[int] = set()

    @property
    def is_inside(self) -> bool:
        """Whether an optimizer's step runs, which may call the model: LBFGS does."""
        return bool(self._inside)

    @property
    def has_begun(self) -> bool:
        """Whether an optimizer has stepped in this step."""
        return bool(self._stepped)

    @property
    def has_any(self) -> bool:
        """Whether any optimizer has stepped at all."""
        return bool(self._stepped or self._before)

    def knows(self, optimizers: list[Any]) -> bool:
        """Whether one of these has stepped in this step or in the one before."""
        return bool({id(optimizer) for optimizer in optimizers} & (self._stepped | self._before))

    def is_over(self, due: set[int]) -> bool:
        """Whether the step has ended. due: the optimizers that have gradients, for the first step."""
        expected = self._before or due
        return self._is_skipped or bool(self._stepped) and expected <= self._stepped

    def begins_next(self, optimizer: Any) -> bool:
        """Whether the next step of this optimizer is of the next step of the job."""
        return self._is_skipped or id(optimizer) in self._stepped

    def advance(self) -> None:
        """The next step begins."""
        self.current += 1
        self._before = self._before if self._is_skipped and not self._stepped else self._stepped
        self._stepped, self._is_skipped = set(), False

    def entered(self, optimizer: Any) -> None:
        """An optimizer's step begins."""
        self._inside.add(id(optimizer))

    def stepped(self, optimizer: Any) -> None:
        """An optimizer has stepped."""
        self._inside.discard(id(optimizer))
        self._stepped.add(id(optimizer))

    def left_out(self) -> None:
        """The job itself leaves the step out."""
        self._is_skipped = True

    def scaler_updated(self) -> bool:
        """A GradScaler ends a step. Returns whether it was one that it had the optimizers leave out, in which
        case a step before it that was left out, too, is over."""
        if self._stepped:
            return False
        if self._is_skipped:
            self.advance()
        self._is_skipped = True
        return True
