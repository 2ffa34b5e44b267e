"""The step's algebra of one process: what jobs do between the backward and the optimizer's step."""

import json

import numpy as np
import pytest
import reading
import torch
import torch.nn as nn
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.utils.checkpoint import checkpoint

import backtape
import backtape.torch

SKIPPED = {"before", "after", "state"}


class Model(nn.Module):
    """Two layers; the second is left out on demand."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.second = nn.Linear(5, 5, bias=False)

    def forward(self, x, both=True):
        x = torch.tanh(self.first(x))
        return self.second(x) if both else x


def model(seed=0):
    torch.manual_seed(seed)
    return Model()


def adamw(module):
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def batch(i):
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(i))


def loss(module, i, **options):
    return module(batch(i), **options).square().mean() / 2


def recorder(tmp_path, **options):
    return backtape.Recorder(dir=tmp_path / "run", **{"strict": True, "steps": "0-99"} | options)


def copies(module, of=lambda one: one):
    return {name: of(one).detach().clone() for name, one in module.named_parameters()}


class Dump:
    def __init__(self, tmp_path, step=0):
        self.step = backtape.open(tmp_path / "run").step(step)
        self.declared = json.loads(bytes(self.step.tensor("step.declared:0")))
        self.names = {key[0] for key in self.step.keys()}

    def tensor(self, stage, name, microbatch=None):
        when = "pre_reduce" if stage in ("grad", "stale", "accumulated") else None
        return self.step.tensor(f"step.{stage}:{name}", microbatch, when=when, rank=when and 0)

    def has(self, stage, name="first.weight"):
        return f"step.{stage}:{name}" in self.names

    def microbatches(self, name):
        return [key[1] for key in self.step.keys() if key[0] == f"step.grad:{name}"]

    def of(self, name):
        return self.declared["parameters"][name]

    def equal(self, stage, tensors):
        for name, wanted in tensors.items():
            found = self.tensor(stage, name)
            assert found.tobytes() == wanted.numpy().tobytes(), (stage, name)
        return True


def test_gradients_of_microbatches_sum_to_the_reduced_one_and_every_stage_is_what_the_job_held(tmp_path):
    module = model()
    optimizer = adamw(module)
    with recorder(tmp_path) as recording:
        for step in range(2):
            with recording.step(step) as tape:
                backtape.torch.step_algebra(tape, module, optimizer)
                for i in range(3):
                    loss(module, i).backward()
                reduced = copies(module, lambda one: one.grad)
                norm = clip_grad_norm_(module.parameters(), 0.05)
                clipped, before = copies(module, lambda one: one.grad), copies(module)
                optimizer.step()
                after = copies(module)
                state = copies(module, lambda one: optimizer.state[one]["exp_avg_sq"])
            optimizer.zero_grad()
    first, dump = Dump(tmp_path, 0), Dump(tmp_path, 1)
    for name in reduced:
        one, two, three = (torch.from_numpy(dump.tensor("grad", name, i).copy()) for i in range(3))
        assert torch.equal((one + two) + three, reduced[name])
    assert dump.equal("reduced", reduced) and dump.equal("clipped", clipped)
    assert dump.equal("before", before) and dump.equal("after", after)
    assert dump.equal("state_after.exp_avg_sq", state)
    assert not first.has("state_before.exp_avg") and dump.has("state_before.exp_avg")
    assert first.of("first.bias")["scalars"] == {"step": [None, 1.0]}
    assert dump.of("first.bias")["scalars"] == {"step": [1.0, 2.0]}
    (told,) = dump.declared["norms"]
    assert told == {
        "value": float(norm), "kind": 2.0, "max_norm": 0.05, "epsilon": 1e-6, "of": "reduced",
        "parameters": [*reduced],
    }  # fmt: skip
    (declared,) = dump.declared["optimizers"]
    assert (declared["name"], declared["module"]) == ("AdamW", "torch.optim.adamw")
    group = declared["groups"][0]
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.01, [0.9, 0.999], 0.01)
    assert dump.of("second.weight")["absent"] == {} and dump.declared["microbatches"] == 3


def test_a_parameter_without_a_gradient_in_one_microbatch_keeps_the_index_of_the_others(tmp_path):
    module = model()
    with recorder(tmp_path) as recording, recording.step(0) as tape:
        backtape.torch.step_algebra(tape, module, adamw(module))
        for i in range(3):
            loss(module, i, both=i != 1).backward()
            # This fills no .grad, so it is no microbatch.
            torch.autograd.grad(loss(module, i), list(module.parameters()))
    dump = Dump(tmp_path)
    assert dump.microbatches("second.weight") == [0, 2]
    assert dump.microbatches("first.weight") == [0, 1, 2]
    assert dump.of("first.weight")["absent"]["after"] == "the optimizer did not step before the tape ended"
    assert dump.equal("reduced", copies(module, lambda one: one.grad))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_runs_the_engine_within_a_pass_and_that_is_one_microbatch(tmp_path, reentrant):
    module = model()
    with recorder(tmp_path) as recording, recording.step(0) as tape:
        backtape.torch.step_algebra(tape, module, adamw(module))
        for i in range(2):
            x = torch.tanh(module.first(batch(i)))
            checkpoint(module.second, x, use_reentrant=reentrant).square().mean().backward()
    dump = Dump(tmp_path)
    assert dump.microbatches("first.weight") == dump.microbatches("second.weight") == [0, 1]
    for name, total in copies(module, lambda one: one.grad).items():
        assert np.array_equal(sum(dump.tensor("grad", name, i) for i in range(2)), total.numpy())


def test_gradients_that_nobody_cleared_are_stale_and_zeros_are_not(tmp_path):
    module = model()
    loss(module, 0).backward()
    module.second.weight.grad.zero_()
    old = copies(module, lambda one: one.grad)
    with recorder(tmp_path) as recording, recording.step(0) as tape:
        backtape.torch.step_algebra(tape, module, adamw(module))
        loss(module, 1).backward()
    dump = Dump(tmp_path)
    assert np.array_equal(dump.tensor("stale", "first.weight"), old["first.weight"].numpy())
    assert not dump.has("stale", "second.weight")


@pytest.mark.parametrize("infinite", [False, True])
def test_the_loss_scale_is_taken_out_before_clipping_and_a_step_that_is_left_out_says_so(tmp_path, infinite):
    module = model()
    optimizer, scaler = adamw(module), torch.amp.GradScaler("cpu", init_scale=1024.0)
    with recorder(tmp_path) as recording, recording.step(0) as tape:
        backtape.torch.step_algebra(tape, module, optimizer)
        scaler.scale(loss(module, 0) * (torch.inf if infinite else 1.0)).backward()
        scaled = copies(module, lambda one: one.grad)
        scaler.unscale_(optimizer)
        unscaled = copies(module, lambda one: one.grad)
        clip_grad_norm_(module.parameters(), 0.05)
        clipped = copies(module, lambda one: one.grad)
        scaler.step(optimizer)
        scaler.update()
    dump = Dump(tmp_path)
    assert dump.equal("reduced", scaled) and dump.equal("unscaled", unscaled)
    assert dump.declared["loss_scale"] == 1024.0 and dump.declared["skipped"] == infinite
    (norm,) = dump.declared["norms"]
    assert norm["of"] == "unscaled"
    if infinite:
        assert not dump.has("after") and not dump.has("clipped")
        assert dump.of("first.weight")["absent"].keys() == SKIPPED
        assert norm["value"] in ("inf", "nan")
    else:
        assert dump.equal("clipped", clipped) and dump.equal("after", copies(module))


def test_a_scaler_that_unscales_in_its_step_and_one_that_is_off(tmp_path):
    for step, enabled in enumerate((True, False)):
        module = model()
        optimizer, scaler = adamw(module), torch.amp.GradScaler("cpu", init_scale=8.0, enabled=enabled)
        with recorder(tmp_path / str(step)) as recording, recording.step(0) as tape:
            backtape.torch.step_algebra(tape, module, optimizer)
            scaler.scale(loss(module, 0)).backward()
            scaler.step(optimizer)
        dump = Dump(tmp_path / str(step))
        assert dump.has("unscaled") == enabled and dump.has("after") and not dump.has("clipped")
        assert dump.declared["loss_scale"] == (8.0 if enabled else None)


@pytest.mark.parametrize("infinite", [False, True])
def test_a_fused_optimizer_takes_the_scale_out_itself_and_leaves_its_step_out(tmp_path, infinite):
    module = model()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0)
    with recorder(tmp_path) as recording, recording.step(0) as tape:
        backtape.torch.step_algebra(tape, module, optimizer)
        scaler.scale(loss(module, 0) * (torch.inf if infinite else 1.0)).backward()
        scaled, before = copies(module, lambda one: one.grad), copies(module)
        scaler.step(optimizer)
        scaler.update()
    dump = Dump(tmp_path)
    assert dump.equal("reduced", scaled) and not dump.has("unscaled") and not dump.has("clipped")
    assert "takes the loss scale out itself" in dump.of("first.weight")["absent"]["unscaled"]
    assert dump.declared["loss_scale"] == 16.0 and dump.declared["skipped"] == infinite
    assert dump.equal("before", before) and dump.equal("after", copies(module))
    assert (dump.tensor("before", "first.bias") == dump.tensor("after", "first.bias")).all() == infinite


class Wrapper:
    """What training libraries put around an optimizer."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        self.optimizer.step()


