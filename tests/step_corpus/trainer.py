"""A training loop over torch, as people write them, with the places where its faults are planted."""

import torch
import torch.distributed as dist

import backtape
import backtape.torch
from step_corpus import held_models, layers, models, optimizers, sharded_models
from step_corpus.bug import Bug
from step_corpus.job import BY_HAND
from step_corpus.meshes import Mesh, local


class Scaler(torch.amp.GradScaler):
    """A loss scaler whose job takes the scale out by itself."""

    def __init__(self, scale, bug, name_of):
        super().__init__("cpu", init_scale=scale, growth_interval=1 << 20)
        self.bug, self.name_of = bug, name_of

    def unscale_(self, optimizer):
        inverse = 1 / self.get_scale()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = self.name_of[parameter]
                if parameter.grad is None or self.bug.hits("loss-scale-left-in", name):
                    continue
                parameter.grad.mul_(inverse)
                if self.bug.hits("loss-scale-taken-out-twice", name):
                    parameter.grad.mul_(inverse)

    def step(self, optimizer, *args, **kwargs):
        is_last = self.bug.job.world > 1 and dist.get_rank() == self.bug.job.world - 1
        if is_last and self.bug.there("inf-skipped-on-some-ranks"):
            return None  # as where this rank alone has found an infinite gradient
        return optimizer.step(*args, **kwargs)


