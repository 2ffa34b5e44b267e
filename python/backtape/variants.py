"""A user's own functions for stages of the loss head, which are compared as the built-in formulas
are.

    def mine(unit):                       # called for each microbatch and unit of tokens
        p = softmax(unit.q @ unit.k.T)
        ...
        return {"dk": dk}                 # any of dq, dk, their parts, dbias, lse, label_logits

    report = backtape.replay("dumps/run-a", step=0, variants={"mine": mine})
    report.variants                       # is it right? is it what the job did?
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from backtape import _native
from backtape.frameworks import framework_of
from backtape.reading import tensor_of

_OF_TOKENS = {"lse", "label_logits", "logprobs", "dq_lse", "dq_label", "dq"}
_OF_CLASSES = {"dk_lse", "dk_label", "dk", "dbias"}
_NATIVE = {"bfloat16", "float16", "float32", "float64"}


@dataclass(frozen=True)
class Unit:
    """What a function is called with: the n tokens of one microbatch whose gradients add up to one
    dk. Those are the tokens of one rank where each rank recorded its addend of dk, and all
    tokens of the microbatch otherwise."""

    microbatch: int | None
    rank: int | None
    """First rank of the unit; None where the unit is all tokens."""
    q: np.ndarray | None
    """Hidden states `[n, D]`, in the dtype they were recorded in."""
    k: np.ndarray | None
    """The unembedding in the layout of the job: `[V, D]`, or `[D, V]` with k_layout="dv"."""
    logits: np.ndarray | None
    """Recorded logits `[n, V]`, where they were recorded."""
    bias: np.ndarray | None
    """Bias of the logits `[V]`, where there is one."""
    weights: np.ndarray | None
    """Token weights `[n]`, where they were recorded; `g` contains them already."""
    labels: np.ndarray
    """Rows of k, int64 `[n]`; -1 for a token that takes no part. Shifted where the head shifts."""
    lse: np.ndarray
    """Log-sum-exp of each token's logits in nats, float64 `[n]`: as captured where it was captured, and
    recomputed otherwise."""
    g: np.ndarray
    """Upstream gradient of each token's nll, float64 `[n]`: weight times cotangent over the
    denominator, 0 for a token that takes no part. dlogits are `g (p - onehot)`."""
    valid_vocab: int
    """Columns of the logits that are not padding."""
    head: Mapping[str, Any] = field(repr=False)
    """The declaration of the head."""


Function = Callable[[Unit], Mapping[str, Any]]
Given = tuple[str, int | None, int | None, bytes, str]


def call(
    where: tuple[str, str | None, int | None], step: int | None, variants: Mapping[str, Function]
) -> list[tuple[str, list[Given]]]:
    """Calls every function for every unit. Returns by function, for each stage and microbatch, the f64
    values as bytes and the dtype that they had. Raises TypeError or ValueError for values that are
    no stage's."""
    dump = _native.StepDump(*where, step)
    described = _native.variant_inputs(*where, step)
    return [(name, _values(name, function, dump, described)) for name, function in variants.items()]


def _values(
    name: str, function: Function, dump: _native.StepDump, described: list[dict[str, Any]]
) -> list[Given]:
    head = json.loads(dump.manifest())["head"]
    whole: dict[tuple[str, int | None], tuple[np.ndarray, str]] = {}
    found: list[Given] = []
    tokens = _tokens(described)
    for unit in described:
        rows = np.frombuffer(unit["rows"], np.uint64).astype(np.int64)
        given = _unit(unit, rows, dump, head)
        returned = function(given)
        if not isinstance(returned, Mapping):
            raise TypeError(
                f"variant {name!r} returned {type(returned).__name__}: return a dict of stages, "
                'such as {"dk": array}'
            )
        for stage, value in returned.items():
            values, dtype = _array(name, stage, value)
            values = _shaped(name, stage, values, given)
            mb = unit["microbatch"]
            if stage in _OF_TOKENS:
                blank = np.zeros((tokens[mb], *values.shape[1:]))
                full, _ = whole.setdefault((stage, mb), (blank, dtype))
                full[rows] = values
            else:
                found.append((stage, mb, unit["rank"], np.ascontiguousarray(values).tobytes(), dtype))
    found += [(stage, mb, None, full.tobytes(), dtype) for (stage, mb), (full, dtype) in whole.items()]
    return found


def _tokens(described: list[dict[str, Any]]) -> dict[int | None, int]:
    """Tokens of each microbatch."""
    most: dict[int | None, int] = {}
    for unit in described:
        rows = np.frombuffer(unit["rows"], np.uint64)
        most[unit["microbatch"]] = max(
            most.get(unit["microbatch"], 0), int(rows.max(initial=0)) + 1
        )
    return most


def _unit(
    unit: dict[str, Any], rows: np.ndarray, dump: _native.StepDump, head: Mapping[str, Any]
) -> Unit:
    def held(role: str) -> np.ndarray | None:
        place = unit["sources"].get(role)
        return None if place is None else tensor_of(dump, *place)

    def of_rows(role: str, dims: int) -> np.ndarray | None:
        whole = held(role)
        if whole is None:
            return None
        return whole.reshape(-1, whole.shape[-1])[rows] if dims == 2 else whole.reshape(-1)[rows]

    return Unit(
        microbatch=unit["microbatch"],
        rank=unit["rank"],
        q=of_rows("q", 2),
        k=held("k"),
        logits=of_rows("logits", 2),
        bias=held("bias"),
        weights=of_rows("weights", 1),
        labels=np.frombuffer(unit["labels"], np.int64),
        lse=np.frombuffer(unit["lse"], np.float64),
        g=np.frombuffer(unit["g"], np.float64),
        valid_vocab=unit["valid_vocab"],
        head=head,
    )


def _array(name: str, stage: str, value: Any) -> tuple[np.ndarray, str]:
    """float64 values of a numpy, JAX or torch array, exactly, and the dtype that they had."""
    if framework_of(value) == "torch":
        dtype = str(value.dtype).removeprefix("torch.")
        array = value.detach().cpu().double().numpy()
    else:
        plain = np.asarray(value)
        dtype, array = plain.dtype.name, plain.astype(np.float64)
    if dtype not in _NATIVE:
        raise TypeError(
            f"variant {name!r} returned {stage!r} as {dtype}: return one of {', '.join(sorted(_NATIVE))}"
        )
    return array, dtype


def _shaped(name: str, stage: str, values: np.ndarray, unit: Unit) -> np.ndarray:
    """Values in the layout of the formulas: `[n, D]`, `[V, D]`, `[V]` or `[n]`."""
    if stage not in _OF_TOKENS | _OF_CLASSES:
        return values  # refused, with the list of what is known, by what knows it
    n = len(unit.labels)
    transposed = unit.head.get("k_layout") == "dv"
    if unit.k is None:
        wanted: tuple[int, ...] = (n,)
    elif stage in ("dq", "dq_lse", "dq_label"):
        wanted = (n, unit.k.shape[0 if transposed else 1])
    elif stage in ("dk", "dk_lse", "dk_label"):
        wanted = unit.k.shape
    elif stage == "dbias":
        wanted = (unit.k.shape[1 if transposed else 0],)
    else:
        wanted = (n,)
    if values.shape != wanted:
        raise ValueError(
            f"variant {name!r} returned {stage!r} of shape {values.shape}: "
            f"wanted {wanted} for microbatch {unit.microbatch}, rank {unit.rank}"
        )
    return values.T if transposed and stage in ("dk", "dk_lse", "dk_label") else values
