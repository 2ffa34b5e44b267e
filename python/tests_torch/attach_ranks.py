"""A training job that knows nothing of backtape, for torchrun: `attach_ranks.py WRAPPER STEPS [FAULT]`. It prints
a hash of its parameters at the end."""

import hashlib
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

VOCAB, WIDTH = 64, 16


class Model(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        nn.init.normal_(self.embed.weight, std=0.2)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for block in self.blocks:
            hidden = hidden + torch.tanh(block(hidden))
        return self.head(F.layer_norm(hidden, (WIDTH,)))


class WithLoss(nn.Module):
    """Returns loss and logits, as models of transformers do."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens, labels):
        logits = self.model(tokens)
        return F.cross_entropy(logits.float().view(-1, VOCAB), labels.view(-1)), logits


def wrapped(model, wrapper):
    if wrapper == "ddp-outputs":
        return nn.parallel.DistributedDataParallel(WithLoss(model), find_unused_parameters=True)
    if wrapper == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    if wrapper.startswith("fsdp2"):
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options = {"mp_policy": mixed} if wrapper == "fsdp2-bf16" else {}
        # The last two together, as torchtitan does: they are one group of communication.
        fully_shard(model.blocks[0], **options)
        fully_shard([model.blocks[1], model.head], **options)
        return fully_shard(model, **options)
    return model


def train(wrapper, steps, fault):
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    model = wrapped(Model(tied=wrapper == "ddp"), wrapper)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    torch.manual_seed(1 + rank)
    if fault == "gradient":
        inside = {"ddp": "module.head", "ddp-outputs": "module.model.head"}
        model.get_submodule(inside.get(wrapper, "head")).register_forward_hook(halved)
    for _ in range(steps):
        for microbatch in range(2):
            tokens, labels = torch.randint(VOCAB, (2, 3, 8))
            labels[0, : 2 + rank] = -100
            is_last = microbatch == 1
            if wrapper.startswith("ddp"):
                model.require_backward_grad_sync = is_last
            elif wrapper.startswith("fsdp2"):
                model.set_requires_gradient_sync(is_last)
            if wrapper == "ddp-outputs":
                loss, _ = model(tokens, labels)
            else:
                logits = model(tokens)
                loss = F.cross_entropy(logits.float().view(-1, VOCAB), labels.view(-1))
            (loss / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if fault == "step":
            raise RuntimeError("the job's own fault")
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model


def halved(module, given, logits):
    logits.register_hook(lambda gradient: gradient / 2)
    return logits


def main(wrapper, steps, fault=""):
    torch.set_num_threads(1)
    if wrapper != "alone":
        dist.init_process_group("gloo")
    model = train(wrapper, int(steps), fault)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        held = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        digest.update(held.detach().float().numpy().tobytes())
    # One write for the whole line, as the ranks share stdout.
    sys.stdout.write(f"parameters {digest.hexdigest()}\n")
    sys.stdout.flush()
    if dist.is_initialized():
        dist.destroy_process_group()


main(*sys.argv[1:])
