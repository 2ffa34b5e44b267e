"""Jobs that call nothing of backtape but `attach`: what is found of them agrees where they are right, and a
fault in them is told. Each job is a training loop as people write it, in one process."""

import gc
import importlib
import weakref

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import backtape
import backtape.torch

TOKENS, WIDTH, VOCAB = (4, 12), 24, 61


class Model(nn.Module):
    """A little language model that returns hidden states and logits."""

    def __init__(self, bias=False, tied=False, dtype=torch.float32):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH, dtype=dtype)
        self.mix = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.head = nn.Linear(WIDTH, VOCAB, bias=bias, dtype=dtype)
        nn.init.normal_(self.embed.weight, std=0.3)
        if tied:
            self.head.weight = self.embed.weight

    def hidden(self, tokens):
        return self.norm(self.embed(tokens) + torch.tanh(self.mix(self.embed(tokens))))

    def forward(self, tokens):
        return self.head(self.hidden(tokens))


def batch():
    tokens = torch.randint(VOCAB, TOKENS)
    labels = torch.randint(VOCAB, TOKENS)
    labels[0, :5] = -100
    return tokens, labels


def flat(logits, labels, **options):
    return F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1), **options)


def shifted(model, tokens, labels):
    logits = model(tokens)[..., :-1, :].contiguous()
    return flat(logits, labels[..., 1:].contiguous())


def classes_second(model, tokens, labels):
    return F.cross_entropy(model(tokens).transpose(1, 2), labels)


def capped(model, tokens, labels):
    logits = model(tokens).float()
    return flat(torch.tanh(logits / 3.0) * 3.0, labels)


def tempered(model, tokens, labels):
    return flat(model(tokens) / 0.7, labels)


def weighted(model, tokens, labels):
    weight = torch.linspace(0.5, 2.0, VOCAB)
    return flat(model(tokens), labels, weight=weight)


def by_token(model, tokens, labels):
    losses = flat(model(tokens), labels, reduction="none")
    mask = (torch.arange(losses.numel()) % 3 > 0).float()
    return (losses * mask).sum() / mask.sum()


def masked(model, tokens, labels):
    counts = labels != -100
    return F.cross_entropy(model(tokens)[counts], labels[counts])


def chunked(model, tokens, labels):
    pairs = zip(model.hidden(tokens).chunk(3, dim=1), labels.chunk(3, dim=1))
    total = sum(flat(model.head(h), y.contiguous(), reduction="sum") for h, y in pairs)
    return total / (labels != -100).sum()


def padded(model, tokens, labels):
    return F.cross_entropy(model(tokens)[..., :50].reshape(-1, 50), labels.clamp(max=49).view(-1))


def log_softmax(model, tokens, labels):
    return F.nll_loss(F.log_softmax(model(tokens).view(-1, VOCAB), dim=-1), labels.view(-1))


def logged_twice(model, tokens, labels):
    loss = flat(model(tokens), labels)
    with torch.no_grad():
        flat(model(tokens), labels, reduction="sum")
    flat(model(tokens), labels)  # For the log: no backward pass reaches it.
    return loss


def module(model, tokens, labels):
    return nn.CrossEntropyLoss(label_smoothing=0.1)(model(tokens).view(-1, VOCAB), labels.view(-1))


def linear(model, tokens, labels):
    hidden = model.hidden(tokens).view(-1, WIDTH)
    return F.linear_cross_entropy(hidden, model.head.weight, labels.view(-1))


def linear_by_chunks(model, tokens, labels):
    options = nn.modules.linear_cross_entropy_options.LinearCrossEntropyOptions(batch_chunk_size=16)
    hidden = model.hidden(tokens).view(-1, WIDTH)
    return F.linear_cross_entropy(hidden, model.head.weight, labels.view(-1), options=options)


def gathered(model, tokens, labels):
    """As it is written by hand, with a mask."""
    logs = F.log_softmax(model(tokens).float(), dim=-1)
    counts = labels != -100
    taken = logs.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return -(taken * counts).sum() / counts.sum()


def preferred(model, tokens, labels):
    """A loss of pairs of sequences, as DPO has it."""
    logs = model(tokens).log_softmax(-1)
    taken = torch.gather(logs, 2, labels.clamp(min=0).unsqueeze(2)).squeeze(2).sum(1)
    return -F.logsigmoid(0.1 * (taken[:2] - taken[2:])).mean()


