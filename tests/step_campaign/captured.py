"""Jobs of one process that backtape.torch.step_algebra records: torch's autograd, GradScaler, clip
functions and optimizers as a job calls them."""

import math

import numpy as np
import torch

import backtape
import backtape.torch
from step_campaign import rules, values
from step_campaign.job import shape_of
from step_campaign.step import LEAST_NORM, is_torchs
from step_campaign.draws import chance, pick


class Model(torch.nn.Module):
    """Parameters whose gradients are given: the loss is their sum, weighted by them."""

    def __init__(self, draw, dtype):
        super().__init__()
        self.weights, self.kinds, self.scales = torch.nn.ParameterDict(), [], []
        decade = draw.uniform(*((-4, 1) if dtype == torch.float16 else (-9, 5)))
        for index in range(int(draw.integers(1, 8))):
            value = torch.nn.Parameter(values.parameter(draw, shape_of(draw), dtype))
            value.requires_grad_(not chance(draw, 0.06))
            self.weights[f"layer{index}"] = value
            self.kinds.append(values.kind_of(draw))
            self.scales.append(float(10 ** (decade + 0.5 * draw.normal())))
        if chance(draw, 0.2):
            self.weights["tied"] = self.weights["layer0"]

    def forward(self, draw, scale, skips):
        """The loss of one microbatch; `skips` is how often a parameter takes no part in it."""
        loss = torch.zeros(())
        for (_, value), kind, size in zip(self.weights.items(), self.kinds, self.scales):
            gradient = values.gradients(draw, tuple(value.shape), kind, size / scale, 1, value.dtype)[0]
            if not chance(draw, skips):
                loss = loss + (value * gradient).sum().float()
        return loss


class Training:
    """A model, its optimizers, and what a step of the job does with them."""

    def __init__(self, draw):
        self.dtype = pick(draw, [torch.float32] * 4 + [torch.bfloat16, torch.bfloat16, torch.float16])
        self.model = Model(draw, self.dtype)
        self.rules, self.optimizers = [], []
        own = list(self.model.parameters())
        middle = int(draw.integers(len(own) + 1)) if chance(draw, 0.25) else len(own)
        for share in filter(None, (own[:middle], own[middle:])):
            cut = int(draw.integers(len(share) + 1))
            groups = [(share[:cut], {}), (share[cut:], rules.group_of(draw))]
            self.rules.append(rules.rule_of(draw, self.dtype, trains=True))
            self.optimizers.append(rules.build(self.rules[-1], groups))
        scaled = self.dtype == torch.float32 and chance(draw, 0.4)
        scale = float(pick(draw, [2.0 ** int(draw.integers(0, 25)), 1000.0]))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, enabled=scaled)
        self.microbatches = pick(draw, [1, 1, 2, 3, 4, 8])
        self.clip = pick(draw, ["none", "norm", "norm", "norm", "value", "value then norm", "norm then value", "twice"])
        self.kind = pick(draw, [2.0, 2.0, 2.0, 1.0, 3.0, float("inf")])
        self.bound = pick(draw, [float(10 ** draw.uniform(-3, 0)), 1.0, 1e3, 0.0, float("inf")])
        self.skips = pick(draw, [0.0, 0.0, 0.2])
        self.has_norms = True
        self.to_none = chance(draw, 0.8)
        self.overflows = scaled and chance(draw, 0.15)
        self.closure = not scaled and chance(draw, 0.1)
        self.unscales = self.clip != "none" or chance(draw, 0.5)

    def backward(self, draw):
        for _ in range(self.microbatches):
            loss = self.model(draw, self.microbatches, self.skips)
            if self.overflows and chance(draw, 0.5):
                loss = loss * float(pick(draw, ["inf", "nan", "1e38"]))
            if loss.requires_grad:
                self.scaler.scale(loss).backward()
        return loss

    def gradients(self):
        return [own.grad for own in self.model.parameters() if own.grad is not None]

    def clip_to(self, share):
        own = [one for one in self.model.parameters() if one.grad is not None and one.numel()]
        size = float(torch.nn.utils.get_total_norm([one.grad for one in own], self.kind)) if own else 1.0
        # A norm that its format has not is none that anybody would keep, but where a scaler finds it.
        self.has_norms &= math.isfinite(size) or self.scaler.is_enabled()
        if self.dtype == torch.float16 and size < LEAST_NORM:
            return
        bound = share * size if math.isfinite(share) and math.isfinite(size) else share
        torch.nn.utils.clip_grad_norm_(own, bound, norm_type=self.kind)

    def clip_values(self):
        largest = max((float(own.abs().max()) for own in self.gradients() if own.numel()), default=1.0)
        bound = 0.3 * largest if math.isfinite(largest) and largest else 1.0
        torch.nn.utils.clip_grad_value_(self.model.parameters(), bound)

    def clips(self):
        if self.clip.startswith("value"):
            self.clip_values()
        if "norm" in self.clip or self.clip == "twice":
            self.clip_to(self.bound)
        if self.clip == "twice":
            self.clip_to(0.5)
        if self.clip == "norm then value":
            self.clip_values()

    def step(self, draw):
        """One step; zero_grad comes first, as where a job leaves it to the next step."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=self.to_none)
        if self.closure and len(self.optimizers) == 1:
            self.optimizers[0].step(lambda: self.backward(draw))
            return
        self.backward(draw)
        has_gradient = lambda one: any(  # noqa: E731
            own.grad is not None for group in one.param_groups for own in group["params"]
        )
        scaled = self.scaler.is_enabled()
        steppable = [one for one in self.optimizers if not scaled or has_gradient(one)]
        for optimizer in steppable if self.unscales else ():
            self.scaler.unscale_(optimizer)
        self.clips()
        for optimizer in steppable:
            self.scaler.step(optimizer)
        if steppable:
            self.scaler.update()

    def finite(self):
        tensors = [*self.model.parameters()]
        for optimizer in self.optimizers:
            tensors += [one for state in optimizer.state.values() for one in state.values() if torch.is_tensor(one)]
        return self.has_norms and all(bool(torch.isfinite(one).all()) for one in tensors)


def train(seed, index, attempt, recorder, step):
    """Trains the job up to its step, which `recorder` may record; the trained job."""
    draw = np.random.default_rng([seed, index, attempt, 7])
    training = Training(draw)
    overflows, training.overflows = training.overflows, False
    for _ in range(int(pick(draw, [0, 1, 2, 5]))):
        training.step(draw)
    training.overflows = overflows
    with recorder.step(step) as tape:
        backtape.torch.step_algebra(tape, training.model, training.optimizers)
        training.step(draw)
    return training


def record(seed, index, recorder, step, attempts):
    """Records a job whose numbers are finite, which a first run without a recorder tells."""
    nobody = backtape.Recorder(steps=None)
    for attempt in range(attempts):
        try:
            is_finite = train(seed, index, attempt, nobody, 0).finite()
        except (TypeError, RuntimeError) as error:
            if not is_torchs(error):
                raise
            continue
        if is_finite:
            training = train(seed, index, attempt, recorder, step)
            names = ", ".join(f"{rule[0]} {rule[2]}" for rule in training.rules)
            return f"captured, {names}, {training.dtype}, {training.microbatches} microbatches, clip {training.clip}"
    raise RuntimeError(f"job {index}: no finite numbers in {attempts} draws")
