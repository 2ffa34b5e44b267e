"""The tape of one step: what `with recorder.step(n) as tape` gives."""

import functools
import logging
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, Self, Unpack

import numpy as np

from backtape import _native, frameworks
from backtape.failopen import CAUGHT, Faults, describe, text_of
from backtape.sampling import Region
from backtape.shards import Key, Mesh, Placement, PlainParts, Shard, shards_of
from backtape.sources import DECLARED, MEASURED, Sourced, of_items

if TYPE_CHECKING:
    # Made by a program that imports this module.
    from backtape.options import HeadOptions

When = Literal["before_op", "after_op", "pre_reduce", "post_reduce", "recompute"]
Reduction = Literal["sum", "mean"]


Arguments = ParamSpec("Arguments")


def fail_open(
    method: Callable[Concatenate["Tape", Arguments], None],
) -> Callable[Concatenate["Tape", Arguments], None]:
    """Makes a method do nothing on an inactive tape. On an active one its exceptions are kept from
    the job, also that of a call with wrong arguments, which Python raises before the body runs."""
    recording = method.__name__ in ("record", "record_plain")
    what = "record" if recording else method.__name__
    # A capture that the recorder refuses is among the dump's omissions already.
    counted = (_native.RecorderError,) if recording else ()

    @functools.wraps(method)
    def call(tape: "Tape", *args: Arguments.args, **options: Arguments.kwargs) -> None:
        native = tape._native
        if native is None:
            return
        try:
            method(tape, *args, **options)
        except CAUGHT as error:
            subject = (args[0] if args else options.get("name", "")) if recording else ""

            def omit(reason: str) -> None:
                tensor = text_of(subject) if recording else what
                native.omit(tensor, index_or_none(options.get("microbatch")), reason)

            tape._faults.caught(error, what, subject, omit, counted)

    return call


