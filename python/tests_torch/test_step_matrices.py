"""torch's optimizers whose rules take norms and products of whole matrices."""

import pytest
import torch
import torch.nn as nn

import backtape
import backtape.torch

RULES = {
    "Muon": lambda own: torch.optim.Muon(own, lr=0.02),
    "Muon of the RMS of AdamW": lambda own: torch.optim.Muon(
        own, lr=0.02, nesterov=False, adjust_lr_fn="match_rms_adamw", weight_decay=0.01
    ),
    "Adafactor": lambda own: torch.optim.Adafactor(own, lr=0.05, weight_decay=0.01),
    "Adafactor of many": lambda own: torch.optim.Adafactor(own, lr=0.05, foreach=True),
}


class Model(nn.Module):
    """Two matrices, and vectors where an optimizer takes any."""

    def __init__(self, bias):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(b, a, bias=bias) for a, b in [(40, 24), (16, 40)])

    def forward(self, x):
        return self.layers[1](torch.tanh(self.layers[0](x)))


def trained(directory, rule, change=lambda module, optimizer: None, dtype=torch.float32, steps=3):
    """Records the last of some steps; `change` may alter the optimizer's step before it."""
    torch.manual_seed(0)
    module = Model(bias=not rule.startswith("Muon")).to(dtype)
    optimizer = RULES[rule](module.parameters())
    with backtape.Recorder(dir=directory, strict=True, steps=str(steps - 1)) as recorder:
        for step in range(steps):
            if step == steps - 1:
                change(module, optimizer)
            with recorder.step(step) as tape:
                optimizer.zero_grad()
                backtape.torch.step_algebra(tape, module, optimizer)
                module(torch.randn(32, 24, dtype=dtype)).square().mean().backward()
                optimizer.step()
    return backtape.replay(directory, step=steps - 1, compare=["step"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rule", RULES)
def test_a_right_step_agrees(tmp_path, rule, dtype):
    report = trained(tmp_path / "run", rule, dtype=dtype)
    stages = {stage["stage"]: stage for stage in report.json["algebra"]["stages"]}
    assert report.verdict == "agreed", str(report)
    assert not any(stage["unchecked"] for stage in stages.values()), str(report)
    assert {"state", "update"} <= set(stages)


def test_a_gradient_that_is_made_orthogonal_in_place_of_the_momentum_is_named(tmp_path, monkeypatch):
    from torch.optim import _muon

    right = _muon._zeropower_via_newtonschulz

    def change(module, optimizer):
        gradients = iter(module.parameters())
        wrong = lambda update, *settings: right(next(gradients).grad, *settings)
        monkeypatch.setattr(_muon, "_zeropower_via_newtonschulz", wrong)

    report = trained(tmp_path / "run", "Muon", change)
    group = report.json["algebra"]["diverged"][0]
    assert (group["stage"], group["reading"]["cause"]) == ("update", "orthogonalised-wrong-tensor")
