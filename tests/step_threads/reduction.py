"""Jobs that bring the gradients of ranks together in a wrong way."""

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

from step_corpus.meshes import local
from step_corpus.sharded_models import Parallel, cut_by_tensor_parallelism
from step_threads.accumulation import adamw
from step_threads.rank import VOCABULARY, WIDTH, sum_over


def tokens_of_all(rank, ranks, microbatches):
    """How many tokens all data ranks have together."""
    count = sum(rank.batch(i)[1].numel() for i in range(microbatches))
    return float(count * ranks)


def scale_grads(model, factor):
    """Multiplies every gradient by a number."""
    for parameter in model.parameters():
        parameter.grad.mul_(factor)


def torchtune_2172(rank, fixed):
    """FSDP2, whose gradients are sums over tokens until they are scaled."""
    model = rank.transformer()
    for block in model.blocks:
        fully_shard(block, mesh=rank.mesh(data=2))
    fully_shard(model, mesh=rank.mesh(data=2))
    optimizer = adamw(model)
    tokens = tokens_of_all(rank, 2, 2)
    # What the recipe is to do: the sum over all ranks, divided by all tokens.
    reduce = {"*": [{"axis": "data", "op": "sum", "divisor": tokens}]}
    with rank.recorded(model, optimizer, reduce=reduce, data=2):
        for i in range(2):
            batch = rank.batch(i)
            (model(*batch) * batch[1].numel()).backward()
        scale_grads(model, (rank.world if fixed else 1) / tokens)
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def torchtune_2436(rank, fixed):
    """The same with tensor parallelism below data parallelism."""
    mesh = rank.mesh(data=2, tp=2)
    model = rank.started(Parallel(WIDTH, VOCABULARY, 1))
    cut_by_tensor_parallelism(model, mesh["tp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    own, ranks = rank.index // 2, 2 if fixed else rank.world
    tokens = tokens_of_all(rank, 2, 1)
    reduce = {"*": [{"axis": "data", "op": "sum", "divisor": tokens}]}
    with rank.recorded(model, optimizer, reduce=reduce, data=2, tp=2) as capture:
        batch = rank.batch(of=own)
        (model(*batch) * batch[1].numel()).backward()
        for parameter in model.parameters():
            sum_over(local(parameter.grad), mesh["data"].get_group()).div_(2)
        scale_grads(model, ranks / tokens)
        capture.reduced()
        optimizer.step()


def torchtitan_2318(rank, fixed):
    """FSDP2 that sums within a shard group, and replicas that are to sum too."""
    mesh = rank.mesh(replicate=2, shard=2)
    model = rank.transformer()
    fully_shard(model, mesh=mesh["shard"])
    model.set_gradient_divide_factor(1.0)
    model.set_force_sum_reduction_for_comms(True)  # gloo has no sum with a factor
    optimizer = adamw(model)
    operation = {"op": "sum"}
    reduce = {"*": [{"axis": "shard"} | operation, {"axis": "replicate"} | operation]}
    tokens = tokens_of_all(rank, 4, 1)
    with rank.recorded(model, optimizer, reduce=reduce, replicate=2, shard=2) as capture:
        batch = rank.batch()
        (model(*batch) * batch[1].numel() / tokens).backward()
        for parameter in model.parameters():
            gradient = local(parameter.grad)
            sum_over(gradient, mesh["replicate"].get_group())
            if not fixed:
                gradient.div_(dist.get_world_size(mesh["replicate"].get_group()))
        capture.reduced()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def veomni_184(rank, fixed):
    """FSDP2 over shards and replicas, and a norm of the job's own."""
    mesh = rank.mesh(replicate=2, shard=2)
    model = rank.transformer()
    fully_shard(model, mesh=mesh)
    optimizer = adamw(model)
    with rank.recorded(model, optimizer, replicate=2, shard=2) as capture:
        model(*rank.batch()).backward()
        squares = sum(local(one.grad).square().sum() for one in model.parameters())
        norm = sum_over(squares, mesh["shard"].get_group() if fixed else None).sqrt()
        capture.norm(norm, max_norm=0.5, epsilon=1e-6)
        for parameter in model.parameters():
            local(parameter.grad).mul_((0.5 / (norm + 1e-6)).clamp(max=1.0))
        capture.clipped()
        optimizer.step()
