"""The losses of torch and of other libraries that are found, and how a call of each is read.

What is read of the libraries stands in liger_kernel 0.8 (ops), cut_cross_entropy 25.1, megatron-core 0.16
(tensor_parallel/cross_entropy.py, fusions/fused_cross_entropy.py), transformers 5 (trainer_pt_utils.py) and trl 1
(kernels/chunked_logprob.py). The functions are those through which every other name of the same loss goes.
"""

from collections.abc import Mapping
from typing import Any

import torch

from backtape.attach_torch.calls import Call, Loss, divided, options_of
from backtape.attach_torch.graph import product_of
from backtape.attach_torch.rows import Unfollowed, kind_of


SOFT = "its targets are probabilities and not labels, which no option of a head describes"

REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}


def _cross_entropy(function: str, given: dict[str, Any], result: torch.Tensor) -> Call:
    logits, labels = given["self"], given["target"]
    if labels.is_floating_point():
        raise Unfollowed(SOFT)
    _refuse_both(given)
    return Call(
        function,
        labels,
        result,
        logits=logits,
        classes=0 if logits.dim() == 1 else 1,
        class_weights=given.get("weight"),
        reduction=REDUCTIONS[given.get("reduction", 1)],
        ignore_label=given.get("ignore_index", -100),
        head={"label_smoothing": given.get("label_smoothing", 0.0)},
    )


def _refuse_both(given: Mapping[str, Any]) -> None:
    """torch smooths with the weight of each class, which no option of a head describes."""
    if given.get("weight") is not None and given.get("label_smoothing"):
        raise Unfollowed(WEIGHED)


WEIGHED = "it has class weights and label smoothing at once"


def _nll(function: str, given: dict[str, Any], result: torch.Tensor) -> Call:
    """`nll_loss(log_softmax(logits))`: the graph has the logits."""
    call = _cross_entropy(function, given, result)
    call.are_logs = True
    return call


def _gathered(function: str, given: dict[str, Any], result: torch.Tensor) -> Call:
    """`log_softmax(logits).gather(-1, labels)`: what becomes of the log-probability of each label shows the
    gradient that arrives at it."""
    logs, labels = given["input"], given["index"]
    return Call(
        function,
        labels,
        result,
        logits=logs,
        classes=given["dim"],
        are_logs=True,
        is_likelihood=True,
        reduction="none",
        ignore_label=None,
    )


def _normaliser(function: str, given: dict[str, Any], result: torch.Tensor) -> Call:
    """`logsumexp(logits)`, of which jobs make a z-loss."""
    return Call(function, result, result, logits=given["input"], classes=_one(given["dim"]), is_normaliser=True)


def _is_of_rows(given: dict[str, Any]) -> bool:
    logits, dim = given.get("input"), given.get("dim")
    has_graph = isinstance(logits, torch.Tensor) and logits.grad_fn is not None and logits.dim() > 0
    return has_graph and _one(dim) is not None


def _one(dim: Any) -> Any:
    """A dimension that is alone."""
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        return dim[0]
    return dim if isinstance(dim, int) else None


def _is_of_labels(given: dict[str, Any]) -> bool:
    """Whether a gather takes one log-probability of each row."""
    logs, labels, dim = (given.get(name) for name in ("input", "index", "dim"))
    if not isinstance(logs, torch.Tensor) or not isinstance(labels, torch.Tensor) or logs.grad_fn is None:
        return False
    last = logs.dim() - 1
    rows = logs.shape[:-1] == labels.shape[:-1] and labels.shape[-1:] == (1,)
    return rows and dim in (-1, last) and kind_of(logs.grad_fn) == "LogSoftmax"


def _linear_cross_entropy(function: str, given: dict[str, Any], result: torch.Tensor) -> Call:
    if given["target"].is_floating_point():
        raise Unfollowed(SOFT)
    _refuse_both(given)
    return Call(
        function,
        given["target"],
        result,
        q=given["input"],
        k=given["linear_weight"],
        bias=given.get("linear_bias"),
        class_weights=given.get("weight"),
        reduction=given["reduction"],
        # torch reads None as the number that it has for cross_entropy.
        ignore_label=-100 if given["ignore_index"] is None else given["ignore_index"],
        head={"label_smoothing": given["label_smoothing"]},
    )


