"""Jobs whose sum over microbatches is wrong."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

import backtape.torch
from step_corpus.meshes import local
from step_threads.experts import REDUCE_EXPERTS, MixtureOfExperts
from step_threads.rank import VOCABULARY, WIDTH, mean_over, sum_over

MEAN = {"*": [{"axis": "data", "op": "mean"}]}


def adamw(model, lr=1e-2):
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)


def hand_over(model, sums, capture):
    """Gives the optimizer the job's own sums as gradients."""
    for name, parameter in model.named_parameters():
        local(parameter.grad).copy_(sums[name])
    capture.reduced()


def taken(parameter):
    """The gradient of the microbatch that just ran, and nothing left of it in `.grad`."""
    gradient = local(parameter.grad).clone()
    local(parameter.grad).zero_()
    return gradient


def megatron_6660(rank, fixed):
    """A sharded buffer of gradients: each microbatch is reduced into a bucket and added to the shard."""
    mesh = rank.mesh(edp=1, ep=2)
    model = rank.started(MixtureOfExperts(WIDTH, VOCABULARY)).cut(mesh["ep"])
    optimizer, shards = adamw(model), {}
    with rank.recorded(model, optimizer, reduce=REDUCE_EXPERTS, edp=1, ep=2) as capture:
        for i in range(3):
            (model(*rank.batch(i)) / 3).backward()
            for name, parameter in model.named_parameters():
                is_expert = name.startswith("experts")
                group = mesh["edp"].get_group() if is_expert else None
                shard = shards.setdefault(name, torch.zeros_like(local(parameter)))
                # Of a group of one rank the shard is the whole buffer, and the bucket a view of it.
                is_view = dist.get_world_size(group) == 1 and not fixed
                bucket = shard.clone() if is_view else torch.zeros_like(shard)
                shard.add_(mean_over(bucket.add_(taken(parameter)), group))
        hand_over(model, shards, capture)
        optimizer.step()


def megatron_7186(rank, fixed):
    """Hybrid data parallelism: each microbatch is reduced over inner ranks, the sum over outer ones."""
    mesh = rank.mesh(outer=2, inner=2)
    model = rank.transformer()
    optimizer, partial, finished = adamw(model), {}, {}
    reduce = {"*": [{"axis": "inner", "op": "mean"}, {"axis": "outer", "op": "mean"}]}
    with rank.recorded(model, optimizer, reduce=reduce, outer=2, inner=2) as capture:
        for i in range(3):
            # The no_sync that the adapter inherited does nothing.
            is_last = i == 2 or not fixed
            (model(*rank.batch(i)) / 3).backward()
            for name, parameter in model.named_parameters():
                gradient = mean_over(taken(parameter), mesh["inner"].get_group())
                partial[name] = partial[name] + gradient if name in partial else gradient
                if is_last:
                    finished[name] = mean_over(partial.pop(name), mesh["outer"].get_group())
        hand_over(model, finished, capture)
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def megatron_3023(rank, fixed, microbatches=3):
    """Each microbatch is summed over ranks and added to a shard that is to hold means."""
    model = rank.transformer()
    optimizer, shards = adamw(model), {}
    with rank.recorded(model, optimizer, reduce=MEAN, data=2) as capture:
        for i in range(microbatches):
            (model(*rank.batch(i)) / microbatches).backward()
            for name, parameter in model.named_parameters():
                shard = shards.setdefault(name, torch.zeros_like(parameter))
                gradient = sum_over(taken(parameter))
                (gradient if fixed else shard).div_(rank.world)
                shard.add_(gradient)
        hand_over(model, shards, capture)
        optimizer.step()


def megatron_3023_one(rank, fixed):
    """The same without accumulation."""
    megatron_3023(rank, fixed, microbatches=1)


class Engine:
    """An engine that accumulates by itself: the sum is kept at a boundary, and begins anew after it."""

    def __init__(self, model):
        self.model, self.sums, self.averaged = model, {}, {}
        self.is_boundary = True

    def backward(self, loss):
        loss.backward()
        for name, parameter in self.model.named_parameters():
            gradient = mean_over(taken(parameter))
            self.sums[name] = self.sums[name] + gradient if name in self.sums else gradient
        if self.is_boundary:
            self.averaged, self.sums = self.sums, {}


