"""One attachment: a function of the job, of which the calls are counted and some are recorded."""

import atexit
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Generator, Iterator
from typing import Any

import jax

from backtape.attach_jax import heads
from backtape.attach_jax.doors import is_outside, mesh_of, opened
from backtape.attach_said import said
from backtape.failopen import CAUGHT, Faults, describe
from backtape.recorder import Recorder
from backtape.settings import rank_and_world_size
from backtape.tape import Tape

HIDDEN = "a step is a call of the function that was attached, from outside of jit"
INSIDE = (
    "the function that was attached was called inside jit alone, where no step is seen to begin: attach the "
    "function that makes a step, or put `with attached.step():` around its call"
)
COMPILED = "the attached function is compiled already, and nothing can be put into it: attach it before it is compiled"


class Attached:
    """What `backtape.jax.attach` gives: it is called as the function is."""

    def __init__(
        self,
        function: Callable[..., Any],
        recorder: Recorder | None = None,
        first_step: int = 0,
        head_bytes: int = heads.DEFAULT_BYTES,
        is_active: bool = True,
    ) -> None:
        functools.update_wrapper(self, function, updated=())
        self._function = function
        self._recorder, self._head_bytes = recorder, head_bytes
        self._next = first_step
        self._shadows: dict[Any, Any] = {}  # of the programs that have run in a recorded step
        self._is_open, self._was_inside = False, False
        self._closed = not is_active
        self._faults = Faults(False, rank_and_world_size(os.environ)[0])
        if is_active:
            atexit.register(self._close_at_exit)
            if isinstance(function, jax.stages.Compiled):
                self._faults.say(30, "%s", COMPILED)

    def __getattr__(self, name: str) -> Any:
        # What a jitted function has besides its call: lower, trace, clear_cache.
        if "_function" not in self.__dict__ or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(name)
        return getattr(self._function, name)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        # A method that is attached where its class is defined.
        return self if instance is None else functools.partial(self, instance)

    @property
    def recorder(self) -> Recorder | None:
        """The recorder, once the first step has begun: for `scalars` and `watch`."""
        return self._recorder

    def __call__(self, *args: Any, **options: Any) -> Any:
        if self._closed:
            return self._function(*args, **options)
        if self._is_open or not is_outside():
            self._was_inside = self._was_inside or not self._is_open
            return self._function(*args, **options)
        with self._counted((args, options)):
            return self._function(*args, **options)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """A step of the job, where the function is called inside of compiled code, as a loss is."""
        if self._closed or self._is_open:
            yield
            return
        with self._counted(()):
            yield

    @contextlib.contextmanager
    def _counted(self, given: Any) -> Generator[None, None, None]:
        """A step, which is recorded if it is asked for. given: the arrays that are known of it."""
        number, self._next = self._next, self._next + 1
        tape = self._tape(number, given)
        if tape is None:
            yield
            return
        self._is_open = True
        try:
            with tape:
                with opened(heads.begin(tape, self._head_bytes), self._shadows, self._faults):
                    yield
        finally:
            self._is_open = False

    def _tape(self, number: int, given: Any) -> Tape | None:
        """The tape of a step; None where it is not recorded."""
        with self._faults.guard("attach"):
            if self._recorder is None:
                self._recorder = Recorder.from_env(mesh=mesh_of(given))
                # What is registered last runs first: this line comes before the recorder closes itself.
                atexit.register(self._close_at_exit)
            if self._recorder.wants(number):
                return self._recorder.step(number)
        return None

    def close(self) -> None:
        """Waits until what was recorded is durable, and says on rank 0 what that is. It is called when the process
        ends; calling it again does nothing. The function is then called as it is."""
        if self._closed:
            return
        self._closed = True
        self._shadows.clear()
        is_first = rank_and_world_size(os.environ)[0] == 0
        summary = None if self._recorder is None else self._recorder.close()
        if is_first and summary is not None:
            print(f"backtape: {said(summary, self._next - 1, HIDDEN)}", file=sys.stderr)
        elif is_first and self._was_inside:
            print(f"backtape: recorded nothing: {INSIDE}", file=sys.stderr)

    def _close_at_exit(self) -> None:
        """Closes the attachment when the process ends. Raises nothing, as the job is over."""
        try:
            self.close()
        except CAUGHT as error:
            self._faults.tell("close", "", error, describe(error))
