"""Loops around an attached job that are no plain forward, backward, step: nothing of the job may fail by it, what is
right is not to be alarmed about, and what cannot be judged is named."""

import copy
import io

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import backtape
import backtape.torch
from test_attach import VOCAB, Model, attached, batch, flat, stages


def trained(model, optimizer, loss, steps=3, between=lambda model: None):
    for _ in range(steps):
        loss(model, *batch()).backward()
        between(model)
        optimizer.step()
        optimizer.zero_grad()


def adam(model):
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


def usual(model, tokens, labels):
    return flat(model(tokens), labels)


def copied():
    """The model is copied and saved within the step, as for an average of its weights."""
    def between(model):
        copy.deepcopy(model)
        torch.save(model, io.BytesIO())

    trained(model := Model(), adam(model), usual, between=between)


def of_torch(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, labels) + torch.gather(logits, 1, labels.unsqueeze(1)).sum()


def scripted():
    trained(model := Model(), adam(model), usual, between=lambda _: torch.jit.script(of_torch))


def transformed():
    """A gradient for each sample by torch.func."""
    def between(_):
        loss = lambda weight, hidden, labels: F.cross_entropy(hidden @ weight.T, labels)  # noqa: E731
        each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))
        each(torch.randn(5, 4), torch.randn(3, 2, 4), torch.randint(5, (3, 2)))

    trained(model := Model(), adam(model), usual, between=between)


def penalised():
    """A penalty on a gradient, which runs through the head twice."""
    def loss(model, tokens, labels):
        hidden = model.hidden(tokens)
        value = flat(model.head(hidden), labels)
        (gradient,) = torch.autograd.grad(value, hidden, create_graph=True)
        return value + gradient.square().sum()

    trained(model := Model(), adam(model), loss)


class Several(torch.optim.Optimizer):
    """An optimizer that has others step for it, and holds what they hold, as that of torchtitan."""

    def __init__(self, model):
        parts = [list(model.embed.parameters()), [*model.mix.parameters(), *model.norm.parameters()]]
        self.optimizers = [torch.optim.AdamW(part) for part in (*parts, list(model.head.parameters()))]
        super().__init__(list(model.parameters()), {})

    def step(self, closure=None):
        for optimizer in self.optimizers:
            optimizer.step()


def several():
    model = Model()
    trained(model, Several(model), usual)


def sharpness_aware():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        tokens, labels = batch()
        usual(model, tokens, labels).backward()
        with torch.no_grad():
            moves = [0.05 * parameter.grad for parameter in model.parameters()]
            for parameter, move in zip(model.parameters(), moves):
                parameter.add_(move)
        optimizer.zero_grad()
        usual(model, tokens, labels).backward()
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves):
                parameter.sub_(move)
        optimizer.step()
        optimizer.zero_grad()


def with_closure():
    model = Model()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    for _ in range(3):
        tokens, labels = batch()

        def closure():
            optimizer.zero_grad()
            loss = usual(model, tokens, labels)
            loss.backward()
            return loss

        optimizer.step(closure)


def in_eval():
    """The forward is that of a model in eval(): the step begins with the backward pass."""
    trained(model := Model().eval(), adam(model), usual)


def with_frozen_head():
    model = Model()
    model.head.requires_grad_(False)
    trained(model, adam(model), usual)


def mixed_labels():
    def loss(model, tokens, labels):
        logits = model(tokens)
        return 0.3 * flat(logits, labels) + 0.7 * flat(logits, labels.flip(0))

    trained(model := Model(), adam(model), loss)


def one_detached():
    """Two losses by one unembedding, of which the first gives no gradient to the hidden states."""
    def loss(model, tokens, labels):
        hidden = model.hidden(tokens)
        return flat(model.head(hidden.detach()), labels) + flat(model.head(hidden), labels.flip(0))

    trained(model := Model(), adam(model), loss)


def smoothed_by_class():
    def loss(model, tokens, labels):
        return flat(model(tokens), labels, weight=torch.rand(VOCAB), label_smoothing=0.1)

    trained(model := Model(), adam(model), loss)


def with_another_optimizer():
    """One that never steps, of another model."""
    other = nn.Linear(3, 3)
    kept.append(torch.optim.SGD(other.parameters(), lr=0.1))
    trained(model := Model(), adam(model), usual, steps=4)


kept = []

