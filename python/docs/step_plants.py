"""What each cause of a step's divergence is in a job: the lines with the fault, and the right ones.

In the order of replayer/src/algebra/causes.rs. Both sources run as they stand here, as pieces of
the job in step_job.py; step_causes.py makes docs/step-causes.md of them.
"""

from step_pieces import (
    BACKWARD,
    BUCKET,
    BUCKET_LATE,
    BUFFER,
    BY_AXIS,
    CENTERED,
    CLIP,
    CLIP_SHARDS,
    COUNTED,
    EAGER,
    MASTERS,
    PIECES,
    PLANTS,
    REPLACED,
    RULES,
    SUMMED,
    SWAP,
    UNSCALE,
    indented,
    of_rule,
    plant,
)

__all__ = ["PLANTS"]

# Two ranks and three microbatches: no number of the one is a number of the other.
TWO = {"ranks": 2, "microbatches": 3}
FOUR = {"ranks": 4, "microbatches": 3}

plant(
    "not-cleared",
    "`zero_grad` is skipped in some step, or is that of an optimizer that does not hold every parameter.",
    "clear",
    PIECES["clear"],
    ("optimizer.zero_grad()", "model.head.zero_grad()"),
    threads="entrenar 257, entrenar 319",
    **TWO,
)
plant(
    "accumulate-window",
    "Gradients are cleared between two microbatches, or the reduction runs before the last of them.",
    "backward",
    BACKWARD,
    ("loss.backward()", "optimizer.zero_grad()\n    loss.backward()"),
    threads="Megatron-LM 7186, open-instruct 1498, DeepSpeed 7985",
    **TWO,
)
plant(
    "accumulate-doubles",
    "A job adds `.grad` to a buffer of its own and does not clear `.grad`, so that the next backward adds to it.",
    "backward",
    BUFFER,
    ("        p.grad = None\n", ""),
    threads="Megatron-LM 6660",
    **TWO,
)
plant(
    "divide-old-shard",
    "Each microbatch is reduced by itself and added to a buffer, and the division that makes a mean of the sum is of\n"
    "the whole buffer, which holds the microbatches before.",
    "backward",
    EAGER,
    ("        shard[p] += p.grad / world\n", "        shard[p] += p.grad\n        shard[p] /= world\n"),
    pieces={"reduce": ""},
    threads="Megatron-LM 3023",
    **TWO,
)
plant(
    "bucket-stale",
    "The buffer of the reduction is copied back before this step's reduction has ended, and still holds the gradients\n"
    "of the step before.",
    "reduce",
    BUCKET,
    ("    bucket[p].copy_(p.grad / world)\n    p.grad.copy_(bucket[p])\n", BUCKET_LATE),
    pieces={"clear": "", "begin": "optimizer.zero_grad()\n", "clip": ""},
    **TWO,
)
plant(
    "accumulate-low-precision",
    "The buffer of gradients has the dtype of the model's forward. Each addition rounds, and what is small beside\n"
    "the sum is lost.",
    "backward",
    BUFFER,
    ("zeros_like(p)", "zeros_like(p, dtype=torch.bfloat16)"),
    ("main_grad[p]\n", "main_grad[p].float()\n"),
    threads="ISEEKYAN/Megatron-LM 149",
    **TWO,
)
plant(
    "microbatch-scale",
    "The loss is divided by the number of microbatches, and the gradient is divided by it again.",
    "backward",
    BACKWARD,
    ("    loss.backward()\n", "    loss.backward()\nfor p in model.parameters():\n    p.grad /= len(batches)\n"),
    **TWO,
)
plant(
    "reduce-sum-for-mean",
    "`all_reduce` sums, and nobody divides; or a comm hook replaces the one of DDP and leaves out its division.",
    "reduce",
    PIECES["reduce"],
    ("    p.grad /= world\n", ""),
    **TWO,
)
plant(
    "reduce-mean-for-sum",
    "Each rank's loss is divided by the tokens of all ranks, so that gradients are to be summed; the reduction\n"
    "averages them all the same.",
    "reduce",
    SUMMED,
    ("    dist.all_reduce(p.grad)\n", "    dist.all_reduce(p.grad)\n    p.grad /= world\n"),
    reduced_over={"data": "sum"},
    **TWO,
)
plant(
    "reduced-mean-twice",
    "The loss was divided by the number of ranks, or a wrapper averages what the job has averaged already.",
    "reduce",
    PIECES["reduce"],
    ("    p.grad /= world\n", "    p.grad /= world\n    p.grad /= world\n"),
    **TWO,
)
plant(
    "reduced-twice",
    "A gradient that is complete on each rank is summed over them once more: that of a replicated parameter, or of\n"
    "an expert whose group was taken for another.",
    "reduce",
    SUMMED,
    (
        "    dist.all_reduce(p.grad)\n",
        '    dist.all_reduce(p.grad)\n    if "head" in name:\n        dist.all_reduce(p.grad)\n',
    ),
    reduced_over={"data": "sum"},
    threads="torchtitan 2318, pytorch 160285",
    **TWO,
)
plant(
    "not-reduced-over-axis",
    "A parameter is not among those that the reduction knows: a pattern of names misses it, or it was marked as\n"
    "being of one rank alone.",
    "reduce",
    PIECES["reduce"],
    ("    dist.all_reduce(p.grad)\n", '    if ".0." in name:\n        continue\n    dist.all_reduce(p.grad)\n'),
    threads="torchtitan 1373",
    **TWO,
)
plant(
    "rank-left-out",
    "The group was made of fewer ranks than the mesh has, as after a node was added.",
    "reduce",
    PIECES["reduce"],
    ("all_reduce(p.grad)\n", "all_reduce(p.grad, group=without_last)\n    dist.broadcast(p.grad, 0)\n"),
    **FOUR,
)
plant(
    "wrong-group",
    "The gradient is reduced over another axis of the mesh: here an expert's over the ranks that hold other experts.",
    "reduce",
    BY_AXIS,
    (
        '    axes = ["data"] if name == "experts" else ["data", "expert"]\n',
        '    axes = ["expert"] if name == "experts" else ["data", "expert"]\n',
    ),
    mesh={"data": 2, "expert": 2},
    experts=True,
    pieces={"clip": "", "start": ""},
    **FOUR,
)
plant(
    "ranks-weighted",
    "Each rank divides its loss by its own count of tokens, and gradients are weighed by that count again; or ranks\n"
    "with fewer tokens weigh as much as others, where the mean should be over tokens.",
    "reduce",
    PIECES["reduce"],
    ("    dist.all_reduce(p.grad)\n", "    p.grad *= 0.8 if rank == 0 else 1.2\n    dist.all_reduce(p.grad)\n"),
    **TWO,
)
plant(
    "gradient-scaled",
    "The gradient of some parameters is multiplied on its way, as by a factor for the embedding that was meant for\n"
    "its learning rate.",
    "reduce",
    PIECES["reduce"],
    ("    p.grad /= world\n", '    p.grad /= world\n    if "embed" in name:\n        p.grad *= 0.3\n'),
    **TWO,
)
plant(
    "tokens-miscounted",
    "Losses are sums over tokens, and gradients are divided by the number of tokens in the end: by that of the last\n"
    "microbatch, or by that of the rank where those of all ranks are summed.",
    "backward",
    COUNTED,
    ("    count += int", "    count = int"),
    microbatches=3,
    counted=True,
)
plant(
    "loss-scale-left-in",
    "The loop that takes out the scale does not know every parameter, as those of a second optimizer.",
    "unscale",
    PIECES["unscale"],
    ("model.parameters()", "model.layers.parameters()"),
    scaled=True,
)
plant(
    "loss-scale-taken-out-twice",
    "Code from before the scaler divides by the scale, and the scaler does so too.",
    "unscale",
    PIECES["unscale"],
    ("p.grad *= 1 / scale\n", "p.grad *= 1 / scale\n    p.grad *= 1 / scale\n"),
    scaled=True,
)
plant(
    "clip-before-unscale",
    "The norm is taken while the loss scale is still in the gradients, and they are clipped by it.",
    "clip",
    UNSCALE + PIECES["clip"],
    (UNSCALE + PIECES["clip"], PIECES["clip"] + UNSCALE),
    scaled=True,
    pieces={"unscaled": ""},
    threads="pytorch-lightning 9599, pytorch/examples 1196",
)
plant(
    "norm-local-not-global",
    "Each rank norms the shards that it holds, and clips by a norm of its own. The name also stands for gradients that ranks\n"
    "clip before they bring them together, and for each parameter clipped by its own norm where that of all is declared.",
    "clip",
    CLIP_SHARDS,
    ('dist.all_reduce(squared, group=mesh["shard"].get_group())\n', ""),
    mesh={"shard": 2},
    sharded=True,
    **TWO,
)
plant(
    "norm-counts-copies",
    "The squared norms are added over all ranks, of which some hold copies of one shard.",
    "clip",
    CLIP_SHARDS,
    ('dist.all_reduce(squared, group=mesh["shard"].get_group())', "dist.all_reduce(squared)"),
    mesh={"copies": 2, "shard": 2},
    sharded=True,
    threads="ROCm/TransformerEngine 715, NVIDIA-NeMo/RL 3788, mindspore-ai/hyper-parallel 526",
    **FOUR,
)
plant(
    "norm-misses-group",
    "The norm is taken over a list of parameters that was made before some were added.",
    "clip",
    CLIP,
    ("for p in model.parameters()]", "for p in model.layers.parameters()]"),
    threads="Megatron-LM 5916",
)
plant(
    "norm-low-precision",
    "The norms of the parameters are added up in the dtype of the model's forward.",
    "clip",
    CLIP,
    ("p.grad.square().sum() for", "p.grad.square().sum().bfloat16() for"),
)
plant(
    "clip-recorded-not-applied",
    "The norm is computed and logged, and the gradient is multiplied out of place: the product is thrown away.",
    "clip",
    CLIP,
    ("p.grad.mul_(", "p.grad.mul("),
)
plant(
    "clip-twice",
    "A parameter is in two lists, each of which is clipped by the coefficient of the whole. The name also stands for `.grad`\n"
    "clipped after each backward pass, so that the first microbatches are clipped again with each later one.",
    "clip",
    CLIP,
    ("for p in model.parameters():", "for p in [*model.parameters(), *model.head.parameters()]:"),
)
of_rule(
    "bias-correction-missing",
    "An optimizer written anew leaves out the division; the first steps are much too long or too short.",
    "AdamW",
    ("(v / (1 - beta2**t)).sqrt()", "v.sqrt()"),
    ("-lr / (1 - beta1**t)", "-lr"),
    threads="pytorch_optimizer 308, mlx 1640, mlx-rs 301",
)
of_rule(
    "bias-correction-twice",
    "Moments that are corrected already are divided once more.",
    "AdamW",
    (
        "denominator = (v / (1 - beta2**t))",
        "m, v = m / (1 - beta1**t), v / (1 - beta2**t)\ndenominator = (v / (1 - beta2**t))",
    ),
)
of_rule(
    "eps-inside-sqrt",
    "eps is added below the root, as some frameworks do; where gradients are small it is then much larger.",
    "AdamW",
    ("(v / (1 - beta2**t)).sqrt() + eps", "(v / (1 - beta2**t) + eps).sqrt()"),
)
of_rule(
    "decay-coupled",
    "The weight decay is added to the gradient, and so divided by the root of the second moment: Adam's in place of\n"
    "AdamW's.",
    "AdamW",
    ("w.mul_(1 - lr * decay)", "g = g + decay * w"),
    threads="nntrainer 3565",
)
of_rule(
    "decay-on-excluded",
    "The optimizer reads the weight decay that it was made with, not that of the parameter's group.",
    "AdamW",
    ("lr * decay", 'lr * defaults["weight_decay"]'),
    excludes=True,
)
of_rule(
    "decay-other",
    "The decay is not multiplied by the learning rate: within some hundred steps nothing is left of the weights.",
    "AdamW",
    ("lr * decay", "decay"),
    threads="tensorflow/addons 2282",
)
of_rule(
    "lr-scaled",
    "The optimizer reads the learning rate that it was made with, and the schedule writes that of the groups.",
    "AdamW",
    ("value=-lr /", 'value=-defaults["lr"] /'),
    hyper={"weight_decay": 0.0},
)
of_rule(
    "setting-other",
    "The optimizer has a beta of its own, as the paper had it, and does not read that of the parameter's group.",
    "AdamW",
    ("v.mul_(beta2)", "beta2 = 0.999\nv.mul_(beta2)"),
)
plant(
    "step-counter",
    "The counter goes up with each microbatch; or it is not restored with the state.",
    "count",
    PIECES["count"],
    ("+= 1", "+= len(batches)"),
    rule="AdamW",
    microbatches=3,
    pieces={"rule": RULES["AdamW"]},
    threads="TrenTorch 187, tt-metal 53212",
)
of_rule(
    "state-reset",
    "The state is made anew in the midst of training: a new optimizer, or one that was loaded without its state.",
    "AdamW",
    ("m.lerp_(", "m.zero_(), v.zero_()\nm.lerp_("),
    threads="KempnerForge 115, OpenNMT-py 617",
)
plant(
    "state-swapped",
    "The state was loaded by position, and the parameters came in another order than when it was saved.",
    "load",
    "",
    ("", SWAP),
    rule="AdamW",
    pieces={"rule": RULES["AdamW"]},
    threads="accelerate 3256",
)
of_rule(
    "tied-updated-twice",
    "A parameter that two modules share is met under both of its names, and takes a step each time.",
    "SGD",
    (RULES["SGD"], 'for name in ("embed.weight", "head.weight"):\n' + indented(RULES["SGD"])),
)
plant(
    "inf-skipped-on-some-ranks",
    "A rank that finds an infinite gradient leaves the step out by itself, and others take it. Here rank 1 does so.",
    "take",
    PIECES["take"],
    (PIECES["take"], "if rank != 1:\n    optimizer.step()\n"),
    scaled=True,
    **TWO,
)
of_rule(
    "nesterov",
    "The switch is not passed on: the parameter follows the momentum, and is declared to look ahead of it.",
    "SGD",
    ("w.add_(g + momentum * buffer, ", "w.add_(buffer, "),
    right=RULES["SGD"].replace("w.add_(buffer, ", "w.add_(g + momentum * buffer, "),
    hyper={"nesterov": True},
)
of_rule(
    "update-ascends",
    "The sign is lost where the update is written anew.",
    "SGD",
    ("alpha=-lr", "alpha=lr"),
)
of_rule(
    "bias-correction-added",
    "RMSprop is written as Adam without a first moment, whose second moment is corrected.",
    "RMSprop",
    ("square_avg.sqrt()", "(square_avg / (1 - alpha**t)).sqrt()"),
)
of_rule(
    "eps-elsewhere",
    "Adamax adds eps where the largest gradient is taken, not where it divides.",
    "Adamax",
    ("g.abs() + eps", "g.abs()"),
    ("w.addcdiv_(m, largest,", "w.addcdiv_(m, largest + eps,"),
    hyper={"eps": 1e-4},
)
of_rule(
    "not-centered",
    "The optimizer keeps the mean of the gradient and does not use it.",
    "RMSprop",
    ("spread = square_avg - grad_avg.square()", "spread = square_avg"),
    right=CENTERED,
    hyper={"centered": True, "momentum": 0.0},
    states={"square_avg": "square_avg", "grad_avg": "grad_avg"},
)
of_rule(
    "lr-in-momentum",
    "The momentum adds up changes, each with the learning rate of its step: under a schedule that is another sum.",
    "RMSprop",
    ("square_avg.sqrt() + eps)", "square_avg.sqrt() + eps, value=-lr)"),
    ("w.add_(buffer, alpha=-lr)", "w.add_(buffer)"),
    always=True,
)
of_rule(
    "momentum-schedule",
    "The momentum is beta1 from the first step; NAdam of torch has it grow to that.",
    "NAdam",
    (
        "mu, mu_next = (beta1 * (1 - 0.5 * 0.96 ** (s * 0.004)) for s in (t, t + 1))",
        "mu = mu_next = beta1",
    ),
    ("1 - float(product))", "1 - beta1**t)"),
    ("1 - float(product) * mu_next", "1 - beta1 ** (t + 1)"),
)
of_rule(
    "rectification-missing",
    "The factor that holds back the first steps is left out.",
    "RAdam",
    ("rectified**0.5 * (1", "(1"),
    step=6,
)
of_rule(
    "rectification-threshold",
    "The average counts as long enough from 4 on, as in the paper; torch has 5.",
    "RAdam",
    ("length > 5", "length > 4"),
    step=4,
)
of_rule(
    "betas-exchanged",
    "The two betas have changed places, as in an implementation that names them otherwise.",
    "Lion",
    ("beta1 * m + (1 - beta1) * g", "beta2 * m + (1 - beta2) * g"),
    ("m.lerp_(g, 1 - beta2)", "m.lerp_(g, 1 - beta1)"),
)
of_rule(
    "update-from-new-moment",
    "The moment changes first, and the update is the sign of it.",
    "Lion",
    ("update = beta1 * m + (1 - beta1) * g\n", ""),
    ("w.add_(update.sign(), alpha=-lr)\nm.lerp_(g, 1 - beta2)", "m.lerp_(g, 1 - beta2)\nw.add_(m.sign(), alpha=-lr)"),
)
of_rule(
    "sign-missing",
    "The update is the mixture itself: small, and as uneven as the gradient.",
    "Lion",
    ("update.sign()", "update"),
)
of_rule(
    "orthogonalised-wrong-tensor",
    "Muon makes the gradient orthogonal, and the momentum that it keeps is never used.",
    "Muon",
    ("orthogonal(update, ", "orthogonal(g, "),
    matrices=True,
    pieces={"clip": "", "clear": "model.zero_grad()\n"},
    threads="optax 1170",
)
of_rule(
    "sharded-norm-inside-update",
    "LAMB takes the norms of the parameter and of its update, and each rank takes those of the shard that it holds.",
    "Lamb",
    ('dist.all_reduce(squares, group=mesh["shard"].get_group())\n', ""),
    mesh={"shard": 2},
    sharded=True,
    pieces={"clip": ""},
    threads="marin 8073",
    **TWO,
)
of_rule(
    "update-is-no-op",
    "The optimizer changes a copy, which is not written back; the loss goes on as if nothing was wrong.",
    "AdamW",
    ("w.mul_(1 - lr * decay)", "w = w.clone()\nw.mul_(1 - lr * decay)"),
    threads="Megatron-LM 4426",
)
plant(
    "param-not-in-optimizer",
    "A part of the model is replaced after the optimizer was made, which goes on with the tensors that it was given.",
    "start",
    REPLACED,
    ('    optimizer.param_groups[0]["params"] = list(model.parameters())\n', ""),
    always=True,
    pieces={"clear": "model.zero_grad()\n"},
)
of_rule(
    "update-from-other-gradient",
    "The optimizer reads a copy of the gradients that was made before the clipping.",
    "AdamW",
    ("w.mul_(1 - lr * decay)", "g = kept[p]\nw.mul_(1 - lr * decay)"),
)
of_rule(
    "master-stale",
    "The master copy is updated, and the parameter that the model computes with is not written.",
    "AdamW",
    ("p.copy_(w)\n", ""),
    right=RULES["AdamW"].replace(MASTERS.splitlines(True)[0], MASTERS),
    master=True,
)
plant(
    "data-parallel-copies-drift",
    "One rank does what the others do not, as in a branch for the rank that writes logs.",
    "start",
    PIECES["start"],
    ("if step == 0:", "if rank == 0:"),
    **TWO,
)
plant(
    "unknown",
    "Nothing that is known gives these values, as of noise that was left in from an experiment. The stage, the\n"
    "parameters and the size of the error still stand.",
    "reduce",
    PIECES["reduce"],
    ("    p.grad /= world\n", "    p.grad /= world\n    p.grad += 0.01 * torch.randn_like(p.grad)\n"),
    **TWO,
)
