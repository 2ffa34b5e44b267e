"""Whether a parameter's value is another where it should be the same: between two passes whose gradients are in
one sum, and between the passes and the optimizer's step.

A value is known by a sample of its elements, as weights that are perturbed, averaged or exchanged change all over.
What was taken away and given back by additions is the same but for rounding.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from backtape.step_torch.parts import Part, Values, local

BETWEEN_PASSES = "between passes"
BEFORE_THE_STEP = "before the step"

# Elements of a parameter that stand for its value.
SAMPLE = 512

# A value that is this multiple of what it was, or a larger one, was decayed by code of the job's own.
DECAYED = 0.9


def begin(models: Iterable[torch.nn.Module], parts: Iterable[Part]) -> None:
    """Notes the values at the beginning of the tape."""
    # An embedding with a `max_norm` changes rows of itself in each forward pass.
    renormed = {
        id(parameter)
        for model in models
        for module in model.modules()
        if getattr(module, "max_norm", None) is not None
        for parameter in module.parameters(recurse=False)
    }
    for part in parts:
        # FSDP1 has other values in the place of its parameters while they are used.
        is_known = part.recorded and part.trainable and part.flat is None
        if is_known and id(part.holder()) not in renormed:
            part.values = Values(begun=sampled(part))


def at_pass(part: Part) -> None:
    """Notes the value that a backward pass finds."""
    values = part.values
    if values is None:
        return
    now = sampled(part)
    values.passes += 1
    values.origin = now if values.passes == 1 else values.origin
    values.first = now if values.is_fresh else values.first
    values.last, values.is_fresh = now, False


def has_moved(part: Part) -> bool:
    """Whether the value is another than at the last pass, be it by one bit. This waits for the device."""
    last = None if part.values is None else part.values.last
    now = None if last is None else sampled(part)
    if last is None or now is None or last.dtype != now.dtype:
        return False
    return not torch.equal(last.cpu(), now.cpu())


def has_changed(part: Part) -> bool:
    """Whether the value is another than at the beginning of the tape."""
    begun = None if part.values is None else part.values.begun
    now = None if begun is None else sampled(part)
    return begun is None or now is None or not torch.equal(begun.cpu(), now.cpu())


def at_step(part: Part) -> None:
    """Notes the value that the optimizer's step finds."""
    if part.values is not None:
        part.values.stepped = sampled(part)


def sampled(part: Part) -> torch.Tensor | None:
    """A copy of some elements of what this rank holds of a parameter; None where these cannot be told."""
    holder = part.holder()
    # The padding of a part of ZeRO stage 3 is never written.
    return None if holder is None else elements_of(part.cut(local(holder)), SAMPLE)


def elements_of(tensor: torch.Tensor, count: int) -> torch.Tensor | None:
    """A copy of up to so many elements of a tensor, from all over it; None of one that is no plain tensor of
    floats, or has none."""
    if type(tensor) is not torch.Tensor or tensor.layout != torch.strided or tensor.is_meta:
        return None
    elements = tensor.numel()
    if not elements or not tensor.is_floating_point():
        return None
    dense = tensor
    if not dense.is_contiguous():
        dense = tensor.permute(sorted(range(tensor.ndim), key=tensor.stride, reverse=True))
        if not dense.is_contiguous():
            return None
    # An odd step goes through all columns of a matrix.
    return dense.view(-1)[:: -(-elements // count) | 1].clone()


def told(parts: Iterable[Part]) -> dict[str, str]:
    """When the value of a parameter became another, as the declaration has it, by the names of those of which it
    did. Nothing is told where nobody can know."""
    known = [(part.name, part.values, part.sharded) for part in parts if part.values is not None]
    moved = {name: BEFORE_THE_STEP for name, values, _ in known if is_before_the_step(values)}
    # Whether FSDP2 has been told to clear the gradients between two passes is not seen.
    summed = [one for one in known if one[2] is None and one[1].last is not one[1].first]
    between = [name for name, own, _ in summed if are_apart(own.first, own.last, own.passes)]
    # Training against perturbed embeddings moves these alone, and sums both gradients on purpose.
    if 2 * len(between) > len(summed):
        moved |= dict.fromkeys(between, BETWEEN_PASSES)
    return moved


def is_before_the_step(values: Values) -> bool:
    """Whether the optimizer's step found another value than there was before. A job may have other weights than
    the optimizer's in place for the passes alone, or for what is before them."""
    return all(
        are_apart(known, values.stepped, values.passes, values.last)
        and not was_decayed(known, values.stepped)
        for known in (values.begun, values.origin)
    )


def are_apart(
    one: torch.Tensor | None,
    other: torch.Tensor | None,
    passes: int,
    between: torch.Tensor | None = None,
) -> bool:
    """Whether two samples differ by more than additions that cancel out round, one for each pass. between: what
    the value was in the meantime."""
    if one is None or other is None or one.dtype != other.dtype or one.shape != other.shape:
        return False
    # Mostly they are the same, which one operation says.
    if one is other or torch.equal(one.cpu(), other.cpu()):
        return False
    epsilon = torch.finfo(one.dtype).eps
    size = torch.maximum(wide(one).abs(), wide(other).abs())
    if between is not None and between.shape == one.shape:
        size = torch.maximum(size, wide(between).abs())
    return bool(((wide(one) - wide(other)).abs() > 2 * epsilon * (1 + passes) * size).any())


def was_decayed(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether the second sample is a little less of the first, as by a weight decay of the job's own."""
    if one is None or other is None:
        return False
    before, after = wide(one), wide(other)
    share = float(before @ after) / max(float(before @ before), torch.finfo(torch.float64).tiny)
    bound = 4 * torch.finfo(one.dtype).eps * before.abs()
    return DECAYED <= share < 1 and bool(((after - share * before).abs() <= bound).all())


def wide(sample: torch.Tensor) -> torch.Tensor:
    """A sample in f64, in the host's memory."""
    return sample.cpu().double()
