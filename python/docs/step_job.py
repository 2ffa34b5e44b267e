"""A small training job in torch whose pieces are source text, so that any of them can be a faulty one.

    python python/docs/step_job.py RANK WORLD PORT DIRECTORY CAUSE ...

Each piece of `PIECES` is what the page docs/step-causes.md shows of a right job, word for word; a plant
(step_plants.py) has other lines in one of them, which run in the recorded step alone. For each cause two
dumps are written: DIRECTORY/CAUSE and DIRECTORY/CAUSE-right.
"""

import copy
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.optim import _muon

import backtape
import backtape.torch
from step_pieces import HYPER, PIECES
from step_plants import PLANTS

WIDTH, VOCABULARY, LENGTH = 6, 13, 5
SEED = 20261130


class Model(nn.Module):
    """An embedding, two layers with norms, and a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.reduction = "mean"

    def forward(self, tokens, labels, expert=None):
        x = self.embed(tokens)
        x = x if expert is None else x + x @ expert
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x).flatten(0, 1).float()
        return F.cross_entropy(logits, labels.flatten(), reduction=self.reduction)


class Expert(nn.Module):
    """Experts of which each rank along an axis holds its own, and answers its own tokens with it."""

    def __init__(self, model, axis):
        super().__init__()
        self.model = model
        whole = 0.3 * torch.randn(axis.size(), WIDTH, WIDTH)
        self.experts = nn.Parameter(distribute_tensor(whole, axis, [Shard(0)]))

    def forward(self, tokens, labels):
        return self.model(tokens, labels, self.experts.to_local()[0])


class Own(torch.optim.Optimizer):
    """An optimizer of the job's own, whose rule is a piece of source text."""

    def __init__(self, groups, defaults, job):
        super().__init__(groups, defaults)
        self.job = job
        self.masters = {}
        if job.plant.master:
            self.masters = {p: p.detach().float() for p in self.parameters()}

    def parameters(self):
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        self.job.run("load")
        for group in self.param_groups:
            for p in group["params"]:
                w = local(self.masters.get(p, p))
                self.update(p, w, local(p.grad).to(w.dtype), group)

    def update(self, p, w, g, group):
        state, states = self.state[p], self.job.plant.states
        for name in states:
            if name not in state:
                like = self.masters.get(p, p)
                state[name] = torch.ones(()) if name == "mu_product" else torch.zeros_like(like)
        state.setdefault("step", torch.zeros(()))
        names = {key: group[key] for key in ("lr", "eps", "momentum", "alpha") if key in group}
        names |= {"beta1": group["betas"][0], "beta2": group["betas"][1]} if "betas" in group else {}
        names |= {"p": p, "w": w, "g": g, "state": state, "decay": group.get("weight_decay", 0.0)}
        names |= {"defaults": self.defaults}
        names |= {own: local(state[name]) for name, own in states.items()}
        self.job.run("count", names)
        self.job.run("rule", names | {"t": float(state["step"])})


class Scaler(torch.amp.GradScaler):
    """A loss scaler whose job takes the scale out by itself."""

    def __init__(self, job):
        super().__init__("cpu", init_scale=1024.0, growth_interval=1 << 20)
        self.job = job

    def unscale_(self, optimizer):
        self.job.run("unscale", {"scale": self.get_scale()})

    def step(self, optimizer, *args, **kwargs):
        self.job.run("take")


