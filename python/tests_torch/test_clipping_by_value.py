"""Clipping by value: a parameter that is left out of it is told, and so is what each call clips to."""

import pytest
import torch
import torch.nn as nn
from test_step_of_strangers import Told
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import backtape
import backtape.torch

FEW, MORE = 1e-2, 2e-2
LEFT = "the job clips gradients of the same optimizer by value and leaves this one out"


def of_all(own):
    clip_grad_value_(own, FEW)


def by_two_values(own):
    clip_grad_value_(own[:4], FEW)
    clip_grad_value_(own[4:], MORE)


def by_value_and_by_norm(own):
    clip_grad_value_(own[:2], FEW)
    clip_grad_norm_(own[2:], 0.1)


def without_one(own):
    clip_grad_value_([*own[:2], *own[3:]], FEW)


def without_one_of_a_group(own):
    clip_grad_value_(own[:3], FEW)


def of_few(own):
    clip_grad_value_(own[:2], FEW)


TOLD = {
    of_all: Told(),
    by_two_values: Told(),
    by_value_and_by_norm: Told(),
    # Fewer than half may be all that the job means to clip, and so may a group of the optimizer.
    of_few: Told(words=LEFT),
    without_one: Told("diverged", "clip", "clip-recorded-not-applied", ("2.weight",), "elements beyond 0.01000"),
    without_one_of_a_group: Told("diverged", "clip", "clip-recorded-not-applied", ("2.bias",), LEFT),
}


@pytest.mark.parametrize("clip", TOLD, ids=lambda clip: clip.__name__)
def test_what_is_left_out_of_clipping_by_value_is_told(tmp_path, clip):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4))
    own = list(module.parameters())
    groups = [{"params": own[:4]}, {"params": own[4:]}] if clip is without_one_of_a_group else own
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    with backtape.Recorder(tmp_path, strict=True, steps="0") as recorder, recorder.step(0) as tape:
        backtape.torch.step_algebra(tape, module, optimizer)
        (9 * (1 + module(torch.randn(32, 8))).square().mean()).backward()
        clip(own)
        optimizer.step()
    TOLD[clip].is_told_by(backtape.replay(tmp_path, step=0, compare=["step"]))
