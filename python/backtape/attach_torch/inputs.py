"""The ids that a model reads, so that a replay can see by how many positions labels are shifted against them.

They are what an embedding with as many rows as the head has classes was called with, where that is one tensor of as many
ids as the head has tokens: a position of the one is then the same position of the other.
"""

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from backtape.torch_arrays import PLAIN

# How many lookups are kept until the loss is called: a model has few.
MOST = 16


@dataclass
class Read:
    """A lookup in an embedding."""

    ids: torch.Tensor
    rows: int  # of the embedding
    version: int  # of the ids then


def observer(reads: list[Read]) -> Callable[..., Generator[None, Any, None]]:
    """Looks at every call of `torch.embedding` of a forward pass in training."""

    def observe(weight: torch.Tensor, indices: torch.Tensor, *_: Any, **__: Any) -> Generator[None, Any, None]:
        # What is computed anew within a backward pass is of a forward that was seen.
        in_backward = torch._C._current_graph_task_id() != -1
        if torch.is_grad_enabled() and not in_backward and type(indices) in PLAIN:
            reads.append(Read(indices.detach(), weight.shape[0], indices._version))
            del reads[:-MOST]
        yield

    return observe


def of_head(reads: Iterable[Read], tokens: int, classes: int) -> torch.Tensor | None:
    """The ids that the model of a head has read; None where no lookup fits, or several with other ids do."""
    fitting = [
        read.ids
        for read in reads
        if (read.rows, read.ids.numel(), read.ids._version) == (classes, tokens, read.version)
    ]
    if not fitting or any(ids.shape != fitting[0].shape or not torch.equal(ids, fitting[0]) for ids in fitting[1:]):
        return None
    return fitting[0].clone()
