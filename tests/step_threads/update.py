"""Jobs whose optimizer, or what surrounds it, is wrong."""

import torch
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.utils import clip_grad_norm_

import backtape.torch
from backtape.rule import minimum, sqrt
from step_corpus.layers import cross_entropy
from step_threads.rank import VOCABULARY, WIDTH


def megatron_5974(rank, fixed):
    """The optimizer's state is made by a step with zero gradients before a checkpoint is loaded into it."""
    model = rank.transformer()
    fully_shard(model, mesh=rank.mesh(data=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    settings = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = group["weight_decay"] = 0.0
    optimizer.step()
    optimizer.zero_grad()
    for group, (lr, decay) in zip(optimizer.param_groups, settings):
        group["lr"], group["weight_decay"] = lr, decay
    if fixed:
        for state in optimizer.state.values():
            state["step"].zero_()
    with rank.recorded(model, optimizer, data=2):
        model(*rank.batch()).backward()
        clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()


def accelerate_3256(rank, fixed):
    """FSDP with flat parameters, and an optimizer of the parameters that they were made of."""
    module = rank.transformer()
    wrapped = lambda: FullyShardedDataParallel(module, use_orig_params=False, device_id=torch.device("cpu"))
    make = lambda parameters: torch.optim.AdamW(list(parameters), lr=1e-2)
    if fixed:
        model = wrapped()
        optimizer = make(model.parameters())
    else:
        optimizer = make(module.parameters())
        model = wrapped()
    with rank.recorded(model, optimizer, data=2):
        model(*rank.batch()).backward()
        optimizer.step()


class Masters(torch.optim.AdamW):
    """An optimizer of f32 copies of a model in bf16, with a hook that copies them back."""

    def __init__(self, model, copies_back):
        self.model, self.copies_back = dict(model.named_parameters()), copies_back
        self.masters = {
            name: nn.Parameter(one.detach().float()) for name, one in self.model.items()
        }
        super().__init__(self.masters.values(), lr=1e-2)

    @torch.no_grad()
    def step(self, closure=None):
        for name, master in self.masters.items():
            master.grad = self.model[name].grad.float()
        super().step()
        self.copy_main_to_model()

    def copy_main_to_model(self):
        if self.copies_back:
            for name, master in self.masters.items():
                self.model[name].copy_(master)


def megatron_6336(rank, fixed):
    """Two steps under an optimizer whose extension point after the step is left empty."""
    model = rank.transformer().to(torch.bfloat16)
    optimizer = Masters(model, fixed)
    with rank.recorder(1) as recorder:
        for step in range(2):
            model.zero_grad()
            with recorder.step(step) as tape:
                backtape.torch.step_algebra(tape, model, optimizer)
                model(*rank.batch(step=step)).backward()
                for when in ("before", "after"):
                    if when == "after":
                        optimizer.step()
                    for name, master in optimizer.masters.items() if tape.active else ():
                        tape.record(f"step.master_{when}:{name}", master)


class Sometimes(nn.Module):
    """A model one part of which runs in some steps only."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.sometimes = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, labels, all_of_it):
        x = self.embed(tokens)
        return cross_entropy(self.head(self.sometimes(x) if all_of_it else x), labels)


class HybridDeviceOptimizer(torch.optim.Optimizer):
    """Steps an inner optimizer over copies of the parameters, as of those that are kept on the CPU."""

    def __init__(self, parameters, clears, **settings):
        super().__init__(list(parameters), settings)
        self.clears = clears
        (group,) = self.param_groups
        self.copies = {one: nn.Parameter(one.detach().clone()) for one in group["params"]}
        self.inner = torch.optim.SGD(self.copies.values(), **settings)

    @torch.no_grad()
    def step(self, closure=None):
        for parameter, copy in self.copies.items():
            if parameter.grad is not None:
                copy.grad = parameter.grad.clone()
            elif self.clears:
                copy.grad = None
            else:
                copy.requires_grad = False
        self.inner.step()
        for parameter, copy in self.copies.items():
            parameter.copy_(copy)


def megatron_6871(rank, fixed):
    """A part of the model is left out in the second step."""
    model = rank.started(Sometimes())
    optimizer = HybridDeviceOptimizer(model.parameters(), fixed, lr=0.1)
    with rank.recorder(1) as recorder:
        for step in range(2):
            optimizer.zero_grad()
            with recorder.step(step) as tape:
                backtape.torch.step_algebra(tape, model, optimizer)
                model(*rank.batch(step=step), all_of_it=step == 0).backward()
                optimizer.step()


class Adapted(nn.Module):
    """A linear layer with an adapter of low rank."""

    def __init__(self, width):
        super().__init__()
        self.base = nn.Linear(width, width)
        self.lora_a = nn.Parameter(torch.empty(3, width))
        self.lora_b = nn.Parameter(torch.empty(width, 3))

    def forward(self, x):
        return self.base(x) + x @ self.lora_a.T @ self.lora_b.T


class Adapter(nn.Module):
    """A model with adapters, all of which is trained."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Adapted(WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens, labels):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return cross_entropy(self.head(x), labels)


def split(model):
    """The parameters of the adapters, and all others."""
    named = list(model.named_parameters())
    lora = [one for name, one in named if "lora" in name]
    return lora, [one for name, one in named if "lora" not in name]


def entrenar_264(rank, fixed):
    """Adapters have an optimizer of their own, which a microbatch of several does not call."""
    model = rank.started(Adapter())
    lora, others = split(model)
    optimizers = [torch.optim.AdamW(some, lr=1e-2) for some in (others, lora)]
    accumulate_only = True  # as in every backward of a window of several microbatches
    with rank.recorded(model, optimizers):
        for i in range(2):
            (model(*rank.batch(i)) / 2).backward()
        optimizers[0].step()
        if fixed or not accumulate_only:
            optimizers[1].step()


def entrenar_267(rank, fixed):
    """Both groups of parameters are to be clipped by their norm; one branch of the code does not."""
    model = rank.started(Adapter())
    groups, limit = split(model), 0.05
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with rank.recorded(model, optimizer) as capture:
        model(*rank.batch()).backward()
        for is_lora, some in zip((True, False), groups):
            norm = sum(one.grad.square().sum() for one in some).sqrt()
            capture.norm(norm, max_norm=limit, epsilon=1e-6, parameters=some)
            if is_lora and not fixed:
                continue
            for one in some:
                one.grad.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
        capture.clipped()
        optimizer.step()


class Own(torch.optim.Optimizer):
    """What optimizers that jobs write by themselves share. `fixed`: without the fault of their thread."""

    def __init__(self, parameters, fixed, **defaults):
        super().__init__(list(parameters), defaults)
        self.fixed = fixed

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                self.update(parameter, parameter.grad, self.state[parameter], group)

    def moments(self, parameter, gradient, state, betas):
        """The two moments after this step."""
        first = state.setdefault("exp_avg", torch.zeros_like(parameter))
        second = state.setdefault("exp_avg_sq", torch.zeros_like(parameter))
        first.lerp_(gradient, 1 - betas[0])
        second.mul_(betas[1]).addcmul_(gradient, gradient, value=1 - betas[1])
        return first, second

    def counted(self, state):
        """The number of this step."""
        step = state.setdefault("step", torch.zeros(()))
        step += 1
        return float(step)


class AdamG(Own):
    """Adam whose first moment is of gradients times a running golden step size."""

    def update(self, parameter, gradient, state, group):
        beta1, beta2, beta3 = group["betas"]
        step = self.counted(state)
        second = state.setdefault("v", torch.zeros_like(parameter))
        golden = state.setdefault("r", torch.zeros_like(parameter))
        first = state.setdefault("m", torch.zeros_like(parameter))
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        golden.mul_(beta3).add_(group["p"] * second ** group["q"], alpha=1 - beta3)
        first.mul_(beta1).addcmul_(golden, gradient, value=1 - beta1)
        one, two = 1 - beta1**step, 1 - beta2**step
        if not self.fixed:
            one, two = 1 - one, 1 - two
        rate = group["lr"] * min(1.0, step**-0.5)
        parameter.addcdiv_(first / one, (second / two).sqrt() + group["eps"], value=-rate)


def adam_g(param, grad, state, hyper):
    """What AdamG is to do, as a replay takes it."""
    beta1, beta2, beta3 = hyper.betas
    step = state.step + 1
    v = beta2 * state.v + (1 - beta2) * grad**2
    r = beta3 * state.r + (1 - beta3) * hyper.p * v**hyper.q
    m = beta1 * state.m + (1 - beta1) * r * grad
    rate = hyper.lr * minimum(1, step**-0.5)
    root = sqrt(v / (1 - beta2**step)) + hyper.eps
    return param - rate * (m / (1 - beta1**step)) / root, {"step": step, "v": v, "r": r, "m": m}


class AdamW(Own):
    """Adam with decay apart from the gradient."""

    def update(self, parameter, gradient, state, group):
        beta1, beta2 = group["betas"]
        step = self.counted(state)
        first, second = self.moments(parameter, gradient, state, group["betas"])
        rate = group["lr"] if self.fixed else 1.0
        parameter.mul_(1 - rate * group["weight_decay"])
        denominator = (second / (1 - beta2**step)).sqrt() + group["eps"]
        parameter.addcdiv_(first, denominator, value=-group["lr"] / (1 - beta1**step))


class RAdam(Own):
    """Adam that is rectified once its average is long enough."""

    def update(self, parameter, gradient, state, group):
        beta1, beta2 = group["betas"]
        step = self.counted(state)
        first, second = self.moments(parameter, gradient, state, group["betas"])
        one, two = 1 - beta1**step, 1 - beta2**step
        corrected = first.div(one) if self.fixed else first.div_(one)
        longest = 2 / (1 - beta2) - 1
        length = longest - 2 * step * beta2**step / two
        if length <= 5:
            parameter.add_(corrected, alpha=-group["lr"])
            return
        above = (length - 4) * (length - 2) * longest
        below = (longest - 4) * (longest - 2) * length
        denominator = second.sqrt() + group["eps"]
        adapted = corrected / denominator * two**0.5
        parameter.add_(adapted, alpha=-group["lr"] * (above / below) ** 0.5)


class Adam(Own):
    """AMSGrad."""

    def update(self, parameter, gradient, state, group):
        beta1, beta2 = group["betas"]
        step = self.counted(state)
        first, second = self.moments(parameter, gradient, state, group["betas"])
        largest = state.setdefault("max_exp_avg_sq", torch.zeros_like(parameter))
        if self.fixed:
            largest = torch.maximum(largest, second, out=largest)
        else:
            largest = torch.maximum(largest, second)
        denominator = (largest / (1 - beta2**step)).sqrt() + group["eps"]
        parameter.addcdiv_(first, denominator, value=-group["lr"] / (1 - beta1**step))


class SkipStepAdamW(Own):
    """AdamW whose step counter is a tensor, as a step may be left out."""

    def update(self, parameter, gradient, state, group):
        beta1, beta2 = group["betas"]
        counter = state.setdefault("step", torch.zeros(()))
        # The sum is another tensor than that of the state.
        step = counter.add_(1.0) if self.fixed else counter + 1.0
        first, second = self.moments(parameter, gradient, state, group["betas"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        denominator = (second / (1 - beta2 ** float(step))).sqrt() + group["eps"]
        parameter.addcdiv_(first, denominator, value=-group["lr"] / (1 - beta1 ** float(step)))


def trained(rank, optimizer_of, last, **said):
    """Steps of a small model up to the recorded one; `said` is what the job says of them."""
    model = rank.transformer()
    optimizer = optimizer_of(model.parameters())
    with rank.recorder(last) as recorder:
        for step in range(last + 1):
            optimizer.zero_grad()
            with recorder.step(step) as tape:
                backtape.torch.step_algebra(tape, model, optimizer, **said)
                model(*rank.batch(step=step)).backward()
                optimizer.step()


def pytorch_optimizer_308(rank, fixed):
    settings = {"lr": 1e-2, "betas": (0.95, 0.999, 0.95), "eps": 1e-8, "p": 0.2, "q": 0.24}
    trained(rank, lambda some: AdamG(some, fixed, **settings), 0, rules={"AdamG": adam_g})


def optimisers_182(rank, fixed):
    settings = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    trained(rank, lambda some: AdamW(some, fixed, **settings), 0)


def holocron_1(rank, fixed):
    settings = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    trained(rank, lambda some: RAdam(some, fixed, **settings), 2)


def pytorch_78807(rank, fixed):
    settings = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": True}
    trained(rank, lambda some: Adam(some, fixed, **settings), 1)


def olmo_core_317(rank, fixed):
    settings = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    trained(rank, lambda some: SkipStepAdamW(some, fixed, **settings), 2)