SKIPPED = "GradScaler left the step out"
BOTH = "something else than the loss takes the logits"
LOOPS = {
    "copied": (copied, "agreed", ""),
    "scripted": (scripted, "agreed", ""),
    "transformed": (transformed, "agreed", ""),
    "penalised": (penalised, "incomplete", BOTH),
    "several optimizers in one": (several, "agreed", ""),
    "sharpness aware": (sharpness_aware, "agreed", "after the unembedding was changed"),
    "with closure": (with_closure, "incomplete", "no rule is known of the optimizer LBFGS"),
    "in eval": (in_eval, "agreed", "the loss head was not judged"),
    "frozen head": (with_frozen_head, "incomplete", "the other operand of the product takes no gradient"),
    "mixed labels": (mixed_labels, "incomplete", BOTH),
    "one detached": (one_detached, "agreed", ""),
    "smoothed by class": (smoothed_by_class, "incomplete", "class weights and label smoothing at once"),
    "another optimizer": (with_another_optimizer, "agreed", ""),
}


@pytest.mark.parametrize("loop, verdict, reason", LOOPS.values(), ids=LOOPS)
def test_a_loop_of_its_own_is_recorded_as_far_as_it_can_be(tmp_path, loop, verdict, reason):
    torch.manual_seed(0)
    with attached(tmp_path):
        loop()
    report = backtape.replay(tmp_path, step=1)
    said = " ".join(str(report).split())
    assert report.verdict == verdict and reason in said, said
    if verdict == "agreed" and not reason:
        assert stages(report)["dk"] == "pass"


def test_torch_knows_its_own_functions_by_their_identity_afterwards(tmp_path):
    torch.manual_seed(0)
    table = torch.jit._builtins._get_builtin_table()
    before = len(table)
    with attached(tmp_path):
        trained(model := Model(), adam(model), usual)
    assert len(table) == before


def test_steps_that_a_scaler_leaves_out_are_counted_and_are_no_fault(tmp_path):
    torch.manual_seed(0)
    model, scaler = Model(), torch.amp.GradScaler("cpu", init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with attached(tmp_path, steps="1,4"):
        for step in range(5):
            optimizer.param_groups[0]["lr"] = 0.1 + step
            loss = usual(model, *batch())
            scaler.scale(loss * float("inf") if step in (1, 2) else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    report = backtape.replay(tmp_path, step=1)
    assert report.verdict == "incomplete" and SKIPPED in " ".join(str(report).split()), report
    report = backtape.replay(tmp_path, step=4)
    assert report.verdict == "agreed", report
    declared = bytes(backtape.open(tmp_path).step(4).tensor("step.declared:0"))
    assert b'"lr": 4.1' in declared, declared[:2000]


def test_a_step_that_the_job_leaves_out_is_named_and_the_next_one_is_whole(tmp_path):
    torch.manual_seed(0)
    optimizer = adam(model := Model())
    with attached(tmp_path, steps="1,2"):
        for step in range(4):
            usual(model, *batch()).backward()
            if step != 1:
                optimizer.step()
            optimizer.zero_grad()
    report = backtape.replay(tmp_path, step=1)
    said = " ".join(str(report).split())
    assert report.verdict == "incomplete" and "cleared the gradients without an optimizer's step" in said, said
    assert backtape.replay(tmp_path, step=2).verdict == "agreed"


def test_the_trainings_of_one_process_are_counted_on(tmp_path):
    torch.manual_seed(0)
    with attached(tmp_path, steps="0-5"):
        for _ in range(2):
            model = Model()
            kept.append((model, optimizer := adam(model)))
            trained(model, optimizer, usual)
    for step in (0, 1, 2, 5):
        assert backtape.replay(tmp_path, step=step).verdict == "agreed", step


def test_a_job_that_fails_after_a_step_has_that_step_whole(tmp_path):
    with pytest.raises(ZeroDivisionError), attached(tmp_path, "0-1"):
        trained(model := Model(), adam(model), usual, steps=2)
        raise ZeroDivisionError
    assert backtape.replay(tmp_path, step=1).verdict == "agreed"


def test_a_job_that_fails_within_a_step_has_that_step_in_part(tmp_path):
    def failing(model):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), attached(tmp_path, "0"):
        trained(model := Model(), adam(model), usual, between=failing)
    report = backtape.replay(tmp_path, step=0)
    assert report.verdict == "incomplete" and "ZeroDivisionError" in str(report), report
