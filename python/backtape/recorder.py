"""The recorder of this process."""

import atexit
import functools
import logging
import os
import weakref
from collections.abc import Mapping
from typing import Any, Self

from backtape import _native, gpu
from backtape.failopen import CAUGHT, Faults, describe
from backtape.launch import launch_name
from backtape.settings import (
    Settings,
    from_environment,
    mesh_axes,
    mesh_coordinates,
    rank_and_world_size,
    truth,
    versions,
    waits,
)
from backtape.scalars import Rows
from backtape.shards import Mesh
from backtape.tape import Tape
from backtape.watch import Readings


class Recorder:
    """Records chosen steps of one rank; without steps to record it costs next to nothing.

    dir: the run's directory, or with `run` the store that holds it.
    steps: which steps to record: "0", "0,100-110", "every:1000" or "none".
    tensors, ranks, microbatches: what to record of them: "q,k,dq*,!d*_label", "0-3,7", "0".
    max_tensor_bytes, max_step_bytes: "512MiB"; a tensor that is larger, or with which the step
        would be larger, is left out and named.
    watch: ask the coordinator for plans and triggers while the job runs.
    ring: keep the loss-head tensors of so many steps that are not selected, in at most
        `ring_bytes`, until something triggers a recording.
    trigger_grad_norm, trigger_spread: what `watch()` triggers on. docs/selection.md describes all
        of these.
    rank, world_size: this process's index in the job and the number of processes.
    coordinator: "host:port"; by default rank 0 runs one, for jobs on one machine.
    credentials: this rank's folder of credentials, for a coordinator that asks (docs/security.md).
    mesh: a jax Mesh, a torch DeviceMesh, or a dict of axis sizes, outermost first.
    strict: raise RecorderError where recording fails. Otherwise the fault is logged once for each
        kind, the dump names what is missing, and the job goes on.
    scalars: take scalars() at every step also where no steps are recorded (steps=None). A recorder
        with steps takes them anyway.
    attempt: which launch of the run this is, where the launcher counts restarts.
    launch: the launcher's name for this launch, "NAME" or "NAME/RESTART": the same on all its
        ranks, and another one after a restart. from_env takes torchrun's, Slurm's or Open MPI's.
    transport: "auto", "direct" (the rank writes the store) or "stream" (the coordinator does).
    place_proof: have jax compute the fingerprint of its arrays: about one pass over each array, and
        4 bytes for each element while it runs.
    close_patience_s: how many seconds close waits after the last progress; 30 by default.
    host, queue_bytes, call_cap_s, join_deadline_s, step_deadline_s: see the README.
    """

    def __init__(
        self,
        dir: str | os.PathLike[str] | None = None,
        steps: str | int | None = "0",
        rank: int = 0,
        world_size: int = 1,
        run: str | None = None,
        coordinator: str | None = None,
        mesh: Any = None,
        strict: bool = False,
        attempt: int | None = None,
        transport: str = "auto",
        *,
        host: str | None = None,
        place_proof: bool = True,
        scalars: bool = False,
        **more: Any,
    ) -> None:
        self._faults = Faults(bool(strict), rank, host)
        self._native: _native.Recorder | None = None
        self._place_proof = place_proof
        self._nothing = Tape(None, -1, self._faults, False)
        self._process = os.getpid()
        self._rows: Rows | None = None
        self._readings: Readings | None = None
        self._in_trouble = False
        if not steps and steps != 0:
            if not (scalars or waits(more)):
                return
            steps = "none"
        with self._faults.guard("start"):
            if dir is None:
                raise ValueError("no directory: set dir= or BACKTAPE_DIR")
            axes, here = mesh_axes(mesh), mesh_coordinates(mesh, rank, world_size)
            settings = Settings(
                os.fspath(dir), str(steps), rank, world_size, run, coordinator, attempt, host,
                axes, here, transport, bool(strict), versions=versions(), **more,
            )
            self._mesh = Mesh(dict(axes), here, rank, world_size)
            self._native = _native.Recorder(settings)
            self._rows = Rows(self._native.scalars)
            self._readings = Readings() if waits(more) else None
            self._at_exit = functools.partial(_close_at_exit, weakref.ref(self))
            atexit.register(self._at_exit)
            if steps != "none":
                gpu.expect()

    @classmethod
    def from_env(cls, **overrides: Any) -> Self:
        """The recorder that the BACKTAPE_* variables ask for; an inactive one unless
        BACKTAPE_STEPS, BACKTAPE_WATCH, BACKTAPE_RING or BACKTAPE_SCALARS is set.

        overrides: options of `Recorder`, which go before the variables.

        Rank and world size are taken from the first of these that has them: `overrides`,
        BACKTAPE_RANK and BACKTAPE_WORLD_SIZE, jax or torch where their processes are initialised,
        the launcher (torchrun, Slurm, Open MPI).
        """
        environment = os.environ
        asked = any(environment.get(f"BACKTAPE_{name}") for name in ("STEPS", "WATCH", "RING"))
        scalars = overrides.get("scalars") or is_true(environment, "BACKTAPE_SCALARS")
        if not (asked or scalars or overrides.get("steps") or waits(overrides)):
            return cls(steps=None)
        strict = overrides.get("strict", is_true(environment, "BACKTAPE_STRICT"))
        faults = Faults(strict, overrides.get("rank"), overrides.get("host"))
        with faults.guard("from_env"):
            options = from_environment(environment)
            if not {"rank", "world_size"} <= overrides.keys():
                options["rank"], options["world_size"] = rank_and_world_size(environment)
            if not {"attempt", "launch"} & {*options, *overrides}:
                world_size = overrides.get("world_size", options.get("world_size", 1))
                options["launch"] = launch_name(environment, world_size)
            return cls(**({"steps": None} | options | overrides))
        return cls(steps=None)

    @property
    def active(self) -> bool:
        """False when nothing will be recorded: it was not asked for, cannot be done, or is over."""
        return self._native is not None

    def wants(self, step: int) -> bool:
        """True when `step(step)` will give an active tape."""
        native = self._native
        if native is None:
            return False
        with self._faults.guard("wants"):
            return self._process == os.getpid() and native.wants(step)
        return False

    def step(self, step: int) -> Tape:
        """The tape of a step, to be used in `with`; an inactive one if the step is not recorded."""
        native = self._native
        if native is None:
            return self._nothing
        with self._faults.guard("step", step):
            # A forked child has no recorder thread, so nobody would write what it records.
            if native.wants(step) and self._process == os.getpid():
                self._say_trouble(native.trouble())
                return Tape(native.step(step), step, self._faults, self._place_proof, self._mesh)
        return self._nothing

    def _say_trouble(self, trouble: str | None) -> None:
        """Logs once that something does not work, and again when it has worked in between."""
        if trouble is not None and not self._in_trouble:
            self._faults.say(logging.WARNING, "%s", trouble)
        self._in_trouble = trouble is not None

    def scalars(self, step: int, values: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        """Records numbers of a step, recorded or not: loss=, learning_rate=, grad_norm=, ...

        values, more: by name, numbers of Python or numpy, jax arrays or torch tensors of one
            element, or what backtape.scalars.of_torch and of_jax return. None is left out.

        It waits for no device. A value that is no number is left out, which is logged, or raised as
        RecorderError with `strict=True`. On an inactive recorder it does nothing.
        """
        rows = self._rows
        if rows is None:
            return
        with self._faults.guard("scalars", step):
            if self._process != os.getpid():
                return
            both = (*(values or {}).items(), *more.items())
            if refused := rows.add(step, both):
                raise TypeError(f"left out: {'; '.join(refused)}")

    def watch(self, step: int, loss: Any = None, grad_norm: Any = None) -> None:
        """Looks at a step's loss and gradient norm, and has every rank record where they are wrong.

        loss, grad_norm: numbers, or arrays of one element. A value that a device still computes is
            looked at by a later call, as this one does not wait.

        It does nothing unless the recorder has `watch` or `ring`.
        """
        readings = self._readings
        if readings is None or self._native is None:
            return
        with self._faults.guard("watch", step):
            if self._process == os.getpid():
                readings.add(step, loss, grad_norm)
                for reading in readings.ready():
                    self._native.watch(*reading)

    def close(self) -> _native.Summary | None:
        """Waits until what was recorded is durable and its steps are committed, or known not to be.

        It waits at most `close_patience_s` (30 s) after the last progress. With `strict=True` it
        raises RecorderError where recording has failed.

        Returns the summary; None on an inactive recorder. Closing again does nothing.
        """
        native, self._native = self._native, None
        rows, self._rows = self._rows, None
        if native is None or self._process != os.getpid():
            return None
        atexit.unregister(self._at_exit)
        if rows is not None:
            self._finish(rows)
        if self._readings is not None:
            with self._faults.guard("watch"):
                for reading in self._readings.ready():
                    native.watch(*reading)
        with self._faults.guard("close"):
            summary = native.close()
            self._report(summary)
            return summary
        return None

    def _finish(self, rows: Rows) -> None:
        """Hands over the rows that still wait. A row with a value that raises is lost, and no other."""
        while len(rows):
            try:
                rows.drain(wait=True)
            except CAUGHT as error:
                self._faults.tell("scalars", "", error, describe(error))
        if rows.dropped:
            message = "%d rows of scalars were dropped: their values were not computed in time"
            self._faults.say(logging.WARNING, message, rows.dropped)

    def _report(self, summary: _native.Summary) -> None:
        trouble = summary.faults or summary.omissions or summary.steps_partial
        self._faults.say(logging.WARNING if trouble else logging.INFO, "%s", summary)
        if repeated := self._faults.repeated():
            self._faults.say(logging.WARNING, "not logged one by one: %s", repeated)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def is_true(environment: Mapping[str, str], name: str) -> bool:
    """The truth value of an environment variable; one that cannot be read counts as false."""
    try:
        return truth(name, environment.get(name, ""))
    except ValueError:
        return False


def _close_at_exit(recorder: weakref.ref[Recorder]) -> None:
    """Closes the recorder of a job that has not done so. Raises nothing, as the job is over."""
    live = recorder()
    if live is None:
        return
    try:
        live.close()
    except CAUGHT as error:
        live._faults.tell("close", "", error, describe(error))
