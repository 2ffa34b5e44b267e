"""How real jobs sum gradients: each partial sum in the format that is sent, in the order of a ring,
of a tree, or of ranks; or in f32 and rounded once."""

import torch


def accumulate(gradients, dtype):
    """`.grad += gradient`, in the order of microbatches."""
    total = gradients[0].to(dtype, copy=True)
    for gradient in gradients[1:]:
        total += gradient
    return total


def sequential(addends):
    total = addends[0].clone()
    for addend in addends[1:]:
        total += addend
    return total


def tree(addends):
    """Halves are summed first."""
    if len(addends) == 1:
        return addends[0].clone()
    middle = len(addends) // 2
    return tree(addends[:middle]) + tree(addends[middle:])


def butterfly(addends):
    """Neighbours are summed, then neighbours of the sums."""
    while len(addends) > 1:
        pairs = [sequential(addends[at : at + 2]) for at in range(0, len(addends), 2)]
        addends = pairs
    return addends[0].clone()


def ring(addends):
    """Each rank's chunk starts its way at the rank after it."""
    count = len(addends)
    flat = [addend.reshape(-1) for addend in addends]
    chunks = list(zip(*(one.tensor_split(count) for one in flat)))
    sums = [sequential(chunk[at:] + chunk[:at]) for at, chunk in enumerate(chunks)]
    return torch.cat(sums).reshape(addends[0].shape)


def wide(addends):
    """In f32, as switches and some kernels do, and rounded once."""
    dtype = addends[0].dtype
    longer = torch.float64 if dtype == torch.float64 else torch.float32
    return sequential([addend.to(longer) for addend in addends]).to(dtype)


ORDERS = {
    "sequential": sequential,
    "tree": tree,
    "butterfly": butterfly,
    "ring": ring,
    "wide": wide,
}
# When the sum is divided: each addend before it, the sum after it, the root of the number at each
# end, or times a reciprocal that is rounded.
DIVISIONS = ("before", "after", "split", "reciprocal")


def reduce(addends, dtype, order, divisor, division):
    """The sum of the addends over `divisor`, in the format `dtype`."""
    own = [addend.to(dtype, copy=True) for addend in addends]
    if divisor == 1:
        return ORDERS[order](own)
    if division == "before":
        return ORDERS[order]([addend / divisor for addend in own])
    if division == "split":
        # FSDP1's rule for the part that is divided before.
        first = 1
        while divisor % first == 0 and divisor / first > first:
            first *= 2
        return ORDERS[order]([addend / first for addend in own]) / (divisor / first)
    total = ORDERS[order](own)
    return total / divisor if division == "after" else total * (1.0 / divisor)
