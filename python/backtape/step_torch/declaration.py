"""What a rank declares of a step: docs/step-format.md has the format."""

import fnmatch
import json
from typing import Any

import numpy as np
import torch

from backtape import rule_declared
from backtape.step_torch import moves, reduction
from backtape.step_torch.backward import UNSEEN
from backtape.step_torch.capture import Capture
from backtape.step_torch.choice import declared_sample, declared_squares
from backtape.step_torch.optimizers import Step, as_json
from backtape.step_torch.parts import Part

VERSION = 1
HOLDS_NOTHING = "this rank holds no element of it"


def record(capture: Capture, ended_by: str | None) -> None:
    """Records the declaration of this rank. ended_by: the exception that ended the step's body."""
    for part in capture.own:
        _explain(capture, part, ended_by)
    text = json.dumps(declaration(capture), allow_nan=False)
    rank = capture.tape.rank
    capture.tape.record(f"step.declared:{rank}", np.frombuffer(text.encode(), np.uint8))


def declaration(capture: Capture) -> dict[str, Any]:
    """The declaration as plain data."""
    reductions: dict[str, list[dict[str, Any]]] = {}
    with capture.guarded("reductions"):
        reductions = reduction.told(capture)
    named = {part.name: part for part in capture.parts}
    with capture.guarded("values that became others"):
        capture.moved = moves.told(capture.own)
    steps = capture.steps
    factors: dict[str, float] = {}
    with capture.guarded("multiplications by the job's own code"):
        factors = own_factors(capture)
    sampled = declared_sample(capture.sampling, capture.own)
    squares = declared_squares(capture.own)
    return {
        "version": VERSION,
        "rank": capture.tape.rank,
        "framework": f"torch {torch.__version__}",
        "microbatches": max(capture.microbatches, default=0),
        "loss_scale": as_json(capture.loss_scale),
        **_scaled_loss(capture),
        **_accumulation(capture),
        "skipped": any(step.skipped for step in steps),
        "norms": [_norm(entry) for entry in capture.norms if not is_later(entry)],
        "clip_value": as_json(capture.clip_value),
        "parameters": {
            part.name: _parameter(capture, part, named, reductions.get(part.name, []))
            | _multiplied(factors.get(part.same_as or part.name))
            for part in capture.parts
            if part.recorded
        },
        "optimizers": [_optimizer(step) | _rule(capture, step) for step in steps],
        **({"sampled": sampled} if sampled is not None else {}),
        **({"squares": squares} if squares else {}),
    }


def own_factors(capture: Capture) -> dict[str, float]:
    """What the job's own code has multiplied gradients by, by names. Where the job brings them together itself,
    its code divides them too, and `reduce=` says by what."""
    if capture.scalings is None:
        return {}
    factors: dict[str, float] = capture.scalings.factors()
    by_hand = capture.reduce or {}
    is_by_hand = lambda name: any(fnmatch.fnmatchcase(name, glob) for glob in by_hand)
    return {name: factor for name, factor in factors.items() if not is_by_hand(name)}


def _multiplied(factor: float | None) -> dict[str, Any]:
    return {} if factor is None else {"multiplied_by": as_json(factor)}


def _accumulation(capture: Capture) -> dict[str, Any]:
    said = capture.accumulation or ("mean" if capture.divisor != 1.0 else None)
    return {} if said is None else {"accumulation": said}


def _scaled_loss(capture: Capture) -> dict[str, Any]:
    """The scale that a GradScaler gave the loss, where it did not take it out again."""
    is_kept = capture.loss_scale is None and capture.scaled_loss is not None
    return {"scaled_loss": as_json(capture.scaled_loss)} if is_kept else {}


def _norm(entry: dict[str, Any]) -> dict[str, Any]:
    norm = {
        name: as_json(entry[name])
        for name in ("value", "kind", "max_norm", "epsilon", "of", "parameters")
    }
    for name in ("local", "others"):
        if entry[name]:
            norm[name] = as_json(entry[name])
    if not (entry["parameters"] or entry["others"]):
        norm["of_nothing"] = True
    if entry["after"]:
        norm["after_step"] = True
    return norm


def is_later(entry: dict[str, Any]) -> bool:
    """Whether a norm is that of a later step: one that was computed between two steps of an optimizer."""
    return any(step.count > 1 for step in entry["after"])


