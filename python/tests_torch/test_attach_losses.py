"""Losses that a job puts together by itself, and the ids that its model reads: what is found of them agrees where they
are right, a fault in them is told, and what no head describes is named."""

import contextlib
import json

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from test_attach import VOCAB, WIDTH, Fused, Model, attached, flat, own_loss, stages, train

import backtape
from backtape.step_torch.patches import Patches


def said(report):
    return " ".join(str(report).split())


def recorded(directory, loss, model=None, **options):
    torch.manual_seed(0)
    with attached(directory):
        train(loss, model or Model(), steps=2, **options)
    return backtape.replay(directory, step=1)


def z_loss(logits, labels, factor=1e-2):
    counts = (labels != -100).float()
    return factor * (logits.logsumexp(-1).square() * counts).sum() / counts.sum()


def plain(model, tokens, labels):
    logits = model(tokens)
    return flat(logits, labels) + z_loss(logits, labels)


def capped(model, tokens, labels):
    logits = torch.tanh(model(tokens) / 3) * 3
    return flat(logits, labels) + z_loss(logits, labels, 1e-4)


def by_token(model, tokens, labels):
    logits = model(tokens).view(-1, VOCAB)
    return (F.cross_entropy(logits, labels.view(-1).clamp(min=0), reduction="none")
            + 1e-3 * torch.logsumexp(logits, dim=1) ** 2).mean()  # fmt: skip


def in_f32(model, tokens, labels):
    logits = model(tokens).float()
    return flat(logits, labels) + z_loss(logits, labels)


def for_the_log(model, tokens, labels):
    logits = model(tokens)
    logits.logsumexp(-1).mean()
    return flat(logits, labels)


def beside_another(model, tokens, labels):
    """A loss that only the log has, of the same logits."""
    logits = model(tokens)
    flat(logits, labels, reduction="sum")
    return flat(logits, labels)


Z_LOSSES = {
    "plain": (plain, 1e-2), "capped": (capped, 1e-4), "by token": (by_token, 1e-3), "in f32": (in_f32, 1e-2),
    "for the log": (for_the_log, 0.0), "beside another": (beside_another, 0.0),
}  # fmt: skip


@pytest.mark.parametrize("loss, factor", Z_LOSSES.values(), ids=Z_LOSSES)
def test_a_z_loss_by_hand_is_measured_and_agrees(tmp_path, loss, factor):
    report = recorded(tmp_path, loss, autocast=loss is in_f32)
    assert report.verdict == "agreed", report
    assert {stages(report)[name] for name in ("loss", "dq", "dk")} == {"pass"}, report
    head = json.loads((tmp_path / "step-00000001" / "manifest.json").read_text())["manifest"]["head"]
    assert (head["z_loss"], head["z_loss_in_loss"]) == (factor, factor == 0.0), head


def test_a_gradient_that_is_wrong_beside_a_z_loss_is_told(tmp_path):
    report = recorded(tmp_path, plain, wrong=1.01)
    assert report.verdict == "diverged" and report.first_divergence.stage == "dq", report


def of_other_logits(model, tokens, labels):
    """The z-loss is of the logits before they are capped."""
    logits = model(tokens)
    return flat(torch.tanh(logits / 3) * 3, labels) + z_loss(logits, labels)


def no_square(model, tokens, labels):
    logits = model(tokens)
    return flat(logits, labels) + 1e-2 * logits.logsumexp(-1).mean()


def entropy(model, tokens, labels):
    logits = model(tokens)
    return flat(logits, labels) + 1e-2 * (logits.softmax(-1) * logits).sum(-1).mean()


def teacher(tokens):
    return torch.randn(*tokens.shape, VOCAB).softmax(-1)


def distilled(model, tokens, labels):
    return F.kl_div(model(tokens).log_softmax(-1), teacher(tokens), reduction="batchmean")


def of_probabilities(model, tokens, labels):
    return F.cross_entropy(model(tokens).view(-1, VOCAB), teacher(tokens).view(-1, VOCAB))


class Eager(torch.autograd.Function):
    """A fused loss that has its gradients from autograd, in the forward pass."""

    smoothing = 0.0
    share = 1.0

    @classmethod
    def loss(cls, model, tokens, labels):
        return cls.apply(model.hidden(tokens).view(-1, WIDTH), model.head.weight, labels.view(-1), cls.smoothing)

    @staticmethod
    def forward(ctx, hidden, weight, target, smoothing):
        with torch.enable_grad():
            own = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
            logits = (own[0] @ own[1].T).float()
            loss = F.cross_entropy(logits, target, label_smoothing=smoothing) * Eager.share
            ctx.save_for_backward(*torch.autograd.grad(loss, own))
        return loss.detach()

    @staticmethod
    def backward(ctx, arrived):
        return *(arrived * gradient for gradient in ctx.saved_tensors), None, None


class Smoothed(Eager):
    """With an option that nothing says."""

    smoothing = 0.1