class Trainer:
    """One rank of one job."""

    def __init__(self, job, directory):
        self.job, self.bug = job, Bug(job)
        rank = dist.get_rank() if job.world > 1 else 0
        job.facts["rank"] = rank
        model = self.fresh_model(rank)
        self.mesh = Mesh(job, model, self.bug)
        self.model = self.mesh.model
        self.named = list(model.named_parameters())
        self.bug.names(model)
        self.optimizer = optimizers.build(job, self.named, self.bug)
        if job.fault == "param-not-in-optimizer":
            # The optimizer was made before these were replaced, as by a new head.
            layers.replace(model, self.bug.concerned)
            self.named = list(model.named_parameters())
        name_of = {parameter: name for name, parameter in self.named}
        self.scaler = Scaler(job.scale, self.bug, name_of) if job.scale else None
        self.recorder = backtape.Recorder.from_env(
            steps=str(job.step),
            dir=directory,
            mesh=self.mesh.sizes if job.mesh != "plain" else None,
            rank=rank,
            world_size=job.world,
            strict=True,
        )
        self.kept = {}  # what the recorded step came to, beside what is recorded

    def fresh_model(self, rank):
        job = self.job
        known = held_models.MODELS if job.part == "held-out" else models.MODELS
        if job.mesh == "tp":
            times = 2 if job.part == "develop" else 4
            model = sharded_models.Parallel(job.width, job.vocabulary, job.depth, times)
        elif job.mesh == "ep":
            gated = job.part == "held-out"
            model = sharded_models.ShardedExperts(job.width, job.vocabulary, job.depth, gated)
        else:
            model = known[job.model](job.width, job.vocabulary, job.depth)
        layers.start(model, job.seed)
        if (
            job.fault == "data-parallel-copies-drift"
            and job.facts["drift"] == "start"
            and rank == job.world - 1
        ):
            # Nobody has sent the first rank's values to this one.
            draw = torch.Generator().manual_seed(job.seed + 1)
            concerned = Bug(job).names(model)
            with torch.no_grad():
                for name, one in model.named_parameters():
                    if name in concerned:
                        one.add_(
                            job.factor * one.abs().mean() * torch.randn(one.shape, generator=draw)
                        )
        return model if job.precision == "f32" else model.to(torch.bfloat16)

    def batch(self, step, microbatch):
        """Tokens and labels that this rank's part of the data has."""
        job = self.job
        seed = ((job.seed * 31 + step) * 17 + self.mesh.shard_of_data) * 13 + microbatch
        draw = torch.Generator().manual_seed(seed % (1 << 40))
        size = (job.rows, job.length)
        return [torch.randint(job.vocabulary, size, generator=draw) for _ in range(2)]

    def run(self):
        with self.recorder:
            for step in range(self.job.step + 1):
                last = step == self.job.step
                self.bug.active = self.job.fault is not None and (last or self.job.always)
                if self.job.warmup:
                    for group in self.optimizer.param_groups:
                        group["lr"] = self.job.lr * (step + 1) / (self.job.step + 2)
                with self.recorder.step(step) as tape:
                    self.train(step, tape, last)

    def train(self, step, tape, last):
        """One step."""
        job = self.job
        if self.bug.there("data-parallel-copies-drift") and job.facts["drift"] == "main rank":
            self.renormalise()
        self.clear(step)
        self.capture = backtape.torch.step_algebra(
            tape, self.model, self.optimizer, reduce=self.mesh.declared
        )
        self.keep_stale()
        self.accumulate(step)
        if not job.facts.get("eager"):
            self.mesh.reduce(self.named)
        self.after_reduction()
        if job.mesh in BY_HAND:
            self.capture.reduced()
        too_early = self.bug.there("clip-before-unscale")
        norm = self.clip() if too_early else None
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if last:
            self.keep("gradient")
        if self.bug.there("update-from-other-gradient"):
            self.optimizer.gradients = {one: local(one.grad).clone() for _, one in self.named}
        norm = norm if too_early else self.clip()
        if last:
            self.keep("taken")
            self.record_masters(tape, "before")
        self.scaler.step(self.optimizer) if self.scaler is not None else self.optimizer.step()
        if last:
            self.record_masters(tape, "after")
            self.keep_results(norm)

    def renormalise(self):
        """What only the first rank does: "if rank == 0", as for a log line."""
        for name, parameter in self.named:
            if self.job.facts["rank"] == 0 and self.bug.hits("data-parallel-copies-drift", name):
                with torch.no_grad():
                    parameter.mul_(1 - self.job.factor)

    def clear(self, step):
        if self.bug.there("bucket-stale"):
            return
        if self.job.fault == "param-not-in-optimizer":
            self.model.zero_grad()
            return
        if not self.bug.there("not-cleared"):
            self.optimizer.zero_grad()
            return
        for name, parameter in self.named:
            if not self.bug.hits("not-cleared", name):
                parameter.grad = None

    def keep_stale(self):
        """A bucket that still holds the gradients of the step before when it is copied back."""
        self.stale = {}
        for name, parameter in self.named:
            if self.bug.there("bucket-stale"):
                self.stale[name], parameter.grad = parameter.grad, None

    def accumulate(self, step):
        """The backward of every microbatch."""
        job, bug = self.job, self.bug
        sums = {}
        for i in range(job.microbatches):
            if i == job.facts.get("cut") and bug.there("accumulate-window"):
                self.drop()
            with self.mesh.communicates(i == job.microbatches - 1):
                loss = self.model(*self.batch(step, i)) / job.microbatches
                self.scaled(loss).backward()
            if job.buffer:
                self.add_to(sums, i)
            elif bug.there("accumulate-doubles"):
                for name, parameter in self.named:
                    if bug.hits("accumulate-doubles", name) and i == 0:
                        parameter.grad.add_(parameter.grad.clone())
        for name, parameter in self.named:
            if job.buffer and name in sums:
                parameter.grad = sums[name].to(parameter.grad.dtype)
            if bug.hits("microbatch-scale", name):
                factor = job.microbatches if job.variant % 2 else 1 / job.microbatches
                parameter.grad.mul_(factor)

    def scaled(self, loss):
        return loss if self.scaler is None else self.scaler.scale(loss)

    def drop(self):
        """A zero_grad in the loop, as of an evaluation between two microbatches."""
        for name, parameter in self.named:
            if self.bug.hits("accumulate-window", name) and parameter.grad is not None:
                parameter.grad.zero_()

    def add_to(self, sums, i):
        """Adds the gradients of a microbatch to the job's own buffers."""
        job, bug = self.job, self.bug
        for name, parameter in self.named:
            if job.facts.get("eager"):
                self.mesh.reduce([(name, parameter)])
            gradient = parameter.grad
            if bug.hits("accumulate-window", name) and i == job.facts["lost"]:
                gradient = torch.zeros_like(gradient)
            if bug.hits("accumulate-low-precision", name):
                gradient = gradient.to(torch.bfloat16)
            elif job.precision != "f32":
                gradient = gradient.float()
            if name not in sums:
                sums[name] = gradient.clone()
            else:
                if bug.hits("divide-old-shard", name):
                    sums[name].div_(self.mesh.sizes["data"])
                sums[name].add_(gradient)
            # Where a fault is, .grad is not cleared: what was added is added again.
            if not bug.hits("accumulate-doubles", name) and i < job.microbatches - 1:
                parameter.grad = None

    def after_reduction(self):
        job, bug = self.job, self.bug
        for name, parameter in self.named:
            if parameter.grad is None:
                continue
            if bug.hits("bucket-stale", name):
                local(parameter.grad).copy_(local(self.stale[name]))
            if bug.hits("reduced-mean-twice", name):
                parameter.grad.div_(job.facts["copies"])
            if bug.hits("gradient-scaled", name):
                parameter.grad.mul_(job.factor)

    def clip(self):
        """Clips as the job does; gives the norm, if there is one."""
        job, bug = self.job, self.bug
        parameters = [parameter for _, parameter in self.named]
        if job.clip == "none":
            return None
        if job.clip == "value":
            largest = max(
                float(local(one.grad).abs().max()) for one in parameters if local(one.grad).numel()
            )
            limit = self.same_everywhere(largest) * job.limit
            # torch clips no mixture of DTensors and others at once.
            torch.nn.utils.clip_grad_value_(parameters, limit, foreach=False)
            return None
        limit = self.limit()
        kind = float("inf") if job.clip == "inf" else 2.0
        if not job.own_clip:
            norm = torch.nn.utils.clip_grad_norm_(parameters, limit, norm_type=kind)
            if bug.there("clip-twice"):
                whole = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
                self.multiply(limit / (float(whole) + 1e-6))
            return norm
        norm = self.mesh.norm(self.named, job.clip)
        self.capture.norm(norm, max_norm=limit, kind=kind, epsilon=1e-6)
        coefficient = float((limit / (norm + 1e-6)).clamp(max=1.0))
        if not bug.there("clip-recorded-not-applied"):
            self.multiply(coefficient)
        if bug.there("clip-twice"):
            self.multiply(coefficient)
        self.capture.clipped()
        return norm

    def multiply(self, coefficient):
        for name, parameter in self.named:
            local(parameter.grad).mul_(coefficient)

    def limit(self):
        """A limit that clips: a share of the norm, without the job's faults."""
        active, self.bug.active = self.bug.active, False
        norm = float(self.mesh.norm(self.named, self.job.clip))
        self.bug.active = active
        if self.bug.there("clip-before-unscale"):
            norm /= self.job.scale  # the limit of a job knows nothing of the scale
        return self.same_everywhere(norm) * self.job.limit

    def same_everywhere(self, number):
        if self.job.world == 1:
            return number
        both = torch.tensor([number], dtype=torch.float64)
        dist.broadcast(both, 0)
        return float(both)

    def record_masters(self, tape, when):
        """The copies of more bits that the optimizer of the job keeps."""
        for name, parameter in self.named:
            masters = getattr(self.optimizer, "masters", {})
            if parameter in masters and tape.active:
                tape.record(f"step.master_{when}:{name}", masters[parameter])

    def keep(self, stage):
        for name, parameter in self.named:
            if parameter.grad is not None:
                self.kept[f"{stage}:{name}"] = local(parameter.grad).detach().clone()

    def keep_results(self, norm):
        """What the step came to on this rank, for the measure of what the fault changes."""
        for name, parameter in self.named:
            self.kept[f"after:{name}"] = local(parameter.detach()).clone()
            masters = getattr(self.optimizer, "masters", {})
            if parameter in masters:
                self.kept[f"master:{name}"] = masters[parameter].clone()
            for kind, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    self.kept[f"{kind}:{name}"] = local(value).detach().clone()
        if norm is not None:
            self.kept["norm:"] = local(norm).detach().clone().reshape(1)


def run(job, directory):
    """Trains a job to its recorded step; what that came to on this rank."""
    torch.manual_seed(job.seed)
    trainer = Trainer(job, directory)
    trainer.run()
    return trainer.kept, sorted(trainer.bug.concerned)
