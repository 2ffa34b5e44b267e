"""Optimizers that no rule is known of, judged by a formula that the job declares (`rules=`)."""

import json
from pathlib import Path

import pytest
import torch
from own_optimizers import AdamG, Bounded, Model, Tiger, adam_g, bounded, tiger
from processes import free_port, run_ranks

import backtape
import backtape.torch
from backtape.rule_declared import formula_of

ADAM = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8}
GOLDEN = {"lr": 10.0, "betas": (0.95, 0.999, 0.95), "eps": 1e-8, "p": 0.2, "q": 0.24}
RULES = {
    "AdamG": (AdamG, adam_g, GOLDEN),
    "Tiger": (Tiger, tiger, {"lr": 1e-3, "beta": 0.9, "weight_decay": 0.1}),
    "Bounded": (Bounded, bounded, ADAM | {"soft": False}),
    "Bounded softly": (Bounded, bounded, ADAM | {"soft": True}),
}
FAULTS = [
    ("AdamG", "golden-missing", "state"),
    ("AdamG", "correction", "update"),
    ("Tiger", "weight-missing", "state"),
    ("Tiger", "sign-missing", "update"),
    ("Bounded", "second-doubled", "state"),
    ("Bounded", "unbounded", "update"),
    ("Bounded softly", "unbounded", "update"),
]


def trained(
    directory, name, fault=None, dtype=torch.float32, steps=3, change=None, strict=True, **said
):
    """Records the last of some steps; `change` may alter the optimizer's step before it."""
    kind, own, settings = RULES[name]
    torch.manual_seed(0)
    module = Model().to(dtype)
    optimizer = kind(module.parameters(), **settings)
    said = said or {"rules": {kind.__name__: own}}
    with backtape.Recorder(dir=directory, strict=strict, steps=str(steps - 1)) as recorder:
        for step in range(steps):
            optimizer.fault = fault if step == steps - 1 else None
            if step == steps - 1 and change is not None:
                change(module, optimizer)
            with recorder.step(step) as tape:
                optimizer.zero_grad()
                backtape.torch.step_algebra(tape, module, optimizer, **said)
                module(torch.randn(32, 24, dtype=dtype)).square().mean().backward()
                optimizer.step()
    return backtape.replay(directory, step=steps - 1, compare=["step"])


def stages_of(report):
    return {stage["stage"]: stage for stage in report.json["algebra"]["stages"]}


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RULES)
def test_a_right_step_agrees_by_the_declared_formula(tmp_path, name, dtype, steps):
    report = trained(tmp_path / "run", name, dtype=dtype, steps=steps)
    stages = stages_of(report)
    assert report.verdict == "agreed", str(report)
    assert not any(stages[stage]["unchecked"] for stage in ("state", "update")), str(report)
    (told,) = report.json["algebra"]["rules"]
    assert told["optimizer"] == RULES[name][0].__name__
    assert "formula that the job declares" in told["rule"]
    assert "the formula that the job declares" in " ".join(str(report).split())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name, fault, stage", FAULTS)
def test_a_faulty_step_diverges_at_its_stage(tmp_path, name, fault, stage, dtype):
    report = trained(tmp_path / "run", name, fault, dtype=dtype)
    assert report.verdict == "diverged", str(report)
    groups = [group for group in report.json["algebra"]["diverged"] if group["stage"] == stage]
    assert report.json["algebra"]["diverged"][0]["stage"] == stage, str(report)
    assert sum(len(group["parameters"]) for group in groups) == 4, str(report)
    # In few bits a change may be lost in rounding.
    causes = {group["reading"]["cause"] for group in groups if group["reading"]}
    causes -= {"unknown"}  # a moment that is told as another mixture of what it is made of
    assert causes <= {"update-is-no-op"} and (dtype != torch.float32 or not causes), str(report)


def doubled_rate(module, optimizer):
    """The learning rate doubles where the declaration does not see it."""
    update = optimizer.update

    def twice(parameter, gradient, state, group):
        update(parameter, gradient, state, group | {"lr": 2 * group["lr"]})

    optimizer.update = twice


def forgotten(module, optimizer):
    for state in optimizer.state.values():
        for entry in state.values():
            if entry.ndim:
                entry.zero_()


