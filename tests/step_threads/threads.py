"""The table of threads. What is expected of each was written down from the thread, before the first replay
of its job; it is what the thread says went wrong, not what the replay is known to say."""

from step_threads.thread import Elsewhere, Thread

GITHUB = "https://github.com/"
MEGATRON = GITHUB + "NVIDIA/Megatron-LM/"
SUMS = ("accumulate", "reduce")

THREADS = [
    Thread(
        "megatron_6660", MEGATRON + "issues/6660",
        "[Megatron-FSDP] Gradients doubled every microbatch (2^N amplification)",
        "the bucket of a group of one rank already holds what was summed before, and is added to it",
        SUMS, ("accumulate-doubles",), "experts.*",
    ),
    Thread(
        "megatron_7186", MEGATRON + "pull/7186",
        "Mark non-final microbatches for MFSDP v2 hybrid data parallelism",
        "every microbatch counts as the last, so that the next one clears the sum",
        SUMS, ("accumulate-window",), "*", world=4,
    ),
    Thread(
        "megatron_3023", MEGATRON + "pull/3023",
        "[Megatron-FSDP] Fix incorrect gradient scaling target",
        "1/DP is applied to the shard that is accumulated, not to the gradient that is added to it",
        SUMS, ("divide-old-shard",), "*",
    ),
    Thread(
        "megatron_3023_one", MEGATRON + "pull/3023",
        "[Megatron-FSDP] Fix incorrect gradient scaling target",
        "the same with one microbatch: the gradient is summed over ranks and not divided",
        SUMS, ("reduce-sum-for-mean",), "*", 2.0,
    ),
    Thread(
        "megatron_5974", MEGATRON + "issues/5974",
        "Megatron-FSDP fully_shard optimizer under-applies the weight update vs DDP/FSDP2",
        "a step with zero gradients that makes the optimizer's state is counted as a step",
        ("state", "update"), ("step-counter",), "*",
    ),
    Thread(
        "megatron_5916", MEGATRON + "pull/5916",
        "Fix gradient-norm undercounting when using EP and TP",
        "experts of all ranks but the first are taken for copies and left out of the norm",
        ("norm",), ("norm-misses-group",), "experts.*",
    ),
    Thread(
        "megatron_7452_8", MEGATRON + "issues/7452",
        "Silent numerical-correctness bugs in Megatron Core parallelism composition, finding 8",
        "attention sinks are cut by heads and not marked so: the norm has those of the first rank alone",
        ("norm",), ("norm-misses-group",), "sink",
    ),
    Thread(
        "megatron_7452_11", MEGATRON + "issues/7452",
        "Silent numerical-correctness bugs in Megatron Core parallelism composition, finding 11",
        "the weight of a norm over a rank's own heads is not summed over tensor ranks",
        ("reduce",), ("not-reduced-over-axis",), "out_norm.*",
    ),
    Thread(
        "megatron_6080", MEGATRON + "pull/6080",
        "Fix gradient reduction issue when EP=1, EP=TP, and EGTP != GTP",
        "gradients of experts are reduced over all ranks, among them those of other experts",
        ("reduce",), ("wrong-group",), "experts.*", world=4,
    ),
    Thread(
        "megatron_6336", MEGATRON + "pull/6336",
        "fix(mfsdp): refresh V2 compute weights after optimizer step",
        "the hook after the step that copies main weights to the model's does nothing",
        ("param",), ("master-stale",), "*", world=1, step=1,
    ),
    Thread(
        "megatron_6871", MEGATRON + "pull/6871",
        "fix: clear stale gradients in HybridDeviceOptimizer",
        "a parameter without a gradient is updated by the one that its copy still has",
        ("update", "state"), (), "sometimes.*", world=1, step=1,
    ),
    Thread(
        "iseekyan_149", GITHUB + "ISEEKYAN/Megatron-LM/issues/149",
        "M-FSDP: grad_norm deviates ~3.5e-5 from dist_opt/fsdp2 under gradient accumulation",
        "microbatches are summed in bf16 and converted to f32 for the reduction",
        SUMS, ("accumulate-low-precision",), "*",
    ),
    Thread(
        "torchtune_2172", GITHUB + "meta-pytorch/torchtune/pull/2172",
        "Fix gradient scaling to account for world_size normalization",
        "sums of token losses are averaged over ranks by FSDP and divided by the tokens of all ranks",
        # The first expectation was the first of the two; FSDP averages what is to be summed.
        ("reduce",), ("reduced-mean-twice", "reduce-mean-for-sum"), "*", 0.5,
    ),
    Thread(
        "torchtune_2436", GITHUB + "meta-pytorch/torchtune/pull/2436",
        "Bugfixes: Grad norm scaling in TP",
        "gradients are scaled by the number of all ranks, tensor ranks among them",
        ("reduce",), ("reduced-twice",), "*", 2.0, world=4,
    ),
    Thread(
        "torchtitan_2318", GITHUB + "pytorch/torchtitan/issues/2318",
        "Grad norm inconsistency when DDP / HSDP is applied before and after #2206",
        "losses are divided by the tokens of all ranks, and the replicas average what is to be summed",
        ("reduce",), ("reduce-mean-for-sum",), "*", 0.5, world=4,
    ),
    Thread(
        "torchtitan_1373", GITHUB + "pytorch/torchtitan/pull/1373",
        "[DSV3] Adding deepseek-v3 model into torchtitan",
        "a key that all heads share sees the gradient of a rank's own heads alone",
        ("param",), ("data-parallel-copies-drift",), "embed.weight norm.* kv_a.weight",
    ),
    Thread(
        "areno_496", GITHUB + "inclusionAI/AReno/pull/496",
        "fix(bailing): correct MLA tensor-parallel gradient reduction",
        "gradients that the backward has summed over tensor ranks are summed over them again",
        ("reduce",), ("reduced-twice",), "q_a.* q_norm.*", 2.0,
    ),
    Thread(
        "pytorch_160285", GITHUB + "pytorch/pytorch/issues/160285",
        "Wrong-size gradients in Expert Parallel MoE",
        "experts have the tokens of all ranks, and FSDP divides by the ranks that share the expert alone",
        ("reduce",), ("reduced-twice",), "experts.*", 2.0, world=4,
    ),
    Thread(
        "open_instruct_1498", GITHUB + "allenai/open-instruct/pull/1498",
        "Fix ZeRO-2 discarding gradients during manual accumulation",
        "every backward is a boundary of the accumulation, which resets what was summed",
        SUMS, ("accumulate-window",), "*",
    ),
    Thread(
        "fast_llm_550", GITHUB + "ServiceNow/Fast-LLM/issues/550",
        "Gradient accumulation drops all but the last micro-batch with shared grad buffers (FSDP size 1)",
        "stages that share a buffer are copied over their sum; the embedding has a buffer of its own",
        SUMS, ("accumulate-window",), "blocks.* norm.*", world=1,
    ),
    Thread(
        "deepspeed_8224", GITHUB + "deepspeedai/DeepSpeed/issues/8224",
        "ZeRO-2 + bf16 silently computes incorrect gradients when a submodule is used more than once per step",
        "a gradient that comes in two parts is reduced after the first",
        SUMS, (), "encoder.*",
    ),
    Thread(
        "deepspeed_7985", GITHUB + "deepspeedai/DeepSpeed/pull/7985",
        "Fix BF16_Optimizer last-microbatch grad leak under ZeRO-1",
        "the last microbatch is added after the reduction, by each rank its own",
        ("reduce",), ("not-reduced-over-axis",), "*",
    ),
    Thread(
        "deepspeed_7839", GITHUB + "deepspeedai/DeepSpeed/pull/7839",
        "Fix bf16 gradient norm divergence with ZeRO stage 0",
        "gradients are not cleared after the step (and a loss scale is taken out that was never put in)",
        SUMS, ("not-cleared",), "*", step=1,
    ),
    Thread(
        "deepspeed_8478", GITHUB + "deepspeedai/DeepSpeed/pull/8478",
        "Count each expert once in the fp32 gradient-clipping norm",
        "the norms of ranks that hold different experts are averaged",
        ("norm",), (), "*",
    ),
    Thread(
        "veomni_184", GITHUB + "ByteDance-Seed/VeOmni/issues/184",
        "fsdp2 based hsdp, caculate grad_norm error in `clip_grad_norm`",
        "squared norms of shards are summed over the replicas too",
        ("norm",), ("norm-counts-copies",), "*", 2**0.5, world=4,
    ),
    Thread(
        "transformer_engine_715", GITHUB + "ROCm/TransformerEngine/pull/715",
        "Do not mark replicated weights as tensor-model-parallel",
        "weights that tensor ranks have copies of are counted once for each rank",
        ("norm",), ("norm-counts-copies",), "q_a.*",
    ),
    Thread(
        "accelerate_3256", GITHUB + "huggingface/accelerate/issues/3256",
        "Model Training Stalls with FSDP when `fsdp_use_orig_params=False`",
        "the optimizer was made before FSDP made flat parameters, and holds the old ones",
        ("update", "param"), ("update-is-no-op", "param-not-in-optimizer"), "*",
    ),
    Thread(
        "entrenar_264", GITHUB + "paiml/entrenar/issues/264",
        "fix: NF4 LoRA weights never updated with gradient_accumulation > 1",
        "the step of the adapters is left out wherever gradients are accumulated",
        ("update", "param"), ("update-is-no-op",), "*lora*", world=1,
    ),
    Thread(
        "entrenar_267", GITHUB + "paiml/entrenar/issues/267",
        "fix: NF4 LoRA backward path missing gradient clipping (ENT-265)",
        "the gradients of the adapters go to their optimizer without being clipped",
        ("clip",), ("clip-recorded-not-applied",), "*lora*", world=1,
    ),
    Thread(
        "pytorch_optimizer_308", GITHUB + "kozistr/pytorch_optimizer/pull/308",
        "[Bugfix] Fix AdamG instability",
        "1 is subtracted twice, so that moments are divided by β^step in place of 1 - β^step",
        ("update",), (), "*", world=1,
    ),
    Thread(
        "optimisers_182", GITHUB + "FluxML/Optimisers.jl/issues/182",
        "AdamW optimizer implemented incorrectly - weight decay does not incorporate learning rate",
        "the parameter decays by the weight decay itself, not by its product with the learning rate",
        ("update",), ("decay-other",), "*", world=1,
    ),
    Thread(
        "holocron_1", GITHUB + "frgfm/holocron/issues/1",
        "Inplace bias correction",
        "the first moment is corrected in place, and the next step goes on from the corrected one",
        ("state",), (), "*", world=1, step=2,
    ),
    Thread(
        "pytorch_78807", GITHUB + "pytorch/pytorch/issues/78807",
        "functionality mis-match for _multi_tensor_adam and _single_tensor_adam",
        "the largest second moment is used and not written back to the state",
        ("state",), (), "*", world=1, step=1,
    ),
    Thread(
        "olmo_core_317", GITHUB + "allenai/OLMo-core/pull/317",
        "Add config option for to enable/disable the step-increment bugfix",
        "the step is not counted, so that every step is corrected as the first",
        ("state", "update"), ("step-counter",), "*", world=1, step=2,
    ),
    Thread(
        "optax_1170", GITHUB + "google-deepmind/optax/pull/1170",
        "Fix Muon implementation",
        "the gradient is made orthogonal in place of the momentum",
        ("update",), ("orthogonalised-wrong-tensor",), "*kernel", world=1, step=2, framework="jax",
    ),
]  # fmt: skip

ELSEWHERE = [
    Elsewhere(
        "huggingface/transformers 34191",
        "each microbatch's loss is a mean over its own tokens: the fault is in the loss, and gradients are "
        "summed as they are to be",
    ),
    Elsewhere(
        "deepspeedai/DeepSpeed 7718",
        "the thread has norms that are too small and no located cause; 8224, a later report on the same "
        "reduction, has one",
    ),
    *(
        Elsewhere(source, "the thread is not in the material that was at hand")
        for source in (
            "NVIDIA/Megatron-LM 4426",
            "kozistr/pytorch_optimizer 408",
            "marin-community/marin 8073",
            "paiml/entrenar 257 and 319",
            "allenai/OLMo-core 702",
        )
    ),
]


def thread_of(case):
    """The thread of this name."""
    return next(thread for thread in THREADS if thread.case == case)