def divided_in_place(model, tokens, labels):
    loss = flat(model(tokens), labels)
    loss /= 3
    return loss


def log_softmax_halved(model, tokens, labels):
    return F.nll_loss(F.log_softmax(model(tokens).view(-1, VOCAB), dim=-1), labels.view(-1)) / 2


def looked_up_before(model, tokens, labels):
    """Python looks gather up before it calls the model."""
    return -torch.gather(model(tokens).log_softmax(-1), 2, labels.clamp(min=0).unsqueeze(2)).mean()


LOSSES = {
    "flat": lambda model, tokens, labels: flat(model(tokens), labels),
    "sum over a number": lambda model, tokens, labels: flat(model(tokens), labels, reduction="sum") / 777,
    "smoothed": lambda model, tokens, labels: flat(model(tokens), labels, label_smoothing=0.2),
    "shifted": shifted,
    "classes second": classes_second,
    "capped": capped,
    "tempered": tempered,
    "weighted classes": weighted,
    "by token": by_token,
    "masked": masked,
    "chunked": chunked,
    "padded": padded,
    "log_softmax": log_softmax,
    "logged twice": logged_twice,
    "divided in place": divided_in_place,
    "log_softmax, halved": log_softmax_halved,
    "looked up before": looked_up_before,
    "gathered": gathered,
    "pairs": preferred,
    "module": module,
    "linear_cross_entropy": linear,
    "linear_cross_entropy by chunks": linear_by_chunks,
}


def train(loss, model, *, steps=3, microbatches=2, wrong=1.0, autocast=False):
    """Trains; returns all parameters. wrong: what the gradient of the logits is multiplied by."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if wrong != 1.0:
        model.head.register_forward_hook(lambda _, __, logits: multiplied(logits, wrong))
    for _ in range(steps):
        for _ in range(microbatches):
            tokens, labels = batch()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                value = loss(model, tokens, labels)
            (value / microbatches).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def multiplied(logits, wrong):
    """The logits, with a gradient that is wrong on its way through autograd's graph."""
    if logits.requires_grad:
        logits.register_hook(lambda gradient: gradient * wrong)
    return logits


def attached(directory, steps="1", **options):
    recorder = backtape.Recorder(dir=directory, strict=True, steps=steps)
    return backtape.torch.attach(recorder=recorder, **options)


def stages(report):
    return {stage["name"]: stage["status"] for stage in report.json["stages"]}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_job_as_it_stands_is_recorded_whole_and_agrees(tmp_path, loss):
    torch.manual_seed(0)
    with attached(tmp_path):
        train(loss, Model())
    report = backtape.replay(tmp_path, step=1)
    assert report.verdict == "agreed", report
    told = stages(report)
    assert {told["loss"], told["dq"], told["dk"]} == {"pass"}, report
    assert report.json["algebra"]["stages"][-1]["agreed"], report


# Those that take the unembedding and not its logits have no logits to plant a fault at.
AT_LOGITS = {name: loss for name, loss in LOSSES.items() if not name.startswith("linear")}


@pytest.mark.parametrize("loss", AT_LOGITS.values(), ids=AT_LOGITS)
def test_a_gradient_that_is_wrong_at_the_logits_is_told(tmp_path, loss):
    torch.manual_seed(0)
    with attached(tmp_path):
        train(loss, Model(), wrong=1.25)
    report = backtape.replay(tmp_path, step=1)
    assert report.verdict == "diverged", report


def with_z_loss(model, tokens, labels):
    logits = model(tokens)
    return flat(logits, labels) + 1e-2 * logits.logsumexp(-1).square().mean()


def two_heads(model, tokens, labels):
    small = model.mix(model.hidden(tokens)).view(-1, WIDTH)
    return flat(model(tokens), labels) + F.cross_entropy(small, labels.view(-1) % WIDTH)


def mean_square(model, tokens, labels):
    return model(tokens).square().mean()


def not_followed(model, tokens, labels):
    return flat(model(tokens).sigmoid(), labels)


