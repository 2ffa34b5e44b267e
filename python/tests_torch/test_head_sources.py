"""Where the items of a head's declaration are from stands in the dump and in the report, and what is declared by
hand and is not what the job has is told before the verdict. Each job is a real training loop in torch."""

import json

import pytest
import torch
import torch.nn.functional as F

import backtape
import backtape.torch
from test_attach import LOSSES, VOCAB, WIDTH, Model, attached, train


def declared(directory, step=1):
    """The head's declaration as the dump has it."""
    (manifest,) = directory.glob(f"step-{step:08}/manifest.json")
    return json.loads(manifest.read_text())["manifest"]["head"]


def report_of(directory, loss="flat", model=None, losses=None, autocast=False, **head):
    """The report of a job that was attached to with this declared by hand."""
    torch.manual_seed(0)
    more = {} if losses is None else {"losses": losses}
    with attached(directory, head=head, **more):
        train(LOSSES.get(loss, loss), model or Model(), autocast=autocast)
    return backtape.replay(directory, step=1)


def told(report):
    return " ".join(str(report).split())


def test_a_job_that_is_attached_to_says_where_each_item_is_from(tmp_path):
    report = report_of(tmp_path, "smoothed")
    sources = declared(tmp_path)["sources"]
    of = ("reduction", "label_smoothing", "softcap", "dtypes.logits", "cotangent", "microbatches", "scope")
    assert [sources[item] for item in of] == ["seen"] * 3 + ["measured"] * 3 + ["assumed"]
    items = {item["item"]: (item["value"], item["source"]) for item in report.json["dump"]["head_items"]}
    assert items["ignore_label"] == ("-100", "seen") and items["dtypes.dlogits"] == ("f32", "measured")
    assert items["z_loss"] == ("0.0", "seen") and items["scope"] == ('"rank"', "assumed")
    for words in (
        "seen in the job: loss, path, reduction, denominator, ignore_label=-100, label_smoothing=0.2; measured:",
        "measured: microbatches, cotangent, dtypes f32; assumed: scope, microbatch_reduction=",
    ):
        assert words in told(report), report
    assert report.verdict == "agreed" and report.contradictions == [], report


def unequal(model, tokens, labels):
    """Another number of tokens counts in each microbatch."""
    labels = labels.masked_fill(torch.rand(labels.shape) < 0.3, -100)
    return F.cross_entropy(model(tokens).view(-1, VOCAB), labels.view(-1))


# What is declared by hand, the loss that the job calls, and what the report says of both.
CONTRADICTIONS = {
    "ignored label": ({"ignore_label": 0}, "flat", "ignore_label=0 is declared by hand, and the job has -100"),
    "smoothing": ({"label_smoothing": 0.1}, "flat", "label_smoothing=0.1 is declared by hand, and the job has 0.0"),
    "softcap": ({"softcap": 5.0}, "capped", "softcap=5.0 is declared by hand, and the job has 3.0"),
    "dtype": (
        {"dtypes": {"logits": "bf16"}},
        "flat",
        "dtypes.logits=bf16 is declared by hand, and the job was measured to have f32",
    ),
    "tokens of the step": (
        {"scope": "global", "microbatch_reduction": "sum"},
        unequal,
        'scope="global" is declared by hand, by which a token\'s loss is divided by 62',
    ),
    "another number": ({"denominator": 778.0, "cotangent": 0.5}, "sum over a number", "is divided by 1,556 (microbatch"),
    "ignored tokens that count": ({"scope": "rank", "cotangent": 0.5}, "by token", "to divide it by 64"),
}


@pytest.mark.parametrize("head, loss, words", CONTRADICTIONS.values(), ids=CONTRADICTIONS)
def test_what_is_declared_by_hand_and_is_not_so_is_told_before_the_verdict(tmp_path, head, loss, words):
    report = report_of(tmp_path, loss, **head)
    text = told(report)
    assert report.verdict == "agreed", report
    assert words in text and len(report.contradictions) == 1, report
    assert text.index(words) < text.index("AGREED on") < text.index("declared by hand contradicts the job"), report


def test_logits_that_are_declared_in_f32_and_flow_in_bf16_are_told(tmp_path):
    report = report_of(tmp_path, "flat", autocast=True, dtypes={"logits": "f32"})
    (found,) = report.contradictions
    assert (found.item, found.declared, found.found) == ("dtypes.logits", "f32", "bf16"), report
    assert found.source == "measured" and report.verdict == "agreed", report


# What is declared by hand, and is what the job does.
RIGHT = {
    "smoothing": ({"label_smoothing": 0.2, "ignore_label": -100}, "smoothed"),
    "mean of each microbatch": ({"scope": "rank", "cotangent": 0.5, "microbatch_reduction": "sum"}, unequal),
    "a number": ({"denominator": 777.0, "cotangent": 0.5}, "sum over a number"),
    "weighted classes": ({"scope": "rank", "cotangent": 0.5, "denominator": "weights"}, "weighted classes"),
    "a mask by hand": ({"scope": "rank", "cotangent": 0.5}, "gathered"),
    "how it is recorded": ({"tied_embedding": True, "labels_shifted": False}, "shifted"),
    "chunks of a step": ({"microbatches": 2}, "chunked"),
}


@pytest.mark.parametrize("head, loss", RIGHT.values(), ids=RIGHT)
def test_what_is_declared_by_hand_and_is_so_contradicts_nothing(tmp_path, head, loss):
    report = report_of(tmp_path, loss, **head)
    assert report.verdict == "agreed" and report.contradictions == [], report