def test_the_optimizer_in_a_wrapper_and_under_a_schedule_is_the_one_that_steps(tmp_path):
    module = model()
    inner = torch.optim.SGD(module.parameters(), lr=torch.tensor(0.5))
    schedule = torch.optim.lr_scheduler.LambdaLR(inner, lambda step: 0.5**step)
    optimizer = Wrapper(inner)
    with recorder(tmp_path) as recording, recording.step(0) as tape:
        backtape.torch.step_algebra(tape, module, optimizer)
        loss(module, 0).backward()
        optimizer.step()
        schedule.step()
    dump = Dump(tmp_path)
    assert dump.declared["optimizers"][0]["name"] == "SGD"
    assert dump.declared["optimizers"][0]["groups"][0]["lr"] == 0.5, "that of the step, not of the next"
    assert dump.equal("after", copies(module)) and dump.of("first.bias")["absent"] == {}


def test_norms_that_are_computed_and_applied_by_separate_calls_are_one_norm(tmp_path):
    module = model()
    optimizer = adamw(module)
    with recorder(tmp_path) as recording, recording.step(0) as tape:
        backtape.torch.step_algebra(tape, module, optimizer)
        loss(module, 0).backward()
        total = get_total_norm([one.grad for one in module.parameters()], float("inf"))
        nn.utils.clip_grads_with_norm_(module.parameters(), 1e-4, total)
        nn.utils.clip_grad_norm_(module.first.parameters(), 1e9)
        nn.utils.clip_grad_value_(module.parameters(), 1e-5)
        optimizer.step()
    dump = Dump(tmp_path)
    whole, part = dump.declared["norms"]
    assert (whole["kind"], whole["max_norm"], whole["value"]) == ("inf", 1e-4, float(total))
    assert part["of"] == "clipped" and part["parameters"] == ["first.weight", "first.bias"]
    assert dump.declared["clip_value"] == 1e-5
    assert dump.equal("clipped", copies(module, lambda one: one.grad))


