"""Jobs whose weights become others within a step, by something else than the optimizer: those that give back what they
took agree, and the others make the step incomplete."""

import pytest
import torch
import torch.nn as nn
from test_step_of_strangers import Job, Told, sgd

PASSES = Told("incomplete", words="the value changed between two backward passes whose gradients are summed")
FIRST = Told("incomplete", words="0.weight: the value with which the optimizer's step began")
STEP = Told("incomplete", words="another than that of the tape's first forward pass")


def sharpness_aware(job, directory):
    """The gradient at perturbed weights is the optimizer's; `form` is how these are written and given back."""
    optimizer = sgd(job.parameters)
    in_place = lambda one, other: one.copy_(other) if job.form.startswith("counted") else one.data.copy_(other)

    @torch.no_grad()
    def put(values):
        for one, value in zip(job.parameters, values):
            if "pointers" in job.form:
                one.data = value
            else:
                in_place(one, value)

    def step():
        job.backward(optimizer)
        kept = [one.detach().clone() for one in job.parameters]
        moves = [0.05 * one.grad / one.grad.norm() for one in job.parameters]
        put([one + move for one, move in zip(kept, moves)])
        if "kept gradient" not in job.form:
            optimizer.zero_grad()
        job.loss().backward()
        if "additions" in job.form:
            put([one - move for one, move in zip([one.detach() for one in job.parameters], moves)])
        elif "never" not in job.form:
            put(kept)
        optimizer.step()

    return job.run(directory, optimizer, step)


def averaged_weights(job, directory):
    """Weights of an average are put in for an evaluation, and given back or not."""
    optimizer = torch.optim.AdamW(job.parameters, lr=1e-2)
    average = [one.detach().clone() for one in job.parameters]

    def put(values):
        for one, value in zip(job.parameters, values):
            one.data.copy_(value)

    def step():
        job.backward(optimizer)
        kept = [one.detach().clone() for one in job.parameters]
        put(average)
        with torch.no_grad():
            job.loss()
        if job.form == "given back":
            put(kept)
        optimizer.step()
        for one, value in zip(job.parameters, average):
            value.lerp_(one.detach(), 0.3)

    return job.run(directory, optimizer, step)


def other_weights_for_the_passes(job, directory):
    """The passes see the signs of the weights, and the optimizer the weights, or what the job left of them."""
    optimizer = sgd(job.parameters)

    def step():
        optimizer.zero_grad()
        for _ in range(2):
            kept = [one.detach().clone() for one in job.parameters]
            for one in job.parameters:
                one.data.sign_()
            job.loss().backward()
            for one, value in zip(job.parameters, kept):
                one.data.copy_(value + (0.01 if job.form == "left" else 0.0))
        optimizer.step()
        for one in job.parameters:
            one.data.clamp_(-0.3, 0.3)

    return job.run(directory, optimizer, step)


def decay_before_the_step(job, directory):
    """The job decays the weights itself, or shrinks each towards zero, which is no multiple."""
    optimizer = sgd(job.parameters)

    def step():
        job.backward(optimizer)
        for one in job.parameters:
            one.data.mul_(0.999) if job.form == "a multiple" else one.data.copy_(nn.functional.softshrink(one, 0.01))
        optimizer.step()

    return job.run(directory, optimizer, step)


def adversarial_training(job, directory):
    """One layer is perturbed for a second pass, whose gradient is added on purpose."""
    optimizer = sgd(job.parameters)
    (first, *_) = job.parameters

    def step():
        job.backward(optimizer)
        kept = first.detach().clone()
        first.data.add_(0.1 * first.grad / first.grad.norm())
        job.loss().backward()
        if job.form != "left":
            first.data = kept
        optimizer.step()

    return job.run(directory, optimizer, step)


