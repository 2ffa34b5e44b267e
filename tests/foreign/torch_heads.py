"""Heads of public training codes in PyTorch."""

import contextlib
import logging
import math
import sys
import types
from typing import Tuple

import torch
import torch.nn.functional as F
from torch import nn

from foreign.case import MEAN, head
from foreign.drawn import IGNORED
from foreign.sources import functions, module


def tensors(drawn, dtype):
    kind = {"bf16": torch.bfloat16, "f32": torch.float32}[dtype]
    q, k = (torch.from_numpy(array).to(kind).requires_grad_() for array in (drawn.q, drawn.k))
    return q, k, torch.from_numpy(drawn.labels).long()


def round_as_a_gpu_does():
    """Triton's interpreter drops the low bits where it stores bf16, and a GPU rounds to nearest."""
    import ml_dtypes
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(values, of, to, mode):
        if (of.name, to.name) == ("fp32", "bf16"):
            return values.view("float32").astype(ml_dtypes.bfloat16).view("uint16")
        return convert(values, of, to, mode)

    interpreter._convert_float = rounded


def captured(loss, q, k, labels, **more):
    """The step of a head that starts from q and k; `loss` is backpropagated."""
    loss.backward()
    named = {"q": q, "k": k, "labels": labels, "loss": loss, "dq": q.grad, "dk": k.grad, **more}
    return {name: tensor.detach() for name, tensor in named.items()}


@head(
    "pytorch/torchtune",
    ("torchtune-linear", "bd2a0fc7c"),
    declared={"path": "chunked", **MEAN},
)  # fmt: skip
def torchtune_linear(root, drawn, dtype):
    q, k, labels = tensors(drawn, dtype)
    offered = {"SFTLoss": type("SFTLoss", (), {})}
    losses = module(
        root, "torchtune/modules/loss/cross_entropy_loss.py",
        torchtune__modules__loss__loss_types=offered, torchtune__utils={"get_logger": logging.getLogger},
    )  # fmt: skip
    loss = losses.LinearCrossEntropyLoss(num_output_chunks=5)
    loss.linear_projection = lambda hidden: hidden @ k.T
    return captured(loss(q, labels), q, k, labels)


@head(
    "Lightning-AI/litgpt",
    ("litgpt-chunked", "26857050"),
    declared=MEAN,
)  # fmt: skip
def litgpt_chunked(root, drawn, dtype):
    q, k, labels = tensors(drawn, dtype)
    loss = functions(root, "litgpt/utils.py", "chunked_cross_entropy", torch=torch)
    return captured(loss(q @ k.T, labels, chunk_size=37), q, k, labels)


@head(
    "allenai/OLMo-core",
    ("olmo-core", "fa6c5014c"),
    declared={**MEAN, "z_loss": 1e-3},
)  # fmt: skip
def olmo_core(root, drawn, dtype):
    q, k, labels = tensors(drawn, dtype)
    losses = module(root, "src/olmo_core/nn/functional/cross_entropy_loss.py")
    logits = (q @ k.T).flatten(0, 1)
    cross_entropy, z = losses.cross_entropy_loss(
        logits, labels.flatten(), compute_z_loss=True, z_loss_multiplier=1e-3
    )
    return captured(cross_entropy + z, q, k, labels)


@head(
    "pytorch/torchtitan",
    ("torchtitan", "b5bcd76c6"),
    declared={"reduction": "sum", "ignore_label": IGNORED},
)  # fmt: skip
def torchtitan(root, drawn, dtype):
    q, k, labels = tensors(drawn, dtype)
    loss = functions(
        root, "torchtitan/components/loss.py", "cross_entropy_loss",
        torch=torch, DTensor=(), IGNORE_INDEX=IGNORED, get_spmd_backend=lambda: None,
    )  # fmt: skip
    return captured(loss((q @ k.T).flatten(0, 1), labels.flatten()), q, k, labels)


@head(
    "huggingface/trl",
    ("trl-chunked", "f2cd57710"),
    declared={"path": "chunked", **MEAN, "softcap": 20.0, "logit_scale": 0.8},
)  # fmt: skip
def trl_chunked(root, drawn, dtype):
    q, k, labels = tensors(drawn, dtype)
    known = {"torch": torch, "F": F, "math": math, "checkpoint": torch.utils.checkpoint.checkpoint, "nn": nn}
    known["maybe_gather_lm_head_ctx"] = lambda *_: contextlib.nullcontext()
    _, run = functions(root, "trl/trainer/sft_trainer.py", "_chunk", "_chunked_cross_entropy_loss", **known)
    result = run(
        q, k, 64, shift_labels=labels, logit_scale=0.8, final_logit_softcapping=20.0, num_items_in_batch=None
    )
    return captured(result[0], q, k, labels)