class Tape:
    """Records tensors of one step, or does nothing at all where the step is not recorded.

    `active` says whether it is, so that a job can leave out what it computes for the tape alone:

        with recorder.step(step) as tape:
            state, taped = steps[tape.active](state, batch)
    """

    __slots__ = (
        "active", "_native", "_faults", "_step", "_place_proof", "_mesh", "_expected", "_arrived",
        "_tracing", "_at_end",
    )

    def __init__(
        self,
        native: _native.Tape | None,
        step: int,
        faults: Faults,
        place_proof: bool,
        mesh: Mesh | None = None,
    ) -> None:
        self.active = native is not None
        self._native = native
        self._step = step
        self._faults = faults
        self._place_proof = place_proof
        self._mesh = mesh
        # Gradients that taps wait for, and those that have come, as (name, microbatch).
        self._expected: set[tuple[str, int | None]] = set()
        self._arrived: set[tuple[str, int | None]] = set()
        self._tracing: AbstractContextManager[object] | None = None
        self._at_end: dict[str, Callable[[str | None], None]] = {}

    @fail_open
    def head(self, *, _found: Sourced | None = None, **declaration: "Unpack[HeadOptions]") -> None:
        """Declares the loss head; every option has the default that is shown, the first of several.

            loss="softmax_xent" | "xent_logits" | "grpo",
            path="fused" | "plain" | "chunked" | a name, reduction="mean" | "sum" | "none",
            denominator="valid" | "all" | "weights" | number,
            scope="global" | "microbatch" | "rank" | {...}, microbatches=1,
            microbatch_reduction="mean" | "sum", ignore_label=None | number, z_loss=0.0,
            z_loss_in_loss=True | False, softcap=None | number, label_smoothing=0.0,
            smoothing_formula="uniform" | "megatron", temperature=1.0, logit_scale=1.0,
            valid_vocab=None | number, mask_value=None | number, k_layout="vd" | "dv",
            labels_shifted=True | False, tied_embedding=False | True, cotangent=1.0, dtypes={},
            autocast=None | "bf16" | "f16", tiles=None | {...}, gradient_filter=None | number,
            policy=None | {...}, grpo=None | {...}

        docs/heads.md has the formula of each option. A wrong option or value, or two options that
        contradict each other, refuse the whole declaration: the log line, or with `strict=True` the
        `RecorderError`, says which options and values there are.
        """
        self._native.head(*_told(_found or _by_hand(declaration)))

    @fail_open
    def record(
        self,
        name: str,
        array: Any,
        *,
        role: str | None = None,
        microbatch: int | None = None,
        global_shape: Sequence[int] | None = None,
        offsets: Sequence[int] | None = None,
        flat_offset: int | None = None,
        extent: Sequence[int] | None = None,
        partial: Reduction | None = None,
        when: When | None = None,
        placement: Placement | None = None,
        regions: Sequence[Region] | None = None,
        _compiled: bool = False,
    ) -> None:
        """Records what this process holds of a tensor.

        array: a numpy or ml_dtypes array, a number, a jax.Array (all its addressable shards), a
            torch.Tensor, or a DTensor (this rank's shard, with the placements that it has).
        role: the tensor's part in the loss head; by default its name, if that is a role.
        microbatch: its index in the step; none for weights and reduced gradients.
        global_shape, offsets: `array` is the box of a tensor of this shape that starts at these
            indices, one for each dimension.
        global_shape, flat_offset: `array`, a torch tensor, is a run of the flattened tensor that
            starts at this element (FSDP1's flat parameters); it may end inside a row. With offsets and
            `extent` it is a run of the flattened box of this extent that starts at the offsets.
        partial: `array` is one rank's addend of the tensor, "sum" or "mean". This needs one process
            for each device; where a process drives several devices, record the reduced tensor.
        placement: how a local array lies on the recorder's mesh: {"data": 0} where the axis `data`
            splits dimension 0, {"data": "sum"} or {"data": "mean"} for addends; other axes
            replicate. Parts of unequal length (dynamic padding) follow each other in the order
            of the axis.
        when: the moment of capture, for a tensor that changes during the step.
        regions: only what lies in these boxes of the global tensor is copied and recorded, each as
            (start, end) for each dimension: a sample of a large tensor.

        Where the array cannot be recorded, the dump names it with the reason, and the log has one
        line for each kind of fault; with `strict=True` a `RecorderError` is raised.
        """
        if isinstance(name, str) and not self._native.wants(name, role, microbatch):
            return
        shards = shards_of(
            array,
            global_shape=global_shape,
            offsets=offsets,
            partial=partial,
            flat_offset=flat_offset,
            extent=extent,
            placement=placement,
            regions=regions,
            mesh=self._mesh,
            place_proof=self._place_proof,
            guard=self._faults.guard,
        )
        for shard in shards:
            shard.compiled = _compiled
            # What the job says goes before what the framework knows of the array.
            shard.partial = shard.partial if partial is None else partial
        if shards:
            self._native.record(Key(name, role, microbatch, when), shards)

    @fail_open
    def record_plain(
        self,
        name: str,
        tensor: Any,
        parts: PlainParts,
        microbatch: int | None,
        when: When | None,
        partial: Reduction | None,
    ) -> None:
        """Records known parts of a torch tensor that lies in the host's memory in C order, by one call
        where `record` takes a dozen."""
        memory = (tensor.data_ptr(), tensor.nbytes, parts.dtype)
        key = (name, microbatch, when, partial)
        self._native.record_plain(parts.staging, parts.cuts, memory, key)

    def record_shards(self, key: Key, shard: Callable[[], Shard]) -> None:
        """Records the one shard that a tap of traced code holds; called from its thread, in which
        nothing may raise: so the shard is made in here."""
        native = self._native
        if native is None:
            return

        def omit(reason: str) -> None:
            native.omit(key.name, key.microbatch, reason)

        with self._faults.guard("tap", key.name, omit, (_native.RecorderError,)):
            native.record(key, [shard()])

    def record_compiled(self, name: str, array: Any, compiled: bool, **key: Any) -> None:
        """Records an array as `record` does, and whether a graph compiler made the code around it."""
        self.record(name, array, _compiled=compiled, **key)

    def leave_out(self, name: str, microbatch: Any, reason: str) -> None:
        """Says in the dump that a tensor is not recorded, and why."""
        native = self._native
        if native is not None:
            with self._faults.guard("leave out", name):
                native.omit(text_of(name), index_or_none(microbatch), reason)

    def expect(self, name: str, microbatch: int | None) -> None:
        """Notes that a tap waits for this gradient: if it does not come, the dump says so."""
        self._expected.add((name, index_or_none(microbatch)))

    def arrived(self, name: str, microbatch: int | None) -> None:
        """Notes that the gradient has come."""
        self._arrived.add((name, index_or_none(microbatch)))

    def guarded(
        self,
        what: str,
        subject: object,
        omit: Callable[[str], None] | None = None,
        counted: tuple[type[BaseException], ...] = (),
    ) -> AbstractContextManager[None]:
        """A context for a part of backtape that handles many tensors: what it raises is logged and
        kept from the job, unless the recorder is strict. `omit` and `counted` as of `Faults.guard`."""
        return self._faults.guard(what, subject, omit, counted)

    @property
    def rank(self) -> int:
        """This process's index in the job; 0 on an inactive tape."""
        return self._mesh.rank if self._mesh is not None else 0

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of the recorder; None on an inactive tape."""
        return self._mesh

    def at_end(self, what: str, callback: Callable[[str | None], None]) -> None:
        """Has `callback` called before the step ends, also where the body raises, while the tape still
        records. It gets the name of the exception's type, or None.

        Raises ValueError where something else of this name waits for the end already.
        """
        if what in self._at_end:
            raise ValueError(f"{what} was called before on this tape: one call takes all there is")
        self._at_end[what] = callback

    def _call_at_end(self, ended_by: str | None) -> None:
        """Calls what waits for the end. Where the body has raised, its exception goes on, and that of a
        callback goes to the log even with `strict`."""
        refused: BaseException | None = None
        for what, callback in self._at_end.items():
            try:
                with self._faults.guard(what, "", functools.partial(self._omit, what)):
                    callback(ended_by)
            except CAUGHT as error:
                # Only a strict recorder raises here. The others are called all the same, as they
                # undo what they have changed.
                refused = refused or error
        if refused is not None and ended_by is None:
            raise refused

    def _omit(self, name: str, reason: str) -> None:
        if self._native is not None:
            self._native.omit(name, None, reason)

    def __enter__(self) -> Self:
        if self.active:
            _open.append(self)
            # A job has taps in traced code only if it imports backtape.jax. Its functions are then
            # traced anew.
            jax = frameworks.imported("backtape.jax")
            if jax is not None:
                self._tracing = jax.taping(True)
                self._tracing.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Ends the step. An exception of the body goes on as it was."""
        native = self._native
        if native is None:
            return
        try:
            self._call_at_end(None if kind is None else kind.__name__)
            if kind is None:
                self._settle()
        finally:
            self._close(native, kind)

    def _close(self, native: _native.Tape, kind: type[BaseException] | None) -> None:
        """Ends the step with the recorder, and takes the tape from what finds it."""
        self.active, self._native = False, None
        if self._tracing is not None:
            self._tracing.__exit__(None, None, None)
        if self in _open:
            _open.remove(self)
        if kind is None:
            with self._faults.guard("step", self._step):
                native.close()
            return
        try:
            native.omit("*", None, f"the step's body ended early with {kind.__name__}")
            native.close()
        except CAUGHT as fault:
            self._faults.tell("step", self._step, fault, describe(fault))
        self._faults.say(
            logging.WARNING, "step %d ended early: the body raised %s", self._step, kind.__name__
        )

    def _settle(self) -> None:
        """Before the step ends: waits for taps in jitted code, and names gradients that have not come."""
        jax = frameworks.imported("backtape.jax")
        if jax is not None:
            with self._faults.guard("taps of step", self._step):
                jax.settle(self)
        for name, microbatch in sorted(self._expected - self._arrived, key=str):
            self.leave_out(name, microbatch, "no gradient reached its tap before the step ended")


