"""One rank of a job of Megatron-LM over gloo, run by test_megatron.py.

    python megatron_ranks.py RANK WORLD PORT DIRECTORY SCENARIO ...

A scenario takes two steps of two microbatches, and records the second into DIRECTORY/SCENARIO: by the call of the
step's algebra, or, where it is named so, as a job that is `attached`.
"""

import functools
import logging
import os
import sys
import warnings
from pathlib import Path

rank, world, port = map(int, sys.argv[1:4])
directory = Path(sys.argv[4])
os.environ |= {
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world),
    "LOCAL_RANK": str(rank), "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}  # fmt: skip
warnings.filterwarnings("ignore")
logging.getLogger("megatron").setLevel(logging.ERROR)

import on_cpu  # noqa: E402, F401
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer import optimizer as of_megatron  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.tensor_parallel.cross_entropy import _VocabParallelCrossEntropy  # noqa: E402
from megatron.core.tensor_parallel.layers import LinearWithGradAccumulationAndAsyncCommunication  # noqa: E402
from megatron.core.transformer import TransformerConfig, torch_norm  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402

import backtape  # noqa: E402
import backtape.torch  # noqa: E402

MICROBATCHES, VOCAB, LENGTH = 2, 32, 6
OF_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16, "f32": torch.float32}


def norm_of_shared_sequence(_, config, hidden_size, eps=1e-5):
    """A norm as those are that Megatron-LM has on a GPU: ranks share the sequence, and so the norm's gradient."""
    norm = torch.nn.LayerNorm(hidden_size, eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = config.sequence_parallel
    return norm


torch_norm.WrappedTorchNorm.__new__ = norm_of_shared_sequence


def chunks_of(dtype, words):
    """The model, in Megatron-LM's own wrapper for data parallelism."""
    config = TransformerConfig(
        num_layers=2, hidden_size=8, num_attention_heads=2, ffn_hidden_size=12, use_cpu_initialization=True,
        bf16=dtype == "bf16", fp16=dtype == "fp16", params_dtype=OF_DTYPE[dtype],
        pipeline_dtype=OF_DTYPE[dtype], hidden_dropout=0.0, attention_dropout=0.0,
        gradient_accumulation_fusion=False, bias_activation_fusion=False, bias_dropout_fusion=False,
        masked_softmax_fusion=False, persist_layer_norm=False, attention_softmax_in_fp32=True,
        calculate_per_token_loss="tokens" in words, gated_linear_unit="gated" in words,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        sequence_parallel="sequence" in words,
        cross_entropy_loss_fusion="fused" in words,
        pipeline_model_parallel_size=parallel_state.get_pipeline_model_parallel_world_size(),
    )  # fmt: skip
    model = GPTModel(
        config, get_gpt_layer_local_spec(), VOCAB, LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
    )  # fmt: skip
    model = model if dtype == "f32" else Float16Module(config, model)
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, use_distributed_optimizer="shared" in words, average_in_collective="average" in words
    )
    chunk = DistributedDataParallel(config, ddp, model)
    chunk.broadcast_params()
    return config, [chunk]


def batches(step):
    """Tokens, labels and which of them count, of each microbatch."""
    generator = torch.Generator().manual_seed(100 * step + parallel_state.get_data_parallel_rank())
    for _ in range(MICROBATCHES):
        tokens = torch.randint(0, VOCAB, (2, LENGTH + 1), generator=generator)
        mask = (torch.rand(2, LENGTH, generator=generator) < 0.7).float().index_fill(1, torch.tensor(0), 1.0)
        yield tokens[:, :-1], tokens[:, 1:], mask


def forward(iterator, model):
    """A forward pass and what computes its loss, as Megatron-LM's schedules take them."""
    tokens, labels, mask = next(iterator)
    places = torch.arange(LENGTH).expand_as(tokens)
    attention = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), diagonal=1)
    output = model(tokens, places, attention, labels=labels)

    def loss(output):
        total = (output.float() * mask).sum()
        return total, mask.sum().to(torch.int), {"loss": total.detach()}

    return output, loss


def left_alone(*_, **__):
    """In place of what a wrong job does not do."""


