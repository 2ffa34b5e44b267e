"""Losses that are an autograd.Function which nobody has named: what looks like a fused cross-entropy is taken for one
if its result is that of its inputs, within rounding, and is named as left out otherwise.

It takes hidden states [..., D], a matrix [V, D] and a label for each row, and gives one number, or one for each label.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from backtape.attach_torch.calls import Call, Seen
from backtape.torch_arrays import PLAIN

# How many logits are computed at a time, to look whether a result is what it seems to be.
AT_ONCE = 1 << 24

# torch's label of tokens that do not count.
IGNORED = -100

UNLIKE = (
    "it takes hidden states, a matrix and labels, and its result is not the cross-entropy of these: name it and its "
    "arguments, attach(losses={'module:function': {'q': ..., 'k': ..., 'labels': ...}})"
)


def observer(seen: Seen, inside: list[str]) -> Callable[..., Generator[None, Any, None]]:
    """Looks at every call of an autograd.Function, in which no known loss is being computed."""
    unlike: set[type] = set()  # those that are no cross-entropy: not computed again

    def observe(owner: type, *args: Any, **_: Any) -> Generator[None, Any, None]:
        if inside or owner in unlike or owner.__module__.partition(".")[0] == "torch":
            return
        found = list(_candidates(args))
        if not found:
            return
        # What it computes of copies of its inputs, as to have gradients in the forward pass, is no loss of the job.
        inside.append(owner.__name__)
        try:
            result = yield
        finally:
            inside.pop()
        first = result[0] if isinstance(result, tuple) else result
        is_value = isinstance(first, torch.Tensor) and first.is_floating_point() and first.requires_grad
        found = [one for one in found if is_value and first.numel() in (1, one[2].numel())]
        for q, k, labels in found:
            reduction = reduction_of(first.detach(), q.detach(), k.detach(), labels)
            if reduction is not None:
                call = Call(owner.__name__, labels, first, q=q, k=k, reduction=reduction, ignore_label=IGNORED)
                # An option that changes little of the result is not seen.
                call.is_known = False
                seen(call)
                return
        if found:
            unlike.add(owner)
            seen(Call(owner.__name__, first, first, problem=UNLIKE))

    return observe


Candidate = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _candidates(args: Sequence[Any]) -> Iterator[Candidate]:
    """Arguments that may be hidden states, unembedding and labels."""
    tensors = [value for value in args if type(value) in PLAIN and value.numel()]
    floats = [value for value in tensors if value.is_floating_point() and value.dim() > 1]
    for labels in tensors:
        if labels.dtype not in (torch.int64, torch.int32):
            continue
        for k in floats:
            for q in floats:
                fits = k is not q and k.dim() == 2 and q.shape[-1] == k.shape[1]
                if fits and q.requires_grad and q.numel() == labels.numel() * q.shape[-1]:
                    yield q, k, labels


@torch.no_grad()
def reduction_of(
    result: torch.Tensor, q: torch.Tensor, k: torch.Tensor, labels: torch.Tensor
) -> str | None:
    """How a result is made of the cross-entropies of its tokens, "mean", "sum" or "none"; None where it is not, or
    where two of these fit."""
    labels, q = labels.reshape(-1).long(), q.reshape(-1, q.shape[-1])
    counts = labels != IGNORED
    if not counts.any() or not ((labels >= 0) & (labels < len(k)) | ~counts).all():
        return None
    losses, largest, matrix = [], 0.0, k.float()
    rows = max(1, AT_ONCE // len(k))
    with torch.autocast(q.device.type, enabled=False):
        for own, own_labels in zip(q.split(rows), labels.split(rows)):
            logits = own.float() @ matrix.t()
            largest = max(largest, float(logits.abs().max()))
            losses.append(F.cross_entropy(logits, own_labels, reduction="none"))
    each = torch.cat(losses).double()
    narrow = max(torch.finfo(one.dtype).eps for one in (q, k))
    if torch.is_autocast_enabled(q.device.type):
        narrow = max(narrow, torch.finfo(torch.get_autocast_dtype(q.device.type)).eps)
    kept = torch.finfo(result.dtype).eps
    value, count = result.double().reshape(-1), int(counts.sum())
    # A loss errs by the roundings of a few logits, which are its own and fall in a mean of many, and as it is kept.
    of_token = 4 * narrow * (1 + largest)
    if value.numel() > 1:
        return "none" if bool(((value - each).abs() <= of_token + 4 * kept * each).all()) else None
    total = float(each.sum())
    allowed = 2 * of_token * count**0.5 + 4 * kept * total
    fits = {"mean": abs(float(value) * count - total) <= allowed, "sum": abs(float(value) - total) <= allowed}
    fitting = [name for name, fit in fits.items() if fit]
    return fitting[0] if len(fitting) == 1 else None
