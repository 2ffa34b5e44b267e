"""Gradients that code of the job's own multiplies after the last backward pass: one number for all of them is the job's
own, and what is wrong in it, or beside it, is told."""

from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from processes import free_port, run_ranks
from test_step_of_strangers import Told

import backtape
import backtape.torch

PROGRAM = Path(__file__).with_name("own_scaling_ranks.py")
# Of the 28 tokens of each rank 22 and 14 are not ignored.
RIGHT = Told(words="multiplied the gradients by 0.05556: 2 ranks / the 36 tokens of the step")
NO_RANKS = Told(words="1 / the 36 tokens of the step; the weights of all tokens are 0.5000 together, and 1 in their mean")
OWN_TOKENS = Told("diverged", "reduce", "tokens-miscounted", None, "each rank divides it by the number of its own tokens")
APART = Told("diverged", "reduce", "gradient-scaled", None, "multiplied it by 0.05000, and by 0.05556 on rank 0")
TOLD = {
    "ddp": RIGHT,
    "fsdp2": RIGHT,
    "ddp no ranks": NO_RANKS,
    "fsdp2 own tokens": OWN_TOKENS,
    "ddp own tokens": OWN_TOKENS,
    "fsdp2 apart": APART,
    "ddp apart": APART,
    "fsdp2 one is left": Told("diverged", "reduce", "gradient-scaled", ("inner.weight",), "did not multiply it"),
    "ddp twice": Told("diverged", "reduce", "reduce-sum-for-mean", None, "captured = 2.0000000 x"),
    "ddp bucket": Told("diverged", "reduce"),
}


@pytest.mark.parametrize("scenario", TOLD)
def test_what_ranks_divide_their_gradients_by_in_the_end_is_told(ranks, scenario):
    report = backtape.replay(ranks / scenario.replace(" ", "-"), step=1, compare=["step"])
    TOLD[scenario].is_told_by(report)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """The directory of what two ranks recorded; all scenarios run one after the other."""
    directory = tmp_path_factory.mktemp("ranks")
    run_ranks(PROGRAM, 2, free_port(), directory, *TOLD)
    return directory


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(17, 12)
        self.inner = nn.Linear(12, 12)
        self.head = nn.Linear(12, 17, bias=False)

    def forward(self, tokens):
        hidden = self.embed(tokens)
        return self.head(hidden + torch.tanh(self.inner(hidden)))


LAST = "it is divided by the 10 tokens of the last microbatch, and those of all 3 microbatches are summed in it, 36 tokens"
OF_STEP = Told(words="1 / the 36 tokens of the step")
BY_ALL = Told(words="1 / all 48 tokens of the step, of which 36 count; the weights of all tokens are 0.7500 together")
LOCAL = {
    "sums": OF_STEP,
    "bf16": OF_STEP,
    "last": Told("diverged", "accumulate", "tokens-miscounted", None, LAST),
    "with padding": BY_ALL,
    "one is left": Told("diverged", "accumulate", "gradient-scaled", ("inner.weight",), "most others by 0.02778"),
    "two numbers": Told("diverged", "accumulate", "gradient-scaled", ("head.weight",), "captured = 0.50000"),
    "means": Told(words="by 0.3333: 1 / 3 microbatches"),
    # The losses are divided by the number of microbatches already.
    "means twice": Told("diverged", "accumulate", "microbatch-scale"),
    "each time": Told("diverged", "accumulate"),
}


def divided(parameters, form, counts):
    """What the job divides its gradients by in the end."""
    factor = {"last": 1 / counts[-1], "with padding": 1 / 48, "means": 1 / 3, "means twice": 1 / 3}
    for index, parameter in enumerate(parameters):
        if form == "one is left" and index == 1 or form == "each time":
            continue
        own = 0.5 / sum(counts) if form == "two numbers" and index == 3 else factor.get(form, 1 / sum(counts))
        parameter.grad *= own