REASONS = {
    "z-loss of other tokens": (with_z_loss, "something else than the loss", "incomplete"),
    "mean square": (mean_square, "no backward pass came from a loss", "agreed"),
    "not followed": (not_followed, "Sigmoid lies between", "incomplete"),
}


@pytest.mark.parametrize("loss, reason, verdict", REASONS.values(), ids=REASONS)
def test_a_head_that_is_not_recorded_is_named_and_the_step_is_judged(tmp_path, capsys, loss, reason, verdict):
    torch.manual_seed(0)
    with attached(tmp_path):
        train(loss, Model())
    assert reason in capsys.readouterr().err
    report = backtape.replay(tmp_path, step=1)
    assert report.verdict == verdict, report
    said = " ".join(str(report).split())
    assert reason in said
    # Of a loss that nothing knows the verdict says that it was not judged.
    assert ("the loss head was not judged" in said) == (verdict == "agreed")
    assert report.json["algebra"]["stages"][-1]["agreed"], report
    assert backtape.replay(tmp_path, step=1, compare=["step"]).verdict == "agreed"


@pytest.mark.parametrize("loss", ["flat", "smoothed", "sum over a number", "by token"])
def test_a_softmax_in_few_bits_keeps_its_logarithm_in_them(tmp_path, loss):
    for wrong in (1.0, 2.0):
        torch.manual_seed(0)
        with attached(tmp_path / str(wrong)):
            train(LOSSES[loss], Model(dtype=torch.bfloat16), wrong=wrong)
        report = backtape.replay(tmp_path / str(wrong), step=1)
        assert report.verdict == ("agreed" if wrong == 1.0 else "diverged"), report


def test_of_two_unembeddings_the_larger_one_is_recorded(tmp_path, capsys):
    torch.manual_seed(0)
    with attached(tmp_path):
        train(two_heads, Model())
    report = backtape.replay(tmp_path, step=1)
    assert report.verdict == "agreed" and stages(report)["dk"] == "pass", report
    assert "with another unembedding" in capsys.readouterr().err


@pytest.mark.parametrize("chosen", [True, False])
def test_a_saved_tensor_that_a_hook_gives_out_once_is_left_to_the_backward_pass(tmp_path, chosen):
    torch.manual_seed(0)
    held = {}

    def pack(tensor):
        held[len(held)] = tensor
        return len(held) - 1

    def loss(model, tokens, labels):
        logits = model(tokens)
        with torch.autograd.graph.saved_tensors_hooks(pack, held.pop):
            if not chosen:
                return flat(logits * 1.5, labels)
            counts = labels != -100
            return F.cross_entropy(logits[counts], labels[counts])

    with attached(tmp_path):
        train(loss, Model())
    assert backtape.replay(tmp_path, step=1, compare=["step"]).verdict == "agreed"


def fused(hidden, weight, target):
    return Fused.apply(hidden, weight, target)


class Fused(torch.autograd.Function):
    """A loss of a job's own, with a factor in the gradient of the weight."""

    factor = 1.0

    @staticmethod
    def forward(ctx, hidden, weight, target):
        logits = hidden @ weight.T
        ctx.save_for_backward(hidden, weight, target)
        return F.cross_entropy(logits, target)

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight, target = ctx.saved_tensors
        counts = target != -100
        p = (hidden @ weight.T).softmax(-1)
        p[torch.arange(len(target)), target.clamp(min=0)] -= 1
        p *= (counts / counts.sum()).unsqueeze(1) * gradient
        return p @ weight, p.T @ hidden * Fused.factor, None


def own_loss(model, tokens, labels):
    return fused(model.hidden(tokens).view(-1, WIDTH), model.head.weight, labels.view(-1))


OWN = {"q": "hidden", "k": "weight", "labels": "target"}


@pytest.mark.parametrize("factor, verdict", [(1.0, "agreed"), (1.01, "diverged")])
def test_a_loss_of_the_jobs_own_is_judged_by_the_name_that_it_is_given(tmp_path, monkeypatch, factor, verdict):
    monkeypatch.setattr(Fused, "factor", factor)
    torch.manual_seed(0)
    with attached(tmp_path, losses={f"{__name__}:fused": OWN}):
        train(own_loss, Model())
    report = backtape.replay(tmp_path, step=1)
    assert report.verdict == verdict, report
    assert stages(report)["dq"] == "pass", report
    assert stages(report)["dk"] == ("pass" if factor == 1.0 else "fail"), report