def test_clipping_by_the_jobs_own_code_is_told_or_else_noticed(tmp_path):
    for step, told in enumerate((True, False)):
        module = model()
        optimizer, scaler = adamw(module), torch.amp.GradScaler("cpu", init_scale=2.0)
        with recorder(tmp_path / str(step)) as recording, recording.step(0) as tape:
            capture = backtape.torch.step_algebra(tape, module, optimizer)
            scaler.scale(loss(module, 0)).backward()
            scaler.unscale_(optimizer)
            if told:
                capture.norm(3.5, max_norm=1.0, epsilon=1e-8)
            # .data has no version that torch counts.
            module.first.weight.grad.data.mul_(0.5)
            if told:
                capture.clipped()
            scaler.step(optimizer)
        dump = Dump(tmp_path / str(step))
        assert dump.equal("clipped", {"first.weight": module.first.weight.grad})
        assert dump.has("clipped", "second.weight") == told
        norms = [(one["value"], one["max_norm"], one["epsilon"], one["of"]) for one in dump.declared["norms"]]
        assert norms == ([(3.5, 1.0, 1e-8, "unscaled")] if told else [])


def test_tied_frozen_and_forgotten_parameters_and_two_optimizers(tmp_path):
    module = model()
    module.again = nn.Linear(5, 5, bias=False)
    module.again.weight = module.second.weight
    module.extra = nn.Linear(4, 5)
    module.first.bias.requires_grad_(False)
    one = torch.optim.SGD([{"params": [module.first.weight]}, {"params": [module.first.bias], "lr": 0.5}], lr=0.1)
    two = torch.optim.SGD(module.second.parameters(), lr=0.2, momentum=0.9, nesterov=True)
    with recorder(tmp_path) as recording, recording.step(0) as tape:
        backtape.torch.step_algebra(tape, module, [one, two])
        loss(module, 0).backward()
        module.extra(batch(0)).sum().backward()
        reduced = copies(module.second, lambda weight: weight.grad)
        one.step()
        two.step()
    dump = Dump(tmp_path)
    assert dump.of("again.weight")["same_as"] == "second.weight" and not dump.has("after", "again.weight")
    assert dump.of("again.weight")["optimizer"] == 1
    places = {name: (dump.of(name)["optimizer"], dump.of(name)["group"]) for name in dump.declared["parameters"]}
    assert places["first.weight"] == (0, 0) and places["first.bias"] == (0, 1) and places["second.weight"] == (1, 0)
    assert places["extra.weight"] == (None, None)
    assert "no optimizer holds it" in dump.of("extra.weight")["absent"]["after"]
    assert dump.has("reduced", "extra.weight") and not dump.of("first.bias")["trainable"]
    assert "frozen" in dump.of("first.bias")["absent"]["grad"]
    assert dump.declared["optimizers"][1]["groups"][0]["nesterov"] is True
    assert dump.equal("reduced", {"second.weight": reduced["weight"]})
    assert dump.has("state_after.momentum_buffer", "second.weight")