def scale_gradient(product):
    """Has the unembedding get a gradient with a factor."""
    backward = product.backward

    def scaled(context, arrived):
        first, second, *others = backward(context, arrived)
        is_head = arrived.shape[-1] == VOCAB // parallel_state.get_tensor_model_parallel_world_size()
        return (first, second * 1.01 if is_head else second, *others)

    product.backward = staticmethod(scaled)


def scale_loss(loss):
    """Has each token's loss, and its gradient, divided by too much."""
    forward, backward = loss.forward, loss.backward

    @functools.wraps(forward)
    def divided(*args):
        return forward(*args) / 1.25

    loss.forward = staticmethod(divided)
    loss.backward = staticmethod(lambda context, arrived: backward(context, arrived / 1.25))


def plant(fault, chunks, optimizer):
    """Has Megatron-LM do something wrong."""
    inner = optimizer.chained_optimizers[0]
    if fault == "not-divided":
        for group in chunks[0].bucket_groups:
            for bucket in group.buckets:
                bucket.gradient_scaling_factor = 1.0
    elif fault == "norm-of-a-part":
        type(inner).get_grad_stats_parallel_group = lambda _: parallel_state.get_model_parallel_group()
    elif fault == "copies-counted":
        of_megatron.tensor_parallel.param_is_not_tensor_parallel_duplicate = lambda *_: True
    elif fault == "not-clipped":
        of_megatron.clip_grad_by_total_norm_fp32 = left_alone
    elif fault == "not-brought-back" and rank == 1:
        inner._copy_main_params_to_model_params = left_alone
    elif fault == "not-cleared":
        chunks[0].zero_grad_buffer = left_alone
    elif fault == "head-scaled":
        scale_gradient(LinearWithGradAccumulationAndAsyncCommunication)
    elif fault == "loss-divided":
        scale_loss(_VocabParallelCrossEntropy)


def run(scenario):
    """Two steps of a scenario."""
    form, _, fault = scenario.partition("+")
    dtype, *words = form.split("-")
    tensor, stages = 1 + ("tensor" in words), 1 + ("stages" in words)
    parallel_state.initialize_model_parallel(tensor, stages)
    model_parallel_cuda_manual_seed(1)
    config, chunks = chunks_of(dtype, words)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-2, weight_decay=0.1, bf16=dtype == "bf16", fp16=dtype == "fp16",
            params_dtype=OF_DTYPE[dtype], use_distributed_optimizer="shared" in words, clip_grad=0.05,
            loss_scale=64.0 if dtype == "fp16" else None,
        ),
        chunks,
    )  # fmt: skip
    config.grad_scale_func, config.finalize_model_grads_func = optimizer.scale_loss, finalize_model_grads
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = group["max_lr"] * group["lr_mult"], 0.1 * group["wd_mult"]
    axes = {"pipe": stages, "data": world // tensor // stages, "tp": tensor}

    def step(number):
        chunks[0].zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward, data_iterator=batches(number), model=chunks,
            num_microbatches=MICROBATCHES, seq_length=LENGTH, micro_batch_size=2, forward_only=False,
        )  # fmt: skip
        optimizer.step()

    if "attached" in words:
        os.environ |= {"BACKTAPE_STEPS": "1", "BACKTAPE_DIR": str(directory / scenario), "BACKTAPE_STRICT": "1"}
        with backtape.torch.attach(chunks, optimizer):
            plant(fault, chunks, optimizer)
            step(0)
            step(1)
    else:
        recorded = "0" if "first" in words else "1"
        with backtape.Recorder(directory / scenario, recorded, rank, world, mesh=axes, strict=True) as recorder:
            for number in range(2):
                if number == 1:
                    plant(fault, chunks, optimizer)
                with recorder.step(number) as tape:
                    sample = 16 if "sampled" in words else None
                    backtape.torch.step_algebra(tape, chunks, optimizer, sample=sample)
                    step(number)
    parallel_state.destroy_model_parallel()


torch.set_num_threads(1)
dist.init_process_group("gloo", rank=rank, world_size=world)
for scenario in sys.argv[5:]:
    torch.manual_seed(0)
    run(scenario)
dist.destroy_process_group()
