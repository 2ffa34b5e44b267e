"""Loops as people write them, which are no plain forward, backward, step: that these are right is not to be alarmed
about, and what is wrong in them is to be named."""

import pytest
import torch
import torch.nn as nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, clip_grads_with_norm_, get_total_norm

import backtape
import backtape.torch


def model(width=12):
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 4))


class Loop:
    """A job of three steps in one process, of which the last is recorded."""

    def __init__(self, fault):
        torch.manual_seed(0)
        self.fault = fault

    def loss(self, module):
        return module(torch.randn(32, 8)).square().mean()

    def run(self, directory, models, optimizers, step, reports=1):
        with backtape.Recorder(dir=directory, strict=True, steps="2") as recorder:
            for number in range(3):
                with recorder.step(number) as tape:
                    self.capture = backtape.torch.step_algebra(tape, models, optimizers)
                    step()
        return backtape.replay(directory, step=2, compare=["step"])


def sgd(module, **settings):
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, **settings)


def generator_and_discriminator(loop, directory):
    """The loss of the generator reaches the discriminator, whose own step comes before it."""
    made, judge = nn.Linear(8, 8), model()
    optimizers = [sgd(made), sgd(judge)]

    def step():
        optimizers[1].zero_grad()
        noise = torch.randn(32, 8)
        judge(made(noise).detach()).square().mean().backward()
        optimizers[1].step()
        if not loop.fault:
            optimizers[0].zero_grad()
        (1 - judge(made(noise))).square().mean().backward()
        optimizers[0].step()

    return loop.run(directory, [made, judge], optimizers, step)


def sharpness_aware(loop, directory):
    """The gradient of a first pass moves the weights, that of a second is the optimizer's."""
    module = model()
    optimizer = sgd(module)

    def step():
        optimizer.zero_grad()
        batch = torch.randn(32, 8)
        module(batch).square().mean().backward()
        moves = [0.05 * one.grad / one.grad.norm() for one in module.parameters()]
        with torch.no_grad():
            for one, move in zip(module.parameters(), moves):
                one.add_(move)
        if not loop.fault:
            optimizer.zero_grad()
        module(batch).square().mean().backward()
        with torch.no_grad():
            for one, move in zip(module.parameters(), moves):
                one.sub_(move)
        optimizer.step()

    return loop.run(directory, module, optimizer, step)


def several_steps(loop, directory):
    """Several steps of the optimizer within one tape: the first of them is judged, and the others are not."""
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)

    def step():
        for _ in range(3):
            if not loop.fault:
                optimizer.zero_grad()
            loop.loss(module).backward()
            clip_grad_norm_(module.parameters(), 0.01)
            optimizer.step()

    return loop.run(directory, module, optimizer, step)


def clipped_too_late(loop, directory):
    module = model()
    optimizer = sgd(module)

    def step():
        optimizer.zero_grad()
        loop.loss(module).backward()
        for part in ("step", "clip") if loop.fault else ("clip", "step"):
            optimizer.step() if part == "step" else clip_grad_norm_(module.parameters(), 0.01)

    return loop.run(directory, module, optimizer, step)


def parameters_used_up(loop, directory):
    """The list of parameters is an iterator, which the first step goes through."""
    module = model()
    optimizer = sgd(module)
    parameters = module.parameters() if loop.fault else list(module.parameters())

    def step():
        optimizer.zero_grad()
        loop.loss(module).backward()
        clip_grad_norm_(parameters, 0.01)
        optimizer.step()

    return loop.run(directory, module, optimizer, step)


def one_norm_for_two_lists(loop, directory):
    """Two lists of parameters are clipped by the norm of both."""
    module = model()
    optimizer = sgd(module)

    def step():
        optimizer.zero_grad()
        loop.loss(module).backward()
        lists = [list(part.parameters()) for part in (module[0], module[2])]
        norms = [get_total_norm([one.grad for one in some]) for some in lists]
        total = torch.stack(norms).sum() if loop.fault else torch.stack(norms).square().sum().sqrt()
        for some in lists:
            clip_grads_with_norm_(some, 0.01, total)
        optimizer.step()

    return loop.run(directory, module, optimizer, step)


def gradients_lost(loop, directory):
    module = model()
    optimizer = sgd(module)

    def step():
        optimizer.zero_grad()
        loop.loss(module).backward()
        if loop.fault:
            optimizer.zero_grad()
        optimizer.step()

    return loop.run(directory, module, optimizer, step)