def test_an_optimizer_of_copies_is_named_and_one_of_factors_has_them_recorded(tmp_path):
    module = model()
    copied = [one.detach() + 1 for one in module.first.parameters()]
    masters, factored = torch.optim.SGD(copied, lr=0.1), torch.optim.Adafactor(module.second.parameters())
    with recorder(tmp_path) as recording, recording.step(0) as tape:
        backtape.torch.step_algebra(tape, module, [masters, factored])
        loss(module, 0).backward()
        masters.step()
        factored.step()
    dump = Dump(tmp_path)
    assert "copies that they keep are not seen" in dump.of("first.weight")["absent"]["master_before"]
    state = factored.state[module.second.weight]
    assert np.array_equal(dump.tensor("state_after.row_var", "second.weight"), state["row_var"].numpy())


def test_an_optimizer_that_holds_a_layer_that_was_replaced_says_so(tmp_path):
    module = model()
    optimizer = adamw(module)
    module.second = nn.Linear(5, 5, bias=False)
    with recorder(tmp_path) as recording, recording.step(0) as tape:
        backtape.torch.step_algebra(tape, module, optimizer)
        loss(module, 0).backward()
        optimizer.step()
    dump = Dump(tmp_path)
    assert dump.declared["optimizers"][0]["foreign"] == [{"shape": [5, 5], "grad": False}]
    assert dump.of("second.weight")["optimizer"] is None
    for stage in ("before", "after"):
        assert dump.equal(stage, {"second.weight": module.second.weight.detach()})
    assert "no optimizer holds it" in dump.of("second.weight")["absent"]["state"]


def functions():
    """What step_algebra replaces for the time of a tape."""
    clip = nn.utils.clip_grad
    cells = [one.__closure__[0].cell_contents for one in (clip._get_total_norm, clip.clip_grad_value_)]
    return [torch.autograd._engine_run_backward, vars(torch.amp.GradScaler)["unscale_"], *cells]