@head(
    "karpathy/nanochat",
    ("nanochat", "92d63d4"),
    declared={"reduction": "mean", "denominator": "valid", "ignore_label": -1, "softcap": 15.0},
    dtypes=("f32",), multiple=(1, 1, 64),
)  # fmt: skip
def nanochat(root, drawn, dtype):
    sys.path.insert(0, str(root))
    from nanochat.gpt import GPT, GPTConfig

    vocab, labels = drawn.k.shape[0], torch.from_numpy(drawn.labels).long()
    labels[labels == IGNORED] = -1
    sizes = {"sequence_len": labels.shape[1], "vocab_size": vocab, "n_layer": 2, "n_head": 2, "n_kv_head": 2}
    torch.manual_seed(int(drawn.rng.integers(1 << 30)))
    model = GPT(GPTConfig(**sizes, n_embd=64))
    model.init_weights()
    held = {}

    def before(_module, arguments):
        held["q"] = arguments[0]
        arguments[0].retain_grad()

    model.lm_head.weight.data.normal_(std=0.3)
    model.lm_head.register_forward_pre_hook(before)
    loss = model(labels.clamp(min=0).roll(1, 1), labels)
    return captured(loss, held["q"], model.lm_head.weight, labels)


@head(
    "apple/ml-cross-entropy",
    ("cce-torch-compile", "d42911f"),
    declared={**MEAN, "softcap": 12.0},
)  # fmt: skip
def cce_torch_compile(root, drawn, dtype):
    q, k, labels = tensors(drawn, dtype)
    known = {"torch": torch, "F": F, "IGNORE_INDEX": IGNORED}
    apply = functions(
        root, "cut_cross_entropy/torch_compile.py", "torch_compile_linear_cross_entropy_apply",
        softcapping=functions(root, "cut_cross_entropy/utils.py", "softcapping", torch=torch), **known,
    )  # fmt: skip
    loss, _ = apply(q.flatten(0, 1), k, labels.flatten(), None, 12.0)
    return captured(loss, q, k, labels)


@head(
    "linkedin/Liger-Kernel",
    ("liger-flce-none-broken", "9ac26bb8^", {
        "what": "every token has the first one's cotangent", "stages": ("dq", "dk"), "causes": ("stride-ignored",),
    }),
    ("liger-flce-none-mended", "9ac26bb8"),
    declared={"path": "chunked", "reduction": "none", "ignore_label": IGNORED}, dtypes=("f32",),
)  # fmt: skip
def liger_flce_none(root, drawn, dtype):
    sys.path.insert(0, str(root / "src"))
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Function

    q, k, labels = tensors(drawn, dtype)
    cotangent = torch.from_numpy(drawn.rng.uniform(0.2, 3.0, labels.shape)).float()
    each = Function.apply(q.flatten(0, 1), k, labels.flatten(), None, None, IGNORED, 0.0, 0.0, "none")[0]
    (each * cotangent.flatten()).sum().backward()
    named = {"q": q, "k": k, "labels": labels, "loss": each, "dq": q.grad, "dk": k.grad, "cotangent": cotangent}
    return {name: tensor.detach() for name, tensor in named.items()}


