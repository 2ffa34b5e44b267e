"""A dump that is open for reading: runs, steps, tensors, and stages of the head recomputed.

    run = backtape.open("dumps/run-a")
    step = run.step(0)
    step.tensor("dk", microbatch=0, rank=3)       # as the job held it
    step.stage("dk_label", microbatch=0, rank=3)  # as it should be, in f64
"""

import json
import os
from typing import Any

import numpy as np

from backtape import _native
from backtape.reading import array_of, tensor_of
from backtape.typing import AnyArray, Float64Array, Place, When


class Step:
    """One step of a run, open for reading. `backtape.open(...).step(...)` makes it.

    Arrays that it gives stay valid when the step is gone; they are read-only, because a dump is
    evidence: copy one to change it.
    """

    def __init__(self, native: _native.StepDump) -> None:
        self._native = native

    @property
    def committed(self) -> bool:
        """True when the coordinator committed the step: every shard that was expected is listed."""
        return self._native.committed

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest as plain data (docs/format.md); of a step that was never committed, what
        its files say of themselves."""
        manifest: dict[str, Any] = json.loads(self._native.manifest())
        return manifest

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the stages that `stage` knows, in the order of the computation."""
        return tuple(_native.stages())

    def keys(self) -> list[tuple[str, int | None, str | None]]:
        """Name, microbatch and moment of every tensor."""
        return self._native.keys()

    def tensor(
        self,
        name: str,
        microbatch: int | None = None,
        *,
        when: When | None = None,
        rank: int | None = None,
    ) -> AnyArray:
        """The global tensor, bit for bit as the job held it.

        name: as it was recorded.
        microbatch, when: which one, where several were captured.
        rank: the addend of this rank, of a tensor that was recorded with `partial=`.

        Where ranks hold copies that differ it gives one of them: the check `replicas`, a part of
        every replay, says which ranks differ and where.

        Returns a read-only array of the global shape (with `rank`, of what the rank held) in the
        tensor's own dtype; bf16 and the 8-bit floats are ml_dtypes'. Nothing is converted and
        nothing is copied twice: where one shard holds the whole tensor the array is a view of the
        mapped file, else of the one buffer that its shards were put together in. Only bytes that
        hash as the training process hashed them come out.

        Raises KeyError for a tensor that is not there or that several are meant by, ValueError for
        a name or moment that cannot be one, RuntimeError with what is missing where it cannot be
        put together.
        """
        return tensor_of(self._native, name, microbatch, when, rank)

    def stage(
        self,
        name: str,
        microbatch: int | None = None,
        *,
        rank: int | None = None,
        from_captured: bool = True,
        policy: str | None = None,
        tokens: tuple[int, int] | None = None,
    ) -> Float64Array:
        """A stage of the loss head, recomputed in f64 from the dump's own inputs.

        name: one of `stages`; inputs (q, k, labels, ...) are recorded, not computed: `tensor` has
            them.
        microbatch: may be left out where there is one; accumulate and reduce have none.
        rank: of dk, dk_lse, dk_label, dbias and accumulate, the addend of this rank alone.
        from_captured: start from what the job captured of the stages before this one (logits, lse,
            label_logits, logprobs), as the replay does. False: from the head's inputs alone.
        policy: instead of the reference, one of the policies that make up the floor, by the name
            that `best_member` of the report has, before its values are stored.
        tokens: of logits, p and dlogits the tokens first to end, `[end - first, V]`.

        Returns float64. Shapes, T being the tokens in the shape that the job gave them:

            lse, label_logits, logprobs, nll, dlogprobs, g, g_lse, g_label   [T]
            loss                                   [], or [T] with reduction="none"
            logits, p, dlogits                     [T, V], padding included
            dq_lse, dq_label, dq                   [T, D]
            dk_lse, dk_label, dk, accumulate, reduce   [V, D], or [D, V] with k_layout="dv"
            dbias                                  [V]

        lse, logits and nll are in nats; gradients are those of the loss that the head declares,
        its denominator and cotangent applied.

        Raises KeyError for a stage, microbatch, rank or policy that is not there, with those that
        are; RuntimeError where the dump lacks an input, naming it; ValueError for tokens that do
        not exist, or a plane above 4 GiB.
        """
        found = _native.recompute_stage(
            self._native, name, microbatch, rank, from_captured, policy, tokens
        )
        array: Float64Array = np.asarray(array_of(found[0], "float64", found[1]))
        return array

    def __repr__(self) -> str:
        state = "committed" if self.committed else "partial"
        return f"<backtape.Step {self._native.step}: {state}, {len(self.keys())} tensors>"


class Run:
    """A run, or a store with one run in it. `backtape.open` makes it."""

    def __init__(self, path: Place, run: str | None = None, attempt: int | None = None) -> None:
        self._where = (os.fspath(path), run, attempt)

    @property
    def steps(self) -> tuple[int, ...]:
        """The steps that were dumped, committed or not, ascending.

        Raises RuntimeError with one sentence where the place is no dump, holds several runs, or
        no step was dumped.
        """
        return tuple(_native.dumped_steps(*self._where))

    def step(self, step: int | None = None) -> Step:
        """A step; may be left out when only one was dumped.

        Raises RuntimeError with one sentence where there is no such step, or several are meant.
        """
        return Step(_native.StepDump(*self._where, step))

    def __repr__(self) -> str:
        path, run, attempt = self._where
        more = "".join(
            f", {name}={value!r}"
            for name, value in (("run", run), ("attempt", attempt))
            if value is not None
        )
        return f"<backtape.Run {path!r}{more}>"
