"""Records the steps of a torch job that was not written for it, with one line.

    backtape.torch.attach(model, optimizer)

    session.py    where steps begin and end
    finding.py    models and optimizers that were not given, and the mesh
    losses.py     sees the calls of losses
    known.py      the losses that are found, and how a call of each is read
    calls.py      a call of a loss, and what its arguments of the usual names say
    functions.py  an autograd.Function that nobody has named
    inputs.py     the ids that the model reads
    graph.py      from logits back to hidden states and unembedding
    rows.py       operations between the two, and which token each row is of
    head.py       one call of a loss in that graph
    heads.py      what is recorded of the heads of a step
    declared.py   what is declared of them
    sharing.py    heads of which ranks share the vocabulary
    z_loss.py     a z-loss that a job adds by hand
"""

import difflib
import inspect
import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from backtape import sources
from backtape.attach_torch.losses import losses_of
from backtape.attach_torch.session import Attachment
from backtape.failopen import Faults
from backtape.recorder import Recorder
from backtape.step_torch import step_algebra

ASKED = ("STEPS", "WATCH", "RING")


def attach(
    model: torch.nn.Module | Sequence[torch.nn.Module] | None = None,
    optimizer: Any = None,
    *,
    recorder: Recorder | None = None,
    first_step: int = 0,
    losses: Mapping[str, Mapping[str, str]] | None = None,
    head: Mapping[str, Any] | None = None,
    head_bytes: int = 1 << 30,
    **options: Any,
) -> Attachment:
    """Records the steps that BACKTAPE_STEPS asks for, of a job that calls nothing else of backtape.

    Of each such step it records the loss head (hidden states, unembedding, labels, loss, and their
    gradients, for each call of a loss) and the step's algebra of all parameters (`step_algebra`). Call
    it once before the training loop; where nothing is asked for, it does nothing.

    model: one module or a list, wrapped as the job calls it; by default those whose parameters an
        optimizer holds are looked for when the first step begins.
    optimizer: one or a list; by default all that hold a parameter of the model.
    recorder: by default `Recorder.from_env`, made when the first step begins.
    first_step: the number of the next step, for a job that goes on from a checkpoint.
    losses: losses of the job's own, by "package.module:function", each with the names of its arguments:
        {"my.losses:fused_xent": {"q": "hidden", "k": "weight", "labels": "target"}}, or `logits` in
        place of q and k.
    head: what you know of the loss head, as options of `Tape.head`: {"label_smoothing": 0.1}. It takes the
        place of what is only assumed. What was seen or measured in the job stays, and the report tells where
        that contradicts what is declared here.
    head_bytes: how many bytes of unembeddings and their gradients each rank records of a step at most: a
        large head is recorded for the first calls of the loss alone.
    options: of `step_algebra`, as sample=4096; BACKTAPE_SAMPLE gives the sample where they do not. By
        default models of more than 67 million elements are recorded by 65,536 of each parameter.

    A step is what lies between two forwards in training with a step of every optimizer in between.
    What cannot be recorded is named in the dump and in one line at the end, with the reason.

    Returns the attachment, whose `close` is called when the process ends.
    """
    if recorder is not None:
        is_asked = recorder.active
    else:
        is_asked = any(os.environ.get(f"BACKTAPE_{name}") for name in ASKED)
    if not is_asked:
        return Attachment(is_active=False)
    faults = Faults(False)
    with faults.guard("attach"):
        models, owners = _listed(model, torch.nn.Module), _listed(optimizer, object)
        if sample := os.environ.get("BACKTAPE_SAMPLE"):
            options.setdefault("sample", float(sample) if "." in sample else int(sample))
        losses_of(losses or {})
        head = _known("head=", head or {}, sources.options())
        options = _known("", options, OPTIONS)
        # `backtape run` has attached itself already: what the job says itself goes before.
        for earlier in _live:
            if earlier.is_waiting:
                earlier.close()
        attached = Attachment(models, owners, recorder, first_step, losses, options, head_bytes, head)
        _live[:] = [attached]
        return attached
    return Attachment(is_active=False)


# The attachment of this process.
_live: list[Attachment] = []


def detach() -> None:
    """Closes what is attached to this process, so that no step is recorded twice."""
    for attached in _live:
        attached.close()
    _live.clear()


# The options of `step_algebra` that `attach` hands on.
OPTIONS = [name for name, of in inspect.signature(step_algebra).parameters.items() if of.kind is of.KEYWORD_ONLY]
# Those of `attach` itself.
OWN = ["model", "optimizer", "recorder", "first_step", "losses", "head", "head_bytes"]


def _known(whose: str, given: Mapping[str, Any], known: Sequence[str]) -> dict[str, Any]:
    """The options that there are; the others are told now, when somebody can still correct them."""
    what = "a head" if whose else "attach"
    for name in given:
        with Faults(False).guard("attach", whose):
            if name not in known:
                listed = known if whose else [*OWN, *known]
                near = difflib.get_close_matches(name, listed, 1)
                meant = f"do you mean {near[0]!r}?" if near else f"there are {', '.join(listed)}."
                raise ValueError(f"{what} has no option {name!r}, and it is left out: {meant}")
    return {name: value for name, value in given.items() if name in known}


def _listed(given: Any, kind: type) -> list[Any]:
    """One object or several, as a list."""
    if given is None or isinstance(given, (list, tuple)):
        return list(given or ())
    return [given] if isinstance(given, kind) else list(given)
