"""What a call of a loss says of its head: the options of `Tape.head`, and labels, weights and cotangents
for each token."""

from dataclasses import dataclass
from typing import Any

import torch

from backtape.attach_torch.calls import Call
from backtape.attach_torch.graph import Product, softmax_of
from backtape.attach_torch.sharing import plain
from backtape.sources import ASSUMED, DTYPES, MEASURED, SEEN, Sourced, of_items, options

NAMES = {torch.float64: "f64", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}

# The label of a token that the loss does not read, where the call has none to ignore.
UNREAD = -100


@dataclass
class Said:
    """What a call says, as it was when it was made."""

    head: Sourced  # options of `Tape.head`, and where each is from
    labels: torch.Tensor  # [T]
    weights: torch.Tensor | None  # [T], of each token's class
    value: torch.Tensor  # the loss: one number, or [T] under reduction "none"
    is_likelihood: bool
    held: tuple[Any, ...]  # what tells the labels that the job holds from others of the same values


def of_call(call: Call, product: Product | None) -> Said:
    """What a call says of its head. The job may write into labels and loss afterwards: they are copied."""
    value = plain(call.result.detach())
    if call.reduction == "none":
        value = by_token(value.reshape(-1), product, 0)
    return Said(
        head_of(call, product),
        labels(call, product).clone(),
        None if call.class_weights is None else weights(call, product),
        -value if call.is_likelihood else value.clone(),
        call.is_likelihood,
        (plain(call.labels.detach()).data_ptr(), call.labels._version, call.labels.numel()),
    )


def head_of(call: Call, product: Product | None) -> Sourced:
    """The head that a call of a loss is.

    Each call divides by its own tokens, and what its result is then divided or multiplied by is in the
    cotangent, which is recorded.
    """
    said: dict[str, Any] = {
        "path": "fused" if product is None else "plain",
        "reduction": call.reduction,
        "scope": "rank",
        "microbatch_reduction": "sum",
        "autocast": autocast(call, product),
        "ignore_label": ignored(call, product),
        **call.head,
        **({} if product is None else product.head),
    }
    if product is not None:
        said["dtypes"] = dtypes(call, product)
    if call.class_weights is not None and call.reduction == "mean":
        said["denominator"] = "weights"
    return Sourced(said, sources(call, product, said))


def sources(call: Call, product: Product | None, said: dict[str, Any]) -> dict[str, str]:
    """Where each item is from: the call and the graph have all of a loss that backtape knows, also that there is
    no other factor. What else a loss does that the user has named is not known."""
    seen = {"reduction", "denominator", "ignore_label", *call.head, *(product.head if product else ())}
    if call.is_known:
        seen |= set(options())
    if product is None:
        # How a fused loss adds up its gradients is not seen.
        seen -= {"path", "tiles", "gradient_filter", "policy", "autocast"}
    seen.discard(DTYPES)
    measured = of_items({DTYPES: said.get(DTYPES, {}), "cotangent": None, "microbatches": None}, MEASURED)
    return {**dict.fromkeys(sorted(seen), SEEN), **measured, "scope": ASSUMED, "microbatch_reduction": ASSUMED}


def autocast(call: Call, product: Product | None) -> str | None:
    """The format that a fused loss narrows its products to; those of a graph say it by themselves."""
    kind = call.result.device.type
    is_narrowed = product is None and torch.is_autocast_enabled(kind)
    return NAMES.get(torch.get_autocast_dtype(kind)) if is_narrowed else None


def dtypes(call: Call, product: Product) -> dict[str, str]:
    """The points at which eager torch rounds, as docs/dtypes.md has them."""
    own = NAMES.get(product.dtype)
    if own is None:
        return {}
    narrow = is_narrowed(product)
    said = {"input": narrow or own, "logits": own, "output": own}
    if sums_in_f32(product):
        said["accumulate"] = "f64" if own == "f64" else "f32"
    if call.entry is not None:
        return said  # Where a kernel rounds is not told.
    # Under autocast the softmax has another dtype than the logits.
    softmax = NAMES.get(softmax_of(call.result)._input_metadata[0].dtype)
    if softmax is None:
        return {}
    if softmax not in ("f32", "f64"):
        # log_softmax of few bits hands its result to the backward pass, which makes p of it in f32.
        return said | {"lse": "f32", "log_p": softmax, "p": "f32", "dlogits": own}
    return said | {"lse": softmax, "p": softmax, "dlogits": own}


def is_narrowed(product: Product) -> str | None:
    """The format that a product of f32 narrows its operands to, as torch is set."""
    device = product.node._input_metadata[0].device
    if product.dtype != torch.float32 or device.type != "cuda":
        return None
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else None


def sums_in_f32(product: Product) -> bool:
    """Whether torch may not add up a product in fewer bits than f32: cuBLAS may, where it is let."""
    if product.node._input_metadata[0].device.type != "cuda":
        return True
    settings = torch.backends.cuda.matmul
    allowed = {
        torch.bfloat16: settings.allow_bf16_reduced_precision_reduction,
        torch.float16: settings.allow_fp16_reduced_precision_reduction,
    }
    return not allowed.get(product.dtype, False)


def ignored(call: Call, product: Product | None) -> int | None:
    """The label of tokens that take no part."""
    leaves_out = product is not None and product.rows is not None
    return UNREAD if leaves_out and call.ignore_label is None else call.ignore_label


def labels(call: Call, product: Product | None) -> torch.Tensor:
    """The label of each token, [T]."""
    fill = ignored(call, product)
    return by_token(plain(call.labels.detach()).reshape(-1), product, UNREAD if fill is None else fill)


def weights(call: Call, product: Product | None) -> torch.Tensor:
    """The weight of each token's class, [T]."""
    assert call.class_weights is not None
    own = labels(call, product)
    counts = own != ignored(call, product)
    return torch.where(counts, plain(call.class_weights.detach())[own.clamp(min=0)], 0.0)


def cotangents(said: Said, product: Product | None, arrived: torch.Tensor) -> torch.Tensor:
    """What arrived at the loss of each token, [T]."""
    arrived = plain(arrived)
    if said.is_likelihood:
        arrived = -arrived
    if arrived.dim() == 0:
        return arrived.detach().expand(said.labels.numel()).contiguous()
    return by_token(arrived.detach().reshape(-1), product, 0)


def by_loss(said: Said, arrived: torch.Tensor) -> torch.Tensor:
    """The gradient that arrives at the cross-entropy of each token, [T], for that at the loss it is in."""
    ignored_label = said.head.options["ignore_label"]
    counts = torch.ones_like(arrived)
    if ignored_label is not None:
        counts = (said.labels != ignored_label).to(arrived.dtype)
    if said.weights is not None:
        counts = said.weights.to(arrived.dtype)
    if said.head.options["reduction"] == "mean":
        arrived = arrived / counts.sum()
    return arrived * counts


def by_token(values: torch.Tensor, product: Product | None, otherwise: float) -> torch.Tensor:
    """Values of the loss's rows, put to the tokens whose rows they are"""
    if product is None or product.rows is None:
        return values
    placed = values.new_full((product.tokens,), otherwise)
    placed[product.rows.to(values.device)] = values
    return placed
