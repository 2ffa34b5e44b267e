"""Jobs that are right, and forgot to declare something, or declared it wrong.

Goal: the report says which declaration would make everything agree, with its value, and calls the
job misdeclared where forward and backward both have it; code that is at odds with itself stays
diverged. Method: heads differentiated by JAX in f32, recorded with one option left out.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import backtape

TOKENS, WIDTH, VOCAB = 48, 24, 70


def inputs(seed):
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((TOKENS, WIDTH)).astype(np.float32) * 2
    k = rng.standard_normal((VOCAB, WIDTH)).astype(np.float32)
    labels = rng.integers(0, 60, TOKENS)
    labels[:8] = 7
    return q, k, labels.astype(np.int32)


def logits_of(q, k, *, softcap=None, temperature=1.0, valid_vocab=None, **_):
    z = q @ k.T / temperature
    z = z if softcap is None else softcap * jnp.tanh(z / softcap)
    return z if valid_vocab is None else z[:, :valid_vocab]


def loss_of(x, labels, *, z_loss=0.0, label_smoothing=0.0, ignore_label=None, divide=None, mask=None, **of):
    z = logits_of(x["q"], x["k"], **of)
    lse = jax.nn.logsumexp(z, -1)
    at = jnp.take_along_axis(z, labels[:, None], -1)[:, 0]
    nll = lse - (1 - label_smoothing) * at - label_smoothing * z.mean(-1) + z_loss * lse**2
    kept = jnp.ones(len(labels)) if ignore_label is None else labels != ignore_label
    kept = kept if mask is None else kept * mask
    return (nll * kept).sum() / (divide or kept.sum())


def job(path, has, declares, *, backward=None, scale=1.0):
    """A step of a head that has these options and declares those; `backward` has others, and a
    loss scale. The dump is replayed."""
    q, k, labels = inputs(3)
    x = {"q": jnp.asarray(q), "k": jnp.asarray(k)}
    loss = loss_of(x, labels, **has)
    other = has if backward is None else backward
    grads = jax.grad(lambda x: scale * loss_of(x, labels, **other))(x)
    lse = jax.nn.logsumexp(logits_of(x["q"], x["k"], **has), -1)
    with backtape.Recorder(path, strict=True) as recorder, recorder.step(0) as tape:
        tape.head(path="plain", **declares)
        held = {"q": q, "k": k, "labels": labels, "lse": lse, "loss": loss,
                "dq": grads["q"], "dk": grads["k"]}  # fmt: skip
        for name, value in held.items():
            tape.record(name, np.asarray(value), microbatch=0)
    return backtape.replay(path, step=0)


FORGOTTEN = {
    "softcap": ({"softcap": 15.0}, {}, 15.0),
    "temperature": ({"temperature": 0.7}, {}, 0.7),
    "valid_vocab": ({"valid_vocab": 61}, {}, 61),
    "z_loss": ({"z_loss": 0.001}, {}, 0.001),
    "label_smoothing": ({"label_smoothing": 0.1}, {}, 0.1),
    "ignore_label": ({"ignore_label": 7}, {}, 7),
}


@pytest.mark.parametrize(("has", "declares", "value"), FORGOTTEN.values(), ids=FORGOTTEN)
def test_a_forgotten_option_is_named_with_its_value(tmp_path, request, has, declares, value):
    report = job(tmp_path / "run", has, declares)
    other = report.other_declaration
    assert report.verdict == "misdeclared", report
    assert other.option == request.node.callspec.id, report
    assert float(other.instead) == pytest.approx(value, rel=1e-3)
    assert "your declaration or your code" in str(report) and "To tell" in str(report)
    assert "MISDECLARED" in str(report) and all(one.id != "unknown" for one in report.causes)


def test_what_agrees_is_not_asked_for_another_declaration(tmp_path):
    report = job(tmp_path / "run", {"softcap": 15.0}, {"softcap": 15.0})
    assert report.verdict == "agreed" and "other_declaration" not in report.json, report


def test_a_loss_scale_is_named_as_a_power_of_two(tmp_path):
    report = job(tmp_path / "run", {}, {}, scale=1024.0)
    assert report.verdict == "misdeclared", report
    other = report.other_declaration
    assert (other.option, other.instead) == ("cotangent", "1024.0")


def test_a_constant_that_the_job_divides_by_is_named(tmp_path):
    report = job(tmp_path / "run", {"divide": 1000.0}, {})
    assert report.verdict == "misdeclared", report
    other = report.other_declaration
    assert (other.option, other.instead) == ("denominator", "1000.0")


MASK = (np.arange(TOKENS) % 5 > 0).astype(np.float32)


@pytest.mark.parametrize("divide", [None, float(TOKENS)], ids=["by what it leaves", "by all tokens"])
def test_a_mask_that_was_not_recorded_is_told_with_how_many_tokens_it_leaves_out(tmp_path, divide):
    report = job(tmp_path / "run", {"mask": MASK, "divide": divide}, {})
    other = report.other_declaration
    assert other.option == "weights" and f"0 for the {int(TOKENS - MASK.sum())} tokens" in other.instead, report
    assert ('denominator="weights"' in other.instead) == (divide is None), report


def test_tokens_that_only_the_backward_leaves_out_are_no_mask(tmp_path):
    report = job(tmp_path / "run", {}, {}, backward={"mask": MASK})
    assert report.verdict == "diverged" and "other_declaration" not in report.json, report


def test_an_option_that_was_declared_and_is_not_there_may_be_the_code(tmp_path):
    report = job(tmp_path / "run", {}, {"softcap": 15.0})
    assert report.verdict == "diverged", report
    other = report.other_declaration
    assert (other.option, other.instead) == ("softcap", "None")


@pytest.mark.parametrize("declares", [{}, {"softcap": 15.0}], ids=["forgotten", "declared"])
def test_a_forward_and_a_backward_that_differ_are_a_fault_whatever_is_declared(tmp_path, declares):
    report = job(tmp_path / "run", {"softcap": 15.0}, declares, backward={})
    assert report.verdict == "diverged", report


ALL_F32 = {"logits": "f32", "lse": "f32", "p": "f32", "dlogits": "f32", "accumulate": "f32"}
COARSE = {
    "output": {"output": "f8_e4m3"},
    "accumulate": ALL_F32 | {"accumulate": "f8_e5m2"},
    "input": ALL_F32 | {"input": "f8_e4m3"},
}


@pytest.mark.parametrize("dtypes", COARSE.values(), ids=COARSE)
def test_dtypes_declared_coarser_than_the_job_computes_are_told(tmp_path, dtypes):
    """One row of an f32 job's dk is a tenth too large; its dtypes are declared in eight bits."""
    right = job(tmp_path / "right", {}, {"dtypes": dtypes})
    assert right.verdict == "agreed", right
    q, k, labels = inputs(3)
    dq, dk = jax.grad(lambda q, k: loss_of({"q": q, "k": k}, labels), (0, 1))(q, k)
    dk = np.asarray(dk).copy()
    dk[5] *= 1.1
    with backtape.Recorder(tmp_path / "run", strict=True) as recorder, recorder.step(0) as tape:
        tape.head(path="plain", dtypes=dtypes)
        for name, value in {"q": q, "k": k, "labels": labels, "dq": dq, "dk": dk}.items():
            tape.record(name, np.asarray(value), microbatch=0)
    report = backtape.replay(tmp_path / "run", step=0)
    text = " ".join(str(report).split())
    point = next(name for name in dtypes if dtypes[name].startswith("f8"))
    for words in ("less closely than is possible", "a fault below that passes", f"{point}={dtypes[point]}"):
        assert words in text, report