def test_chunks_that_count_their_own_tokens_are_not_compared_with_a_declared_scope(tmp_path):
    report = report_of(tmp_path, "chunked", scope="rank", cotangent=0.5)
    assert report.verdict == "agreed" and "the loss is computed in chunks" in told(report), report


class Capped(torch.autograd.Function):
    """A loss of a job's own, with a softcap that none of its arguments names."""

    @staticmethod
    def value(hidden, weight, target):
        return F.cross_entropy(4.0 * torch.tanh(hidden @ weight.T / 4.0), target)

    @staticmethod
    def forward(ctx, hidden, weight, target):
        ctx.save_for_backward(hidden, weight, target)
        return Capped.value(hidden, weight, target)

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight, target = ctx.saved_tensors
        with torch.enable_grad():
            own = [hidden.detach().requires_grad_(), weight.detach().requires_grad_()]
            gradients = torch.autograd.grad(Capped.value(*own, target), own)
        return *(gradient * found for found in gradients), None


def capped_loss(hidden, weight, target):
    return Capped.apply(hidden, weight, target)


def own_loss(model, tokens, labels):
    return capped_loss(model.hidden(tokens).view(-1, WIDTH), model.head.weight, labels.view(-1))


def test_what_is_declared_by_hand_takes_the_place_of_what_is_assumed(tmp_path):
    losses = {f"{__name__}:capped_loss": {"q": "hidden", "k": "weight", "labels": "target"}}
    report = report_of(tmp_path / "told", own_loss, losses=losses, softcap=4.0)
    assert report.verdict == "agreed" and report.contradictions == [], report
    assert "declared by hand: softcap=4.0" in told(report) and "all else, by default" in told(report), report
    report = report_of(tmp_path / "not", own_loss, losses=losses)
    assert report.verdict == "misdeclared", report
    assert "MISDECLARED: the declaration does not describe this job: with softcap=4" in told(report), report


def by_hand(directory, logits=torch.float32, autocast=False, has_cotangents=False, **head):
    """The report of a head that is recorded and declared by hand."""
    torch.manual_seed(0)
    q, k = torch.randn(24, WIDTH, requires_grad=True), torch.randn(VOCAB, WIDTH, requires_grad=True)
    labels = torch.randint(VOCAB, (24,))
    recorder = backtape.Recorder(dir=directory, strict=True)
    with recorder, recorder.step(0) as tape, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        tape.head(path="plain", **head)
        z = (q @ k.T).to(logits)
        loss = F.cross_entropy(z.float(), labels) / 2
        loss.backward()
        if has_cotangents:
            tape.record("cotangent", torch.full((24,), 0.5))
        for name, value in {"q": q, "k": k, "labels": labels, "logits": z, "dq": q.grad, "dk": k.grad}.items():
            tape.record(name, value)
    return backtape.replay(directory, step=0)


def test_a_head_that_is_declared_by_hand_says_so_and_that_the_rest_is_assumed(tmp_path):
    report = by_hand(tmp_path, cotangent=0.5, dtypes={"logits": "f32"})
    assert declared(tmp_path, 0)["sources"] == dict.fromkeys(("path", "cotangent", "dtypes.logits"), "declared")
    words = (
        "declared by hand: path, cotangent=0.5, dtypes f32 (logits); "
        "assumed: loss, reduction, denominator, scope, microbatches, all else, by default"
    )
    assert words in told(report), report
    assert report.verdict == "agreed" and report.contradictions == [], report


def test_an_autocast_that_the_declaration_is_made_in_is_measured(tmp_path):
    report = by_hand(tmp_path, autocast=True, cotangent=0.5)
    assert declared(tmp_path, 0)["sources"] == {"path": "declared", "cotangent": "declared", "autocast": "measured"}
    assert 'measured: autocast="bf16"; declared by hand: path, cotangent=0.5' in told(report), report


def test_logits_that_are_declared_in_more_bits_than_they_are_recorded_in_are_told(tmp_path):
    report = by_hand(tmp_path, torch.bfloat16, cotangent=0.5, dtypes={"logits": "f32"})
    words = "dtypes.logits=f32 is declared by hand, and the recorded logits are numbers of bf16"
    assert words in told(report), report
    assert [found.item for found in report.contradictions] == ["dtypes.logits"], report


def test_a_factor_that_is_declared_beside_the_recorded_cotangents_is_told(tmp_path):
    report = by_hand(tmp_path, has_cotangents=True, cotangent=0.5)
    words = "cotangent=0.5 is declared by hand, and the cotangent that was recorded holds every factor"
    assert report.verdict != "agreed" and words in told(report), report
    assert told(report).index(words) < told(report).index("DIVERGED" if report.verdict == "diverged" else "MISDECLARED")


def test_an_option_that_there_is_not_is_told_before_the_first_step_and_the_rest_is_taken(tmp_path, caplog):
    with attached(tmp_path, head={"label_smothing": 0.1, "scope": "rank"}, haed={}):
        assert "attach has no option 'haed', and it is left out: do you mean 'head'?" in caplog.text
        assert "a head has no option 'label_smothing', and it is left out: do you mean 'label_smoothing'?" in caplog.text
        torch.manual_seed(0)
        train(LOSSES["flat"], Model())
    assert declared(tmp_path)["sources"]["scope"] != "declared" and "label_smothing" not in declared(tmp_path)["by_hand"]
    assert backtape.replay(tmp_path, step=1).verdict == "agreed"
