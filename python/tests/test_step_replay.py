"""The replay of a step that jax recorded: a right one agrees, and each fault is named."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_step_algebra_jax import ADAMW, names_of, record, taken

import backtape

SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True}
RULES = {
    "adamw": (optax.adamw(1e-3, weight_decay=0.01), ADAMW),
    "sgd": (optax.sgd(0.1, momentum=0.9, nesterov=True), SGD),
}


def replayed(directory, step, **options):
    """The report on a step of one rank."""
    options = {"optimizer": ADAMW, "max_norm": 0.05, "accumulation": "mean"} | options
    record(directory, step, **options)
    return backtape.replay(directory, step=0, compare=["step"])


def first(report):
    """The first stage that diverges, its cause, and the parameters."""
    group = report.json["algebra"]["diverged"][0]
    return group["stage"], group["reading"] and group["reading"]["cause"], group["parameters"]


def changed(step, key, change):
    """A step in which one of its trees is another."""
    return step | {key: jax.tree.map(change, step[key])}


def stepped(step, transform, gradient):
    """A step whose optimizer took another gradient."""
    updates, state = transform.update(step[gradient], step["opt_state"], step["params"])
    params = optax.apply_updates(step["params"], updates)
    return step | {"updates": updates, "new_opt_state": state, "new_params": params}


@pytest.mark.parametrize("rule", RULES)
def test_a_right_step_agrees_at_every_stage(tmp_path, rule):
    transform, declared = RULES[rule]
    report = replayed(tmp_path / "run", taken(transform), optimizer=declared)
    stages = {stage["stage"]: stage for stage in report.json["algebra"]["stages"]}
    assert report.verdict == "agreed", str(report)
    assert set(stages) == {"accumulate", "norm", "clip", "state", "update"}
    assert all(stage["agreed"] and not stage["unchecked"] for stage in stages.values()), stages
    assert "AGREED on 5 stages of 4 parameters" in str(report)


@pytest.mark.parametrize("rule", RULES)
def test_a_sampled_step_agrees_at_every_stage(tmp_path, rule):
    transform, declared = RULES[rule]
    step = taken(transform)
    report = replayed(tmp_path / "run", step, optimizer=declared, sample=24)
    stages = {stage["stage"]: stage for stage in report.json["algebra"]["stages"]}
    assert report.verdict == "agreed" and report.json["dump"]["proved"], str(report)
    assert all(stage["agreed"] and not stage["unchecked"] for stage in stages.values()), stages
    sampled = report.json["algebra"]["sampled"]
    assert (sampled["parameters"], sampled["elements"], sampled["of"]) == (2, 48, 128)


def test_a_fault_in_a_sampled_step_is_named(tmp_path):
    transform = optax.adam(1e-3)
    step = scaled_gradient(taken(transform), transform)
    declared = {"name": "adam", "lr": 1e-3}
    report = replayed(tmp_path / "run", step, optimizer=declared, sample=24)
    parameters = ["params.layer_1.bias", "params.layer_1.kernel"]
    assert first(report) == ("accumulate", "gradient-scaled", parameters), str(report)
    gap = report.json["algebra"]["norm"]
    assert gap["estimated"] and gap["captured"] == pytest.approx(gap["reported"], rel=1e-5)


def scaled_gradient(step, transform):
    """The gradient of one layer is three times what it should be, before the norm."""
    grads = step["grads"]
    layers = grads["params"]
    thrice = jax.tree.map(lambda g: 3 * g, layers["layer_1"])
    step = step | {"grads": {"params": layers | {"layer_1": thrice}}}
    norm = optax.tree.norm(step["grads"])
    clipped = jax.tree.map(lambda g: g * jnp.minimum(1, 0.05 / norm), step["grads"])
    return stepped(step | {"norm": norm, "clipped": clipped}, transform, "clipped")


FAULTS = {
    "gradient-scaled": ("accumulate", scaled_gradient),
    "clip-twice": (
        "clip",
        lambda step, transform: stepped(
            changed(step, "clipped", lambda g: g * (0.05 / step["norm"])), transform, "clipped"
        ),
    ),
    "clip-recorded-not-applied": (
        "clip", lambda step, transform: stepped(step | {"clipped": step["grads"]}, transform, "grads"),
    ),
    "norm-misses-group": (
        "norm",
        lambda step, transform: step
        | {"norm": optax.tree.norm([leaf for leaf in jax.tree.leaves(step["grads"]) if leaf.ndim > 1])},
    ),
    "update-from-other-gradient": ("state", lambda step, transform: stepped(step, transform, "grads")),
    "state-reset": (
        "state",
        lambda step, transform: step
        | {
            key: value
            for key, value in stepped(
                step | {"opt_state": transform.init(step["params"])}, transform, "clipped"
            ).items()
            if key != "opt_state"
        },
    ),
    "lr-scaled": ("update", lambda step, transform: with_updates(step, lambda u: 4 * u)),
    "update-ascends": ("update", lambda step, transform: with_updates(step, lambda u: -u)),
}  # fmt: skip


def with_updates(step, change):
    updates = jax.tree.map(change, step["updates"])
    return step | {"updates": updates, "new_params": optax.apply_updates(step["params"], updates)}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_at_its_stage(tmp_path, fault):
    # Without weight decay a change of another learning rate is a multiple of the right one.
    transform = optax.adam(1e-3)
    stage, plant = FAULTS[fault]
    step = plant(taken(transform, steps=3), transform)
    if fault.startswith("clip") or fault == "norm-misses-group":
        step["norm"] = float(step["norm"])
    report = replayed(tmp_path / "run", step, optimizer={"name": "adam", "lr": 1e-3})
    assert report.verdict == "diverged", str(report)
    assert first(report)[:2] == (stage, fault), str(report)


def test_the_parameters_of_a_fault_and_the_share_of_the_norm_are_told(tmp_path):
    transform = optax.adam(1e-3)
    step = scaled_gradient(taken(transform), transform)
    report = replayed(tmp_path / "run", step, optimizer={"name": "adam", "lr": 1e-3})
    _, _, parameters = first(report)
    assert parameters == ["params.layer_1.bias", "params.layer_1.kernel"]
    gap = report.json["algebra"]["norm"]
    right = optax.tree.norm(taken(transform)["grads"])
    assert gap["right"] == pytest.approx(float(right), rel=1e-5)
    assert gap["shares"] == [["params.layer_1.* (2 parameters)", 1.0]]
    assert "captured = 3.000000" in str(report)


def test_wrong_sums_that_cancel_in_the_norm_have_no_shares_of_what_rounding_leaves(tmp_path):
    """Two layers hold each other's gradients, so the norm is right but for its rounding."""
    transform = optax.adam(1e-3)
    step = taken(transform)
    layers = step["grads"]["params"]
    swapped = {"params": layers | {"layer_0": layers["layer_1"], "layer_1": layers["layer_0"]}}
    clipped = jax.tree.map(lambda g: g * jnp.minimum(1, 0.05 / step["norm"]), swapped)
    wrong = stepped(step | {"grads": swapped, "clipped": clipped}, transform, "clipped")
    report = replayed(tmp_path / "run", wrong, optimizer={"name": "adam", "lr": 1e-3})
    gap = report.json["algebra"]["norm"]
    assert first(report)[0] == "accumulate" and gap["shares"] == []
    assert abs(gap["captured"] ** 2 - gap["right"] ** 2) <= gap["apart"] < 1e-4 * gap["right"] ** 2
    assert "roundings explain the difference, so it has no shares" in " ".join(str(report).split())
    assert "Shares of the difference" not in report._repr_html_()


