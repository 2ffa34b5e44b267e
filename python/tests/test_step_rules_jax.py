"""A transformation that no rule is known of, judged by a formula of the job (`rules=`)."""

import jax
import jax.numpy as jnp
import optax
import pytest
from test_step_algebra_jax import taken
from test_step_replay import changed, first, replayed, stepped, with_updates

import backtape
from backtape.rule import maximum, sqrt, where


def belief(lr, b1, b2, eps):
    """AdaBelief (Zhuang et al. 2020), held back where the gradient is against the moment."""
    inner = optax.adabelief(lr, b1=b1, b2=b2, eps=eps, eps_root=0.0)

    def update(updates, state, params=None):
        made, state = inner.update(updates, state, params)
        with_it = lambda g, u: jnp.where(g * u <= 0, u, 0.0)
        return jax.tree.map(with_it, updates, made), state

    return optax.GradientTransformation(inner.init, update)


def mine(param, grad, state, hyper):
    step = state["count"] + 1
    mu = hyper.b1 * state.mu + (1 - hyper.b1) * grad
    nu = hyper.b2 * state.nu + (1 - hyper.b2) * (grad - mu) ** 2
    root = sqrt(maximum(nu, 0) / (1 - hyper.b2**step)) + hyper.eps
    moved = hyper.lr * (mu / (1 - hyper.b1**step)) / root
    return param - where(grad * mu >= 0, moved, 0), {"mu": mu, "nu": nu, "count": step}


SETTINGS = {"lr": 1e-2, "b1": 0.9, "b2": 0.99, "eps": 1e-3}
DECLARED = {"optimizer": {"name": "belief"} | SETTINGS, "rules": {"belief": mine}}


def run(directory, step, **options):
    return replayed(directory, step, **DECLARED | options)


@pytest.mark.parametrize("steps", [1, 4])
def test_a_right_step_agrees_by_the_declared_formula(tmp_path, steps):
    report = run(tmp_path / "run", taken(belief(**SETTINGS), steps=steps))
    stages = {stage["stage"]: stage for stage in report.json["algebra"]["stages"]}
    assert report.verdict == "agreed", str(report)
    assert set(stages) == {"accumulate", "norm", "clip", "state", "update"}
    assert all(stage["agreed"] and not stage["unchecked"] for stage in stages.values()), str(report)
    (told,) = report.json["algebra"]["rules"]
    assert told["optimizer"] == "belief" and "test_step_rules_jax.mine" in told["rule"]


def test_a_step_that_is_not_the_formula_diverges_where_it_is_not(tmp_path):
    transform = belief(**SETTINGS)
    step = taken(transform, steps=3)
    other = stepped(step, belief(**SETTINGS | {"b2": 0.999}), "clipped")
    assert first(run(tmp_path / "state", other))[:2] == ("state", "setting-other")
    eps = stepped(step, belief(**SETTINGS | {"eps": 2e-3}), "clipped")
    assert first(run(tmp_path / "update", eps))[:2] == ("update", None)
    faster = with_updates(step, lambda u: 1.5 * u)
    assert first(run(tmp_path / "rate", faster))[:2] == ("update", "lr-scaled")
    unclipped = stepped(step, transform, "grads")
    report = run(tmp_path / "gradient", unclipped)
    assert first(report)[:2] == ("state", "update-from-other-gradient")
    gone = changed(step, "new_params", lambda p: p.at[(0,) * p.ndim].set(jnp.nan))
    assert first(run(tmp_path / "nan", gone))[0] == "update"


def test_a_known_rule_may_stand_for_a_name_of_ones_own(tmp_path):
    declared = {"name": "mine"} | SETTINGS
    step = taken(optax.adam(1e-2, b1=0.9, b2=0.99, eps=1e-3), steps=2)
    report = replayed(tmp_path / "run", step, optimizer=declared, rules={"mine": "adam"})
    assert report.verdict == "agreed", str(report)
    assert report.json["algebra"]["rules"] == [
        {"optimizer": "mine", "rule": "that of adam, as the job declares"}
    ]


def test_a_rule_that_is_no_formula_is_told_and_the_rest_is_recorded(tmp_path):
    step = taken(belief(**SETTINGS))
    wrong = lambda param, grad, state, hyper: (jnp.sqrt(grad), {})
    said = DECLARED | {"rules": {"belief": wrong}}
    with backtape.Recorder(tmp_path / "run") as recorder, recorder.step(0) as tape:
        backtape.jax.step_algebra(tape, **step, **said)
    report = backtape.replay(tmp_path / "run", step=0, compare=["step"])
    unchecked = report.json["algebra"]["unchecked"]
    (told,) = {one["why"] for one in unchecked if one["stage"] == "update"}
    assert "of belief cannot be used" in told and "functions of backtape.rule" in told, told
    with pytest.raises(backtape.RecorderError, match="functions of backtape.rule"):
        replayed(tmp_path / "strict", step, **said)