def two_optimizers(loop, directory):
    module = model()
    optimizers = [sgd(module)] + [sgd(module[2])] * loop.fault

    def step():
        optimizers[0].zero_grad()
        loop.loss(module).backward()
        for optimizer in optimizers:
            optimizer.step()

    return loop.run(directory, module, optimizers, step)


def trunk_of_two_models(loop, directory):
    """Two models share a part, and one norm is of both."""
    trunk = nn.Linear(8, 12)
    models = [nn.Sequential(trunk, nn.Tanh(), nn.Linear(12, 1)) for _ in range(2)]
    own = [*trunk.parameters(), *models[0][2].parameters(), *models[1][2].parameters()]
    optimizer = torch.optim.SGD(own, lr=0.1)

    def step():
        optimizer.zero_grad()
        sum(loop.loss(one) for one in models).backward()
        clip_grad_norm_([*own, *trunk.parameters()] if loop.fault else own, 0.01)
        optimizer.step()

    return loop.run(directory, models, optimizer, step)


class AdamW(torch.optim.Optimizer):
    """As courses write it: a state of m, v and t, the paper's second form, and a decay at the end."""

    def __init__(self, parameters, fault):
        super().__init__(parameters, {"lr": 1e-2, "betas": (0.9, 0.995), "eps": 1e-6, "weight_decay": 0.1})
        self.fault = fault

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            (b1, b2), lr, decay = group["betas"], group["lr"], group["weight_decay"]
            for one in group["params"]:
                state = self.state[one]
                t, m, v = state.get("t", 0) + 1, state.get("m", 0), state.get("v", 0)
                state["m"], state["v"] = b1 * m + (1 - b1) * one.grad, b2 * v + (1 - b2) * one.grad**2
                state["t"], at = t, 1 if self.fault is True else t
                step = lr * (1 - b2**at) ** 0.5 / (1 - b1**at)
                if isinstance(self.fault, str):
                    self.plain(one, state, group, lr)
                    continue
                one -= step * state["m"] / (state["v"].sqrt() + group["eps"])
                one -= lr * decay * one


    def plain(self, one, state, group, lr):
        """The form of frameworks: the decay first, and the correction inside of the root."""
        (b1, b2), t = group["betas"], state["t"]
        rate = {"rate": 3, "sign": -1}.get(self.fault, 1)
        one -= (1 if self.fault == "decay" else lr) * group["weight_decay"] * one
        root = (state["v"] / (1 - b2**t)).sqrt() + group["eps"]
        one -= rate * lr * state["m"] / (1 - b1**t) / root


def optimizer_of_a_course(loop, directory):
    module = model()
    optimizer = AdamW(module.parameters(), loop.fault)

    def step():
        optimizer.zero_grad()
        loop.loss(module).backward()
        optimizer.step()

    return loop.run(directory, module, optimizer, step)


# Each loop with the stage and the cause of its fault; no cause where several names would do.
LOOPS = {
    generator_and_discriminator: ("accumulate", "not-cleared"),
    sharpness_aware: ("accumulate", None),
    several_steps: ("accumulate", "not-cleared"),
    clipped_too_late: ("clip", "clip-recorded-not-applied"),
    parameters_used_up: ("norm", "norm-misses-group"),
    one_norm_for_two_lists: ("norm", None),
    gradients_lost: ("accumulate", "accumulate-window"),
    two_optimizers: ("update", "tied-updated-twice"),
    trunk_of_two_models: ("norm", None),
    optimizer_of_a_course: ("update", "step-counter"),
}


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_a_right_loop_agrees(tmp_path, loop):
    """Of several steps within one tape the first is judged, which the verdict says."""
    report = loop(Loop(False), tmp_path / "run")
    assert report.verdict == ("incomplete" if loop is several_steps else "agreed"), str(report)
    assert not report.json["algebra"]["diverged"], str(report)


@pytest.mark.parametrize("loop", [one for one in LOOPS if one is not sharpness_aware], ids=lambda loop: loop.__name__)
def test_a_wrong_loop_is_told_by_its_stage_and_cause(tmp_path, loop):
    stage, cause = LOOPS[loop]
    report = loop(Loop(True), tmp_path / "run")
    first = report.json["algebra"]["diverged"][0]
    assert first["stage"] == stage, str(report)
    assert cause is None or first["reading"]["cause"] == cause, str(report)