@head(
    "linkedin/Liger-Kernel",
    ("liger-grpo", "ead96b61"),
    declared={
        "loss": "grpo", "path": "chunked", "reduction": "mean", "denominator": "valid",
        "grpo": {"clip_low": 0.2, "clip_high": 0.2, "kl_beta": 0.04}, "temperature": 0.9,
    },
    ignored=False, dtypes=("f32",),
)  # fmt: skip
def liger_grpo(root, drawn, dtype):
    sys.path.insert(0, str(root / "src"))
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss

    q, k, labels = tensors(drawn, dtype)
    logp = torch.log_softmax((q @ k.T).detach() / 0.9, -1).gather(-1, labels[..., None])[..., 0]
    near = lambda: logp + torch.from_numpy(drawn.rng.standard_normal(logp.shape) * 0.15).float()
    old, reference = near(), near()
    advantages = torch.from_numpy(drawn.rng.standard_normal(logp.shape[0])).float()
    weights = torch.ones_like(logp)
    for row, length in zip(weights, drawn.rng.integers(logp.shape[1] // 2, logp.shape[1], len(logp)), strict=True):
        row[length:] = 0
    loss = LigerFusedLinearGRPOLoss(
        beta=0.04, compiled=False, use_ref_model=True, temperature=0.9, loss_type="bnpo", chunk_size=2
    )
    found = loss(
        q, k, labels, weights, advantages, ref_per_token_logps=reference, old_per_token_logps=old
    )
    more = {"advantages": advantages, "old_logprobs": old, "ref_logprobs": reference, "weights": weights}
    return captured(found[0] if isinstance(found, tuple) else found, q, k, labels, **more)


@head(
    "NVIDIA/Megatron-LM",
    ("megatron-vocab-parallel", "d98e8a64dd"),
    declared={"reduction": "sum", "label_smoothing": 0.1, "smoothing_formula": "megatron"},
    ignored=False,
)  # fmt: skip
def megatron_vocab_parallel(root, drawn, dtype):
    q, k, labels = tensors(drawn, dtype)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    world = torch.distributed.group.WORLD
    ranges = types.SimpleNamespace(vocab_range_from_per_partition_vocab_size=lambda size, *_: (0, size))
    known = {"torch": torch, "Tuple": Tuple, "VocabUtility": ranges, "get_pg_rank": lambda _: 0, "get_pg_size": lambda _: 1}
    known |= {"get_tensor_model_parallel_group": lambda *_, **__: world}
    path = "megatron/core/tensor_parallel/cross_entropy.py"
    names = ("VocabParallelCrossEntropy", "_VocabParallelCrossEntropy", "vocab_parallel_cross_entropy")
    loss = functions(root, path, *names, **known)[-1]
    each = loss((q @ k.T).float().transpose(0, 1).contiguous(), labels.T.contiguous(), 0.1)
    return captured(each.sum(), q, k, labels)




@head(
    "linkedin/Liger-Kernel",
    ("liger-label-prob-broken", "be1cdc17^", {
        "what": "p of the label rounded before 1 is taken off", "stages": ("dlogits",), "causes": ("label-prob-rounded-early",),
    }),
    ("liger-label-prob-mended", "be1cdc17"),
    declared={
        "loss": "xent_logits", "path": "plain", **MEAN,
        "dtypes": {"logits": "f32", "lse": "f32", "p": "f32", "parts": "f32", "label_grad": "f32", "dlogits": "bf16"},
    },
    dtypes=("bf16",),
)  # fmt: skip
def liger_cross_entropy(root, drawn, dtype):
    round_as_a_gpu_does()
    sys.path.insert(0, str(root / "src"))
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction as Function

    q, k, labels = tensors(drawn, dtype)
    logits = (q @ k.T).detach().flatten(0, 1).requires_grad_()
    # The kernel writes the gradient over its input.
    loss = Function.apply(logits.clone(), labels.flatten(), None, IGNORED, 0.0, 0.0, "mean", None, False)[0]
    loss.backward()
    named = {"logits": logits, "labels": labels.flatten(), "loss": loss, "dlogits": logits.grad}
    return {name: tensor.detach() for name, tensor in named.items()}


@head(
    "linkedin/Liger-Kernel",
    ("liger-flce-accumulated-in-bf16", "ead96b61", {
        "arguments": {"accumulator": None},
        "what": "dk summed over chunks in bf16, its default", "stages": ("dk",), "causes": ("chunk-accumulator-low-precision",),
    }),
    ("liger-flce-accumulated-in-f32", "ead96b61"),
    declared={"path": "chunked", **MEAN}, dtypes=("bf16",),
)  # fmt: skip
def liger_flce(root, drawn, dtype, accumulator=torch.float32):
    round_as_a_gpu_does()
    sys.path.insert(0, str(root / "src"))
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Function

    q, k, labels = tensors(drawn, dtype)
    fixed = (None, None, IGNORED, 0.0, 0.0, "mean", None, False)
    return captured(Function.apply(q.flatten(0, 1), k, labels.flatten(), *fixed, accumulator)[0], q, k, labels)


@head(
    "unslothai/unsloth-zoo",
    ("unsloth-fused-broken", "2a4e2a85^", {
        "what": "upstream cotangent ignored", "stages": ("dq", "dk"), "causes": ("cotangent-dropped",),
    }),
    ("unsloth-fused-mended", "2a4e2a85"),
    ("unsloth-fused", "ce232d6c"),
    declared={"path": "chunked", **MEAN, "labels_shifted": False, "cotangent": 2.0, "softcap": 30.0}, dtypes=("f32",),
)  # fmt: skip
def unsloth_fused(root, drawn, dtype):
    patches = {"UNSLOTH_ENABLE_LOGGING": False, "torch_compile_options": {}, "logger": logging.getLogger()}
    losses = module(
        root, "unsloth_zoo/fused_losses/cross_entropy_loss.py",
        unsloth_zoo__temporary_patches__common=patches, unsloth_zoo__device_type={"DEVICE_TYPE": "cpu"},
    )  # fmt: skip
    q, k, labels = tensors(drawn, dtype)
    loss = losses.unsloth_fused_ce_loss(
        None, q, k, None, labels, torch_compile=False, n_chunks=3, logit_softcapping=30.0
    )
    # As DDP does with the world's size.
    (loss * 2).backward()
    named = {"q": q, "k": k, "labels": labels, "loss": loss, "dq": q.grad, "dk": k.grad}
    return {name: tensor.detach() for name, tensor in named.items()}
