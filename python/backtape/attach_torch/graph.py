"""From the logits that a loss reads back to the product of hidden states and unembedding that they come from, by the
operations of `rows.py`.

Autograd's graph says how logits were made whatever the code looks like that made them: which matrix
product they are of, and which rows, columns and factors lie between. Nothing here computes with the
job's values, and saved tensors are read only when the backward pass reaches them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from backtape import attach_logits
from backtape.attach_torch.rows import FORWARD, SCALES, Rows, Unfollowed, kind_of, number_of

# How many operations may lie between a loss and its product.
LONGEST = 64
# How many operations of a backward pass are looked at.
MOST_NODES = 1_000_000


@dataclass
class Product:
    """The product z0 = q k^T that logits come from."""

    node: Any  # of the autograd graph
    q: int  # which input of the node is q, [T, D]
    k: int  # which is k^T, [D, V]
    tokens: int  # T
    vocabulary: int  # V
    rows: torch.Tensor | None  # the token of each row of the loss; None: they are the same rows
    head: dict[str, Any]  # what lies between it and the loss, as options of `Tape.head`
    dtype: torch.dtype  # of the product
    saved: tuple[str, ...]  # under which names autograd keeps q and k^T; empty: as what a Function saves
    bias: torch.Tensor | None  # [V]
    width: int  # D
    is_transposed: bool = True  # the node takes k^T; otherwise k
    # Where a rank's part of q, k, dq and dk lies, if the product says it and not the tensors.
    places: dict[str, dict[str, int | str]] | None = None


def product_of(logits: torch.Tensor, classes: int, are_logs: bool = False) -> Product:
    """The product that logits come from. `classes` is their dimension of the vocabulary; are_logs: they
    are what log-softmax has made of the logits.

    Raises Unfollowed where there is none, or something between is none of the operations of `FORWARD`.
    """
    start = logits.grad_fn
    if are_logs:
        if start is None or kind_of(start) != "LogSoftmax" or number_of(start._saved_dim, logits.dim()) != classes:
            raise Unfollowed("they do not come from log_softmax over the classes")
        start = _before(start)
    chain, node = _chain(start)
    q, k, saved = PRODUCTS[kind_of(node)]
    *leading, vocabulary = _shape(node)
    tokens = math.prod(leading)
    rows = Rows(torch.arange(tokens).view(*leading, 1), len(leading), vocabulary)
    factor, cap, bias = 1.0, None, _bias(node)
    for step, shape in reversed(chain):
        name = kind_of(step)
        if name == ADD:
            if bias is not None or factor != 1.0 or cap is not None:
                raise Unfollowed("a bias is added to logits that have one or are scaled already")
            bias = _added(step, rows, shape)
        elif name in FORWARD:
            rows = FORWARD[name](step, rows, shape)
        elif name in SCALES:
            value = SCALES[name](step)
            if cap is None:
                factor *= value
            else:
                cap *= value
        elif name == "Tanh":
            if cap is not None:
                raise Unfollowed("tanh is taken of them twice")
            cap = 1.0
    if rows.width != logits.shape[classes] or rows.classes != classes:
        raise Unfollowed("the classes are in another dimension than the loss takes them from")
    index = rows.index.movedim(classes, -1).reshape(-1)
    same = len(index) == tokens and bool((index == torch.arange(tokens)).all())
    if not same and len(index.unique()) != len(index):
        raise Unfollowed("one hidden state gives several rows of the loss")
    return Product(
        node=node,
        q=q,
        k=k,
        tokens=tokens,
        vocabulary=vocabulary,
        rows=None if same else index,
        head=attach_logits.options(
            _plain(factor if cap is None else factor * cap),
            None if cap is None else _plain(cap),
            None if rows.width == vocabulary else rows.width,
        ),
        dtype=node._input_metadata[0].dtype,
        saved=saved,
        bias=bias,
        width=int(getattr(node, f"_saved_{saved[1]}_sym_sizes")[0]) if saved else node.saved_tensors[1].shape[1],
        is_transposed=bool(saved),
        places=None if saved else places_of(node),
    )


def _chain(node: Any) -> tuple[list[tuple[Any, tuple[int, ...]]], Any]:
    """The operations from the one that has made the logits back to the product, each with the shape of
    its result; and the product's node."""
    chain: list[tuple[Any, tuple[int, ...]]] = []
    for _ in range(LONGEST):
        if node is None:
            raise Unfollowed("they come from no product of hidden states that takes a gradient")
        name = kind_of(node)
        if name in PRODUCTS:
            return chain, node
        is_bias = name == ADD and sum(_vector_of(function) is not None for function, _ in node.next_functions) == 1
        if not is_bias and name not in FORWARD and name not in SCALES and name != "Tanh":
            raise Unfollowed(f"{name} lies between the product of hidden states and the loss")
        chain.append((node, _shape(node)))
        node = _before(node)
    raise Unfollowed(f"more than {LONGEST} operations lie between the product and the loss")