def test_steps_of_which_nothing_was_judged_are_incomplete(tmp_path):
    """An optimizer that nobody knows, one that was never called, and one that lost a gradient."""

    class Own(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure=None):
            for one in self.param_groups[0]["params"]:
                one -= self.param_groups[0]["lr"] * one.grad.sign()

    def unknown(loop, module):
        optimizer = Own(module.parameters())
        return optimizer, lambda: (loop.loss(module).backward(), optimizer.step(), optimizer.zero_grad())

    def idle(loop, module):
        optimizers = [sgd(module[0]), sgd(module[2])]
        return optimizers, lambda: (module.zero_grad(), loop.loss(module).backward(), optimizers[0].step())

    def lost(loop, module):
        optimizer = sgd(module)
        return optimizer, lambda: (
            optimizer.zero_grad(), loop.loss(module).backward(), module[2].zero_grad(), optimizer.step()
        )

    for job, sentence in (
        (unknown, "nothing of the stage update could be judged: no rule is known of the optimizer Own"),
        (idle, "the optimizer of 2.* (2 parameters) took no step, though there is a gradient"),
        (lost, "2.* (2 parameters): backward passes gave it a gradient, and `.grad` was empty"),
    ):
        loop, module = Loop(False), model()
        optimizer, step = job(loop, module)
        report = loop.run(tmp_path / job.__name__, module, optimizer, step)
        said = " ".join(str(report).split())
        assert report.verdict == "incomplete" and sentence in said, str(report)


def test_a_norm_before_the_last_microbatch_leaves_the_reduction_unchecked(tmp_path):
    """A norm for the log after each microbatch is no reduced gradient: that is said, and nothing diverges."""
    loop, module = Loop(False), model()
    optimizer = sgd(module)

    def step():
        optimizer.zero_grad()
        for _ in range(2):
            loop.loss(module).backward()
            get_total_norm([one.grad for one in module.parameters()])
        optimizer.step()

    report = loop.run(tmp_path / "run", module, optimizer, step)
    assert report.verdict == "incomplete" and "before this backward pass" in " ".join(str(report).split()), str(report)


@pytest.mark.parametrize("fault, cause", [("rate", "lr-scaled"), ("sign", "update-ascends"), ("decay", "decay-other")])
def test_a_change_and_its_decay_that_have_other_factors_are_told_apart(tmp_path, fault, cause):
    """The learning rate of the direction alone, its sign alone, and a decay that is not multiplied by the rate."""
    report = optimizer_of_a_course(Loop(fault), tmp_path / "run")
    told = {group["reading"] and group["reading"]["cause"] for group in report.json["algebra"]["diverged"]}
    assert report.json["algebra"]["diverged"][0]["stage"] == "update" and told == {cause}, str(report)


def fused(module):
    """A fused optimizer takes its step, and leaves it out itself; with the loss scale before it."""
    return torch.optim.AdamW(module.parameters(), fused=True), torch.amp.GradScaler("cpu", init_scale=8.0)


@pytest.mark.parametrize("fault", [False, True])
def test_a_norm_that_is_nan_leaves_no_number_of_what_was_clipped_by_value(tmp_path, fault):
    """In a step that is left out torch multiplies by NaN what a value had clipped before. Some of it multiplied is
    neither that nor a gradient which is left as it was."""
    loop, module = Loop(fault), model()
    optimizer, scaler = fused(module)

    def step():
        optimizer.zero_grad()
        scaler.scale(loop.loss(module) + (module[2].bias[:1] * torch.nan).sum()).backward()
        scaler.unscale_(optimizer)
        clip_grad_value_(module.parameters(), 1e-3)
        before = module[0].weight.grad[:1].clone()
        clip_grad_norm_(module.parameters(), 0.01)
        if fault:
            module[0].weight.grad[:1] = before
        scaler.step(optimizer)
        scaler.update()

    report = loop.run(tmp_path / "run", module, optimizer, step)
    told = [(group["stage"], group["parameters"]) for group in report.json["algebra"]["diverged"]]
    assert told == ([("clip", ["0.weight"])] if fault else []), str(report)


def test_a_step_that_is_left_out_is_not_counted_also_where_it_made_the_state(tmp_path):
    """The optimizer makes its state in the first step, finds what is infinite, and counts no step."""
    loop, module = Loop(False), model()
    optimizer, scaler = fused(module)
    with backtape.Recorder(dir=tmp_path, strict=True, steps="0") as recorder, recorder.step(0) as tape:
        backtape.torch.step_algebra(tape, module, optimizer)
        scaler.scale(loop.loss(module) * torch.inf).backward()
        scaler.step(optimizer)
    report = backtape.replay(tmp_path, step=0, compare=["step"])
    assert report.json["algebra"]["diverged"] == [], str(report)