def local(tensor):
    """This rank's part of a DTensor, or all of another."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Job:
    """One rank of one run of a plant, with its fault or without."""

    def __init__(self, plant, faulty, directory, rank, world):
        self.plant, self.faulty, self.rank, self.world = plant, faulty, rank, world
        self.active, self.batches = False, []
        self.scope = {"copy": copy, "dist": dist, "local": local, "torch": torch, "limit": 0.02}
        self.scope["orthogonal"] = _muon._zeropower_via_newtonschulz
        torch.manual_seed(SEED)
        self.model = Model()
        if plant.master:
            self.model.to(torch.bfloat16)
        if plant.counted:
            self.model.reduction = "sum"
        self.mesh = None
        if plant.mesh:
            names, shape = zip(*plant.mesh.items())
            self.mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        if plant.sharded:
            fully_shard(self.model, mesh=self.mesh)
        if plant.experts:
            self.model = Expert(self.model, self.mesh["expert"])
        self.scope["bucket"] = {p: torch.zeros_like(p) for p in self.model.parameters()}
        self.optimizer = self.own_optimizer() if plant.rule else self.torch_optimizer()
        self.scaler = Scaler(self) if plant.scaled else None
        sizes = plant.mesh or ({"data": world} if world > 1 else None)
        self.recorder = backtape.Recorder(
            directory, steps=str(plant.step), mesh=sizes, rank=rank, world_size=world, strict=True
        )

    def groups(self):
        if self.plant.matrices:
            return [{"params": [p for p in self.model.parameters() if p.ndim == 2]}]
        if not self.plant.excludes:
            return [{"params": list(self.model.parameters())}]
        those = lambda flat: [p for p in self.model.parameters() if (p.ndim < 2) == flat]
        return [{"params": those(False)}, {"params": those(True), "weight_decay": 0.0}]

    def own_optimizer(self):
        # A Muon is known by its module, as there are several; this one does what torch's does.
        module = {"__module__": _muon.__name__} if self.plant.rule == "Muon" else {}
        kind = type(self.plant.rule, (Own,), module)
        return kind(self.groups(), HYPER[self.plant.rule] | self.plant.hyper, self)

    def torch_optimizer(self):
        # torch's loop over several tensors takes no mixture of DTensors and others.
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2, foreach=False)

    def run(self, piece, names=None):
        """Runs a piece of the job's source."""
        plant = self.plant
        source = plant.right if piece == plant.piece else plant.pieces.get(piece, PIECES[piece])
        if piece == plant.piece and self.faulty and (self.active or plant.always):
            source = plant.wrong
        # Names that a piece makes are there in the next ones.
        self.scope |= {
            "model": self.model, "optimizer": self.optimizer, "batches": self.batches, "rank": self.rank,
            "world": self.world, "mesh": self.mesh, "scaler": self.scaler,
            "without_last": self.group_without_last(),
        }  # fmt: skip
        scope = self.scope | names if names else self.scope
        exec(compile(source, f"<{plant.cause}: {piece}>", "exec"), scope)

    def group_without_last(self):
        if not hasattr(self, "without_last"):
            needed = "without_last" in self.plant.wrong
            self.without_last = dist.new_group(list(range(self.world - 1))) if needed else None
        return self.without_last

    def batches_of(self, step):
        draw = torch.Generator().manual_seed(SEED + 100 * step + self.rank)
        size = (2, LENGTH)
        two = lambda: tuple(torch.randint(VOCABULARY, size, generator=draw) for _ in range(2))
        batches = [two() for _ in range(self.plant.microbatches)]
        for index, (_, labels) in enumerate(batches if self.plant.counted else ()):
            labels[:, : 1 + index] = -100
        return batches

    def declared(self):
        if self.world == 1 or self.plant.sharded:
            return None
        axes = self.plant.reduced_over or {"data": "mean"}
        group = lambda axis: self.mesh[axis].get_group() if self.mesh else None
        of = lambda axis, op: {"axis": axis, "op": op} | (
            {"group": group(axis)} if self.mesh else {}
        )
        if self.plant.experts:
            return {"experts": [of("data", "mean")], "*": [of("data", "mean"), of("expert", "mean")]}
        return {"*": [of(axis, op) for axis, op in axes.items()]}

    def train(self):
        with self.recorder:
            for step in range(self.plant.step + 1):
                self.active = step == self.plant.step
                for group in self.optimizer.param_groups:
                    group["lr"] = self.optimizer.defaults["lr"] * (step + 1) / (self.plant.step + 2)
                with self.recorder.step(step) as tape:
                    self.take(step, tape)

    def take(self, step, tape):
        """One step."""
        self.scope["step"] = step
        self.run("start")
        self.run("clear")
        self.algebra = backtape.torch.step_algebra(
            tape, self.model, self.optimizer, reduce=self.declared()
        )
        self.scope["algebra"] = self.algebra
        self.run("begin")
        self.batches = self.batches_of(step)
        hook = self.recorded_head(tape) if self.plant.counted else None
        self.run("backward")
        if hook is not None:
            hook.remove()
        if self.world > 1 and not self.plant.sharded:
            self.run("reduce")
        self.algebra.reduced()
        self.run("unscaled")
        self.scope["kept"] = {p: p.grad.clone() for p in self.model.parameters()}
        self.run("clip")
        self.record_masters(tape, "before")
        self.run("step")
        self.record_masters(tape, "after")

    def recorded_head(self, tape):
        """Records the tokens of each microbatch."""
        tape.head(
            loss="xent_logits", path="plain", reduction="sum", scope="microbatch",
            microbatches=len(self.batches), microbatch_reduction="sum", ignore_label=-100,
        )  # fmt: skip
        left = iter(enumerate(self.batches))

        def record(module, given, logits):
            index, (_, labels) = next(left)
            tape.record("logits", logits, microbatch=index)
            tape.record("labels", labels, microbatch=index)

        return self.model.head.register_forward_hook(record)

    def record_masters(self, tape, when):
        for name, p in self.model.named_parameters():
            if tape.active and p in getattr(self.optimizer, "masters", {}):
                tape.record(f"step.master_{when}:{name}", self.optimizer.masters[p])


def main(rank, world, port, directory, causes):
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if world > 1:
        dist.init_process_group("gloo", rank=rank, world_size=world)
    for cause in causes:
        plant = PLANTS[cause]
        for faulty in (True, False):
            name = cause if faulty else f"{cause}-right"
            Job(plant, faulty, directory / name, rank, world).train()
            if world > 1:
                dist.barrier()
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), Path(sys.argv[4]), sys.argv[5:])
