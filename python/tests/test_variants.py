"""A user's own functions in the replay: an explanation of what was captured, and a cure."""

import backtape
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

T, V, D = 211, 173, 24


def gradients(q, k, labels, g, lse, forget_confident=False):
    """dq and dk in f32, as a plain path has them; the fault leaves out tokens with p_y > 1/2."""
    q, k = q.astype(jnp.float32), k.astype(jnp.float32)
    p = jnp.exp(q @ k.T - lse[:, None])
    d = p - jax.nn.one_hot(labels, k.shape[0])
    if forget_confident:
        of_label = jnp.take_along_axis(p, labels[:, None], 1)
        d = jnp.where(of_label > 0.5, 0.0, d)
    d = g[:, None] * d
    return d @ k, d.T @ q


def record(directory, fault, ranks=1):
    rng = np.random.default_rng(7)
    q = (1.5 * rng.normal(size=(T, D))).astype(ml_dtypes.bfloat16)
    k = rng.normal(size=(V, D)).astype(ml_dtypes.bfloat16)
    labels = np.minimum(rng.zipf(1.4, size=T) - 1, V - 1).astype(np.int32)
    z = q.astype(np.float64) @ k.astype(np.float64).T
    lse = np.log(np.exp(z - z.max(1, keepdims=True)).sum(1)) + z.max(1)
    # Confident tokens, whose p is near one.
    confident = np.arange(0, T, 5)
    labels[confident] = z[confident].argmax(1)
    g = np.full(T, 1.0 / T)
    dq, dk = gradients(jnp.asarray(q), jnp.asarray(k), jnp.asarray(labels), g, lse, fault)
    recorder = backtape.Recorder(dir=directory, steps="0", rank=0, world_size=1)
    with recorder.step(0) as tape:
        tape.head(loss="softmax_xent", path="plain", reduction="mean")
        tape.record("q", q, microbatch=0)
        tape.record("k", k)
        tape.record("labels", labels, microbatch=0)
        tape.record("dq", np.asarray(dq).astype(ml_dtypes.bfloat16), microbatch=0)
        tape.record("dk", np.asarray(dk), microbatch=0)
    recorder.close()
    return directory


def variant(unit, **fault):
    dq, dk = gradients(
        jnp.asarray(unit.q), jnp.asarray(unit.k), unit.labels, unit.g, unit.lse, **fault
    )
    return {"dq": dq.astype(jnp.bfloat16), "dk": dk}


def broken(unit):
    return variant(unit, forget_confident=True)


def test_a_function_that_does_what_the_job_did_is_named_as_the_cause_and_the_fixed_one_is_right(
    tmp_path,
):
    dump = record(tmp_path / "run", fault=True)
    report = backtape.replay(dump, variants={"forgets-confident": broken, "fixed": variant})
    assert report.verdict == "diverged"
    (cause,) = report.causes
    assert (cause.id, cause.standing) == ("forgets-confident", "named"), str(report)
    found = {(one.variant, one.stage): one for one in report.variants}
    for stage in ("dq", "dk"):
        wrong, right = found["forgets-confident", stage], found["fixed", stage]
        assert (wrong.agrees, wrong.explains) == (False, True), str(report)
        assert (right.agrees, right.explains) == (True, False), str(report)


def test_without_the_function_the_catalogue_says_what_each_token_shows_and_guesses_no_rule(tmp_path):
    dump = record(tmp_path / "run", fault=True)
    report = backtape.replay(dump)
    (cause,) = report.json["causes"]
    assert (cause["id"], cause["standing"]) == ("token-weights", "named"), str(report)
    assert cause["parameters"]["each token counts"] == "with a number of its own that the dump does not explain"


def test_a_right_function_on_a_right_job_explains_it_and_there_is_no_cause(tmp_path):
    dump = record(tmp_path / "run", fault=False)
    report = backtape.replay(dump, variants={"mine": variant, "broken": broken})
    assert (report.verdict, report.causes) == ("agreed", [])
    for one in report.variants:
        assert one.agrees == one.explains == (one.variant == "mine"), str(report)


def test_torch_tensors_are_values_too(tmp_path):
    torch = pytest.importorskip("torch")
    dump = record(tmp_path / "run", fault=False)

    def mine(unit):
        return {name: torch.tensor(np.array(x, np.float32)) for name, x in variant(unit).items()}

    report = backtape.replay(dump, variants={"mine": mine})
    assert all(one.agrees for one in report.variants)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        ({"dk": np.zeros((V, D + 1))}, r"'dk' of shape \(173, 25\): wanted \(173, 24\)"),
        ({"grad": np.zeros(3)}, '"grad": the stages that it may return are lse'),
        ({"dk": np.zeros((V, D), np.int64)}, "'dk' as int64"),
        (np.zeros(3), "returned ndarray: return a dict of stages"),
    ],
)
def test_what_a_function_must_not_return_is_said_in_one_sentence(tmp_path, returned, words):
    dump = record(tmp_path / "run", fault=False)
    with pytest.raises((TypeError, ValueError), match=words):
        backtape.replay(dump, variants={"mine": lambda unit: returned})


def test_a_function_that_gives_no_number_does_not_agree(tmp_path):
    dump = record(tmp_path / "run", fault=False)

    def nan(unit):
        return {"dk": np.full((V, D), np.nan, np.float32)}

    (one,) = backtape.replay(dump, variants={"nan": nan}).variants
    assert (one.agrees, one.explains) == (False, False)


@pytest.mark.parametrize("variants", [None, {"mine": broken}])
def test_a_device_that_cannot_be_used_is_warned_of_and_the_cpu_computes_the_same(tmp_path, variants):
    run = record(tmp_path / "run", fault=False)
    with pytest.raises(ValueError, match="cuda:N"):
        backtape.replay(run, step=0, variants=variants, device="gpu")
    cpu = backtape.replay(run, step=0, variants=variants, device="cpu")
    # No machine has so many.
    with pytest.warns(RuntimeWarning, match="the CPU computed the reference"):
        other = backtape.replay(run, step=0, variants=variants, device="cuda:4095")
    assert other.device.name == "cpu" and other.device.fallback
    del other.json["device"]
    cpu.json.pop("device", None)
    assert other.json == cpu.json
