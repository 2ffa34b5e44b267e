"""Jobs that keep copies of more bits of their parameters by hand: which parameter each is the copy of is found by the
values, and what the optimizer does to the copies is judged as what it does to parameters."""

import pytest
import torch
import torch.nn as nn
from test_step_of_strangers import Told

import backtape
import backtape.torch

STEPS = 2
# How the copies are kept, and what is told.
FORMS = {
    "each": Told(words="param 6 0 0"),
    "each, in another order": Told(words="param 6 0 0"),
    "one tensor": Told(words="clip 6 0 0"),
    "one tensor of each group": Told(words="state 6 0 0"),
    "of f32": Told("incomplete", words="no optimizer that was given holds all 6 parameters"),
    "each, some not brought back": Told("diverged", "param", "master-stale", ("3.weight", "3.bias")),
    "each, after the tape": Told("incomplete", words="the copies changed and no parameter did before the tape ended"),
    "each, not clipped": Told("diverged", "clip", "clip-recorded-not-applied"),
    "each, equal ones in two groups": Told("incomplete", words="no optimizer that was given holds"),
    "each, and zeros of a stranger": Told("incomplete", words="no optimizer that was given holds 3.bias"),
    "each, of several passes": Told(words="accumulate 6 0 0"),
    "one tensor, of several passes": Told(words="clip 6 0 0"),
    "each, clipped before": Told(words="clip 6 0 0"),
    "each, with a loss scale": Told(words="unscale 6 0 0"),
    "each, with a loss scale left in": Told("diverged", "unscale", "loss-scale-left-in"),
    "one tensor, of a stale gradient": Told("diverged", "clip"),
}


class Copies:
    """Copies of parameters, and what they are one tensor each of."""

    def __init__(self, form, module):
        own = [[one for one in module.parameters() if one.ndim > 1], [one for one in module.parameters() if one.ndim == 1]]
        own = own if "group" in form else [own[0] + own[1] if "order" in form else list(module.parameters())]
        self.lists = own if "one tensor" in form else [[one] for parameters in own for one in parameters]
        joined = [torch.cat([one.detach().float().reshape(-1) for one in listed]) for listed in self.lists]
        if "one tensor" not in form:
            joined = [flat.view_as(listed[0]) for flat, listed in zip(joined, self.lists)]
        self.tensors = [nn.Parameter(flat.clone()) for flat in joined]

    def take_gradients(self, scale):
        for tensor, listed in zip(self.tensors, self.lists):
            tensor.grad = torch.cat([one.grad.float().reshape(-1) / scale for one in listed]).view_as(tensor)

    @torch.no_grad()
    def bring_back(self, but=()):
        for tensor, listed in zip(self.tensors, self.lists):
            start = 0
            for one in listed:
                part = tensor.reshape(-1)[start : start + one.numel()]
                start += one.numel()
                if not any(one is other for other in but):
                    one.copy_(part.view_as(one))


@pytest.mark.parametrize("form", FORMS)
def test_copies_that_a_job_keeps_are_found_by_their_values(tmp_path, form):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12), nn.Tanh(), nn.Linear(12, 4))
    module.to(torch.float32 if "f32" in form else torch.bfloat16)
    copies = Copies(form, module)
    groups, strangers = [copies.tensors], []
    if "two groups" in form:
        with torch.no_grad():
            module[0].bias.copy_(module[1].bias)
            copies.tensors[1].copy_(copies.tensors[3])
        groups = [[one for one in copies.tensors if one is not copies.tensors[3]], [copies.tensors[3]]]
    if "stranger" in form:
        # A weight of the loss, beside a bias that nobody trains.
        torch.nn.init.zeros_(module[3].bias)
        strangers = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.randn(3))]
        groups = [copies.tensors[:-1] + strangers]
    optimizer = torch.optim.AdamW([{"params": one} for one in groups], lr=1e-2)
    # The first step makes equal values others.
    recorded = 0 if "two groups" in form else STEPS - 1
    scale = 64.0 if "scale" in form else None
    recorder = backtape.Recorder(tmp_path, str(recorded), strict=True)
    for step in range(STEPS):
        kept = None
        with recorder.step(step) as tape:
            backtape.torch.step_algebra(tape, module, optimizer, loss_scale=scale)
            module.zero_grad()
            for _ in range(3 if "several passes" in form else 1):
                loss = module(torch.randn(16, 8).to(module[0].weight.dtype)).float().square().mean()
                loss = loss + sum((one + 1).square().sum() for one in strangers)
                (loss * (scale or 1.0)).backward()
            if "clipped before" in form:
                torch.nn.utils.clip_grad_norm_(module.parameters(), 0.05)
            copies.take_gradients(1.0 if scale is None or "left in" in form else scale)
            kept = [one.grad.clone() for one in copies.tensors]
            if "clipped before" not in form:
                torch.nn.utils.clip_grad_norm_(copies.tensors, 0.05)
            if "not clipped" in form or "stale" in form:
                for one, gradient in zip(copies.tensors, kept):
                    one.grad = gradient.roll(1) if "stale" in form else gradient
            optimizer.step()
            if "after the tape" not in form:
                copies.bring_back(but=[*module[3].parameters()] if "not brought back" in form else ())
        copies.bring_back()
    recorder.close()
    FORMS[form].is_told_by(backtape.replay(tmp_path, step=recorded, compare=["step"]))