NAMED = {
    "z-loss of other logits": (of_other_logits, "something else than the loss takes the logits"),
    "no square": (no_square, "something else than the loss takes the logits"),
    "entropy": (entropy, "something else than the loss takes the logits"),
    "distilled": (distilled, "kl_div: its targets are probabilities and not labels"),
    "probabilities": (of_probabilities, "cross_entropy: its targets are probabilities and not labels"),
    "a function": (Smoothed.loss, "Smoothed: it takes hidden states, a matrix and labels, and its result is not"),
}


@pytest.mark.parametrize("loss, reason", NAMED.values(), ids=NAMED)
def test_a_loss_that_no_head_describes_is_named(tmp_path, loss, reason):
    report = recorded(tmp_path, loss)
    assert report.verdict == "incomplete" and reason in said(report), report


@pytest.mark.parametrize("factor, verdict", [(1.0, "agreed"), (1.01, "diverged")])
def test_a_function_that_nobody_has_named_is_judged_where_its_result_is_a_cross_entropy(
    tmp_path, monkeypatch, factor, verdict
):
    monkeypatch.setattr(Fused, "factor", factor)
    report = recorded(tmp_path, own_loss)
    assert report.verdict == verdict, report
    assert stages(report)["dk"] == ("pass" if factor == 1.0 else "fail"), report


def test_a_function_that_computes_its_gradients_with_the_loss_is_judged(tmp_path):
    report = recorded(tmp_path, Eager.loss)
    assert report.verdict == "agreed" and stages(report)["dk"] == "pass", report


@pytest.mark.parametrize("counted, verdict", [("labels", "agreed"), ("all tokens", "incomplete")])
def test_a_function_in_few_bits_that_divides_by_padding_too_is_no_mean(tmp_path, monkeypatch, counted, verdict):
    share = 1.0 if counted == "labels" else 43 / 48
    monkeypatch.setattr(Eager, "share", share)
    report = recorded(tmp_path, Eager.loss, Model(dtype=torch.bfloat16))
    assert report.verdict == verdict, report


def test_functions_of_compiled_code_stay_as_they_are(tmp_path):
    class Squared(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, arrived):
            return 2 * ctx.saved_tensors[0] * arrived

    block = torch.compile(lambda x: Squared.apply(x) + 1, backend="eager", fullgraph=True)
    report = recorded(tmp_path, lambda model, tokens, labels: flat(model.head(block(model.hidden(tokens))), labels))
    assert report.verdict == "agreed" and stages(report)["dk"] == "pass", report
    assert vars(torch.autograd.Function)["apply"] is APPLY


APPLY = vars(torch.autograd.Function)["apply"]

TEXT = "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want. " * 4


def read(model, length=20, rows=6):
    """Pieces of a text, as ids."""
    ids = torch.tensor([ord(letter) % VOCAB for letter in TEXT])
    return torch.stack([ids[at : at + length] for at in torch.randint(len(ids) - length, (rows,))])


def next_one(labels):
    return F.pad(labels[:, 1:], (0, 1), value=-100)


def within(model, ids, labels):
    """The loss shifts the labels, as models of transformers do."""
    return flat(model(ids)[:, :-1].contiguous(), labels[:, 1:].contiguous())


def of_prefix(model, *_):
    """Padding on the right, and a prefix that is not learnt."""
    ids = read(model)
    labels = ids.clone()
    ids[:3, 10:], labels[:3, 10:], labels[3:, :7] = 0, -100, -100
    return within(model, ids, labels)


def hidden_ones(model, *_):
    ids = read(model)
    hide = torch.rand(ids.shape) < 0.3
    return flat(model(torch.where(hide, VOCAB - 1, ids)), torch.where(hide, ids, -100))


SHIFTS = {
    "shifted by the loss": (lambda model, *_: (lambda ids: within(model, ids, ids))(read(model)), None),
    "shifted before": (lambda model, *_: (lambda ids: flat(model(ids), next_one(ids)))(read(model)), None),
    "a prefix": (of_prefix, None),
    "hidden ones": (hidden_ones, None),
    "twice": (lambda model, *_: (lambda ids: within(model, ids, next_one(ids)))(read(model)), "warn"),
    "not at all": (lambda model, *_: (lambda ids: flat(model(ids), ids))(read(model)), "FAIL"),
}


@pytest.mark.parametrize("loss, told", SHIFTS.values(), ids=SHIFTS)
def test_labels_are_held_against_the_ids_that_the_model_reads(tmp_path, loss, told):
    report = recorded(tmp_path, loss)
    assert report.verdict == ("diverged" if told == "FAIL" else "agreed"), report
    assert (f"checks {told} shift [label-shift]" in said(report)) == (told is not None), report
    assert "shift" in said(report).split("checks pass:")[1].split("checks")[0] or told, report


def test_ids_of_two_lookups_that_both_fit_are_not_recorded(tmp_path):
    """As in an encoder and a decoder: which one the labels belong to is not known."""
    class Both(Model):
        def __init__(self):
            super().__init__()
            self.encode = nn.Embedding(VOCAB, WIDTH)

        def forward(self, ids):
            return self.head(self.hidden(ids) + self.encode(ids.flip(1)))

    report = recorded(tmp_path, lambda model, *_: (lambda ids: flat(model(ids), ids))(read(model)), Both())
    assert report.verdict == "agreed" and "shift [label-shift]" not in said(report), report