def reset(module, optimizer):
    """The state is dropped inside of the step."""
    update = optimizer.update

    def anew(parameter, gradient, state, group):
        forgotten(module, optimizer) if parameter is group["params"][0] else None
        update(parameter, gradient, state, group)

    optimizer.update = anew


def still(module, optimizer):
    """The step is that of copies, which are not written back."""
    update = optimizer.update
    optimizer.update = lambda parameter, *rest: update(parameter.clone(), *rest)


def coupled(module, optimizer):
    """The weight decay is added to the gradient."""
    update = optimizer.update

    def added(parameter, gradient, state, group):
        update(parameter, gradient + group["weight_decay"] * parameter, state, group | {"weight_decay": 0.0})

    optimizer.update = added


def counting_anew(module, optimizer):
    """The step that the bias correction takes is the first."""
    counted = optimizer.counted
    optimizer.counted = lambda state: counted(state) * 0 + 1


@pytest.mark.parametrize(
    "name, change, stage, cause",
    [
        ("AdamG", doubled_rate, "update", "lr-scaled"),
        ("Tiger", reset, "state", "state-reset"),
        ("Tiger", coupled, "state", "decay-coupled"),
        ("Bounded", still, "update", "update-is-no-op"),
        ("Bounded", counting_anew, "update", "step-counter"),
    ],
)
def test_a_cause_that_any_rule_may_have_is_named(tmp_path, name, change, stage, cause):
    report = trained(tmp_path / "run", name, change=change)
    first = report.json["algebra"]["diverged"][0]
    reading = first["reading"] and first["reading"]["cause"]
    assert (first["stage"], reading) == (stage, cause), str(report)


@pytest.mark.parametrize("fault", [None, "weight-missing"])
def test_groups_that_have_a_formula_are_judged_beside_those_that_have_none(tmp_path, fault):
    """One class for matrices and vectors, of which the rule of matrices is no formula."""

    def of_vectors(param, grad, state, hyper):
        if hyper["matrix"]:
            raise NotImplementedError("a norm of the whole matrix")
        return tiger(param, grad, state, hyper)

    torch.manual_seed(0)
    module, settings = Model(), RULES["Tiger"][2]
    by_rank = lambda dim: [one for one in module.parameters() if one.ndim == dim]
    groups = [{"params": by_rank(2), "matrix": True}, {"params": by_rank(1), "matrix": False}]
    optimizer = Tiger(groups, **settings)
    optimizer.fault = fault
    with backtape.Recorder(dir=tmp_path / "run", strict=False, steps="0") as recorder:
        with recorder.step(0) as tape:
            backtape.torch.step_algebra(tape, module, optimizer, rules={"Tiger": of_vectors})
            module(torch.randn(32, 24)).square().mean().backward()
            optimizer.step()
    report = backtape.replay(tmp_path / "run", step=0, compare=["step"])
    stages = stages_of(report)
    assert "NotImplementedError: a norm of the whole matrix" in " ".join(str(report).split()), str(report)
    assert stages["update"]["unchecked"] == len(by_rank(2)), str(report)
    if fault is None:
        assert report.verdict == "incomplete", str(report)
        assert stages["state"]["agreed"] == stages["update"]["agreed"] == len(by_rank(1)), str(report)
    else:
        assert report.verdict == "diverged" and stages["state"]["diverged"] == len(by_rank(1)), str(report)


def test_an_optimizer_that_is_declared_to_be_a_known_one_is_judged_as_that(tmp_path):
    class Renamed(torch.optim.AdamW):
        pass

    def run(directory, said, fault=False):
        torch.manual_seed(0)
        module = Model()
        optimizer = Renamed(module.parameters(), lr=1e-2)
        with backtape.Recorder(dir=directory, strict=True, steps="0") as recorder:
            with recorder.step(0) as tape:
                backtape.torch.step_algebra(tape, module, optimizer, rules={"Renamed": said})
                module(torch.randn(32, 24)).square().mean().backward()
                optimizer.step()
        return backtape.replay(directory, step=0, compare=["step"])

    report = run(tmp_path / "right", "AdamW")
    assert report.verdict == "agreed", str(report)
    assert report.json["algebra"]["rules"] == [
        {"optimizer": "Renamed", "rule": "that of AdamW, as the job declares"}
    ]
    other = " ".join(str(run(tmp_path / "other", "SGD")).split())
    assert "decoupled_weight_decay is on, and the rule of SGD" in other
    unknown = " ".join(str(run(tmp_path / "unknown", "Sgdw")).split())
    assert "Renamed is judged as Sgdw, and no rule is known of Sgdw" in unknown


