"""Optimizers that jobs write by themselves, as their authors name them: some of them with a fault.

What a job declares is what stands in `param_groups`; that a step does something else is the fault.
"""

import torch
import torch.distributed as dist

from step_corpus.meshes import local


class Handwritten(torch.optim.Optimizer):
    """What the rules share: state, the step counter, and copies of more bits."""

    def __init__(self, named, groups, defaults, job, bug):
        super().__init__(groups, defaults)
        self.job, self.bug = job, bug
        self.name_of = {parameter: name for name, parameter in named}
        self.masters = {}
        self.gradients = {}  # those before clipping, where a fault takes them
        self.last_lr = {}
        if job.precision == "master":
            self.masters = {parameter: parameter.detach().float() for _, parameter in named}

    @torch.no_grad()
    def step(self, closure=None):
        self.saved = self.states() if self.bug.there("state-swapped") else {}
        for index, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, group, index)
                    # The parameter is met under its second name too.
                    if self.bug.hits("tied-updated-twice", self.name_of[parameter]):
                        self.update(parameter, group, index)
        self.last_lr = {index: group["lr"] for index, group in enumerate(self.param_groups)}

    def states(self):
        """Each parameter's state before the step, under the parameter of its shape that follows: as by
        a load that goes by position."""
        saved, all_of = {}, [one for group in self.param_groups for one in group["params"]]
        for at, parameter in enumerate(all_of):
            others = all_of[at + 1 :] + all_of[:at]
            other = next((one for one in others if one.shape == parameter.shape), None)
            if other is not None:
                state = self.state[other].items()
                saved[parameter] = {k: v.clone() if torch.is_tensor(v) else v for k, v in state}
        return saved

    def update(self, parameter, group, index):
        bug, name = self.bug, self.name_of[parameter]
        value = local(self.masters.get(parameter, parameter).data)
        gradient = local(parameter.grad)
        if bug.hits("update-from-other-gradient", name) and parameter in self.gradients:
            gradient = self.gradients[parameter]
        gradient = gradient.to(value.dtype)
        if bug.hits("state-reset", name):
            self.state.pop(parameter, None)
        if bug.hits("state-swapped", name) and parameter in self.saved:
            self.state[parameter].update(self.saved[parameter])
        state = self.state[parameter]
        settings = group | {"lr": self.rate(group, index, name)}
        target = value.clone() if bug.hits("update-is-no-op", name) else value
        self.apply(target, gradient, state, settings, name, parameter)
        if parameter in self.masters and not bug.hits("master-stale", name):
            parameter.data.copy_(value)

    def rate(self, group, index, name):
        bug, lr = self.bug, group["lr"]
        if bug.hits("lr-scaled", name):
            stale = self.job.variant % 2 and self.job.warmup
            lr = self.last_lr.get(index, lr) if stale else lr * self.job.facts["lr_factor"]
        return -lr if bug.hits("update-ascends", name) else lr

    def decay_of(self, group, name):
        """The decay of a group; a fault takes the first group's for all."""
        if self.bug.hits("decay-on-excluded", name):
            return self.param_groups[0]["weight_decay"]
        return group["weight_decay"]

    def zeros(self, state, name, like, parameter):
        """A tensor of the state, which begins with zeros and lies as the parameter does."""
        if name not in state:
            state[name] = torch.zeros_like(parameter, dtype=like.dtype)
        return local(state[name])