def _trl(function: str, given: dict[str, Any], result: torch.Tensor) -> Call:
    """trl's log-probabilities by chunks: the temperature is after all else."""
    said = options_of(given, {"weight"})
    return Call(
        function,
        given["targets"],
        result,
        q=given["hidden"],
        k=given["weight"],
        bias=given["bias"],
        is_likelihood=True,
        reduction="none",
        ignore_label=None,
        head=divided(said["head"], given["temperature"]),
    )


def _liger(function: str, given: dict[str, Any], result: torch.Tensor) -> dict[str, Any]:
    """What both of Liger-Kernel's losses say beside their logits."""
    said = options_of(given, {"weight"} if "ce_weight" in given else set())
    if said.get("class_weights") is not None and (said["head"]["label_smoothing"] or said["head"]["z_loss"]):
        raise Unfollowed("it has class weights beside label smoothing or a z-loss")
    if given.get("use_token_scaling"):
        raise Unfollowed("it scales the loss of each token by the token's own probability")
    return {"function": function, "labels": given["target"], "result": result} | said


def _liger_fused(function: str, given: dict[str, Any], result: torch.Tensor) -> Call:
    said = _liger(function, given, result)
    said["head"]["path"] = "chunked"
    return Call(**said, q=given["_input"], k=given["weight"], bias=given["bias"])


def _liger_of_logits(function: str, given: dict[str, Any], result: torch.Tensor) -> Call:
    """Its kernel computes in f32 and writes the gradient over the logits, in their dtype."""
    said = _liger(function, given, result)
    return Call(**said, logits=given["_input"], entry=result.grad_fn)


def _cce_compiled(function: str, given: dict[str, Any], result: torch.Tensor) -> Call:
    """Apple's loss has the tokens that count chosen before, and gives those to a compiled function."""
    said = options_of(given, set())
    return Call(function, given["targets"], result, q=given["e"], k=given["c"], bias=given.get("bias"), **said)


def _cce(function: str, given: dict[str, Any], result: torch.Tensor) -> Call:
    """Apple's kernel takes all tokens, and numbers of those that count, each with its label `shift` further."""
    params, q = given["params"], given["e"]
    said = options_of(vars(params), set())
    if params.shift and said["reduction"] == "none":
        raise Unfollowed("it shifts labels by itself and gives a loss for each token (shift=, reduction='none')")
    if getattr(params, "vocab_parallel_options", None) is not None:
        raise Unfollowed("ranks share its vocabulary (vocab_parallel_options)")
    labels = params.targets.reshape(-1)
    if params.valids is not None:
        counted = params.valids.long()
        labels = torch.full_like(labels, -100).index_copy(0, counted, labels[counted + int(params.shift)])
    if params.filter_eps is not None:
        said["head"]["gradient_filter"] = float(params.filter_eps)
    return Call(function, labels, result, q=q, k=given["c"], bias=given.get("bias"), **said)


def _vocabulary_parallel(function: str, given: dict[str, Any], result: torch.Tensor) -> Call:
    """Megatron-LM's, of logits of which each rank has some classes."""
    product = product_of(given["vocab_parallel_logits"], given["vocab_parallel_logits"].dim() - 1)
    smoothing = given.get("label_smoothing", 0.0)
    if smoothing and product.places:
        raise Unfollowed("it smooths labels over each rank's part of the vocabulary by itself")
    return Call(
        function,
        given["target"],
        result,
        logits=given["vocab_parallel_logits"],
        entry=result.grad_fn,
        reduction="none",
        ignore_label=None,
        head={"label_smoothing": smoothing, "smoothing_formula": "megatron"} if smoothing else {},
    )