UNUSABLE = {
    "branches": (
        lambda param, grad, state, hyper: (param if state.step > 3 else grad, {}),
        "it branches on state['step'] > 3, whose value is known only when the step is judged",
    ),
    "unknown hyper": (
        lambda param, grad, state, hyper: (param - hyper.rate * grad, {}),
        "it takes the hyper-parameter 'rate', and the group has lr, beta, weight_decay",
    ),
    "unknown state": (
        lambda param, grad, state, hyper: (param - hyper.lr * state.momentum, {}),
        "it takes or gives momentum of the optimizer's state, of which exp_avg was recorded",
    ),
    "raises": (
        lambda param, grad, state, hyper: 1 / 0,
        "ZeroDivisionError",
    ),
    "functions of torch": (
        lambda param, grad, state, hyper: (torch.sqrt(grad), {}),
        "ordinary operators and the functions of backtape.rule",
    ),
    "too long": (
        lambda param, grad, state, hyper: (sum((grad * i for i in range(2, 900)), param), {}),
        "it does more than 512 operations",
    ),
    "no pair": (lambda param, grad, state, hyper: param, "it returns no pair"),
    "a power": (
        lambda param, grad, state, hyper: (param**grad, {}),
        "an exponent is a number",
    ),
}


@pytest.mark.parametrize("case", UNUSABLE)
def test_a_rule_that_is_no_formula_is_one_sentence_in_the_dump_and_costs_the_job_nothing(
    tmp_path, case
):
    function, sentence = UNUSABLE[case]
    report = trained(tmp_path / "run", "Tiger", strict=False, rules={"Tiger": function})
    update = stages_of(report)["update"]
    assert (update["agreed"], update["diverged"], update["unchecked"]) == (0, 0, 4), str(report)
    unchecked = report.json["algebra"]["unchecked"]
    (told,) = {one["why"] for one in unchecked if one["stage"] == "update"}
    assert "the rule that the job declares of Tiger cannot be used" in told, told
    assert sentence in told, told
    if case not in ("unknown state",):  # which a replay alone knows
        with pytest.raises(backtape.RecorderError, match="rule of Tiger"):
            trained(tmp_path / "strict", "Tiger", rules={"Tiger": function})


def test_rules_that_are_none_are_refused(tmp_path):
    with pytest.raises(backtape.RecorderError, match="rules= has a int for Tiger"):
        trained(tmp_path / "run", "Tiger", rules={"Tiger": 3})


def test_a_formula_is_plain_data_of_the_operations_once_each():
    settings = {"lr": 0.1, "betas": [0.9, 0.99], "maximize": False, "inf": "inf"}

    def sgd(param, grad, state, hyper):
        assert hyper.lr > 0 and hyper.betas[0] < 1 and "nesterov" not in hyper and hyper.inf > 9
        assert hyper.get("dampening", 0) == 0 and not hyper.maximize and "m" in state
        moved = hyper.lr * grad * 1 + 0
        return param - moved, {"m": hyper.lr * grad}

    formula = formula_of(sgd, settings)
    assert formula == json.loads(json.dumps(formula))
    listed = [node for node in formula["nodes"] if node[0] not in ("hyper", "number")]
    moved = formula["state"]["m"]
    assert listed == [["param"], ["grad"], ["mul", 2, 1], ["sub", 0, moved]]
    assert formula["nodes"][moved] == ["mul", 2, 1] and formula["param"] == moved + 1


@pytest.mark.parametrize("fault, verdict", [("-", "agreed"), ("sign-missing", "diverged")])
def test_the_shards_of_several_ranks_are_judged_by_the_formula(tmp_path, fault, verdict):
    program = Path(__file__).with_name("step_rules_ranks.py")
    run_ranks(program, 2, free_port(), tmp_path, fault)
    report = backtape.replay(tmp_path / "run", step=1, compare=["step"])
    assert report.verdict == verdict, str(report)
    stages = stages_of(report)
    assert not any(stages[stage]["unchecked"] for stage in ("state", "update")), str(report)
    for group in report.json["algebra"]["diverged"]:
        assert (group["stage"], group["ranks"]) == ("update", [1]), str(report)
