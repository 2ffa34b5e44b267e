"""Optimizers that no rule is known of, each with the function that says what it does, and a model."""

import torch
import torch.nn as nn

from backtape.rule import maximum, minimum, sign, sqrt, tanh, where


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(b, a) for a, b in [(40, 24), (16, 40)])

    def forward(self, x):
        return self.layers[1](torch.tanh(self.layers[0](x)))


class Own(torch.optim.Optimizer):
    """What the optimizers here share. `fault` is what one does wrong."""

    def __init__(self, parameters, fault=None, **defaults):
        super().__init__(list(parameters), defaults)
        self.fault = fault

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.update(parameter, parameter.grad, self.state[parameter], group)

    def counted(self, state):
        step = state.setdefault("step", torch.zeros(()))
        step += 1
        return float(step)

    def kept(self, state, name, parameter):
        return state.setdefault(name, torch.zeros_like(parameter))


class AdamG(Own):
    """Adam whose first moment is of gradients times a running golden step size."""

    def update(self, parameter, gradient, state, group):
        beta1, beta2, beta3 = group["betas"]
        step = self.counted(state)
        second, golden, first = (self.kept(state, name, parameter) for name in "vrm")
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        golden.mul_(beta3).add_(group["p"] * second ** group["q"], alpha=1 - beta3)
        taken = gradient if self.fault == "golden-missing" else golden * gradient
        first.mul_(beta1).add_(taken, alpha=1 - beta1)
        one, two = 1 - beta1**step, 1 - beta2**step
        if self.fault == "correction":
            one, two = 1 - one, 1 - two
        rate = group["lr"] * min(1.0, step**-0.5)
        parameter.addcdiv_(first / one, (second / two).sqrt() + group["eps"], value=-rate)


def adam_g(param, grad, state, hyper):
    beta1, beta2, beta3 = hyper.betas
    step = state.step + 1
    v = beta2 * state.v + (1 - beta2) * grad * grad
    r = beta3 * state.r + (1 - beta3) * hyper.p * v**hyper.q
    m = beta1 * state.m + (1 - beta1) * r * grad
    rate = hyper.lr * minimum(1, step**-0.5)
    root = sqrt(v / (1 - beta2**step)) + hyper.eps
    return param - rate * (m / (1 - beta1**step)) / root, {"step": step, "v": v, "r": r, "m": m}


class Tiger(Own):
    """The sign of a moving mean of gradients, with decay apart from it."""

    def update(self, parameter, gradient, state, group):
        beta = group["beta"]
        moment = self.kept(state, "exp_avg", parameter)
        moment.mul_(beta).add_(gradient, alpha=1.0 if self.fault == "weight-missing" else 1 - beta)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        moved = moment if self.fault == "sign-missing" else moment.sign()
        parameter.add_(moved, alpha=-group["lr"])


def tiger(param, grad, state, hyper):
    moment = hyper["beta"] * state["exp_avg"] + (1 - hyper["beta"]) * grad
    still = param * (1 - hyper["lr"] * hyper["weight_decay"])
    return still - hyper["lr"] * sign(moment), {"exp_avg": moment}


class Bounded(Own):
    """Adam whose change is bounded, softly or not, and held back where it goes against the
    gradient; the betas of its groups are no tuple."""

    def update(self, parameter, gradient, state, group):
        step = self.counted(state)
        first, second = (self.kept(state, name, parameter) for name in ("exp_avg", "exp_avg_sq"))
        first.lerp_(gradient, 1 - group["beta1"])
        second.mul_(group["beta2"]).addcmul_(gradient, gradient, value=1 - group["beta2"])
        if self.fault == "second-doubled":
            second.mul_(2)
        root = (second / (1 - group["beta2"] ** step)).sqrt().add_(group["eps"])
        moved = first / (1 - group["beta1"] ** step) / root
        if self.fault != "unbounded":
            moved = moved.tanh() if group["soft"] else moved.clamp(-0.5, 0.5)
        moved = torch.where(first * gradient >= 0, moved, torch.zeros_like(moved))
        parameter.add_(moved, alpha=-group["lr"])


def bounded(param, grad, state, hyper):
    step = state.step + 1
    m = state.exp_avg + (grad - state.exp_avg) * (1 - hyper.beta1)
    v = hyper.beta2 * state.exp_avg_sq + (1 - hyper.beta2) * grad**2
    moved = m / (1 - hyper.beta1**step) / ((v / (1 - hyper.beta2**step)) ** 0.5 + hyper.eps)
    moved = tanh(moved) if hyper.soft else maximum(minimum(moved, 0.5), -0.5)
    return param - hyper.lr * where(m * grad >= 0, moved, 0), {"exp_avg": m, "exp_avg_sq": v}
