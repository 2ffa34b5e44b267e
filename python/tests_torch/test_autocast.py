"""Jobs under torch.autocast: parameters and hidden states in f32, products in bf16.

Goal: such a job agrees without a word on its dtypes, and with some of them declared, and a fault
in it is found all the same. Method: the real torch.autocast on the CPU, over several seeds.
"""

import pytest
import torch
from torch.nn import functional

import backtape

TOKENS, WIDTH, VOCAB = 120, 64, 250
SEEDS = range(6)

DECLARED = {
    "nothing": {},
    "logits": {"logits": "bf16"},
    "lse and accumulate": {"lse": "f32", "accumulate": "f32"},
    "input": {"input": "bf16"},
    "all": {"input": "bf16", "logits": "bf16", "lse": "f32", "p": "f32", "dlogits": "bf16"},
}


def job(path, seed, dtypes, *, factor=1.0, inside=False, captured=("lse", "dq", "dk")):
    """One step of a head under autocast, recorded as its tensors are: q, k and their gradients
    in f32. `factor` is of the backward alone."""
    torch.manual_seed(seed)
    norm = torch.nn.LayerNorm(WIDTH)
    q = norm(torch.randn(TOKENS, WIDTH) * 3)
    k = torch.nn.Parameter(torch.randn(VOCAB, WIDTH) * 0.3)
    labels = torch.randint(VOCAB, (TOKENS,)) // (1 + torch.randint(4, (TOKENS,)))
    q.retain_grad()
    declare = lambda tape: tape.head(path="plain", dtypes=dtypes)  # noqa: E731
    with backtape.Recorder(path, strict=True) as recorder, recorder.step(0) as tape:
        if not inside:
            declare(tape)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            if inside:
                declare(tape)
            logits = functional.linear(q, k)
            loss = functional.cross_entropy(logits, labels)
        (factor * loss).backward()
        held = {"lse": logits.detach().float().logsumexp(-1), "dq": q.grad, "dk": k.grad,
                "logits": logits.detach().float()}  # fmt: skip
        for name in captured:
            tape.record(name, held[name], microbatch=0)
        for name, value in {"q": q, "k": k, "labels": labels, "loss": loss}.items():
            tape.record(name, value.detach(), microbatch=0)
    return backtape.replay(path, step=0)


@pytest.mark.parametrize("dtypes", DECLARED.values(), ids=DECLARED.keys())
def test_a_right_job_agrees_whatever_it_declares(tmp_path, dtypes):
    for seed in SEEDS:
        report = job(tmp_path / f"run-{seed}", seed, dtypes)
        assert report.verdict == "agreed", f"seed {seed}: {report}"


def test_a_job_agrees_by_its_recorded_state_where_no_value_shows_it(tmp_path):
    for seed in SEEDS:
        report = job(tmp_path / f"run-{seed}", seed, {}, inside=True, captured=("lse",))
        assert report.verdict == "agreed", f"seed {seed}: {report}"


@pytest.mark.parametrize("dtypes", [{}, DECLARED["all"]], ids=["nothing", "all"])
def test_a_fault_in_such_a_job_is_found(tmp_path, dtypes):
    for seed in SEEDS:
        report = job(tmp_path / f"run-{seed}", seed, dtypes, factor=TOKENS / (TOKENS - 8))
        assert report.verdict == "diverged", f"seed {seed}: {report}"
        assert report.first_divergence.stage == "dq", report


def test_low_precision_products_are_found_where_f32_is_declared(tmp_path):
    report = job(tmp_path / "run", 0, {"input": "f32", "logits": "f32"})
    assert report.verdict in ("diverged", "misdeclared"), report
