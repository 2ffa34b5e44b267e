"""One rank of a job of Megatron-LM over gloo, run by test_megatron.py.

    python megatron_ranks.py RANK WORLD PORT DIRECTORY SCENARIO ...

A scenario takes two steps of two microbatches, and records the second into DIRECTORY/SCENARIO.
"""

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
from megatron.core.transformer import TransformerConfig  # noqa: E402
from megatron.core.transformer.module import Float16Module  # noqa: E402

import backtape  # noqa: E402
import backtape.torch  # noqa: E402

MICROBATCHES, VOCAB, LENGTH = 2, 32, 6
OF_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16, "f32": torch.float32}


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
    recorded = "0" if "first" in words else "1"
    with backtape.Recorder(directory / scenario, recorded, rank, world, mesh=axes, strict=True) as recorder:
        for step in range(2):
            if step == 1:
                plant(fault, chunks, optimizer)
            with recorder.step(step) as tape:
                sample = 16 if "sampled" in words else None
                backtape.torch.step_algebra(tape, chunks, optimizer, sample=sample)
                chunks[0].zero_grad_buffer()
                optimizer.zero_grad()
                get_forward_backward_func()(
                    forward_step_func=forward, data_iterator=batches(step), model=chunks,
                    num_microbatches=MICROBATCHES, seq_length=LENGTH, micro_batch_size=2, forward_only=False,
                )  # fmt: skip
                optimizer.step()
    parallel_state.destroy_model_parallel()


torch.set_num_threads(1)
dist.init_process_group("gloo", rank=rank, world_size=world)
for scenario in sys.argv[5:]:
    torch.manual_seed(0)
    run(scenario)
dist.destroy_process_group()