def test_an_optimizer_that_nobody_knows_is_unchecked_and_the_rest_is_judged(tmp_path):
    step = taken(optax.adam(1e-3))
    report = replayed(tmp_path / "run", step, optimizer={"name": "mine", "lr": 1e-3})
    stages = {stage["stage"]: stage for stage in report.json["algebra"]["stages"]}
    assert report.verdict == "incomplete" and stages["update"]["unchecked"] == 4
    said = " ".join(str(report).split())
    assert "nothing of the stage update could be judged: no rule is known of the optimizer mine" in said


def test_a_step_that_only_accumulates_gradients_is_no_fault(tmp_path):
    """optax.MultiSteps changes parameters at every second step; this is a first of two."""
    step = taken(optax.MultiSteps(optax.adam(1e-3), 2), steps=3)
    report = replayed(tmp_path / "run", step, optimizer={"name": "adam", "lr": 1e-3})
    assert report.verdict == "agreed", str(report)
    assert "the optimizer took no step of it" in str(report)


def test_a_step_that_was_not_recorded_is_incomplete(tmp_path):
    with backtape.Recorder(tmp_path / "run") as recorder, recorder.step(0) as tape:
        tape.record("x", np.zeros(3))
    report = backtape.replay(tmp_path / "run", step=0, compare=["step"])
    assert report.verdict == "incomplete"
    assert "no part of the step was recorded" in str(report)


def test_a_value_that_is_no_number_diverges(tmp_path):
    step = taken(optax.adam(1e-3))
    step = changed(step, "new_params", lambda p: p.at[(0,) * p.ndim].set(jnp.nan))
    report = replayed(tmp_path / "run", step, optimizer={"name": "adam", "lr": 1e-3})
    assert first(report)[0] == "update" and "not finite" in str(report)


def test_every_microbatch_counts(tmp_path):
    """The last of two microbatches alone, where both should be summed."""
    transform = optax.adam(1e-3)
    step = taken(transform)
    step = step | {"grads": step["local_grads"][1]}
    norm = optax.tree.norm(step["grads"])
    clipped = jax.tree.map(lambda g: g * jnp.minimum(1, 0.05 / norm), step["grads"])
    step = stepped(step | {"norm": norm, "clipped": clipped}, transform, "clipped")
    report = replayed(
        tmp_path / "run", step, optimizer={"name": "adam", "lr": 1e-3}, accumulation="sum"
    )
    assert first(report)[:2] == ("accumulate", "accumulate-window"), str(report)
    assert len(names_of(step["params"])) == len(first(report)[2])


