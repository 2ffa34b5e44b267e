"""Jobs as strangers to backtape wrote them: what is right in them agrees, what is wrong is named, and what nobody can
know makes the step incomplete."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn as nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm

import backtape
import backtape.torch

SCALE = 256.0


@dataclass
class Told:
    """What the report on a job says: the first stage that diverges, of which parameters, and in which words."""

    verdict: str = "agreed"
    stage: str | None = None
    cause: str | None = None
    parameters: tuple[str, ...] | None = None
    words: str = ""
    factor: float | None = None

    def is_told_by(self, report):
        said = " ".join(str(report).split())
        assert report.verdict == self.verdict and self.words in said, str(report)
        if self.stage is None:
            return
        first = report.json["algebra"]["diverged"][0]
        assert first["stage"] == self.stage, str(report)
        assert self.cause is None or first["reading"]["cause"] == self.cause, str(report)
        assert self.parameters is None or set(first["parameters"]) == set(self.parameters), str(report)
        assert self.factor is None or first["factor"] == pytest.approx(self.factor, rel=1e-5), str(report)


class Job:
    """Three steps in one process, of which the last is recorded."""

    def __init__(self, form):
        torch.manual_seed(0)
        self.form = form
        self.module = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))
        self.parameters = list(self.module.parameters())

    def loss(self):
        return self.module(torch.randn(32, 8)).square().mean()

    def backward(self, optimizer, scaled=lambda loss: loss):
        optimizer.zero_grad()
        scaled(self.loss()).backward()

    def plain(self, optimizer):
        """One backward pass and the optimizer's step."""
        return lambda: (self.backward(optimizer), optimizer.step())

    def of_several_passes(self, optimizer):
        """Three backward passes, and the optimizer's step."""

        def step():
            optimizer.zero_grad()
            for _ in range(3):
                self.loss().backward()
            optimizer.step()

        return step

    def run(self, directory, optimizers, step, **options):
        with backtape.Recorder(dir=directory, strict=True, steps="2") as recorder:
            for number in range(3):
                with recorder.step(number) as tape:
                    self.algebra = backtape.torch.step_algebra(tape, self.module, optimizers, **options)
                    step()
        return backtape.replay(directory, step=2, compare=["step"])


ALL = ("0.weight", "0.bias", "2.weight", "2.bias")


def sgd(parameters, **settings):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, **settings)


def part_that_no_optimizer_holds(job, directory):
    """The last layer is trained by nobody; its gradient is cleared by the model, or by nobody either."""
    optimizer = sgd(job.module[0].parameters())

    def step():
        (optimizer if job.form == "stale" else job.module).zero_grad()
        job.loss().backward()
        optimizer.step()

    return job.run(directory, optimizer, step)


def second_step_within_the_tape(job, directory):
    optimizer = torch.optim.AdamW(job.parameters, lr=1e-2)

    def step():
        job.backward(optimizer)
        if job.form.endswith("clipped"):
            clip_grad_norm_(job.parameters, 10.0)
        optimizer.step()
        if job.form == "another gradient":
            job.backward(optimizer)
        optimizer.step()

    return job.run(directory, optimizer, step)


