"""The norm of a large gradient whose squares differ much: torch adds it up in f32, and loses the small ones."""

import pytest
import torch

import backtape
import backtape.torch


def norm_of_a_step(directory, missing):
    """Records a step with a large gradient and its norm, of which a share is missing."""
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(1 << 19))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    sizes = torch.exp(2.5 * torch.randn(1 << 19))
    recorder = backtape.Recorder(dir=directory, steps="0", strict=True)
    with recorder.step(0) as tape:
        backtape.torch.step_algebra(tape, torch.nn.ParameterList([weight]), optimizer)
        (weight * sizes).sum().backward()
        norm = torch.nn.utils.get_total_norm([weight.grad]) * (1 - missing)
        torch.nn.utils.clip_grads_with_norm_([weight], 1.0, norm)
        optimizer.step()
    recorder.close()
    return (1 - norm.double() / sizes.double().norm()).item()


@pytest.mark.parametrize("missing, verdict", [(0.0, "agreed"), (0.01, "diverged")])
def test_a_norm_may_lose_its_small_squares_and_no_more(tmp_path, missing, verdict):
    lost = norm_of_a_step(tmp_path, missing)
    report = backtape.replay(tmp_path, step=0)
    assert report.verdict == verdict, (lost, report)