def open_instruct_1498(rank, fixed):
    """A loop that accumulates by hand with an engine that is set to accumulate nothing."""
    model = rank.transformer()
    optimizer, engine = adamw(model), Engine(model)
    with rank.recorded(model, optimizer, reduce=MEAN, data=2) as capture:
        for i in range(4):
            if fixed:
                engine.is_boundary = i == 3
            engine.backward(model(*rank.batch(i)) / 4)
        hand_over(model, engine.averaged, capture)
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def fast_llm_550(rank, fixed):
    """Stages take turns with one buffer, which is flushed into each stage's sum after each microbatch."""
    model = rank.transformer(depth=2)
    model.head.weight = model.embed.weight
    optimizer, sums = adamw(model), {}
    with rank.recorded(model, optimizer) as capture:
        for i in range(3):
            (model(*rank.batch(i)) / 3).backward()
            for name, parameter in model.named_parameters():
                gradient = taken(parameter)
                has_own_buffer = name.startswith("embed")
                if name in sums and (fixed or has_own_buffer):
                    sums[name].add_(gradient)
                else:
                    sums[name] = gradient
        hand_over(model, sums, capture)
        optimizer.step()


class Siamese(torch.nn.Module):
    """An encoder that is applied to two inputs, each time under checkpointing."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Tanh(), torch.nn.Linear(2 * WIDTH, WIDTH)
        )
        self.head = torch.nn.Linear(2 * WIDTH, VOCABULARY)

    def forward(self, tokens, labels):
        both = [self.embed(one) for one in (tokens, labels)]
        encoded = [checkpoint(self.encoder, one, use_reentrant=True) for one in both]
        logits = self.head(torch.cat(encoded, -1))
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def deepspeed_8224(rank, fixed):
    """A hook of each parameter moves its gradient into a bucket, which is reduced in the end."""
    model = rank.started(Siamese())
    optimizer, buckets = adamw(model), {}

    def move(name, parameter):
        if fixed and name in buckets:
            buckets[name].add_(parameter.grad)
        elif name not in buckets:
            buckets[name] = parameter.grad.clone()
        parameter.grad = None

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda one, name=name: move(name, one))
    with rank.recorded(model, optimizer, reduce=MEAN, data=2) as capture:
        model(*rank.batch()).backward()
        for name, parameter in model.named_parameters():
            parameter.grad = mean_over(buckets[name])
        capture.reduced()
        optimizer.step()


def deepspeed_7985(rank, fixed):
    """Sums in a buffer of each rank, which are reduced at the boundary."""
    model = rank.transformer()
    optimizer, sums = adamw(model), {}
    with rank.recorded(model, optimizer, reduce=MEAN, data=2) as capture:
        for i in range(4):
            (model(*rank.batch(i)) / 4).backward()
            for name, parameter in model.named_parameters():
                total = sums.setdefault(name, torch.zeros_like(parameter))
                if i == 3 and not fixed:
                    # all_reduce runs before the epilogue that adds this microbatch.
                    mean_over(total)
                total.add_(taken(parameter))
                if i == 3 and fixed:
                    mean_over(total)
        hand_over(model, sums, capture)
        optimizer.step()


def deepspeed_7839(rank, fixed):
    """bf16 training under a wrapper that was made for fp16: a loss scale, and zero_grad left to others."""
    module = rank.transformer()
    model = DistributedDataParallel(module)
    optimizer = adamw(module)
    scaler = torch.amp.GradScaler("cpu", init_scale=65536.0, enabled=not fixed)
    with rank.recorder(1, data=2) as recorder:
        for step in range(2):
            if fixed:
                optimizer.zero_grad()
            with recorder.step(step) as tape:
                backtape.torch.step_algebra(tape, model, optimizer)
                loss = model(*rank.batch(step=step))
                scaler.scale(loss.detach())  # and not of the loss that is differentiated
                loss.backward()
                scaler.unscale_(optimizer)
                clip_grad_norm_(module.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()


def iseekyan_149(rank, fixed):
    """Sums of bf16 gradients, which are converted for the reduction."""
    model = rank.transformer()
    optimizer, sums = adamw(model), {}
    dtype = torch.float32 if fixed else torch.bfloat16
    with rank.recorded(model, optimizer, reduce=MEAN, data=2) as capture:
        for i in range(4):
            (model(*rank.batch(i)) / 4).backward()
            for name, parameter in model.named_parameters():
                total = sums.setdefault(name, torch.zeros_like(parameter, dtype=dtype))
                total.add_(taken(parameter).to(dtype))
        hand_over(model, {name: mean_over(one.float()) for name, one in sums.items()}, capture)
        optimizer.step()
