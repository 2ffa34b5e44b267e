"""Optimizers as jobs set them: torch's own with every switch and implementation, Lion, and an Adam
that is written as apex's fused one computes."""

import torch

from step_campaign.draws import chance, pick


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, algorithm 2, as public implementations in torch write it."""

    def __init__(self, groups, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for parameter in (own for own in group["params"] if own.grad is not None):
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                parameter.mul_(1 - lr * group["weight_decay"])
                moment, gradient = state["exp_avg"], parameter.grad
                update = moment.clone().mul_(beta1).add_(gradient, alpha=1 - beta1).sign_()
                parameter.add_(update, alpha=-lr)
                moment.mul_(beta2).add_(gradient, alpha=1 - beta2)


class FusedAdam(torch.optim.Optimizer):
    """Adam in f32 (or f64), whatever the parameters are stored in, with the decay beside the direction."""

    def __init__(self, groups, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, adam_w_mode=True):
        super().__init__(
            groups,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adam_w_mode": adam_w_mode},
        )

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in (own for own in group["params"] if own.grad is not None):
                self.update(parameter, group)

    def update(self, parameter, group):
        (beta1, beta2), decay = group["betas"], group["weight_decay"]
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros(())
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        compute = torch.promote_types(parameter.dtype, torch.float32)
        step, value = float(state["step"]), parameter.to(compute)
        gradient = parameter.grad.to(compute)
        if not group["adam_w_mode"]:
            gradient = gradient + decay * value
        first = beta1 * state["exp_avg"].to(compute) + (1 - beta1) * gradient
        second = beta2 * state["exp_avg_sq"].to(compute) + (1 - beta2) * gradient * gradient
        denominator = (second / (1 - beta2**step)).sqrt() + group["eps"]
        update = first / (1 - beta1**step) / denominator
        if group["adam_w_mode"]:
            update = update + decay * value
        state["exp_avg"].copy_(first)
        state["exp_avg_sq"].copy_(second)
        parameter.copy_(value - group["lr"] * update)


CLASSES = {"Lion": Lion, "FusedAdam": FusedAdam}
OWN = tuple(CLASSES)
TORCH = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "RMSprop")
# What torch implements in one kernel on the CPU.
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")


def lr_of(draw):
    return 0.0 if chance(draw, 0.03) else float(10 ** draw.uniform(-8, 1))


def betas_of(draw):
    return (
        pick(draw, [0.9, 0.9, 0.95, 0.8, 0.5, 0.0, 0.99, 0.9999]),
        pick(draw, [0.999, 0.999, 0.95, 0.98, 0.99, 0.9, 0.0, 0.9999]),
    )


def eps_of(draw, dtype):
    if dtype == torch.float16:
        return pick(draw, [1e-3, 1e-4])
    return pick(draw, [1e-8, 1e-8, 1e-6, 1e-5, 1e-3, 1e-15, 0.0, float(10 ** draw.uniform(-12, -3))])


def decay_of(draw):
    return pick(draw, [0.0, 0.0, 0.01, 0.1, 1e-4, 0.3])


def of_sgd(draw, dtype):
    momentum = pick(draw, [0.0, 0.9, 0.9, 0.99, 0.5])
    nesterov = bool(momentum) and chance(draw, 0.4)
    dampening = 0.0 if nesterov else pick(draw, [0.0, 0.0, 0.1, 0.9])
    return {"momentum": momentum, "dampening": dampening, "nesterov": nesterov}


def of_adam(draw, dtype):
    return {"betas": betas_of(draw), "eps": eps_of(draw, dtype), "amsgrad": chance(draw, 0.3)}


def of_nadam(draw, dtype):
    return {
        "betas": betas_of(draw), "eps": eps_of(draw, dtype),
        "momentum_decay": pick(draw, [4e-3, 4e-3, 0.0, 0.1]),
        "decoupled_weight_decay": chance(draw, 0.4),
    }  # fmt: skip


def of_radam(draw, dtype):
    return {
        "betas": betas_of(draw), "eps": eps_of(draw, dtype),
        "decoupled_weight_decay": chance(draw, 0.4),
    }  # fmt: skip


def of_adamax(draw, dtype):
    return {"betas": betas_of(draw), "eps": eps_of(draw, dtype)}


def of_adagrad(draw, dtype):
    return {
        "lr_decay": pick(draw, [0.0, 0.0, 1e-3, 0.1]),
        "initial_accumulator_value": pick(draw, [0.0, 0.0, 0.1, 1.0]),
        "eps": eps_of(draw, dtype) or 1e-10,
    }


def of_rmsprop(draw, dtype):
    return {
        "alpha": pick(draw, [0.99, 0.9, 0.5, 0.0, 0.9999]), "eps": eps_of(draw, dtype),
        "momentum": pick(draw, [0.0, 0.9, 0.99]), "centered": chance(draw, 0.4),
    }  # fmt: skip


def of_lion(draw, dtype):
    return {"betas": betas_of(draw)}


def of_fused_adam(draw, dtype):
    return {"betas": betas_of(draw), "eps": eps_of(draw, dtype), "adam_w_mode": chance(draw, 0.6)}


SETTINGS = {
    "SGD": of_sgd, "Adam": of_adam, "AdamW": of_adam, "NAdam": of_nadam, "RAdam": of_radam,
    "Adamax": of_adamax, "Adagrad": of_adagrad, "RMSprop": of_rmsprop, "Lion": of_lion,
    "FusedAdam": of_fused_adam,
}  # fmt: skip


def way_of(draw, name, dtype, trains):
    """How torch computes it. `differentiable` computes with the step as a tensor of f32, as what is
    captured in a CUDA graph does."""
    if name in OWN:
        return "own"
    ways = ["single", "foreach", "foreach", "tensor"]
    # Of parameters that autograd follows torch changes none in that way, and in f16 its denominator,
    # which is divided by the learning rate, has too few bits for anybody to use it.
    ways += [] if trains or dtype == torch.float16 else ["differentiable"]
    ways += ["fused", "fused", "fused-tensor"] if name in FUSED else []
    if name == "RAdam" and dtype == torch.float16:
        # The same holds of all ways of RAdam but its plain one: where the denominator over the learning
        # rate and the rectification is more than f16 has, its reciprocal is 0, and so is the update.
        ways = ["single", "tensor"]
    return pick(draw, ways)


def rule_of(draw, dtype, trains=False):
    """The class of an optimizer, its settings and how it is computed; `trains`: of parameters of
    autograd."""
    name = pick(draw, [*TORCH, "AdamW", "Adam", "SGD", *OWN])
    settings = {"lr": lr_of(draw), "weight_decay": decay_of(draw)} | SETTINGS[name](draw, dtype)
    way = way_of(draw, name, dtype, trains)
    if name not in OWN:
        settings["maximize"] = chance(draw, 0.1)
        settings["foreach"] = way == "foreach"
        if way == "differentiable":
            settings["differentiable"] = True
        if way.startswith("fused"):
            settings |= {"fused": True, "foreach": None}
    return name, settings, way


def group_of(draw):
    """What one group of parameters sets otherwise than the optimizer."""
    other = {}
    if chance(draw, 0.5):
        other["weight_decay"] = pick(draw, [0.0, 0.05, 0.2])
    if chance(draw, 0.5):
        other["lr"] = float(10 ** draw.uniform(-6, 0))
    return other


def build(rule, groups):
    """The optimizer. groups: for each the parameters, and what it sets otherwise."""
    name, settings, way = rule
    kind = CLASSES.get(name) or getattr(torch.optim, name)
    number = (lambda lr: torch.tensor(lr)) if way.endswith("tensor") else lambda lr: lr
    given = [
        {"params": params, **other} | ({"lr": number(other["lr"])} if "lr" in other else {})
        for params, other in groups
    ]
    return kind(given, **settings | {"lr": number(settings["lr"])})


def advance(optimizer, steps):
    """Has the optimizer's counters say that so many steps were made more."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if "step" not in state:
                continue
            if "mu_product" in state:
                beta, decay = group["betas"][0], group["momentum_decay"]
                state["mu_product"] = momenta(state["mu_product"], float(state["step"]), steps, beta, decay)
            state["step"] += steps


def momenta(product, step, steps, beta, decay):
    """The product of NAdam's momenta, as torch multiplies it up."""
    for index in range(1, steps + 1):
        factor = beta * (1.0 - 0.5 * 0.96 ** ((step + index) * decay))
        if float(product) < 1e-30:
            break
        product = product * factor
    return product