def test_dtypes_that_the_job_has_are_not_called_too_coarse(tmp_path):
    """An f32 job that rounds all but its sums to bf16, and declares it."""

    def rounded(x):
        return x.astype(jnp.bfloat16).astype(jnp.float32)

    q, k, labels = inputs(3)
    a, b = rounded(jnp.asarray(q)), rounded(jnp.asarray(k))
    p = rounded(jax.nn.softmax(rounded(a @ b.T), -1))
    entries = rounded((p - jax.nn.one_hot(labels, VOCAB)) / TOKENS)
    held = {"q": q, "k": k, "labels": labels, "dq": rounded(entries @ b), "dk": rounded(entries.T @ a)}
    points = ("input", "logits", "p", "dlogits", "output")
    with backtape.Recorder(tmp_path, strict=True) as recorder, recorder.step(0) as tape:
        tape.head(path="plain", dtypes=dict.fromkeys(points, "bf16"))
        for name, value in held.items():
            tape.record(name, np.asarray(value), microbatch=0)
    report = backtape.replay(tmp_path, step=0)
    assert report.verdict == "agreed" and "less closely" not in str(report), report


def test_a_scope_over_an_axis_that_the_mesh_does_not_have_is_told_with_those_that_it_has(tmp_path):
    q, k, labels = inputs(3)
    with pytest.raises(backtape.RecorderError, match="names one at least"):
        with backtape.Recorder(tmp_path / "none", strict=True) as recorder, recorder.step(0) as tape:
            tape.head(scope={"ranks": []})
    with backtape.Recorder(tmp_path / "run", strict=True, mesh={"data": 1}) as recorder, recorder.step(0) as tape:
        tape.head(path="plain", scope={"ranks": ["dp"]})
        for name, value in {"q": q, "k": k, "labels": labels, "dq": q}.items():
            tape.record(name, value, microbatch=0)
    with pytest.raises(RuntimeError, match="along dp, and the mesh of q microbatch 0 has the axes data"):
        backtape.replay(tmp_path / "run", step=0)
