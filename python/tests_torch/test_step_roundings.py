"""Roundings of torch's optimizers that all elements have in common are no finding; each was an alarm of the campaign of
clean steps."""

import pytest
import torch
import torch.nn as nn

import backtape
import backtape.torch


def multiplied(kind, factor):
    """An optimizer of torch whose change of a parameter is multiplied."""

    def step(self):
        (parameter,) = self.param_groups[0]["params"]
        before = parameter.detach().clone()
        kind.step(self)
        with torch.no_grad():
            parameter.copy_(before + factor * (parameter - before))

    return kind if factor == 1.0 else type(kind.__name__, (kind,), {"step": step, "__module__": kind.__module__})


def stepped(directory, optimizer, parameter, grad, wrong=1.0):
    """The report of the third step of an optimizer; wrong: what its change is multiplied by."""
    module = nn.Module()
    module.weight = nn.Parameter(parameter)
    right = optimizer([module.weight])
    optimizer = multiplied(type(right), wrong)(right.param_groups)
    with backtape.Recorder(directory, strict=True, steps="2") as recorder:
        for step in range(3):
            with recorder.step(step) as tape:
                backtape.torch.step_algebra(tape, module, optimizer)
                (module.weight * grad).sum().backward()
                optimizer.step()
            optimizer.zero_grad()
    return backtape.replay(directory, step=2, compare=["step"])


# By name: an optimizer, its parameter, its gradient, and a factor of its change that is told.
CASES = {
    # It brings each element to the next number below, whatever it is.
    "a decay of less than the spacing below 1": (
        lambda own: torch.optim.AdamW(own, lr=1.0909e-7, betas=(0.0, 0.95), eps=1e-3, weight_decay=0.3),
        lambda: torch.randn(60, 64) * 5.7e-7,
        lambda: torch.randn(60, 64) * 1e-9,
        30.0,
    ),
    # torch divides it by 1 + (t - 1) lr_decay in f32.
    "a rate that is a tensor of f32 beside parameters of f64": (
        lambda own: torch.optim.Adagrad(own, lr=torch.tensor(9.385e-3), lr_decay=0.1),
        lambda: torch.zeros(60, 64, dtype=torch.float64),
        lambda: torch.randn(60, 64, dtype=torch.float64),
        1.00001,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_all_elements_round_alike_is_no_finding_and_more_is_one(tmp_path, case):
    torch.manual_seed(0)
    optimizer, parameter, grad, wrong = CASES[case]
    report = stepped(tmp_path / "right", optimizer, parameter(), grad())
    assert report.verdict == "agreed", report
    report = stepped(tmp_path / "wrong", optimizer, parameter(), grad(), wrong)
    assert report.verdict == "diverged", report