def test_a_loss_of_a_module_that_is_imported_after_attaching_is_found(tmp_path, monkeypatch):
    (tmp_path / "late_losses.py").write_text(
        "from test_attach import Fused\n\ndef late(hidden, weight, target):\n    return Fused.apply(hidden, weight, target)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    torch.manual_seed(0)
    with attached(tmp_path / "run", losses={"late_losses:late": OWN}):
        late = importlib.import_module("late_losses")

        def loss(model, tokens, labels):
            return late.late(model.hidden(tokens).view(-1, WIDTH), model.head.weight, labels.view(-1))

        train(loss, Model())
    report = backtape.replay(tmp_path / "run", step=1)
    assert report.verdict == "agreed" and stages(report)["dk"] == "pass", report


@pytest.mark.parametrize(
    "losses, reason",
    [
        ({f"{__name__}:fuse": OWN}, "no backward pass came from a call of it"),
        ({f"{__name__}:fused": OWN | {"q": "hiden"}}, "has no argument hiden: it has hidden, weight, target"),
    ],
)
def test_a_loss_that_is_named_wrong_is_told_and_makes_the_report_incomplete(tmp_path, losses, reason):
    torch.manual_seed(0)
    with attached(tmp_path, losses=losses):
        train(own_loss, Model())
    report = backtape.replay(tmp_path, step=1)
    assert report.verdict == "incomplete" and reason in " ".join(str(report).split()), report


def test_no_logits_outlive_their_backward_pass(tmp_path):
    alive = []

    def loss(model, tokens, labels):
        alive[:] = [one for one in alive if one() is not None]
        counted.append(len(alive))
        logits = model(tokens)
        alive.append(weakref.ref(logits))
        return flat(logits, labels)

    counted = []
    with attached(tmp_path, steps="0"):
        train(loss, Model(), steps=1, microbatches=6)
        gc.collect()
    assert max(counted) <= 1, counted


@pytest.mark.parametrize("left, verdict", [(0, "agreed"), (1, "diverged")])
def test_what_a_norm_counts_is_to_be_clipped_by_it(tmp_path, left, verdict):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    parameters = list(model.parameters())
    with attached(tmp_path, steps="0"):
        (9 * model(torch.randn(32, 8)).square().mean()).backward()
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        for own in (parameters[left:2], parameters[2:]):
            nn.utils.clip_grads_with_norm_(own, 0.1, norm)
        optimizer.step()
    report = backtape.replay(tmp_path, step=0)
    assert report.verdict == verdict, report
    assert ("clip-recorded-not-applied" in str(report)) == bool(left), report


@pytest.mark.parametrize(
    "fault, verdict",
    [
        ("", "agreed"),
        ("two optimizers", "agreed"),
        ("one of zeros", "agreed"),
        ("one is left", "diverged"),
        # One number for all of them that nobody knows.
        ("another norm", "incomplete"),
    ],
)
def test_clipping_by_hand_is_found_by_what_it_does(tmp_path, fault, verdict):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))
    if fault == "one of zeros":
        # So that the first layer gets a gradient of zeros.
        nn.init.zeros_(model[2].weight)
    parameters = list(model.parameters())
    held = [parameters[:2], parameters[2:]] if fault == "two optimizers" else [parameters]
    optimizers = [torch.optim.SGD(own, lr=0.1, momentum=0.9) for own in held]
    with attached(tmp_path, steps="0"):
        for _ in range(2):
            model.zero_grad()
            for _ in range(2):
                (9 * (1 + model(torch.randn(32, 8))).square().mean()).backward()
            gradients = [parameter.grad for parameter in model.parameters()]
            norm = torch.sqrt(sum(gradient.square().sum() for gradient in gradients[fault == "another norm" :]))
            for gradient in gradients[fault == "one is left" :]:
                gradient.mul_(0.5 / (norm + 1e-6))
            for optimizer in optimizers:
                optimizer.step()
    report = backtape.replay(tmp_path, step=0)
    assert report.verdict == verdict, report
    if verdict == "agreed":
        judged = {stage["stage"]: stage["agreed"] for stage in report.json["algebra"]["stages"]}
        assert judged["clip"] == 4, report