def hooks(module, optimizer):
    of_tensors = [one._backward_hooks for one in module.parameters() if one._backward_hooks]
    return of_tensors, dict(optimizer._optimizer_step_pre_hooks), dict(optimizer._optimizer_step_post_hooks)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exception_in_the_body_goes_on_and_everything_is_undone(tmp_path, strict):
    module = model()
    optimizer = adamw(module)
    before = functions()
    with recorder(tmp_path, strict=strict) as recording:
        with pytest.raises(KeyError, match="job"), recording.step(0) as tape:
            backtape.torch.step_algebra(tape, module, optimizer)
            assert functions() != before and hooks(module, optimizer) != ([], {}, {})
            loss(module, 0).backward()
            raise KeyError("job")
        assert functions() == before and hooks(module, optimizer) == ([], {}, {})
        with recording.step(1) as tape:
            backtape.torch.step_algebra(tape, module, optimizer)
            loss(module, 0).backward()
            optimizer.step()
    assert functions() == before and hooks(module, optimizer) == ([], {}, {})
    dump = Dump(tmp_path, 0)
    assert dump.of("first.weight")["optimizer"] == 0
    assert "ended early with KeyError" in dump.of("first.weight")["absent"]["reduced"]
    assert dump.has("grad") and Dump(tmp_path, 1).has("after")


def test_outside_a_recorded_step_nothing_is_set(tmp_path):
    module = model()
    optimizer, before = adamw(module), functions()
    with recorder(tmp_path, steps="5") as recording, recording.step(0) as tape:
        capture = backtape.torch.step_algebra(tape, module, optimizer)
        capture.norm(1.0)
        capture.reduced()
        capture.clipped()
        assert functions() == before and hooks(module, optimizer) == ([], {}, {})


def test_what_cannot_be_recorded_is_kept_from_the_job_and_said(tmp_path, caplog):
    module = model()
    optimizer = adamw(module)
    wrong = {"*": [{"axis": "data", "op": "max"}]}
    divided = {"*": [{"axis": "data", "op": "mean", "divisor": 60}]}
    with recorder(tmp_path, strict=False) as recording, recording.step(0) as tape:
        backtape.torch.step_algebra(tape, module, optimizer, reduce=wrong)
        backtape.torch.step_algebra(tape, module, optimizer, reduce=divided)
        backtape.torch.step_algebra(tape, module, [object(), optimizer])
        backtape.torch.step_algebra(tape, module, optimizer)
        loss(module, 0).backward()
        optimizer.step()
    assert "an entry is an axis, op 'sum' or 'mean'" in caplog.text
    assert "object is no torch.optim.Optimizer" in caplog.text
    reasons = " ".join(reason for name, reason in reading.omissions(tmp_path / "run") if name == "step")
    is_sum = "a divisor is a number other than 0 that a 'sum' is divided by"
    for said in ("op 'sum' or 'mean'", is_sum, "object is no torch.optim", "was called before on this tape"):
        assert said in reasons
    dump = Dump(tmp_path)
    assert dump.has("grad") and dump.has("after") and dump.of("first.bias")["optimizer"] == 0
    with recorder(tmp_path / "alone", strict=False) as recording, recording.step(0) as tape:
        backtape.torch.step_algebra(tape, module, object())
        loss(module, 0).backward()
    assert "has none as .optimizer" in Dump(tmp_path / "alone").of("first.bias")["absent"]["after"]


def test_reductions_by_hand_globs_of_names_and_models_with_equal_names(tmp_path):
    one, two = model(1), model(2)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
    summed = {"axis": "tp", "op": "sum", "ranks": [0], "dtype": torch.bfloat16, "divisor": 60}
    by_hand = {"*bias": [], "*": [summed]}
    with recorder(tmp_path) as recording, recording.step(0) as tape:
        backtape.torch.step_algebra(tape, [one, two], optimizer, names="*first*", reduce=by_hand)
        (loss(one, 0) + loss(two, 0)).backward()
        loss(two, 1).backward()
        clip_grad_norm_(two.parameters(), 1.0)
        optimizer.step()
    dump = Dump(tmp_path)
    assert [*dump.declared["parameters"]] == [
        f"model{i}.first.{name}" for i in range(2) for name in ("weight", "bias")
    ]
    assert dump.of("model0.first.weight")["reduce"] == [
        {"axis": "tp", "op": "sum", "ranks": [0], "dtype": "bfloat16", "divisor": 60.0}
    ]
    assert dump.of("model1.first.bias")["reduce"] == []
    assert dump.microbatches("model0.first.weight") == [0] and dump.microbatches("model1.first.weight") == [0, 1]
    assert dump.declared["norms"][0]["parameters"][-1] == "model1.second.weight"
    assert not any("second" in name for name in dump.names)


