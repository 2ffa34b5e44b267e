"""Losses of Liger-Kernel and of Apple's cut_cross_entropy in jobs that call nothing of backtape but `attach`: what is
found of them agrees where they are right, and a fault in them is told. Triton's kernels are interpreted on the CPU;
Apple's need a GPU, and are replaced by the formulas that they compute."""

import functools
import os

os.environ["TRITON_INTERPRET"] = "1"

import cut_cross_entropy  # noqa: E402
import cut_cross_entropy.cce as cce  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
import triton.runtime.interpreter as interpreter  # noqa: E402
from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction  # noqa: E402
from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction  # noqa: E402
from liger_kernel.transformers.cross_entropy import LigerCrossEntropyLoss  # noqa: E402
from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss  # noqa: E402
from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy  # noqa: E402
from test_attach import VOCAB, WIDTH, Model, attached, stages, train  # noqa: E402

import backtape  # noqa: E402


def rows(model, tokens):
    return model.hidden(tokens).view(-1, WIDTH)


def liger(**options):
    fused = LigerFusedLinearCrossEntropyLoss(**options)
    return lambda model, tokens, labels: fused(model.head.weight, rows(model, tokens), labels.view(-1))


def liger_with_bias(model, tokens, labels):
    return liger_fused_linear_cross_entropy(
        rows(model, tokens), model.head.weight, labels.view(-1), bias=model.head.bias, reduction="sum"
    ) / 40


def liger_by_token(model, tokens, labels):
    each = liger(reduction="none")(model, tokens, labels)
    return (each * torch.linspace(0.5, 1.5, each.numel())).mean()


def liger_of_logits(**options):
    loss = LigerCrossEntropyLoss(**options)
    return lambda model, tokens, labels: loss(model(tokens).view(-1, VOCAB), labels.view(-1))


def compiled(**options):
    """Apple's, as it is compiled where its kernel does not run."""
    def loss(model, tokens, labels):
        hidden, weight = model.hidden(tokens), model.head.weight
        value = cut_cross_entropy.linear_cross_entropy(hidden, weight, labels, impl="torch_compile", **options)
        return value if value.dim() == 0 else value.sum() / 40

    return loss


def of_apple(**options):
    def loss(model, tokens, labels):
        return cut_cross_entropy.linear_cross_entropy(
            model.hidden(tokens), model.head.weight, labels, impl="cce", filter_eps=None, **options
        )

    return loss


class Number(float):
    """A number as a kernel has it on a GPU."""

    def to(self, dtype):
        return self


@pytest.fixture(autouse=True)
def numbers(monkeypatch):
    """The interpreter hands on Python's own numbers, of which some kernels ask what those have not."""
    given = interpreter._implicit_cvt
    monkeypatch.setattr(interpreter, "_implicit_cvt", lambda one: Number(one) if type(one) is float else given(one))


def chosen(valids, count):
    return torch.arange(count) if valids is None else valids.long()


def lse_of(e, c, valids, softcap=None, return_logit_avg=False):
    return (e[chosen(valids, len(e))] @ c.T).logsumexp(-1)


def dot_of(e, c, targets, shift, valids, softcap, dtype):
    at = chosen(valids, len(e))
    return -(e[at] * c[targets[at + int(shift)]]).sum(-1)


def gradients_of(arrived, e, c, lse, valids, softcap, eps, targets, shift, vocab_ordering, grad_scale):
    at = chosen(valids, len(e))
    p = (e[at] @ c.T - lse.unsqueeze(1)).exp()
    p[torch.arange(len(at)), targets[at + int(shift)]] -= 1
    p *= grad_scale * arrived
    return torch.zeros_like(e).index_copy(0, at, p @ c), p.T @ e[at]


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Apple's autograd.Function with torch in place of its kernels."""
    monkeypatch.setattr(cce, "cce_lse_forward_kernel", lse_of)
    monkeypatch.setattr(cce, "indexed_neg_dot_forward_kernel", dot_of)
    monkeypatch.setattr(cce, "cce_backward_kernel", gradients_of)