def softmax_of(result: torch.Tensor) -> Any:
    """The log-softmax that a cross-entropy is computed by. Raises Unfollowed where there is none."""
    waiting, seen = [result.grad_fn], 0
    while waiting and seen < LONGEST:
        node, seen = waiting.pop(0), seen + 1
        if node is not None and kind_of(node) == "LogSoftmax":
            return node
        waiting += [function for function, _ in getattr(node, "next_functions", ())]
    raise Unfollowed("it is computed by no softmax that autograd shows")


def between(entry: Any, product: Product) -> list[Any]:
    """The operations from the one in which a loss takes its logits back to their product, without the product."""
    nodes = [entry]
    while len(nodes) < LONGEST:
        node = _before(nodes[-1])
        if node is product.node:
            return nodes
        nodes.append(node)
    raise Unfollowed(f"more than {LONGEST} operations lie between the product and the loss")


def takers(roots: Sequence[Any], path: Sequence[Any], is_whole: bool = True) -> dict[Any, int]:
    """How often each result on the path from a loss back to its product is taken, on the way back from the
    roots. path: the nodes, the last one that of the product; is_whole: also behind the product."""
    counts = dict.fromkeys(path, 0)
    waiting = [(root.grad_fn, root.output_nr) for root in roots if isinstance(root, torch.Tensor)]
    seen = set()
    while waiting and len(seen) < MOST_NODES:
        node, output = waiting.pop()
        # What DDP puts around all outputs of its model hands on the gradient of each by itself.
        is_sink = node is not None and kind_of(node) == "_DDPSink"
        visited = (node, output if is_sink else None)
        if node is None or visited in seen:
            continue
        seen.add(visited)
        if node is path[-1] and not is_whole:
            continue
        following = node.next_functions
        for function, number in [following[output]] if is_sink else following:
            if function in counts:
                counts[function] += 1
            waiting.append((function, number))
    return counts


def _before(node: Any) -> Any:
    """The one node whose result an operation takes, beside a bias that it adds."""
    found = [function for function, _ in node.next_functions if function is not None]
    if kind_of(node) == ADD:
        found = [function for function in found if _vector_of(function) is None]
    if len(found) != 1:
        raise Unfollowed(f"{kind_of(node)} takes several tensors that have a gradient")
    return found[0]


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(map(int, node._input_metadata[0].shape))


def _bias(node: Any) -> torch.Tensor | None:
    """What a product with a bias adds, where it takes a gradient."""
    if not PRODUCTS[kind_of(node)][2] and node.use_bias:
        raise Unfollowed("Megatron-LM's output layer has a bias")
    if kind_of(node) != "Addmm":
        return None
    if node._saved_alpha != 1 or node._saved_beta != 1:
        raise Unfollowed("the product is scaled within addmm")
    bias = _vector_of(node.next_functions[0][0])
    if bias is None:
        raise Unfollowed("what is added to the product is no bias that takes a gradient")
    return bias


# torch adds a bias by an operation of its own where the hidden states have no memory of their own in C order, as
# those of an LSTM that has the batch first.
ADD = "Add"