def _label_smoother(function: str, given: dict[str, Any], result: torch.Tensor) -> Call:
    """transformers' smoothing: the mean of all log-probabilities of the tokens that count, beside the labels'."""
    smoother, output, labels = (given[name] for name in ("self", "model_output", "labels"))
    if labels.dim() and labels.shape[-1:] == (1,):
        labels = labels.squeeze(-1)
    if given["shift_labels"]:
        labels = torch.nn.functional.pad(labels[..., 1:], (0, 1), value=smoother.ignore_index)
    # The Trainer has counted the tokens of all microbatches where it accumulates gradients.
    items = given.get("num_items_in_batch")
    divided = {} if items is None else {"denominator": float(items)}
    return Call(
        function,
        labels,
        result,
        logits=output["logits"] if isinstance(output, Mapping) else output[0],
        ignore_label=smoother.ignore_index,
        head={"label_smoothing": smoother.epsilon, **divided},
    )


def _teacher(function: str, given: dict[str, Any], result: torch.Tensor) -> Call:
    raise Unfollowed(SOFT)


def _is_of_softmax(given: dict[str, Any]) -> bool:
    logs = given.get("input")
    return isinstance(logs, torch.Tensor) and logs.grad_fn is not None and kind_of(logs.grad_fn) == "LogSoftmax"


# `cross_entropy`, `nn.CrossEntropyLoss` and all that calls them go through one function of torch._C.
CROSS_ENTROPY = "self target weight reduction ignore_index label_smoothing"
LOSSES = [
    Loss("cross_entropy", "torch._C._nn", "cross_entropy_loss", _cross_entropy, CROSS_ENTROPY),
    Loss("nll_loss", "torch._C._nn", "nll_loss_nd", _nll, "self target weight reduction ignore_index"),
    Loss("gather", "torch", "gather", _gathered, "input dim index", _is_of_labels),
    Loss("gather", "torch", "Tensor.gather", _gathered, "input dim index", _is_of_labels),
    Loss(
        "ChunkedLogProbFunction of trl",
        "trl.kernels.chunked_logprob",
        "ChunkedLogProbFunction.apply",
        _trl,
    ),
    Loss(
        "linear_cross_entropy",
        "torch.nn.functional",
        "linear_cross_entropy",
        _linear_cross_entropy,
        applies=lambda given: given.get("options") is not None,
    ),
    Loss("logsumexp", "torch", "logsumexp", _normaliser, "input dim keepdim", _is_of_rows),
    Loss("logsumexp", "torch", "Tensor.logsumexp", _normaliser, "input dim keepdim", _is_of_rows),
    Loss("kl_div", "torch", "kl_div", _teacher, "input target", _is_of_softmax),
    Loss(
        "Liger-Kernel's fused cross-entropy",
        "liger_kernel.ops.fused_linear_cross_entropy",
        "LigerFusedLinearCrossEntropyFunction.apply",
        _liger_fused,
    ),
    Loss(
        "Liger-Kernel's cross-entropy",
        "liger_kernel.ops.cross_entropy",
        "LigerCrossEntropyFunction.apply",
        _liger_of_logits,
    ),
    Loss(
        "linear_cross_entropy of cut_cross_entropy",
        "cut_cross_entropy.torch_compile",
        "torch_compile_linear_cross_entropy_apply",
        _cce_compiled,
    ),
    Loss(
        "linear_cross_entropy of cut_cross_entropy",
        "cut_cross_entropy.cce",
        "LinearCrossEntropyFunction.apply",
        _cce,
    ),
    Loss(
        "LabelSmoother of transformers", "transformers.trainer_pt_utils", "LabelSmoother.__call__", _label_smoother
    ),
    *(
        Loss(
            "vocab_parallel_cross_entropy of Megatron-LM",
            f"megatron.core.{module}",
            "_VocabParallelCrossEntropy.apply",
            _vocabulary_parallel,
        )
        for module in ("tensor_parallel.cross_entropy", "fusions.fused_cross_entropy")
    ),
]