LOSSES = {
    "liger": liger(),
    "liger, smoothed, z-loss": liger(label_smoothing=0.1, lse_square_scale=1e-2),
    "liger, weighted classes": liger(ce_weight=torch.linspace(0.5, 2.0, VOCAB)),
    "liger with a bias": liger_with_bias,
    "liger by token": liger_by_token,
    "liger of logits": liger_of_logits(),
    "liger of logits, smoothed, z-loss": liger_of_logits(label_smoothing=0.1, lse_square_scale=1e-2),
    "liger of logits, by token": lambda *given: liger_of_logits(reduction="none")(*given).square().sum() / 99,
    "apple, compiled": compiled(),
    "apple, compiled, shifted": compiled(shift=True, softcap=3.0),
    "apple, compiled, by token": compiled(reduction="none"),
    "apple": of_apple(),
    "apple, shifted": of_apple(shift=True, reduction="sum"),
}
CASES = [(name, False) for name in LOSSES] + [(name, True) for name in ("liger", "apple, compiled")]


@pytest.mark.parametrize("name, autocast", CASES)
def test_a_loss_of_a_library_is_found_and_agrees(tmp_path, name, autocast):
    torch.manual_seed(0)
    with attached(tmp_path):
        train(LOSSES[name], Model(bias="bias" in name), steps=2, autocast=autocast)
    report = backtape.replay(tmp_path, step=1)
    assert report.verdict == "agreed", report
    told = stages(report)
    assert {told["loss"], told["dq"], told["dk"]} == {"pass"}, report


FUNCTIONS = {
    "liger": LigerFusedLinearCrossEntropyFunction,
    "liger of logits": LigerCrossEntropyFunction,
    "apple": cce.LinearCrossEntropyFunction,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("fault, stage", [("gradient", ("dk", "dq")), ("divisor", ("loss",))])
def test_a_fault_of_a_loss_of_a_library_is_told_where_it_is(tmp_path, monkeypatch, name, fault, stage):
    """Its gradient of the weight, or of the logits, has a factor; or it divides by all tokens."""
    function = FUNCTIONS[name]
    forward, backward = function.forward, function.backward
    factor = 43 / 48

    @functools.wraps(forward)
    def divided(*args):
        loss = forward(*args)
        return (loss[0] * factor, *loss[1:]) if isinstance(loss, tuple) else loss * factor

    def scaled(context, arrived, *more):
        first, second, *others = backward(context, arrived * (factor if fault == "divisor" else 1), *more)
        if fault == "gradient":
            first, second = (first * 1.01, None) if second is None else (first, second * 1.01)
        return (first, second, *others)

    if fault == "divisor":
        monkeypatch.setattr(function, "forward", staticmethod(divided))
    monkeypatch.setattr(function, "backward", staticmethod(scaled))
    torch.manual_seed(0)
    with attached(tmp_path):
        train(LOSSES[name], Model(), steps=2)
    report = backtape.replay(tmp_path, step=1)
    assert report.verdict == "diverged", report
    assert report.first_divergence.stage in stage, report


def test_an_unembedding_that_takes_no_gradient_is_named(tmp_path):
    def loss(model, tokens, labels):
        return LigerFusedLinearCrossEntropyLoss()(model.head.weight.detach(), rows(model, tokens), labels.view(-1))

    torch.manual_seed(0)
    with attached(tmp_path):
        train(loss, Model(), steps=2)
    report = backtape.replay(tmp_path, step=1)
    assert "dk microbatch 1 was not recorded by rank 0: k takes no gradient" in " ".join(str(report).split()), report
    assert stages(report)["dq"] == "pass", report


@pytest.mark.parametrize("items", [None, 77, torch.tensor(77)], ids=["counted", "given", "given as a tensor"])
def test_the_smoother_of_transformers_divides_by_what_its_trainer_has_counted(tmp_path, items):
    from transformers.trainer_pt_utils import LabelSmoother

    smoother = LabelSmoother(epsilon=0.1)

    def loss(model, tokens, labels):
        return smoother({"logits": model(tokens)}, labels, num_items_in_batch=items)

    torch.manual_seed(0)
    with attached(tmp_path):
        train(loss, Model(), steps=2)
    report = backtape.replay(tmp_path, step=1)
    assert report.verdict == "agreed" and stages(report)["loss"] == "pass", report