def critic_whose_weights_are_clamped(job, directory):
    """The loss of the generator reaches the critic, which is clamped after its own step, or just before it."""
    generator, critic = nn.Linear(8, 8), nn.Linear(8, 1)
    job.module = nn.ModuleList([generator, critic])
    optimizers = [sgd(generator.parameters()), sgd(critic.parameters())]

    def clamp():
        for one in critic.parameters():
            one.data.clamp_(-0.1, 0.1)

    def of_critic():
        optimizers[1].zero_grad()
        (critic(generator(torch.randn(32, 8)).detach()) - critic(torch.randn(32, 8))).square().mean().backward()
        if job.form == "before its step":
            clamp()
        optimizers[1].step()
        clamp()

    def of_generator():
        optimizers[0].zero_grad()
        critic(generator(torch.randn(32, 8))).mean().backward()
        optimizers[0].step()

    def step():
        if job.form == "before its step":
            critic.weight.data.mul_(1.5)
        for turn in (of_generator, of_critic) if job.form == "last" else (of_critic, of_generator):
            turn()

    return job.run(directory, optimizers, step)


def optimizers_in_hooks_of_the_backward_pass(job, directory):
    """Each parameter is stepped as soon as its gradient is there."""
    optimizers = [sgd([one]) for one in job.parameters]

    def hook(optimizer, one):
        if job.form == "weights halved" and one.ndim == 2:
            one.data.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()

    for optimizer, one in zip(optimizers, job.parameters):
        one.register_post_accumulate_grad_hook(lambda one, optimizer=optimizer: hook(optimizer, one))
    return job.run(directory, optimizers, lambda: job.loss().backward())


def modules_of_other_kinds(job, directory):
    """Several passes through what is compiled, or computes its weights from parameters."""
    if job.form == "compiled":
        job.module = torch.compile(job.module, backend="aot_eager")
    else:
        nn.utils.parametrizations.weight_norm(job.module[0])
        nn.utils.parametrizations.spectral_norm(job.module[2])
    optimizer = sgd(job.module.parameters())
    return job.run(directory, optimizer, job.of_several_passes(optimizer))


class Renormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(16, 4, max_norm=0.5)

    def forward(self, x):
        return 2 - self.rows(torch.randint(0, 16, (6,)))


def embedding_of_bounded_rows(job, directory):
    """Each forward pass renormalizes the rows that it looks up."""
    job.module = Renormed()
    optimizer = sgd(job.module.parameters())
    return job.run(directory, optimizer, job.of_several_passes(optimizer))


JOBS = [
    *((sharpness_aware, form, Told()) for form in ("counted", "uncounted", "pointers", "counted, additions")),
    *((sharpness_aware, form + ", kept gradient", PASSES) for form in ("counted", "uncounted", "pointers")),
    *((sharpness_aware, form + ", never", STEP) for form in ("counted", "uncounted", "pointers")),
    (averaged_weights, "given back", Told()),
    (averaged_weights, "left", STEP),
    (other_weights_for_the_passes, "right", Told()),
    (other_weights_for_the_passes, "left", STEP),
    (decay_before_the_step, "a multiple", Told()),
    (decay_before_the_step, "no multiple", STEP),
    (adversarial_training, "right", Told()),
    (adversarial_training, "left", FIRST),
    (embedding_of_bounded_rows, "right", Told()),
    (critic_whose_weights_are_clamped, "first", Told()),
    (critic_whose_weights_are_clamped, "last", Told()),
    (critic_whose_weights_are_clamped, "before its step", STEP),
    (optimizers_in_hooks_of_the_backward_pass, "right", Told()),
    (optimizers_in_hooks_of_the_backward_pass, "weights halved", STEP),
    (modules_of_other_kinds, "compiled", Told()),
    (modules_of_other_kinds, "parametrized", Told()),
]  # fmt: skip


@pytest.mark.parametrize("job, form, told", JOBS, ids=[f"{job.__name__}-{form}" for job, form, _ in JOBS])
def test_weights_that_became_others_are_told(tmp_path, job, form, told):
    told.is_told_by(job(Job(form), tmp_path / "run"))