def test_a_class_that_inherits_from_an_observed_one_runs_its_own_code():
    class Known(Eager):
        name = "known"

    class Mine(Known):
        name = "mine"

    Eager.called = classmethod(lambda cls, *args: (cls.name, *args))
    seen = []

    def observe(*args, **_):
        seen.append(args)
        yield

    patches = Patches(lambda what: contextlib.nullcontext())
    try:
        patches.attribute(Known, "called", observe)
        assert (Known.called(1), Mine.called(2)) == (("known", 1), ("mine", 2))
        assert seen == [(1,)]
    finally:
        patches.undo()
        del Eager.called
    assert "called" not in vars(Known)


class Dropped(Model):
    """Two passes through it give other hidden states."""

    def hidden(self, tokens):
        return F.dropout(super().hidden(tokens), 0.2)


def twice(model, tokens, labels):
    """Two losses of one batch in one backward pass, as R-Drop has them, without its divergence."""
    return sum(flat(model(tokens), labels) for _ in range(2)) / 2


def always_the_same(model, *_):
    """The loader repeats itself: each backward pass is of the same batch."""
    tokens = torch.arange(40).view(2, 20) % VOCAB
    return flat(model(tokens), tokens.flip(1))


def twice_the_same(model, *_):
    """The same, of a job that adds up the losses of its microbatches before the backward pass."""
    return sum(always_the_same(model) for _ in range(2)) / 2


def test_two_losses_of_one_batch_in_one_backward_pass_are_no_repeated_batch(tmp_path):
    report = recorded(tmp_path / "twice", twice, Dropped())
    assert report.verdict == "agreed" and "duplicate-batch" not in said(report), report
    manifest = json.loads((tmp_path / "twice/step-00000001/manifest.json").read_text())["manifest"]
    assert manifest["head"]["batches"] == [0, 0, 2, 2]
    for name, loss in {"same": always_the_same, "same-within-a-pass": twice_the_same}.items():
        report = recorded(tmp_path / name, loss, Dropped())
        assert report.verdict == "diverged" and "[duplicate-batch]" in said(report), report


def test_a_factor_on_few_bits_near_the_start_of_training_is_no_label_smoothing(tmp_path):
    """Where all classes are as likely, a factor below 1 and a smoothing of labels give nearly the same gradient; the
    call of the loss was seen, and has none."""
    model = Model(dtype=torch.bfloat16)
    with torch.no_grad():
        model.head.weight.mul_(0.1)
    report = recorded(tmp_path, lambda model, tokens, labels: flat(model(tokens), labels), model, wrong=0.95)
    (cause,) = report.json["causes"]
    assert cause["id"] == "upstream-factor" and float(cause["parameters"]["factor"]) == pytest.approx(0.95, rel=0.01)
    assert "label_smoothing=0.0" not in said(report), report


class Recurrent(nn.Module):
    """An LSTM that has the batch first: its states do not lie in C order, and torch adds the bias of the head by itself."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, dtype=dtype)
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True, dtype=dtype)
        self.head = nn.Linear(WIDTH, VOCAB, dtype=dtype)
        nn.init.normal_(self.head.bias)

    def forward(self, tokens):
        return self.head(self.lstm(self.embed(tokens))[0])


def test_a_bias_that_torch_adds_by_an_operation_of_its_own_is_that_of_the_head(tmp_path):
    loss = lambda model, tokens, labels: flat(model(tokens), labels)
    report = recorded(tmp_path / "right", loss, Recurrent())
    assert report.verdict == "agreed" and stages(report)["dq"] == "pass" and stages(report)["bias"] == "pass", report
    report = recorded(tmp_path / "wrong", loss, Recurrent(), wrong=1.01)
    assert report.verdict == "diverged" and stages(report)["dq"] == "fail", report
    report = recorded(tmp_path / "bf16", loss, Recurrent(torch.bfloat16))
    assert "a bias is added in few bits after the product was rounded" in said(report), report
    # Something else that is added is no bias.
    shift = torch.randn(12, VOCAB, requires_grad=True)
    report = recorded(tmp_path / "other", lambda model, *of: loss(lambda tokens: model(tokens) + shift, *of))
    assert "Add lies between the product of hidden states and the loss" in said(report), report


class Two(Model):
    """Two heads, of which one is of an auxiliary loss."""

    def __init__(self):
        super().__init__()
        self.other = nn.Linear(WIDTH, VOCAB - 4, bias=False)


def both(model, tokens, labels):
    hidden = model.hidden(tokens)
    other = F.cross_entropy(model.other(hidden).flatten(0, 1), labels.clamp(0, VOCAB - 5).flatten())
    return flat(model.head(hidden), labels) + 0.1 * other


def test_of_two_heads_the_report_says_which_is_judged(tmp_path):
    report = recorded(tmp_path, both, Two())
    words = "is called with another unembedding too (other.weight, beside head.weight, which is judged)"
    assert report.verdict == "agreed" and words in said(report), report
