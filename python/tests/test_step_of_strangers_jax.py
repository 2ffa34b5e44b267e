"""Steps of optax as strangers to backtape declared them: what is right agrees, and what is wrong is named."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from test_step_algebra_jax import loss, model, record, taken
from test_step_replay import first, replayed, stepped

import backtape

LR, SCALE = 1e-2, 256.0
ADAMW = {"name": "adamw", "lr": LR, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 1e-4}
ADAM = ADAMW | {"name": "adam", "weight_decay": 0.0}
# What optax makes, and the arguments of that very call as the declaration.
RIGHT = {
    "adamw with Nesterov": (optax.adamw(LR, nesterov=True), ADAMW | {"nesterov": True}),
    "adamw with Nesterov, as nadamw": (optax.adamw(LR, nesterov=True), ADAMW | {"name": "nadamw"}),
    "amsgrad": (optax.amsgrad(LR), ADAM | {"name": "amsgrad"}),
    "adafactor": (
        optax.adafactor(LR, min_dim_size_to_factor=4, factored=True),
        {"name": "adafactor", "lr": LR, "factored": True},
    ),
    "rmsprop": (
        optax.rmsprop(LR, decay=0.9, eps=1e-8, eps_in_sqrt=True),
        {"name": "rmsprop", "lr": LR, "decay": 0.9, "eps": 1e-8, "eps_in_sqrt": True},
    ),
}
# What optax makes, and a declaration of another.
WRONG = {
    "plain, and Nesterov is declared": (
        optax.adamw(LR), ADAMW | {"nesterov": True}, ("update", "nesterov"), "",
    ),
    "Nesterov, and plain is declared": (
        optax.adamw(LR, nesterov=True), ADAMW, ("update", "nesterov"), "the gradient of this step is in it twice",
    ),
    "another b2": (
        optax.adam(LR, b2=0.98), ADAM, ("state", "setting-other"), "beta2 is 0.9800, and 0.9990 is declared",
    ),
    "another b1": (
        optax.adam(LR, b1=0.5), ADAM, ("state", "setting-other"), "beta1 is 0.5000, and 0.9000 is declared",
    ),
    "another eps": (
        optax.adam(LR, eps=1e-5), ADAM | {"eps": 1e-3}, ("update", "setting-other"), "eps is 1.000e-5",
    ),
}  # fmt: skip


def words_of(report):
    return " ".join(str(report).split())


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("rule", RIGHT)
def test_what_optax_was_called_with_is_a_declaration(tmp_path, rule, steps):
    transform, declared = RIGHT[rule]
    report = replayed(tmp_path / "run", taken(transform, steps=steps), optimizer=declared)
    stages = {stage["stage"]: stage for stage in report.json["algebra"]["stages"]}
    assert report.verdict == "agreed", str(report)
    assert all(stages[name]["agreed"] and not stages[name]["unchecked"] for name in ("state", "update")), str(report)


@pytest.mark.parametrize("fault", WRONG)
def test_another_setting_than_the_declared_one_is_named(tmp_path, fault):
    transform, declared, told, words = WRONG[fault]
    report = replayed(tmp_path / "run", taken(transform, steps=3), optimizer=declared)
    assert first(report)[:2] == told and words in words_of(report), str(report)
    assert len(first(report)[2]) == 4, str(report)


@pytest.mark.parametrize(
    "transform, told",
    [
        (optax.adamw(LR, weight_decay=0.3, mu_dtype=jnp.bfloat16), None),
        (optax.adamw(LR, weight_decay=0.0, mu_dtype=jnp.bfloat16), ("update", "decay-other")),
        (optax.adamw(3 * LR, weight_decay=0.1, mu_dtype=jnp.bfloat16), ("update", "lr-scaled")),
    ],
)
def test_a_moment_of_few_bits_hides_no_cause(tmp_path, transform, told):
    declared = ADAMW | {"weight_decay": 0.3}
    report = replayed(tmp_path / "run", taken(transform, steps=3), optimizer=declared)
    assert (first(report)[:2] if report.verdict == "diverged" else None) == told, str(report)


@pytest.mark.parametrize("switch", ["cautious", "eps_in_sqrt", "debias"])
def test_a_switch_that_the_rule_does_not_know_leaves_the_update_unchecked(tmp_path, switch):
    """Also one that another rule knows, and that is not true of this one."""
    report = replayed(tmp_path / "run", taken(optax.adam(LR)), optimizer=ADAM | {switch: True})
    sentence = f"the optimizer's switch {switch} is on, and the rule of Adam, AdamW, AMSGrad does not know it"
    assert report.verdict == "incomplete" and sentence in words_of(report), str(report)
    off = replayed(tmp_path / "off", taken(optax.adam(LR)), optimizer=ADAM | {switch: False})
    assert off.verdict == "agreed", str(off)


def unscaled_before_the_reduction(mesh, by):
    """Each of four devices divides its gradient by the loss scale, and then the mean over them is taken: no array is
    reduced and has the scale in it."""
    params, _ = model()
    transform = optax.adam(LR)
    opt_state = transform.init(params)
    batches = np.random.default_rng(1).standard_normal((4, 4, 8)).astype(np.float32)
    scaled = lambda params, batch: SCALE * loss(params, batch)

    @jax.jit
    def run(params, opt_state):
        local = jax.vmap(jax.grad(scaled), (None, 0))(params, batches)
        unscaled = jax.tree.map(lambda g: jnp.mean(g / by, 0), local)
        updates, new_state = transform.update(unscaled, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        return {"new_params": new_params, "local_grads": [local], "unscaled": unscaled, "new_opt_state": new_state}

    step = {"params": params, "opt_state": opt_state} | run(params, opt_state)
    return step | {"local_grads": jax.device_put(step["local_grads"], NamedSharding(mesh, P("data")))}


@pytest.mark.parametrize(
    "by, told",
    [
        (SCALE, None),
        (SCALE * SCALE, "loss-scale-taken-out-twice"),
        (1.0, "loss-scale-left-in"),
        (2 * SCALE, "unknown"),
    ],
)
def test_gradients_that_were_unscaled_before_they_were_reduced_are_judged(tmp_path, by, told):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        record(
            tmp_path / "run", unscaled_before_the_reduction(mesh, by), optimizer=ADAM, loss_scale=SCALE, local_axis="data",
            reduce={"*": [{"axis": "data", "op": "mean"}]},
        )  # fmt: skip
    report = backtape.replay(tmp_path / "run", step=0, compare=["step"])
    if told is None:
        assert report.verdict == "agreed", str(report)
        unscale = next(one for one in report.json["algebra"]["stages"] if one["stage"] == "unscale")
        assert unscale["agreed"] == 4 and not unscale["unchecked"], str(report)
        return
    group = report.json["algebra"]["diverged"][0]
    assert first(report)[:2] == ("unscale", told) and len(first(report)[2]) == 4, str(report)
    assert group["factor"] == pytest.approx(SCALE / by, rel=1e-5), str(report)


def left_out(moved):
    """A step whose gradient is infinite and which the job left out; `moved`: its state decayed all the same."""
    transform = optax.adam(LR)
    step = taken(transform, steps=2)
    infinite = jax.tree.map(lambda g: jnp.full_like(g, jnp.inf), step["grads"])
    state = step["opt_state"]
    if moved:
        zeros = jax.tree.map(jnp.zeros_like, step["grads"])
        state = stepped(step | {"clipped": zeros}, transform, "clipped")["new_opt_state"]
    return {
        "params": step["params"], "new_params": step["params"], "opt_state": step["opt_state"],
        "new_opt_state": state, "grads": infinite, "skipped": True,
    }  # fmt: skip


def test_a_step_that_the_job_left_out_changes_nothing(tmp_path):
    record(tmp_path / "run", left_out(moved=False), optimizer=ADAM)
    report = backtape.replay(tmp_path / "run", step=0, compare=["step"])
    assert report.verdict == "agreed", str(report)
    stages = {stage["stage"]: stage for stage in report.json["algebra"]["stages"]}
    assert stages["state"]["agreed"] == stages["update"]["agreed"] == 4, str(report)


def test_an_optimizer_that_changes_nothing_leaves_a_step_incomplete(tmp_path):
    """The job computes gradients and updates, and takes over neither parameters nor state."""
    step = taken(optax.adam(LR), steps=2)
    kept = step | {"new_params": step["params"], "new_opt_state": step["opt_state"]}
    record(tmp_path / "run", kept, optimizer=ADAM)
    report = backtape.replay(tmp_path / "run", step=0, compare=["step"])
    assert report.verdict == "incomplete", str(report)
    assert "no parameter and no state of an optimizer changed" in words_of(report), str(report)


def test_a_state_that_moved_in_a_step_that_was_left_out_diverges(tmp_path):
    record(tmp_path / "run", left_out(moved=True), optimizer=ADAM)
    report = backtape.replay(tmp_path / "run", step=0, compare=["step"])
    assert report.verdict == "diverged" and first(report)[0] == "state", str(report)
    assert "the job left the optimizer's step out, and state_after." in words_of(report), str(report)


def narrow(transform, *, b1=None):
    """A step of a transform whose gradients have few bits, and whose state and parameters many."""
    step = taken(transform, steps=2)
    clipped = jax.tree.map(lambda g: g.astype(jnp.bfloat16), step["grads"])
    used = transform if b1 is None else optax.adam(LR, b1=b1)
    return {
        name: step[name] for name in ("params", "opt_state")
    } | {"grads": clipped} | {
        name: value for name, value in stepped(step | {"clipped": clipped}, used, "clipped").items()
        if name in ("new_params", "new_opt_state")
    }  # fmt: skip


@pytest.mark.parametrize("b1, told", [(None, None), (0.8, ("state", "setting-other"))])
def test_gradients_of_few_bits_go_into_a_state_of_many(tmp_path, b1, told):
    """optax multiplies a gradient of bf16 by 1 - b1, which is a number of bf16 then."""
    record(tmp_path / "run", narrow(optax.adam(LR), b1=b1), optimizer=ADAM)
    report = backtape.replay(tmp_path / "run", step=0, compare=["step"])
    assert (first(report)[:2] if report.verdict == "diverged" else None) == told, str(report)
    assert told or report.verdict == "agreed", str(report)


def test_a_decay_of_the_wrong_sign_is_told_of_every_parameter(tmp_path):
    chained = optax.chain(optax.scale_by_adam(), optax.scale(-1), optax.add_decayed_weights(0.1), optax.scale(LR))
    report = replayed(tmp_path / "run", taken(chained, steps=3), optimizer=ADAMW | {"weight_decay": 0.1})
    assert first(report)[:2] == ("update", "decay-other") and len(first(report)[2]) == 4, str(report)
    assert "decays by -0.1000, and 0.1000 is declared" in words_of(report), str(report)


def sharded(step, mesh):
    """The step with its matrices in as many parts as there are devices."""
    place = lambda x: jax.device_put(x, NamedSharding(mesh, P("data") if jnp.ndim(x) == 2 else P()))
    return {name: jax.tree.map(place, part) if name != "norm" else part for name, part in step.items()}


@pytest.mark.parametrize("device", [None, 2])
def test_the_norm_of_what_one_device_holds_is_told(tmp_path, device):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    step = taken(optax.adam(LR))
    rows = slice(None) if device is None else slice(2 * device, 2 * device + 2)
    held = jax.tree.map(lambda g: g[rows] if g.ndim == 2 else g, step["grads"])
    step = {name: step[name] for name in ("params", "grads", "opt_state")} | {"norm": optax.tree.norm(held)}
    record(tmp_path / "run", sharded(step, mesh), optimizer=ADAM)
    report = backtape.replay(tmp_path / "run", step=0, compare=["step"])
    norms = [group for group in report.json["algebra"]["diverged"] if group["stage"] == "norm"]
    if device is None:
        assert not norms, str(report)
        return
    assert norms[0]["reading"]["cause"] == "norm-local-not-global", str(report)
    assert "box 2 of the 4" in words_of(report), str(report)
