"""One rank of a job of DeepSpeed over gloo, run by test_deepspeed.py.

    python deepspeed_ranks.py RANK WORLD PORT DIRECTORY SCENARIO ...

A scenario takes two steps of two microbatches, and records the second into DIRECTORY/SCENARIO.
"""

import logging
import os
import sys
from pathlib import Path

rank, world, port = map(int, sys.argv[1:4])
directory = Path(sys.argv[4])
os.environ |= {
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "LOCAL_RANK": str(rank),
    "WORLD_SIZE": str(world), "LOCAL_SIZE": str(world), "DS_ACCELERATOR": "cpu",
}  # fmt: skip

import deepspeed  # noqa: E402
import torch  # noqa: E402
import torch.nn as nn  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402

import backtape  # noqa: E402
import backtape.torch  # noqa: E402

# A path for inference alone, which has to be compiled and leaves files in /dev/shm.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
# No kernels of f16 are compiled for a CPU, and torch computes it there all the same.
get_accelerator().is_fp16_supported = lambda: True
deepspeed.utils.logger.setLevel(logging.ERROR)

MICROBATCHES = 2
OF_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16, "f32": torch.float32}


def model():
    """Layers whose elements no number of ranks divides."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 13), nn.LayerNorm(13), nn.GELU(), nn.Linear(13, 5))


def settings(stage, dtype, more):
    """What DeepSpeed is configured by."""
    told = {
        "train_micro_batch_size_per_gpu": 3, "gradient_accumulation_steps": MICROBATCHES,
        "gradient_clipping": 0.05 if "clipped" in more else 0.0, "steps_per_print": 10**9,
        "zero_optimization": {"stage": stage},
    }  # fmt: skip
    if dtype == "bf16":
        told["bf16"] = {"enabled": True}
    if dtype == "fp16":
        told["fp16"] = {"enabled": True, "loss_scale": 2**40 if "infinite" in more else 128}
    if "wide" in more:
        told["data_types"] = {"grad_accum_dtype": "fp32"}
    return told


def left_alone(*_, **__):
    """In place of what a wrong job does not do."""


def plant(fault, engine):
    """Has the optimizer of DeepSpeed do something wrong."""
    own = engine.optimizer
    if fault == "not-averaged":
        average = own.average_tensor
        own.average_tensor = lambda tensor, dtype: (average(tensor, dtype), tensor.mul_(world))
    elif fault == "norm-of-a-part":
        whole = own.get_grad_norm_direct

        def norm_of_a_part(gradients, parameters, norm_type=2):
            total = whole(gradients, parameters, norm_type)
            return torch.cat([one.float().reshape(-1) for one in gradients]).norm().to(total.dtype)

        own.get_grad_norm_direct = norm_of_a_part
    elif fault == "not-unscaled":
        own.unscale_and_clip_grads = left_alone
    elif fault == "not-brought-back":
        own._reassign_or_swap_out_partitioned_parameters = left_alone


def run(scenario):
    """Two steps of a scenario."""
    form, _, fault = scenario.partition("+")
    stage, dtype, *more = form.removeprefix("zero").split("-")
    module = model().to(OF_DTYPE[dtype])
    groups = [
        {"params": [one for one in module.parameters() if one.ndim > 1], "weight_decay": 0.1},
        {"params": [one for one in module.parameters() if one.ndim == 1], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=1e-2)
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=adamw,
        config=settings(int(stage), dtype, more),
    )
    torch.manual_seed(1 + rank)
    axes = {"data": world}
    with backtape.Recorder(directory / scenario, "1", rank, world, mesh=axes, strict=True) as recorder:
        for step in range(2):
            if step == 1:
                plant(fault, engine)
            with recorder.step(step) as tape:
                sample = 16 if "sampled" in more else None
                given = engine if "engine" in more else adamw if "inner" in more else engine.optimizer
                backtape.torch.step_algebra(tape, engine, given, sample=sample)
                for _ in range(MICROBATCHES):
                    output = engine(torch.randn(3, 7).to(OF_DTYPE[dtype]))
                    engine.backward(output.float().square().mean())
                    engine.step()


deepspeed.init_distributed(dist_backend="gloo", verbose=False)
for scenario in sys.argv[5:]:
    run(scenario)
torch.distributed.destroy_process_group()
