"""The options of `tape.head`, as types: made by python/docs/options.py, change them in src/head/options.rs."""

from typing import Any, Literal, TypedDict

__all__ = ["GrpoOptions", "HeadOptions"]


class GrpoOptions(TypedDict, total=False):
    """The options of a policy loss: `tape.head(loss="grpo", grpo=...)`."""

    clip_low: float
    """Default: 0.2. How far below 1 the ratio counts."""

    clip_high: float
    """Default: 0.2. How far above 1 the ratio counts."""

    dual_clip: float | None
    """Default: None. The bound c of -r A for negative advantages, as a ratio: min(L, -c A)
    (dual-clip PPO)."""

    kl_beta: float
    """Default: 0.0. The factor of the KL term."""

    kl: Literal["k3", "k1", "k2"]
    """Default: "k3". How the KL term is estimated: k1 -d, k2 d²/2, k3 exp(d) - d - 1, with d =
    ref_logprobs - logprobs (Schulman 2020)."""

    ratio: Literal["token", "sequence"]
    """Default: "token". `sequence`: the ratio is the geometric mean over the sequence (GSPO)."""

    average: Literal["token", "sequence"]
    """Default: "token". `token`: over the head's denominator; `sequence`: the mean of each sequence
    first, then the mean over sequences."""


class HeadOptions(TypedDict, total=False):
    """The options of `tape.head`."""

    loss: Literal["softmax_xent", "xent_logits", "grpo"]
    """Default: "softmax_xent". Which loss: on q and k, on recorded logits, or a policy loss."""

    path: Literal["fused", "plain", "chunked"] | str
    """Default: "fused". How the backward sums: one of the three ways, or a name for what `policy`
    describes."""

    reduction: Literal["mean", "sum", "none"]
    """Default: "mean". How the losses of tokens become one. `none`: they do not, `loss` is `[T]`, w
    ℓ, 0 where ignored; record the upstream `cotangent` `[T]`."""

    denominator: Literal["valid", "all", "weights"] | float
    """Default: "valid". What a mean divides by: `valid` tokens that are not ignored, `all` of them,
    the sum of `weights`, or a number."""

    scope: Literal["global", "microbatch", "rank"] | dict[str, Any]
    """Default: "global". Over which tokens the denominator counts: all ranks and microbatches
    (`global`), all ranks of one `microbatch`, or one `rank`'s part of a microbatch; or ranks,
    microbatches and sequences one by one, as {"ranks": "one"}."""

    microbatches: int
    """Default: 1. How many microbatches the step has."""

    microbatch_reduction: Literal["mean", "sum"]
    """Default: "mean". Whether the microbatches' gradients are averaged or summed. A denominator
    that counts all microbatches, as that of `scope="global"` does, is divided by already: declare
    `sum` with it."""

    ignore_label: int | None
    """Default: None. Tokens with this label take no part."""

    z_loss: float
    """Default: 0.0. The factor of lse² in the loss."""

    z_loss_in_loss: bool
    """Default: True. Whether the recorded loss holds the z-loss; the gradients always do."""

    softcap: float | None
    """Default: None. The bound of the logits: z = softcap · tanh(z1 / softcap)."""

    label_smoothing: float
    """Default: 0.0. The share of the target that is spread over the classes."""

    smoothing_formula: Literal["uniform", "megatron"]
    """Default: "uniform". Over which share smoothing spreads: ε, or Megatron-LM's ε K/(K-1)."""

    temperature: float
    """Default: 1.0. What the logits are divided by."""

    logit_scale: float
    """Default: 1.0. What the logits are multiplied by: the other way to say a temperature."""

    valid_vocab: int | None
    """Default: None. The number of classes that take part in the softmax. Where padding classes
    take part, as in Megatron, leave it out."""

    mask_value: float | None
    """Default: None. What the logits of the other classes are set to; None and -inf: they have no
    part in the softmax."""

    k_layout: Literal["vd", "dv"]
    """Default: "vd". `dv`: k and its gradients lie as `[D, V]`."""

    labels_shifted: bool
    """Default: True. False: position t uses the label and the weight of t+1 of its sequence (the
    last of the leading dimensions); the last position takes no part, and counts in no denominator
    but `all`."""

    tied_embedding: bool
    """Default: False. True: dk holds the input embedding's part too: its parts are judged, dk is
    not."""

    cotangent: float
    """Default: 1.0. A number that the loss was multiplied by before its backward: the loss scale,
    or the number of ranks under DDP."""

    dtypes: dict[str, Any]
    """Default: {}. The dtype of each point at which the job rounds: `input` (of the GEMMs),
    `product`, `logits`, `lse`, `p`, `dlogits`, `label_grad`, `parts`, `accumulate`,
    `label_scatter`, `reduce`, `output`, in f64, f32, tf32, bf16, f16, f8_e4m3 or f8_e5m2;
    [dtypes.md](dtypes.md) says which, by framework."""

    autocast: Literal["bf16", "f16"] | None
    """Default: None. `bf16` or `f16`: the head ran under `torch.autocast`; found by itself where
    `tape.head` is called inside it. Points that are not declared may be rounded to it, operands of
    products among them."""

    tiles: dict[str, int] | None
    """Default: None. How large the tiles of a kernel are, where you know it: {"tokens": 256,
    "vocab": 512}."""

    gradient_filter: float | None
    """Default: None. Probabilities below it may have been dropped from the backward (Apple CCE)."""

    policy: dict[str, Any] | None
    """Default: None. A whole path, {"base": ..., "round": ..., "sums": ...}: see `replay
    --policy`."""

    grpo: GrpoOptions | None
    """Default: None. The options of a policy loss."""
