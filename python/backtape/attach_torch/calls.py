"""A call of a loss, and what its arguments of the usual names say."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from backtape.attach_torch.inputs import Read


@dataclass
class Call:
    """One call of a loss, as the job made it."""

    function: str  # as the user knows it
    labels: torch.Tensor
    result: torch.Tensor
    logits: torch.Tensor | None = None
    classes: int = -1  # the dimension of the logits that is the vocabulary
    are_logs: bool = False  # they are log-probabilities
    # The result is the log-probability of each label, of which the loss is the negative.
    is_likelihood: bool = False
    is_normaliser: bool = False  # no loss, but the logsumexp of logits
    problem: str | None = None  # why no head can be declared of it
    q: torch.Tensor | None = None  # a fused loss takes q and k in place of logits
    k: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    entry: Any = None  # the operation of autograd that takes the logits; None: the log-softmax before the result
    class_weights: torch.Tensor | None = None
    reduction: str = "mean"
    ignore_label: int | None = -100
    reads: Sequence[Read] = ()  # the lookups in embeddings before it
    # What else it says of the head, as options of `Tape.head`.
    head: dict[str, Any] = field(default_factory=dict)
    is_known: bool = True  # no option but these has a part in it


Seen = Callable[[Call], None]
Reader = Callable[[str, dict[str, Any], Any], Call]


@dataclass
class Loss:
    """A function that computes a loss."""

    name: str  # as the user knows it
    module: str  # the module that the job's call goes through
    attribute: str
    read: Reader
    parameters: str = ""  # of a builtin function, which has no signature
    # Whether a call is one itself; otherwise it calls another loss that is.
    applies: Callable[[dict[str, Any]], bool] = lambda given: True
    is_named: bool = False  # the user has named it


def options_of(given: Mapping[str, Any], taken: set[str]) -> dict[str, Any]:
    """What a call says by arguments of the usual names, without those that are something else."""
    options: dict[str, Any] = {}
    for name, usual in USUAL.items():
        words = [word for word in usual if word not in taken]
        value = next((given[word] for word in words if given.get(word) is not None), None)
        if value is not None:
            options[name] = value
    own = {name: options.pop(name) for name in OF_CALL if name in options}
    return own | {"head": options}


# Names that loss functions have for the same thing.
USUAL = {
    "reduction": ("reduction",),
    "ignore_label": ("ignore_index", "ignored_index"),
    "label_smoothing": ("label_smoothing",),
    "softcap": ("softcap", "logit_softcapping", "final_logit_softcapping", "logits_soft_cap"),
    "logit_scale": ("logit_scale", "scale"),
    "z_loss": ("z_loss", "lse_square_scale"),
    "class_weights": ("weight", "ce_weight"),
}

# Those that a call has by itself; the others are options of the head.
OF_CALL = ("reduction", "ignore_label", "class_weights")


def divided(head: Mapping[str, Any], temperature: float) -> dict[str, Any]:
    """The options of a head whose logits are divided by a temperature after all else: z = cap tanh(z1 / cap) / t."""
    softcap, scale = head.get("softcap"), head.get("logit_scale", 1.0)
    return {
        **head,
        "softcap": None if softcap is None else softcap / temperature,
        "logit_scale": scale / temperature,
    }
