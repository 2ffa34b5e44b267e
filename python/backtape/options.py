"""The options of `tape.head`, as types: made by python/docs/options.py, change them in src/head/options.rs."""

from typing import Any, Literal, TypedDict

__all__ = ["GrpoOptions", "HeadOptions"]


class GrpoOptions(TypedDict, total=False):
    """The options of a policy loss: `tape.head(loss="grpo", grpo=...)`."""

    clip_low: float
    """Default: 0.2. The ratio is clipped to 1 - clip_low at least: 0.2 clips at 0.8. Needed: a
    number from 0 on."""

    clip_high: float
    """Default: 0.2. The ratio is clipped to 1 + clip_high at most: 0.2 clips at 1.2. Needed: a
    number from 0 on."""

    dual_clip: float | None
    """Default: None. The bound c of the ratio for negative advantages (dual-clip PPO): the first
    term of L is -c A at most. The KL term has no bound. Needed: a number above 1, or None."""

    kl_beta: float
    """Default: 0.0. The factor of the KL term. Needed: a number from 0 on."""

    kl: Literal["k3", "k1", "k2"]
    """Default: "k3". How the KL term is estimated: k1 -d, k2 d²/2, k3 exp(d) - d - 1, with d =
    ref_logprobs - logprobs (Schulman 2020)."""

    ratio: Literal["token", "sequence"]
    """Default: "token". `sequence`: the ratio is the geometric mean over the sequence (GSPO)."""

    average: Literal["token", "sequence"]
    """Default: "token". `token`: over the head's denominator; `sequence`: the mean of each sequence
    first, then the mean over sequences, and `denominator` has no part."""


class HeadOptions(TypedDict, total=False):
    """The options of `tape.head`."""

    loss: Literal["softmax_xent", "xent_logits", "grpo"]
    """Default: "softmax_xent". Which loss: on q and k, on recorded logits, or a policy loss."""

    path: Literal["fused", "plain", "chunked"] | str
    """Default: "fused". How the backward sums: `plain` (dlogits whole, as autograd of a plain
    cross-entropy does), `fused`, `chunked`, or a name for what `policy` describes."""

    reduction: Literal["mean", "sum", "none"]
    """Default: "mean". How the losses of tokens become one: their mean, or their sum, which nothing
    divides. `none`: `loss` is `[T]`, w ℓ, 0 where ignored; record the upstream `cotangent`
    `[T]`."""

    denominator: Literal["valid", "all", "weights"] | float
    """Default: "valid". What a mean divides by: `valid` tokens, which are not ignored (of a policy
    loss: whose weight is not 0), `all` of them, the sum of `weights`, or a number. Needed: a finite
    number other than zero."""

    scope: Literal["global", "microbatch", "rank"] | dict[str, Any]
    """Default: "global". Over which tokens the denominator counts: all ranks and microbatches
    (`global`), all ranks of one `microbatch`, or one `rank`'s part of a microbatch; or ranks,
    microbatches and sequences one by one, as {"ranks": "one"}. Needed: a scope whose list of axes
    names one at least."""

    microbatches: int
    """Default: 1. How many microbatches the step has. Needed: at least 1."""

    microbatch_reduction: Literal["mean", "sum"]
    """Default: "mean". Whether the microbatches' gradients are averaged or summed. A denominator
    that counts all microbatches, as that of `scope="global"` does, is divided by already: declare
    `sum` with it."""

    ignore_label: int | None
    """Default: None. Tokens with this label take no part (PyTorch: -100)."""

    z_loss: float
    """Default: 0.0. The factor of lse² in the loss. Needed: a number from 0 on."""

    z_loss_in_loss: bool
    """Default: True. Whether the recorded loss holds the z-loss; the gradients always do."""

    softcap: float | None
    """Default: None. The bound of the logits: z = softcap · tanh(z1 / softcap). Needed: a positive
    number, or None."""

    label_smoothing: float
    """Default: 0.0. The share of the target that is spread over the classes. Needed: a number from
    0 to below 1."""

    smoothing_formula: Literal["uniform", "megatron"]
    """Default: "uniform". What is spread over the K classes: label_smoothing, or Megatron-LM's
    label_smoothing · K/(K-1)."""

    temperature: float
    """Default: 1.0. What the logits are divided by. Needed: a positive number."""

    logit_scale: float
    """Default: 1.0. What the logits are multiplied by: the other way to say a temperature. Needed:
    a finite number other than zero."""

    valid_vocab: int | None
    """Default: None. How many columns of the logits, from the first on, are classes; None: all are.
    Where padding takes part in the softmax, as in Megatron, leave it out. Needed: at least 1, or
    None."""

    mask_value: float | None
    """Default: None. What the logits of the columns beyond are set to; None and -inf: they have no
    part in the softmax. Needed: -inf or a finite number, or None."""

    k_layout: Literal["vd", "dv"]
    """Default: "vd". `dv`: k and its gradients lie as `[D, V]`."""

    labels_shifted: bool
    """Default: True. True: the label of position t stands at t. False: position t uses the label
    and the weight of t+1 of its sequence (the last of the leading dimensions); the last position
    takes no part, and counts in no denominator but `all`."""

    tied_embedding: bool
    """Default: False. True: dk holds the input embedding's part too: dk_lse and dk_label are
    judged, where recorded, dk is not."""

    cotangent: float
    """Default: 1.0. A number that the loss was multiplied by before its backward: the loss scale,
    or the number of ranks under DDP. Needed: a finite number."""

    dtypes: dict[str, Any]
    """Default: {}. The dtype of each point at which the job rounds: `input` (of the GEMMs),
    `product`, `logits`, `lse`, `log_p`, `p`, `dlogits`, `label_grad`, `parts`, `accumulate`,
    `label_scatter`, `reduce`, `output`, in f64, f32, tf32, bf16, f16, f8_e4m3 or f8_e5m2.
    docs/dtypes.md says which, by framework."""

    autocast: Literal["bf16", "f16"] | None
    """Default: None. `bf16` or `f16`: the head ran under `torch.autocast`; found by itself where
    `tape.head` is called inside it. Points that are not declared may be rounded to it, operands of
    products among them. Needed: bf16 or f16, or None."""

    tiles: dict[str, int] | None
    """Default: None. How large the tiles of a kernel are, where you know it: {"tokens": 256,
    "vocab": 512}. Needed: sizes of at least 1, or None."""

    gradient_filter: float | None
    """Default: None. Probabilities below it may have been dropped from the backward (Apple CCE).
    Needed: a number from 0 to below 1, or None."""

    policy: dict[str, Any] | None
    """Default: None. A whole path, {"base": ..., "round": ..., "sums": ..., "tiles": ...}: what a
    file of `replay --policy` has."""

    grpo: GrpoOptions | None
    """Default: None. The options of a policy loss, with loss="grpo"; None: their defaults."""
