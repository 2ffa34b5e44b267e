"""Optimizers of optax whose rules take norms and products of whole matrices: a right step agrees, and a
fault in one is named."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import muon
from optax.contrib._muon import orthogonalize_via_newton_schulz
from test_step_algebra_jax import taken
from test_step_replay import changed, first, replayed, with_updates

MUON = [
    {"names": "*kernel", "name": "muon", "lr": 0.02, "beta": 0.95, "weight_decay": 0.01},
    {"names": "*", "name": "nadamw", "lr": 0.02, "b1": 0.9, "b2": 0.999, "eps": 1e-8},
]
LAMB = {"name": "lamb", "lr": 0.01, "weight_decay": 0.01}
RULES = {
    "lamb": (optax.lamb(0.01, weight_decay=0.01), LAMB),
    "adafactor of rows and columns": (
        optax.adafactor(0.01, min_dim_size_to_factor=4), {"name": "adafactor", "lr": 0.01},
    ),
    "adafactor": (
        optax.adafactor(0.01, weight_decay_rate=1e-3, multiply_by_parameter_scale=False),
        {"name": "adafactor", "lr": 0.01, "weight_decay": 1e-3, "multiply_by_parameter_scale": False},
    ),
    "muon": (muon(0.02, weight_decay=0.01), MUON),
    "muon without Nesterov": (
        muon(0.02, nesterov=False, consistent_rms=0.2),
        [
            MUON[0] | {"nesterov": False, "consistent_rms": 0.2, "weight_decay": 0.0},
            MUON[1] | {"name": "adamw"},
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("steps", [1, 4])
@pytest.mark.parametrize("rule", RULES)
def test_a_right_step_agrees_at_every_stage(tmp_path, rule, steps):
    transform, declared = RULES[rule]
    report = replayed(tmp_path / "run", taken(transform, steps=steps), optimizer=declared)
    stages = {stage["stage"]: stage for stage in report.json["algebra"]["stages"]}
    assert report.verdict == "agreed", str(report)
    assert set(stages) == {"accumulate", "norm", "clip", "state", "update"}
    assert all(stage["agreed"] and not stage["unchecked"] for stage in stages.values()), str(report)


@pytest.mark.parametrize("rule", ["lamb", "adafactor of rows and columns", "muon"])
def test_another_learning_rate_is_seen(tmp_path, rule):
    transform, declared = RULES[rule]
    if rule == "lamb":
        transform, declared = optax.lamb(0.01), LAMB | {"weight_decay": 0.0}
    if rule == "muon":
        transform, declared = muon(0.02), [MUON[0] | {"weight_decay": 0.0}, MUON[1]]
    step = with_updates(taken(transform, steps=3), lambda u: 1.5 * u)
    report = replayed(tmp_path / "run", step, optimizer=declared)
    group = report.json["algebra"]["diverged"][0]
    assert first(report)[:2] == ("update", "lr-scaled"), str(report)
    assert group["factor"] == pytest.approx(1.5, rel=1e-3)


def test_a_gradient_that_is_made_orthogonal_in_place_of_the_momentum_is_named(tmp_path):
    """https://github.com/google-deepmind/optax/pull/1170: Muon orthogonalised the raw updates."""
    step = taken(muon(0.02), steps=3)
    coefficients = jnp.asarray([3.4445, -4.7750, 2.0315])

    def wrong(path, update, gradient):
        if "bias" in jax.tree_util.keystr(path):
            return update
        return -0.02 * orthogonalize_via_newton_schulz(gradient, coefficients)

    updates = jax.tree_util.tree_map_with_path(wrong, step["updates"], step["clipped"])
    step = step | {"updates": updates, "new_params": optax.apply_updates(step["params"], updates)}
    report = replayed(tmp_path / "run", step, optimizer=[MUON[0] | {"weight_decay": 0.0}, MUON[1]])
    assert first(report)[:2] == ("update", "orthogonalised-wrong-tensor"), str(report)
    assert first(report)[2] == ["params.layer_0.kernel", "params.layer_1.kernel"]


def test_a_mean_of_rows_that_is_off_is_seen(tmp_path):
    transform, declared = RULES["adafactor of rows and columns"]
    step = taken(transform, steps=3)

    def off(path, leaf):
        is_row = "v_row" in jax.tree_util.keystr(path) and np.size(leaf) > 1
        return leaf * 1.001 if is_row else leaf

    state = jax.tree_util.tree_map_with_path(off, step["new_opt_state"])
    report = replayed(tmp_path / "run", step | {"new_opt_state": state}, optimizer=declared)
    assert first(report)[0] == "state", str(report)


def test_a_matrix_that_is_no_number_diverges(tmp_path):
    transform, declared = RULES["muon"]
    step = changed(taken(transform, steps=2), "new_params", lambda p: p.at[(0,) * p.ndim].set(jnp.nan))
    report = replayed(tmp_path / "run", step, optimizer=declared)
    assert first(report)[0] == "update" and "not finite" in str(report)