def _added(node: Any, rows: Rows, shape: tuple[int, ...]) -> torch.Tensor:
    """The bias that an addition adds to rows of logits."""
    if node._saved_alpha != 1 or rows.classes != len(shape) - 1 or shape[-1] != rows.width:
        raise Unfollowed("Add lies between the product of hidden states and the loss")
    if node._input_metadata[0].dtype not in (torch.float32, torch.float64):
        raise Unfollowed("a bias is added in few bits after the product was rounded")
    biases = [bias for function, _ in node.next_functions if (bias := _vector_of(function)) is not None]
    if biases[0].numel() != rows.width:
        raise Unfollowed("Add lies between the product of hidden states and the loss")
    return biases[0]


def _vector_of(function: Any) -> torch.Tensor | None:
    """The parameter of one dimension that a node has, as it is or as a view or a copy."""
    while function is not None and kind_of(function) in ("ToCopy", "View", "Alias"):
        function = _before(function)
    vector = getattr(function, "variable", None)
    return vector if vector is not None and vector.dim() == 1 else None


def _plain(value: float) -> float:
    """A number without the rounding of the few products that it was made by."""
    rounded = float(f"{value:.12g}")
    return rounded if math.isclose(rounded, value, rel_tol=1e-12) else value


# Which inputs of a product's node are q and k^T, and under which names autograd keeps them. Megatron-LM's takes k and
# keeps both as any Function does.
PRODUCTS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "Mm": (0, 1, ("self", "mat2")),
    "Addmm": (1, 2, ("mat1", "mat2")),
    "LinearWithGradAccumulationAndAsyncCommunication": (0, 1, ()),
}


def places_of(node: Any) -> dict[str, dict[str, int | str]]:
    """How Megatron-LM's product lies on the axis of tensor parallelism (tensor_parallel/layers.py of megatron-core
    0.16): ranks share the rows of k, and with sequence parallelism those of q."""
    if node.tp_group is None or node.tp_group.size() == 1:
        return {}
    tokens: dict[str, int | str] = {TENSOR: 0} if node.sequence_parallel else {}
    is_summed = node.sequence_parallel or node.allreduce_dgrad
    return {
        "q": tokens,
        "dq": tokens if is_summed else {TENSOR: "sum"},
        **{name: {TENSOR: 0} for name in ("k", "dk", "bias")},
    }


# The axis of the mesh along which Megatron-LM's ranks share matrices.
TENSOR = "tensor"


def leaf_of(node: Any, at: int) -> tuple[Any, int | None]:
    """What an input of a node is made of, and how often that was changed: the parameter, or the node that
    has computed it, and which of the outputs on the way it is, as FSDP1's parameters are views of one
    tensor that are made anew for each forward."""
    function, number = node.next_functions[at]
    path = []
    while function is not None and len(path) < LONGEST:
        path.append(number)
        if hasattr(function, "variable") or len(function.next_functions) != 1:
            break
        function, number = function.next_functions[0]
    leaf = getattr(function, "variable", function)
    return (id(leaf), *path), getattr(leaf, "_version", None)


def node_into(result: torch.Tensor, q: torch.Tensor, k: torch.Tensor) -> tuple[Any, int, int]:
    """The node of a fused loss that hands on the gradients of q and k, and which of its inputs they are, -1
    for one that takes no gradient.

    Raises Unfollowed where no node has both, as where the loss is computed of copies of them.
    """
    edges = [tuple(get_gradient_edge(x))[:2] if x.requires_grad else None for x in (q, k)]
    waiting, seen = [result.grad_fn], 0
    while waiting and seen < LONGEST:
        node, seen = waiting.pop(0), seen + 1
        following = list(getattr(node, "next_functions", ()))
        places = [following.index(edge) if edge in following else -1 for edge in edges]
        if all((place >= 0) == (edge is not None) for place, edge in zip(places, edges)):
            return node, places[0], places[1]
        waiting += [function for function, _ in following if function is not None]
    raise Unfollowed("no operation takes both the hidden states and the unembedding")