class _Adaptive(Handwritten):
    """The rule of Adam, with decay added to the gradient or apart."""

    decoupled = False

    def apply(self, value, gradient, state, group, name, parameter):
        bug, (beta1, beta2) = self.bug, group["betas"]
        decay = self.decay_of(group, name)
        decoupled = self.decoupled != bug.hits("decay-coupled", name)
        if decoupled:
            value.mul_(1 - group["lr"] * decay)
        elif decay:
            gradient = gradient.add(value, alpha=decay)
        first = self.zeros(state, "exp_avg", value, parameter)
        second = self.zeros(state, "exp_avg_sq", value, parameter)
        step = self.count(state, name)
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        self.descend(value, first, second, step, group, name)

    def count(self, state, name):
        step = state.setdefault("step", torch.zeros(()))
        if not self.bug.hits("step-counter", name):
            step += 1
        elif self.job.variant % 2:  # counts microbatches
            step += self.job.microbatches
        # Otherwise nobody counts.
        return max(float(step), 1.0)

    def descend(self, value, first, second, step, group, name):
        bug, (beta1, beta2) = self.bug, group["betas"]
        one, two = 1 - beta1**step, 1 - beta2**step
        if bug.hits("bias-correction-missing", name):
            one, two = [(1.0, 1.0), (1.0, two), (one, 1.0)][self.job.variant % 3]
        if bug.hits("bias-correction-twice", name):
            one, two = one * one, two * two
        if bug.hits("eps-inside-sqrt", name):
            denominator = (second / two + group["eps"]).sqrt()
        else:
            denominator = (second / two).sqrt() + group["eps"]
        value.addcdiv_(first, denominator, value=-group["lr"] / one)


class Adam(_Adaptive):
    """Decay is added to the gradient."""


class AdamW(_Adaptive):
    """Decay is apart."""

    decoupled = True


class Lamb(_Adaptive):
    """Adam's direction with the decay in it, times the norm of the parameter over that of the direction."""

    def apply(self, value, gradient, state, group, name, parameter):
        beta1, beta2 = group["betas"]
        first = self.zeros(state, "exp_avg", value, parameter)
        second = self.zeros(state, "exp_avg_sq", value, parameter)
        step = self.count(state, name)
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        direction = first / (1 - beta1**step)
        direction = direction / ((second / (1 - beta2**step)).sqrt() + group["eps"])
        direction = direction.add(value, alpha=self.decay_of(group, name))
        norms = torch.stack([one.float().square().sum() for one in (value, direction)])
        if not self.bug.hits("sharded-norm-inside-update", name):
            self.over_shards(norms, parameter)
        norms = norms.sqrt()
        ratio = float(norms[0] / norms[1]) if norms.all() else 1.0
        value.add_(direction, alpha=-group["lr"] * ratio)

    def over_shards(self, norms, parameter):
        """Adds up over the ranks that hold other parts of the parameter."""
        for axis, placement in enumerate(getattr(parameter, "placements", ())):
            if placement.is_shard():
                dist.all_reduce(norms, group=parameter.device_mesh.get_group(axis))


class SGD(Handwritten):
    """Momentum, plain or Nesterov's."""

    def apply(self, value, gradient, state, group, name, parameter):
        decay, momentum = self.decay_of(group, name), group["momentum"]
        if decay:
            gradient = gradient.add(value, alpha=decay)
        if momentum:
            begun = "momentum_buffer" in state
            buffer = self.zeros(state, "momentum_buffer", value, parameter)
            buffer.mul_(momentum if begun else 0.0).add_(
                gradient, alpha=1 - group["dampening"] if begun else 1.0
            )
            gradient = gradient.add(buffer, alpha=momentum) if group["nesterov"] else buffer
        value.add_(gradient, alpha=-group["lr"])


def groups_of(job, named):
    """The groups of parameters: where a job excludes norms and biases from decay, those are the second."""
    if not job.excluded:
        return [{"params": [parameter for _, parameter in named]}]
    matrices = [parameter for _, parameter in named if parameter.ndim > 1]
    others = [parameter for _, parameter in named if parameter.ndim <= 1]
    return [{"params": matrices}, {"params": others, "weight_decay": 0.0}]


def build(job, named, bug):
    """The optimizer of a job."""
    groups = groups_of(job, named)
    defaults = {"lr": job.lr, "weight_decay": job.decay}
    if job.rule == "SGD":
        defaults |= {"momentum": job.momentum, "nesterov": job.nesterov, "dampening": 0.0}
    else:
        defaults |= {"betas": job.betas, "eps": job.eps}
    if job.own:
        return {"SGD": SGD, "Adam": Adam, "AdamW": AdamW, "Lamb": Lamb}[job.rule](
            named, groups, defaults, job, bug
        )
    options = {
        "foreach": {"foreach": True},
        "fused": {"fused": True},
        "single": {"foreach": False},
    }[job.way]
    return getattr(torch.optim, job.rule)(groups, **defaults, **options)
