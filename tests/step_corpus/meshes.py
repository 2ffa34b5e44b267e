"""How a model lies on the ranks, and how its gradients come together.

A mesh says over which axes a gradient is to be reduced (`declared`), has the code that does it
where no wrapper does, and the code of a norm over all ranks.
"""

import contextlib
import functools

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from step_corpus.sharded_models import cut_by_tensor_parallelism, is_cut

AXES = {
    "plain": (("data",), lambda n: (n,)),
    "ddp": (("data",), lambda n: (n,)),
    "hand": (("data",), lambda n: (n,)),
    "fsdp2": (("shard",), lambda n: (n,)),
    "hsdp": (("copies", "shard"), lambda n: (2, n // 2)),
    "grid": (("data", "tensor"), lambda n: (2, n // 2)),
    "tp": (("data", "tp"), lambda n: (n // 2, 2)),
    "ep": (("edp", "ep"), lambda n: (2, n // 2)),
}


@functools.cache
def device_mesh(shape, names):
    """One mesh for all jobs of a process, as each makes process groups."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@functools.cache
def group_without_last(world):
    """The ranks but the last."""
    return dist.new_group(list(range(world - 1)))


def local(tensor):
    """This rank's part of a DTensor, or all of another."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Mesh:
    """The mesh of one job, with its model on it."""

    def __init__(self, job, model, bug):
        self.job, self.bug = job, bug
        self.names, shape = AXES[job.mesh][0], AXES[job.mesh][1](job.world)
        self.sizes = dict(zip(self.names, shape))
        self.torch = device_mesh(shape, self.names) if job.world > 1 else None
        self.rank = dist.get_rank() if job.world > 1 else 0
        self.place = (
            dict(zip(self.names, self.torch.get_coordinate())) if self.torch is not None else {}
        )
        self.model = self.wrapped(model)
        self.plain = model
        self.declared = self.reductions()

    def wrapped(self, model):
        """The model as the job trains it."""
        kind = self.job.mesh
        if kind == "ddp":
            if self.bug.name == "not-reduced-over-axis":
                skipped = sorted(self.bug.names(model))
                ddp = torch.nn.parallel.DistributedDataParallel
                ddp._set_params_and_buffers_to_ignore_for_model(model, skipped)
            return torch.nn.parallel.DistributedDataParallel(model)
        if kind in ("fsdp2", "hsdp"):
            for block in model.blocks if hasattr(model, "blocks") else ():
                fully_shard(block, mesh=self.torch)
            return fully_shard(model, mesh=self.torch)
        if kind == "tp":
            return cut_by_tensor_parallelism(model, self.torch["tp"])
        if kind == "ep":
            return model.cut(self.torch["ep"])
        return model

    @property
    def shard_of_data(self):
        """Which part of the data this rank takes."""
        if self.job.mesh in ("grid", "tp"):
            return self.place["data"]
        return self.rank

    def axes_of(self, parameter):
        """The axes over which the job's own code reduces a gradient."""
        if self.job.mesh == "ep":
            return ["edp"] if is_cut(parameter) else ["edp", "ep"]
        axes = {"hand": ["data"], "grid": ["data"], "tp": ["data"]}.get(self.job.mesh, [])
        return [axis for axis in axes if self.sizes[axis] > 1]

    def reductions(self):
        """What the job declares of reductions that no wrapper does; None where one does them all."""
        job = self.job
        if job.mesh == "ddp" and self.bug.name == "not-reduced-over-axis":
            return {"*": [{"axis": "data", "op": "mean", "ranks": list(range(job.world))}]}
        if job.mesh not in ("hand", "grid", "tp", "ep"):
            return None
        group = lambda axis: self.torch[axis].get_group()
        return {
            name: [
                {"axis": axis, "op": job.operation, "group": group(axis)}
                for axis in self.axes_of(one)
            ]
            for name, one in self.plain.named_parameters()
        }

    def communicates(self, last):
        """Entered around the backward of a microbatch: its gradient is reduced now or with the last."""
        if self.job.each or last:
            return self.synced(True)
        return self.synced(False)

    def synced(self, now):
        if self.job.mesh in ("fsdp2", "hsdp"):
            self.model.set_requires_gradient_sync(now)
        elif self.job.mesh == "ddp" and not now:
            return self.model.no_sync()
        return contextlib.nullcontext()

    def reduce(self, parameters):
        """The reduction by the job's own code, one parameter after the other."""
        bug, tokens = self.bug, self.weight()
        for name, parameter in parameters:
            if parameter.grad is None:
                continue
            gradient = local(parameter.grad)
            if bug.hits("ranks-weighted", name):
                gradient.mul_(tokens)
            for axis in self.axes_of(parameter):
                if bug.hits("not-reduced-over-axis", name) and axis == self.axes_of(parameter)[-1]:
                    continue
                if bug.hits("wrong-group", name):
                    axis = next(other for other in self.names if other != axis)
                self.all_reduce(gradient, axis, name)

    def weight(self):
        """What a rank weighs by the tokens that it counts: as if each had another number of padded ones."""
        shares = torch.arange(1, self.job.world + 1, dtype=torch.float64) + self.job.variant % 3
        return float(shares[self.rank] / shares.mean())

    def all_reduce(self, gradient, axis, name):
        bug, group, count = self.bug, self.torch[axis].get_group(), self.sizes[axis]
        mean = self.job.operation == "mean"
        other = bug.hits("reduce-sum-for-mean", name) or bug.hits("reduce-mean-for-sum", name)
        if other and axis != "ep":
            mean = not mean
        if bug.hits("rank-left-out", name):
            if self.job.variant % 2 and self.job.world > 2:
                # A group that was made of all ranks but one, whose result the last takes over.
                if self.rank < self.job.world - 1:
                    dist.all_reduce(gradient, group=group_without_last(self.job.world))
                dist.broadcast(gradient, 0)
            else:
                if self.rank == self.job.world - 1:
                    gradient.zero_()
                dist.all_reduce(gradient, group=group)
        else:
            dist.all_reduce(gradient, group=group)
        if mean:
            gradient.div_(count)

    def low_norm(self, own, shared, kind):
        """The same in bf16, or of norms that are kept in bf16."""
        low = lambda number: number.to(torch.bfloat16).float()
        rounded = low if self.job.variant % 2 else lambda number: number
        total = torch.zeros(())
        for one, is_own in [(one, True) for one in own] + [(one, False) for one in shared]:
            part = one.abs().max() if kind == "inf" and one.numel() else one.square().sum()
            axis = {"fsdp2": "shard", "hsdp": "shard", "tp": "tp", "ep": "ep"}.get(self.job.mesh)
            if axis and is_own:
                operation = dist.ReduceOp.MAX if kind == "inf" else dist.ReduceOp.SUM
                dist.all_reduce(part, operation, group=self.torch[axis].get_group())
            part = low(part if kind == "inf" else part.sqrt())
            total = torch.maximum(total, part) if kind == "inf" else rounded(total + part.square())
        return total if kind == "inf" else rounded(total.sqrt())

    def norm(self, named, kind):
        """The norm of the whole gradient by the job's own code: each element once."""
        bug = self.bug
        own, shared = [], []
        for name, parameter in named:
            if parameter.grad is None or bug.hits("norm-misses-group", name):
                continue
            (own if is_cut(parameter) else shared).append(local(parameter.grad).float())
        if bug.hits("norm-low-precision"):
            return self.low_norm(own, shared, kind)
        power = lambda tensors: sum((one.square().sum() for one in tensors), torch.zeros(()))
        largest = lambda tensors: max(
            (one.abs().max() for one in tensors if one.numel()), default=torch.zeros(())
        )
        part = largest if kind == "inf" else power
        of_cut, of_shared = part(own), part(shared)
        axis = {"fsdp2": "shard", "hsdp": "shard", "tp": "tp", "ep": "ep"}.get(self.job.mesh)
        operation = dist.ReduceOp.MAX if kind == "inf" else dist.ReduceOp.SUM
        if axis and not bug.hits("norm-local-not-global"):
            group = self.torch[axis].get_group()
            if bug.hits("norm-counts-copies"):
                # Over all ranks, and with what every rank holds.
                of_cut, of_shared = of_cut + of_shared, torch.zeros(())
                group = None
            dist.all_reduce(of_cut, operation, group=group)
        return torch.maximum(of_cut, of_shared) if kind == "inf" else (of_cut + of_shared).sqrt()