def _by_hand(declaration: "HeadOptions") -> Sourced:
    """A declaration that somebody wrote, with what is measured for it."""
    measured = {} if "autocast" in declaration else {"autocast": autocast()}
    measured = {name: value for name, value in measured.items() if value is not None}
    own = dict(declaration)
    sources = {**of_items(own, DECLARED), **of_items(measured, MEASURED)}
    return Sourced({**own, **measured}, sources)


def _told(head: Sourced) -> tuple[dict[str, Any], dict[str, str], dict[str, Any], list[int]]:
    """A head as the recorder takes it: values of Python's own."""
    options, by_hand = (
        {name: plain(value) for name, value in given.items()} for given in (head.options, head.by_hand)
    )
    return options, head.sources, by_hand, head.batches


# Tapes in use, the innermost last: a tap inside the model finds its tape here. They are those of
# the process and not of a thread, as backward passes and callbacks run in threads of their own.
_open: list[Tape] = []


def open_tape() -> Tape | None:
    """The tape of the step that is being recorded, if one is."""
    return _open[-1] if _open else None


def autocast() -> str | None:
    """The dtype of the `torch.autocast` that this thread is in; None where it is in none."""
    torch = frameworks.imported("torch")
    if torch is None:
        return None
    for device in ("cuda", "cpu", "xpu"):
        # It raises for a device that this build of torch does not know.
        try:
            if torch.is_autocast_enabled(device):
                return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
        except (AttributeError, TypeError, RuntimeError):
            continue
    return None


def plain(value: Any) -> Any:
    """An option as a value of Python's own: scalars of numpy and jax become numbers, and dtypes their
    names."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (np.dtype, type)):
        return np.dtype(value).name
    if getattr(value, "ndim", None) == 0:
        return np.asarray(value).item()
    return value


def index_or_none(microbatch: Any) -> int | None:
    """The microbatch that an omission names; None for a value that is no index."""
    try:
        index = operator.index(microbatch)
    except CAUGHT:
        return None
    return index if 0 <= index < 2**32 else None