def loss_scale(job, directory):
    """That of a scaler whose own step is not called, or one in the job's own code: the job has to divide by hand."""
    optimizer = torch.optim.AdamW(job.parameters, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    is_own = job.form.startswith("own")
    if job.form.endswith("zeros"):
        # A gradient of zeros is the same with the scale and without it.
        job.parameters[0].register_hook(lambda gradient: gradient * 0)

    def step():
        job.backward(optimizer, lambda loss: loss * SCALE if is_own else scaler.scale(loss))
        divide(job, SCALE)
        optimizer.step()

    return job.run(directory, optimizer, step, **({"loss_scale": SCALE} if is_own else {}))


def divide(job, by):
    if not job.form.endswith("left in"):
        for one in job.parameters:
            one.grad /= by


def gradients_divided_by_microbatches(job, directory):
    """Not the loss of each microbatch is divided by their number, but what was summed."""
    optimizer = sgd(job.parameters)

    def step():
        optimizer.zero_grad()
        for _ in range(3):
            job.loss().backward()
        divide(job, 3)
        optimizer.step()

    options = {} if job.form == "undeclared" else {"accumulation": "mean"}
    return job.run(directory, optimizer, step, **options)


class MoreInItsStep:
    """What is put before an optimizer so that it warms up and clips by itself."""

    form, number = "right", 0

    def step(self, closure=None):
        self.number += 1
        own = self.param_groups[0]
        own["lr"] = 1e-3 * self.number
        if self.form != "clipped too late":
            clip_grad_norm_(own["params"], 0.01)
        super().step(closure)
        if self.form == "clipped too late":
            clip_grad_norm_(own["params"], 0.01)


def optimizer_that_does_more_in_its_step(job, directory):
    """torch gives the `step` of a class its hooks when one is made of that very class, and not of one below it."""
    own = torch.optim.AdamW.step
    base = type("Base", (torch.optim.AdamW,), {"step": own.__wrapped__ if hasattr(own, "hooked") else own})
    if job.form == "beside another one":
        base(job.parameters)
    optimizer = type("Scheduled", (MoreInItsStep, base), {})(job.parameters)
    optimizer.form = job.form
    return job.run(directory, optimizer, job.plain(optimizer), rules={"Scheduled": "AdamW"})


def probe_on_detached_features(job, directory):
    """Two optimizers hold the first layer, which has no gradient when the second of them steps."""
    body, head = job.module[:2], job.module[2]
    optimizers = [sgd(body.parameters()), torch.optim.Adam(job.parameters)]

    def step():
        batch = torch.randn(32, 8)
        optimizers[0].zero_grad()
        body(batch).square().mean().backward()
        optimizers[0].step()
        (optimizers[1] if job.form == "right" else head).zero_grad()
        head(body(batch).detach()).square().mean().backward()
        optimizers[1].step()

    return job.run(directory, optimizers, step)


class AdamW(torch.optim.Optimizer):
    """Written out, with numbers that may be others than those of its groups."""

    DECLARED = {"lr": 1e-2, "betas": (0.9, 0.995), "eps": 1e-4, "weight_decay": 0.0}

    def __init__(self, parameters, **used):
        super().__init__(parameters, dict(self.DECLARED))
        (beta1, beta2), eps = self.DECLARED["betas"], self.DECLARED["eps"]
        self.used = {"beta1": beta1, "beta2": beta2, "eps": eps} | used

    @torch.no_grad()
    def step(self, closure=None):
        b1, b2, eps = (self.used[name] for name in ("beta1", "beta2", "eps"))
        for one in self.param_groups[0]["params"]:
            state = self.state[one]
            t = state["step"] = state.get("step", 0) + 1
            m = state["exp_avg"] = b1 * state.get("exp_avg", 0) + (1 - b1) * one.grad
            v = state["exp_avg_sq"] = b2 * state.get("exp_avg_sq", 0) + (1 - b2) * one.grad**2
            correction = 1 - b2**t
            # The paper's second form adds ε to the root before that is corrected.
            is_second = "second form" in self.used
            root = (v.sqrt() + eps) / correction**0.5 if is_second else (v / correction).sqrt() + eps
            first = 1.0 if "uncorrected" in self.used else 1 - b1**t
            one -= self.param_groups[0]["lr"] * (m / first) / root


class SGD(torch.optim.Optimizer):
    DECLARED = {"lr": 0.1, "momentum": 0.9, "dampening": 0.0, "nesterov": False, "weight_decay": 0.0}

    def __init__(self, parameters, **used):
        super().__init__(parameters, dict(self.DECLARED))
        self.used = {"momentum": 0.9} | used

    @torch.no_grad()
    def step(self, closure=None):
        for one in self.param_groups[0]["params"]:
            state = self.state[one]
            buffer = self.used["momentum"] * state.get("momentum_buffer", 0) + one.grad
            state["momentum_buffer"] = buffer
            one -= 0.1 * buffer


def numbers_that_the_groups_do_not_say(job, directory):
    """`form`: the class, and what it uses in place of what its groups say."""
    optimizer = job.form[0](job.parameters, **job.form[1])
    return job.run(directory, optimizer, job.plain(optimizer))


def norm_for_the_log(job, directory):
    """A norm that nothing is clipped by, before or after the scaler took out its scale."""
    optimizer = torch.optim.AdamW(job.parameters, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    norm = lambda: get_total_norm([one.grad for one in job.parameters])

    def step():
        job.backward(optimizer, scaler.scale)
        for part in ("norm", "unscale") if job.form == "scaled" else ("unscale", "norm"):
            norm() if part == "norm" else scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()

    return job.run(directory, optimizer, step)


def clipped_by_norms_of_its_own(job, directory):
    """The norm of all gradients is declared, and each is clipped by its own, or those of a layer by theirs."""
    optimizer = sgd(job.parameters)
    of = {
        "all": [job.parameters],
        "each": [[one] for one in job.parameters],
        "each layer": [list(job.module[0].parameters()), list(job.module[2].parameters())],
    }

    def step():
        job.backward(optimizer)
        norm = get_total_norm([one.grad for one in job.parameters])
        job.algebra.norm(norm, max_norm=0.02)
        for own in of[job.form]:
            coefficient = 0.02 / (get_total_norm([one.grad for one in own]) + 1e-6)
            for one in own if coefficient < 1 else ():
                one.grad *= coefficient
        job.algebra.clipped()
        optimizer.step()

    return job.run(directory, optimizer, step)


class Unknown(torch.optim.Optimizer):
    """Nothing is known of what it does."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for one in self.param_groups[0]["params"]:
            one -= 0.1 * one.grad.sign()


def optimizer_of_no_rule_beside_a_known_one(job, directory):
    optimizers = [sgd(job.module[0].parameters()), Unknown(job.module[2].parameters())]

    def step():
        job.module.zero_grad()
        job.loss().backward()
        for optimizer in optimizers:
            optimizer.step()

    return job.run(directory, optimizers, step)


def second_task_after_the_step(job, directory):
    """A pass for another purpose, as for an estimate of the Hessian, whose gradients are clipped by their own norm."""
    optimizer = torch.optim.AdamW(job.parameters, lr=1e-2)

    def step():
        job.backward(optimizer)
        late = job.form == "clipped too late"
        optimizer.step() if late else clip_grad_norm_(job.parameters, 0.01)
        clip_grad_norm_(job.parameters, 0.01) if late else optimizer.step()
        optimizer.zero_grad()
        job.module(torch.randn(32, 8)).exp().mean().backward()
        if job.form == "by value":
            clip_grad_value_(job.parameters, 1e-4)
        elif job.form == "declared":
            job.algebra.norm(get_total_norm([one.grad for one in job.parameters]), max_norm=0.001)
        else:
            clip_grad_norm_(job.parameters, 0.001)
        optimizer.zero_grad()

    return job.run(directory, optimizer, step)


def second_half_after_the_step_of_the_first(job, directory):
    """The loss of the second optimizer reaches what the first one has stepped. One of both clips by a norm of all."""
    trunk, head = job.module[:2], job.module[2]
    optimizers = [sgd(trunk.parameters()), sgd(head.parameters())]

    def step():
        job.module.zero_grad()
        trunk(torch.randn(32, 8)).square().mean().backward()
        clip_grad_norm_(trunk.parameters(), 0.01)
        optimizers[0].step()
        trunk.zero_grad()
        job.loss().backward()
        clip_grad_norm_((job.module if job.form == "all" else head).parameters(), 0.01)
        if job.form == "scaled again":
            head.weight.grad *= 0.5
        optimizers[1].step()

    return job.run(directory, optimizers, step)


UNHELD = "no optimizer that was given holds 2.* (2 parameters)"
AGAIN = "stepped several times while the tape was open"
EPS = "eps is 0.001000, and 1.000e-4 is declared"
KEPT = Told("diverged", "unscale", "loss-scale-left-in", ALL, factor=SCALE)
HALVED = Told("diverged", "clip", None, ("2.weight",), factor=0.5)
LATE = Told("diverged", "clip", "clip-recorded-not-applied", ALL)


def constant_of_the_bits_of_a_fill_pattern(job, directory):
    """A bias of two bytes an element that nothing moves, whose bits are 0xABAB by chance."""
    job.module.bfloat16()
    bias = job.module[2].bias
    bias.data.fill_(torch.tensor([0xABAB - 0x10000], dtype=torch.int16).view(torch.bfloat16).item())
    bias.register_hook(lambda gradient: gradient * 0)
    optimizer = sgd(job.parameters)

    def step():
        optimizer.zero_grad()
        job.module(torch.randn(32, 8, dtype=torch.bfloat16)).float().square().mean().backward()
        optimizer.step()

    return job.run(directory, optimizer, step)


def two_scalers(job, directory):
    """Each half has a scaler and an optimizer of its own; the loss of the first half may have no scaler."""
    halves = [job.module[0], job.module[2]]
    optimizers = [sgd(half.parameters()) for half in halves]
    scalers = [torch.amp.GradScaler("cpu", init_scale=by * SCALE) for by in (4.0, 4.0 if job.form == "alike" else 1.0)]
    if job.form == "without one":
        scalers[0] = torch.amp.GradScaler("cpu", enabled=False)
    turns = [0, 1]

    def losses():
        yield scalers[0].scale(halves[0](torch.randn(32, 8)).square().mean())
        yield scalers[1].scale(halves[1](torch.randn(32, 12)).square().mean())

    def step():
        job.module.zero_grad()
        scaled = list(losses()) if job.form == "scaled first" else losses()
        for _, loss in zip(turns, scaled):
            loss.backward()
        for index, optimizer in enumerate(optimizers):
            scalers[0 if job.form == "wrong scaler" else index].step(optimizer)
        for scaler in scalers:
            scaler.update(scaler.get_scale())

    return job.run(directory, optimizers, step)


def scaler_that_grows_between_two_halves(job, directory):
    """One scaler, whose scale is another for the second half of the step."""
    halves = [job.module[0], job.module[2]]
    optimizers = [sgd(half.parameters()) for half in halves]
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=1)

    def step():
        job.module.zero_grad()
        for half, size, optimizer in zip(halves, (8, 12), optimizers):
            scaler.scale(half(torch.randn(32, size)).square().mean()).backward()
            if job.form == "too early":
                scaler.update(2 * scaler.get_scale())
            scaler.step(optimizer)
            scaler.update()

    return job.run(directory, optimizers, step)


OTHERS = "2 gradients in it are of no parameter that was recorded"
def outer_optimizer_with_gradients_of_its_own(job, directory):
    """What the inner optimizer moved is the gradient of an outer one, which holds the same parameters."""
    anchors = [one.detach().clone() for one in job.parameters]
    inner, outer = torch.optim.AdamW(job.parameters, lr=1e-2), sgd(job.parameters)

    def step():
        job.backward(inner)
        inner.step()
        if job.form == "written":
            for one, anchor in zip(job.parameters, anchors):
                one.grad = anchor - one.detach()
        outer.step()

    return job.run(directory, [inner, outer], step)


def switch_that_another_class_put_into_the_groups(job, directory):
    """SAM keeps its settings in the groups of the optimizer that it calls."""
    optimizer = sgd(job.parameters)
    optimizer.param_groups[0]["adaptive"] = True
    return job.run(directory, optimizer, job.plain(optimizer))


class Scheduler:
    """What sets the learning rate and then has the optimizer step; a scaler takes it for the optimizer."""

    def __init__(self, optimizer):
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups

    def step(self):
        self.optimizer.step()


def clipped_with_the_scale_in_it(job, directory):
    """A scaler takes its scale out in its step, after the gradients were clipped, or nobody does."""
    optimizer = torch.optim.AdamW(job.parameters, lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    stepped = Scheduler(optimizer) if job.form == "unscaled by a scheduler" else optimizer

    def step():
        job.backward(optimizer, scaler.scale)
        if job.form == "unscaled first":
            scaler.unscale_(optimizer)
        clip_grad_norm_(job.parameters, 0.02)
        if job.form == "left in":
            optimizer.step()
        else:
            scaler.step(stepped)
            scaler.update()

    return job.run(directory, optimizer, step)


UNCORRECTED = Told("diverged", "update", "bias-correction-missing", ALL, "the first moment is used without bias")
MISSING = Told("diverged", "update", "bias-correction-missing", ALL)
OWN = "it is clipped to 0.02000 by {}, and the norm that is declared, "
UNJUDGED = "the update of 2.* (2 parameters) could not be judged: no rule is known of the optimizer Unknown"


def local(by, parameters):
    return Told("diverged", "clip", "norm-local-not-global", parameters, OWN.format(by))


def other(words, stage="state"):
    return Told("diverged", stage, "setting-other", ALL, words)


JOBS = [
    (part_that_no_optimizer_holds, "cleared", Told("incomplete", words=UNHELD)),
    (part_that_no_optimizer_holds, "stale", Told("diverged", "accumulate", "param-not-in-optimizer", ALL[2:])),
    (second_step_within_the_tape, "another gradient", Told("incomplete", words=AGAIN)),
    (second_step_within_the_tape, "the same gradient", Told("diverged", "update", "tied-updated-twice", ALL)),
    (second_step_within_the_tape, "the same, clipped", Told("diverged", "update", "tied-updated-twice", ALL)),
    (loss_scale, "scaler, divided", Told()),
    (loss_scale, "scaler, left in", KEPT),
    (loss_scale, "own, divided", Told()),
    (loss_scale, "own, left in", KEPT),
    (loss_scale, "own, divided, one of zeros", Told()),
    (gradients_divided_by_microbatches, "right", Told()),
    (gradients_divided_by_microbatches, "undeclared", Told(words="the gradients by 0.3333: 1 / 3 microbatches")),
    (optimizer_that_does_more_in_its_step, "right", Told()),
    (optimizer_that_does_more_in_its_step, "beside another one", Told()),
    (optimizer_that_does_more_in_its_step, "clipped too late", LATE),
    (probe_on_detached_features, "right", Told()),
    (probe_on_detached_features, "not cleared", Told("diverged", "update", "tied-updated-twice", ALL[:2])),
    (numbers_that_the_groups_do_not_say, (AdamW, {}), Told()),
    (numbers_that_the_groups_do_not_say, (AdamW, {"beta1": 0.8}), other("beta1 is 0.8000, and 0.9000 is declared")),
    (numbers_that_the_groups_do_not_say, (AdamW, {"beta2": 0.95}), other("beta2 is 0.9500, and 0.9950 is declared")),
    (numbers_that_the_groups_do_not_say, (AdamW, {"eps": 1e-3}), other(EPS, "update")),
    (numbers_that_the_groups_do_not_say, (AdamW, {"uncorrected": True}), UNCORRECTED),
    (numbers_that_the_groups_do_not_say, (AdamW, {"second form": True}), Told()),
    (numbers_that_the_groups_do_not_say, (AdamW, {"second form": True, "uncorrected": True}), MISSING),
    (numbers_that_the_groups_do_not_say, (SGD, {}), Told()),
    (numbers_that_the_groups_do_not_say, (SGD, {"momentum": 0.5}), other("momentum is 0.5000, and 0.9000 is declared")),
    (clipped_by_norms_of_its_own, "all", Told()),
    (clipped_by_norms_of_its_own, "each", local("its own norm", ALL)),
    (clipped_by_norms_of_its_own, "each layer", local("the norm of some of them alone", ALL)),
    (optimizer_of_no_rule_beside_a_known_one, "right", Told("incomplete", words=UNJUDGED)),
    (constant_of_the_bits_of_a_fill_pattern, "right", Told()),
    (outer_optimizer_with_gradients_of_its_own, "written", Told("incomplete", words=AGAIN)),
    (outer_optimizer_with_gradients_of_its_own, "left", Told("diverged", "update", "tied-updated-twice", ALL)),
    (switch_that_another_class_put_into_the_groups, "right", Told()),
    (clipped_with_the_scale_in_it, "unscaled first", Told()),
    (clipped_with_the_scale_in_it, "unscaled last", Told("diverged", "unscale", "clip-before-unscale", ALL)),
    (clipped_with_the_scale_in_it, "unscaled by a scheduler", Told("diverged", "clip", "clip-before-unscale", ALL)),
    (clipped_with_the_scale_in_it, "left in", KEPT),
    (norm_for_the_log, "right", Told()),
    (norm_for_the_log, "scaled", Told("incomplete", words="norm 0 is of gradients with the loss scale 256 in them")),
    (second_task_after_the_step, "right", Told()),
    (second_task_after_the_step, "by value", Told()),
    (second_task_after_the_step, "declared", Told()),
    (second_task_after_the_step, "clipped too late", LATE),
    (second_half_after_the_step_of_the_first, "right", Told()),
    (second_half_after_the_step_of_the_first, "all", Told(words=OTHERS)),
    (second_half_after_the_step_of_the_first, "scaled again", HALVED),
    (two_scalers, "alike", Told()),
    (two_scalers, "right", Told()),
    (two_scalers, "scaled first", Told()),
    (two_scalers, "without one", Told()),
    (two_scalers, "wrong scaler", Told("diverged", "unscale", "loss-scale-left-in", ALL[2:], factor=0.25)),
    (scaler_that_grows_between_two_halves, "right", Told()),
    (scaler_that_grows_between_two_halves, "too early", Told("diverged", "unscale", None, factor=0.5)),
]  # fmt: skip


def name_of(form):
    return form if isinstance(form, str) else form[0].__name__ + "".join(f" {name}" for name in form[1])


@pytest.mark.parametrize("job, form, told", JOBS, ids=[f"{job.__name__}-{name_of(form)}" for job, form, _ in JOBS])
def test_what_a_job_does_is_told(tmp_path, job, form, told):
    told.is_told_by(job(Job(form), tmp_path / "run"))


def test_parameters_that_a_clip_leaves_out_are_named_and_the_step_agrees(tmp_path):
    job = Job("right")
    optimizer = sgd(job.parameters)

    def step():
        job.backward(optimizer)
        clip_grad_norm_(job.module[0].parameters(), 0.01)
        optimizer.step()

    report = job.run(tmp_path / "run", optimizer, step)
    Told().is_told_by(report)
    (line,) = [one for one in report.json["algebra"]["unchecked"] if one["stage"] == "clip"]
    assert "2.*" in line["what"] and "a norm that leaves this one out" in line["why"], line