def _parameter(
    capture: Capture, part: Part, named: dict[str, Part], reduce: list[dict[str, Any]]
) -> dict[str, Any]:
    # All that happens to a tied parameter is told under its first name.
    first = part if part.same_as is None else named.get(part.same_as, part)
    optimizer, group = first.place or (None, None)
    # With a gradient of its own in between, a second step is another update.
    others = [] if first.later else sorted(first.stepped_by - {optimizer})
    moved = capture.moved.get(first.name)
    return {
        "optimizer": optimizer,
        "group": group,
        "trainable": first.trainable,
        "reduce": reduce,
        "same_as": part.same_as,
        **({"first_pass": first.first_pass} if first.first_pass else {}),
        **({"also_in": others} if others else {}),
        **_own_loss_scale(capture, first),
        **({"clip_value": as_json(first.clip_value)} if first.clip_value is not None else {}),
        **({"moved": moved} if moved else {}),
        "scalars": part.scalars,
        "absent": part.absent,
    }


def _own_loss_scale(capture: Capture, part: Part) -> dict[str, Any]:
    """What the loss of this parameter was multiplied by, where it is not the loss scale of the step: a job
    may have several scalers, and one that is updated between two halves of a step."""
    own, common = part.loss_scale, capture.loss_scale
    return {} if own is None or common is None or own == common else {"loss_scale": as_json(own)}


def _rule(capture: Capture, step: Step) -> dict[str, Any]:
    """The rule that the job says of an optimizer."""
    name, groups = _inner(step).__name__, step.groups or step.hyper_parameters()
    told, error = rule_declared.declared(capture.rules, name, groups)
    if error is not None:
        with capture.guarded(f"the rule of {name}"):
            raise error
    return told


def _inner(step: Step) -> type:
    """The class whose rule it is."""
    return type(step.optimizer.optim) if step.sharded else type(step.optimizer)


def _optimizer(step: Step) -> dict[str, Any]:
    kind, inner = type(step.optimizer), _inner(step)
    groups = step.groups or step.hyper_parameters()
    told = {"name": inner.__name__, "module": inner.__module__, "groups": groups}
    if kind is not inner:
        told["sharded_by"] = kind.__name__
    if step.others:
        told["foreign"] = step.others
    if step.again:
        told["again"] = True
    return told | {"skipped": step.skipped, "steps": step.count}


def _explain(capture: Capture, part: Part, ended_by: str | None) -> None:
    """Names what was not recorded of a parameter and why. What was recorded before an exception stays."""
    ended = None if ended_by is None else f"the step's body ended early with {ended_by}"
    if part.trainable and not part.passes:
        part.leave_out("grad", ended or _no_gradient(part))
    if part.trainable and "reduced" not in part.taken:
        is_summed = part.master is not None and not part.master.follows
        nothing = "the optimizer did not step before the tape ended" if is_summed else "it has no .grad"
        nothing = HOLDS_NOTHING if part.updated().holder() is None else nothing
        part.leave_out("reduced", ended or nothing)
    if part.place is None and part.master is not None:
        _leave_out_values(part, HOLDS_NOTHING)
        return
    if part.place is None:
        foreign = sum(len(step.foreign()) for step in capture.steps)
        if foreign and part.trainable and part.holder() is not None:
            reason = (
                f"no optimizer holds it, and the optimizers hold {foreign} tensors that are no "
                "parameters of the model: copies that they keep are not seen"
            )
            part.leave_out("master_before", reason)
            part.leave_out("master_after", reason)
        reason = "; ".join(["no optimizer holds it", *capture.unknown])
        if part in capture.unheld and ended_by is None:
            part.leave_out("state", reason)
        else:
            _leave_out_values(part, reason)
        return
    if part.updated().holder() is None:
        _leave_out_values(part, HOLDS_NOTHING)
        return
    step = capture.steps[part.place[0]]
    if step.skipped and step.count == 0:
        by = "GradScaler" if step.outer is None else type(step.outer.optimizer).__name__
        _leave_out_values(part, f"{by} left the optimizer's step out")
    elif step.count == 0:
        _leave_out_values(part, ended or "the optimizer did not step before the tape ended")
    elif step.count > 1:
        part.leave_out("later_steps", f"the optimizer stepped {step.count} times: the first is recorded")


def _no_gradient(part: Part) -> str:
    holder = part.holder()
    if holder is not None and holder.grad is not None or part.taken:
        return UNSEEN
    return "no backward pass reached it"


def _leave_out_values(part: Part, reason: str) -> None:
    copies = ("before", "after") if part.master is None else ("master_before", "master_after")
    for stage in (*copies, "state"):
        part.leave_out(stage, reason)