@pytest.mark.parametrize("told", [False, True])
def test_of_plain_modules_on_several_ranks_the_job_says_how_gradients_are_reduced(tmp_path, told):
    settings = {"world_size": 2, "mesh": {"data": 2}}
    recorders = [recorder(tmp_path, rank=rank, **settings) for rank in range(2)]
    reduce = {"*": [{"axis": "data", "op": "mean"}]} if told else None
    for recording in recorders:
        module = model()
        with recording.step(0) as tape:
            backtape.torch.step_algebra(tape, module, adamw(module), reduce=reduce)
            loss(module, 0).backward()
    for recording in reversed(recorders):
        recording.close()
    weight = Dump(tmp_path).of("first.weight")
    assert ("say so in reduce=" in weight["absent"].get("reduce", "")) == (not told)
    entry = {"axis": "data", "op": "mean", "ranks": [0, 1], "dtype": "float32"}
    assert weight["reduce"] == ([entry] if told else [])


class Doubled(torch.optim.SGD):
    """An optimizer that calls the step of its base class, and counts in its state."""

    def step(self, closure=None):
        for group in self.param_groups:
            for one in group["params"]:
                self.state[one]["calls"] = self.state[one].get("calls", 0) + 1
        return super().step(closure)


def test_a_step_within_a_step_counts_once_and_gradients_of_a_closure_are_recorded(tmp_path):
    module = model()
    optimizer = Doubled(module.parameters(), lr=0.1)
    with recorder(tmp_path) as recording, recording.step(0) as tape:
        backtape.torch.step_algebra(tape, module, optimizer)
        before = copies(module)

        def closure():
            loss(module, 0).backward()
            return 0.0

        optimizer.step(closure)
    dump = Dump(tmp_path)
    assert dump.equal("before", before) and dump.equal("after", copies(module))
    assert dump.of("first.weight")["scalars"] == {"calls": [None, 1]}
    assert dump.declared["optimizers"][0]["steps"] == 1
    assert dump.equal("reduced", copies(module, lambda one: one.grad)) and dump.microbatches("first.bias") == [0]


def test_an_optimizer_that_calls_its_closure_again_records_the_first_gradient_and_says_so(tmp_path):
    module = model()
    optimizer = torch.optim.LBFGS(module.parameters(), max_iter=3)
    gradients = []

    def closure():
        optimizer.zero_grad()
        value = loss(module, 0)
        value.backward()
        gradients.append(copies(module, lambda one: one.grad))
        return value

    with recorder(tmp_path) as recording, recording.step(0) as tape:
        backtape.torch.step_algebra(tape, module, optimizer)
        optimizer.step(closure=closure)
    dump = Dump(tmp_path)
    assert len(gradients) > 1 and dump.equal("reduced", gradients[0]) and dump.equal("after", copies(module))
    assert "called its closure several times" in dump.of("first.weight")["absent"]["grad"]
    assert "it is a list" in dump.of("first.weight")["absent"]["state.old_dirs"]


def test_compiled_code_is_compiled_whole_and_gives_the_same_bits(tmp_path):
    """Goal: a job that forbids breaks of the graph runs, compiled models are recorded, and a clip in
    compiled code can be told. Method: the same two steps with and without a tape."""

    def trained(directory, steps):
        module = model()
        optimizer = adamw(module)
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        clip = torch.compile(clip_grad_norm_, backend="aot_eager", fullgraph=True)
        with recorder(directory, steps=steps) as recording:
            for step in range(2):
                with recording.step(step) as tape:
                    capture = backtape.torch.step_algebra(tape, compiled, optimizer)
                    for i in range(2):
                        loss(compiled, i).backward()
                    capture.reduced()
                    clip([*module.parameters()], 0.01)
                    capture.clipped()
                    optimizer.step()
                optimizer.zero_grad()
        return copies(module)

    plain, recorded = trained(tmp_path / "plain", "none"), trained(tmp_path, "0-1")
    assert all(torch.equal(plain[name], recorded[name]) for name in plain)
    dump = Dump(tmp_path, 1)
    assert dump.microbatches("first.weight") == [0, 1] and dump.equal("after", recorded)
    assert dump.declared["norms"] == [] and Dump(tmp_path, 0).declared["norms"] == []
    assert (dump.tensor("clipped", "first.weight") != dump.tensor("reduced", "first.weight")).any()
