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

    Its arrays stay valid when the step is gone. They are read-only, because a dump is evidence:
    copy one to change it.
    """

    def __init__(self, native: _native.StepDump) -> None:
        self._native = native

    @property
    def committed(self) -> bool:
        """True when the coordinator committed the step: every shard that was expected is listed."""
        return self._native.committed

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest as plain data (docs/format.md). For a step that was never committed it is put
        together from what the step's files say of themselves."""
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

        name: the name under which it was recorded.
        microbatch, when: which value of it, where several were captured.
        rank: the addend of this rank, for a tensor that was recorded with `partial=`.

        Where ranks hold copies that differ, it returns one of them: the check `replicas`, which is
        a part of every replay, says which ranks differ and where.

        Returns a read-only array of the global shape (with `rank`, of the shape that the rank held)
        in the tensor's own dtype; bf16 and the 8-bit floats are ml_dtypes'. Nothing is converted,
        and bytes are copied once at most: where one shard holds the whole tensor the array is a
        view of the mapped file, otherwise of one buffer into which the shards were copied. Bytes
        are only returned if their hash is the one that the training process computed.

        Raises KeyError where there is no such tensor or several fit, ValueError for a name or
        moment that no tensor can have, RuntimeError that says what is missing where the tensor
        cannot be assembled.
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
        """A stage of the loss head, recomputed in f64 from the inputs in the dump.

        name: one of `stages`. The head's inputs (q, k, labels, ...) are recorded and not computed:
            `tensor` returns them.
        microbatch: may be left out where there is one; accumulate and reduce have none.
        rank: for dk, dk_lse, dk_label, dbias and accumulate, the addend of this rank alone.
        from_captured: start from what the job captured of the stages before this one (logits, lse,
            label_logits, logprobs), as the replay does. False: from the head's inputs alone.
        policy: in place of the reference, one of the policies that make up the floor, by the name
            in the report's `best_member`; its values are those before it rounds them to store them.
        tokens: for logits, p and dlogits the tokens from first up to end, `[end - first, V]`.

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