@pytest.mark.parametrize("form", LOCAL)
def test_what_a_job_divides_its_gradients_by_in_the_end_is_told(tmp_path, form):
    torch.manual_seed(0)
    model = Model().to(torch.bfloat16 if form == "bf16" else torch.float32)
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    reduction = "mean" if "means" in form else "sum"
    recorder = backtape.Recorder(tmp_path, strict=True, steps="0")
    # Models of other tests may still be alive in this process.
    with recorder, backtape.torch.attach(model, optimizer, recorder=recorder):
        counts = []
        for index in range(3):
            text, labels = torch.randint(17, (2, 2, 8))
            labels[:, : 1 + index] = -100
            counts.append(int((labels != -100).sum()))
            logits = model(text).flatten(0, 1).float()
            loss = F.cross_entropy(logits, labels.flatten(), ignore_index=-100, reduction=reduction)
            (loss / 3 if form == "means twice" else loss).backward()
            if form == "each time":
                for parameter in parameters:
                    parameter.grad *= 0.5
        divided(parameters, form, counts)
        nn.utils.clip_grad_norm_(parameters, 0.05)
        optimizer.step()
    LOCAL[form].is_told_by(backtape.replay(tmp_path, step=0, compare=["step"]))


@pytest.mark.parametrize("factor", [1.0, 0.5])
def test_a_sum_that_the_job_makes_elsewhere_is_judged_by_itself(tmp_path, factor):
    """Of equal microbatches the sum is a multiple of the last one, which no code multiplied."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    summed = {parameter: torch.zeros_like(parameter) for parameter in module.parameters()}
    given = torch.randn(16, 8)
    with backtape.Recorder(tmp_path, strict=True, steps="0") as recorder, recorder.step(0) as tape:
        backtape.torch.step_algebra(tape, module, optimizer)
        for _ in range(3):
            module(given).square().mean().backward()
            for parameter, own in summed.items():
                own += parameter.grad
                parameter.grad = None
        for parameter, own in summed.items():
            parameter.grad = factor * own
        nn.utils.clip_grad_norm_(module.parameters(), 0.05)
        optimizer.step()
    report = backtape.replay(tmp_path, step=0, compare=["step"])
    assert report.verdict == ("agreed" if factor == 1.0 else "diverged"), str(report)
    assert "multiplied the gradients" not in " ".join(str(report).split())


@pytest.mark.parametrize("microbatches", [2, 3])
def test_one_gradient_times_the_microbatches_may_be_multiplied_by_something_else(tmp_path, microbatches):
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with backtape.Recorder(tmp_path, strict=True, steps="0") as recorder, recorder.step(0) as tape:
        backtape.torch.step_algebra(tape, model, optimizer)
        for _ in range(microbatches):
            tokens, labels = torch.randint(17, (2, 4, 8))
            F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
        # Not in sight of what looks for factors of the job's own.
        model.inner.weight.grad = model.inner.weight.grad.clone() * microbatches
        optimizer.step()
    report = backtape.replay(tmp_path, step=0, compare=["step"])
    told = f"which is {microbatches} microbatches (microbatch-scale), or something multiplies these parameters alone"
    Told("diverged", "accumulate", "unknown", ("inner.weight",), told).is_told_by(report)


# By name: what becomes of one gradient after each of three backward passes, the cause, and the words of the report.
BETWEEN = {
    "smaller once": ((1.0, 0.7), "gradient-scaled", "do not have it, as they would if gradients were clipped"),
    "doubled once": ((1.0, 2.0), "accumulate-doubles", "is added once more in between: 2.0000 of rank 0 microbatch 0"),
    "doubled each time": ((2.0, 2.0), "accumulate-doubles", "is added once more with each microbatch"),
}


@pytest.mark.parametrize("name", BETWEEN)
def test_one_gradient_that_is_multiplied_between_backward_passes_is_told_as_it_is(tmp_path, name):
    factors, cause, words = BETWEEN[name]
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with backtape.Recorder(tmp_path, strict=True, steps="0") as recorder, recorder.step(0) as tape:
        backtape.torch.step_algebra(tape, model, optimizer)
        for factor in (*factors, 1.0):
            tokens, labels = torch.randint(17, (2, 4, 8))
            F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
            model.inner.weight.grad *= factor
        optimizer.step()
    report = backtape.replay(tmp_path, step=0, compare=["step"])
    Told("diverged", "accumulate", cause, ("inner.weight",), words).is_told_by(report)
