"""Heads of which ranks share the vocabulary: which part of q, k and their gradients a rank has.

torch has them as DTensors. Megatron-LM has an operation of its own for the product (tensor_parallel/layers.py of
megatron-core 0.16), which says the group of ranks and whether these share the sequence of the hidden states, too.
"""

from collections.abc import Mapping
from typing import Any

import torch

from backtape.attach_torch.graph import LONGEST, Product
from backtape.attach_torch.rows import Unfollowed, is_packed, kind_of
from backtape.shards import REPLICATE
from backtape.torch_arrays import is_dtensor, placement_of

# By tensor of a head, the word that `placement` of `Tape.record` has for each axis that is not replicated.
Words = dict[str, int | str]

NOT_SHARED = "the ranks share tokens by tensor parallelism, and not the vocabulary of its logits"

NOT_SUMMED = "each rank has an addend of it, and what adds them up is not seen"
SCATTERED = "what adds it up over ranks scatters it along the sequence"


def part_of(tensor: torch.Tensor) -> tuple[torch.Tensor, Words]:
    """What this rank has of a tensor, and how it lies on the axes of its mesh; of any but a DTensor all."""
    if not is_dtensor(tensor):
        return tensor, {}
    held: Any = tensor
    words, _ = placement_of(held.device_mesh, held.placements)
    return held.to_local(), {axis: word for axis, word in words.items() if word != REPLICATE}


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a tensor that each rank has whole. Raises Unfollowed for one that ranks share."""
    values, words = part_of(tensor)
    if words:
        raise Unfollowed("its labels or its loss are shared over ranks")
    return values


def check(product: Product, shared: Mapping[str, int]) -> None:
    """Raises Unfollowed where ranks share tokens, and the product of a head does not say how it lies on them.

    shared: the axes of the mesh along which ranks share tokens, with their sizes.
    """
    if product.places is not None or not shared:
        return
    if any(is_packed(getattr(product.node, f"_raw_saved_{name}")) for name in product.saved):
        raise Unfollowed("activation checkpointing or offloading has what says how ranks share it")
    q, k = (getattr(product.node, f"_saved_{name}") for name in product.saved)
    known = q is not None and k is not None and is_dtensor(q) and is_dtensor(k)
    if not known or part_of(q)[1] or set(part_of(k)[1]) != set(shared) or set(part_of(k)[1].values()) != {1}:
        raise Unfollowed(NOT_SHARED)


def summing(node: Any, at: int) -> Any:
    """The operation that adds up over ranks the gradient of an input of a product of DTensors: that which had given
    each rank all of the input. None where there is none.

    What each rank adds to dq is no tensor to be judged: of a token whose label another rank has it depends on q alone.
    """
    function = node.next_functions[at][0]
    for _ in range(LONGEST):
        if function is None or kind_of(function) in ("_FromTorchTensor", "Redistribute"):
            return function
        if kind_of(function) not in ("View", "UnsafeView", "ReshapeAlias", "Alias"):
            return None
        function = function.next_functions[0][0]
    return None
