"""Stages recomputed for Python against the same formulas in numpy, and arrays without a copy."""

import ml_dtypes
import numpy as np
import pytest

import backtape

T, D, V = 48, 12, 37
ROWS = (6, 8)  # T tokens, as [B, S]


def head(seed: int = 3):
    """q [6, 8, D] and k [V, D] in bf16, labels with repeats and one ignored, weights and a bias."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((*ROWS, D)).astype(ml_dtypes.bfloat16)
    k = (rng.standard_normal((V, D)) / 3).astype(ml_dtypes.bfloat16)
    labels = rng.integers(0, V, ROWS).astype(np.int32)
    labels[:, 0] = 5
    labels[1, 3] = -100
    weights = rng.uniform(0.5, 1.5, ROWS).astype(np.float32)
    bias = np.random.default_rng((seed, 1)).standard_normal(V).astype(np.float32)
    return {"q": q, "k": k, "labels": labels, "weights": weights, "bias": bias}


def formulas(inputs, lse=None, denominator=None):
    """Softmax cross-entropy in f64, as a page of numpy: the oracle."""
    q = inputs["q"].astype(np.float64).reshape(T, D)
    k = inputs["k"].astype(np.float64)
    labels = inputs["labels"].reshape(T)
    weights = inputs["weights"].astype(np.float64).reshape(T)
    counted = labels != -100
    logits = q @ k.T + inputs["bias"].astype(np.float64)
    if lse is None:
        top = logits.max(1, keepdims=True)
        lse = top[:, 0] + np.log(np.exp(logits - top).sum(1))
    at = np.where(counted, labels, 0)
    label_logits = np.where(counted, logits[np.arange(T), at], 0.0)
    total = weights[counted].sum() if denominator is None else denominator
    g = np.where(counted, weights / total, 0.0)
    p = np.exp(logits - lse[:, None])
    onehot = np.zeros((T, V))
    onehot[np.arange(T), at] = counted
    softmax, label = g[:, None] * p, -g[:, None] * onehot
    return {
        "logits": logits, "lse": lse, "label_logits": label_logits, "nll": lse - label_logits,
        "logprobs": label_logits - lse, "loss": (g * (lse - label_logits)).sum(), "g": g, "g_lse": g,
        "g_label": -g, "p": p, "dlogits": softmax + label, "dq_lse": softmax @ k, "dq_label": label @ k,
        "dq": (softmax + label) @ k, "dk_lse": softmax.T @ q, "dk_label": label.T @ q,
        "dk": (softmax + label).T @ q, "dbias": (softmax + label).sum(0),
    }  # fmt: skip


def record(directory, inputs, more=(), **options):
    with backtape.Recorder(dir=directory, strict=True) as recorder, recorder.step(0) as tape:
        tape.head(denominator="weights", ignore_label=-100, **options)
        for name, value in {**inputs, **dict(more)}.items():
            tape.record(name, value)
    return backtape.open(directory).step(0)


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    return record(tmp_path_factory.mktemp("stages") / "run", head())


@pytest.mark.parametrize("name", sorted(formulas(head())))
def test_a_stage_is_what_the_formula_says_in_the_shape_of_the_job(step, name):
    found, expected = step.stage(name), np.asarray(formulas(head())[name])
    assert found.dtype == np.float64 and not found.flags.writeable
    columns = {"logits": (V,), "p": (V,), "dlogits": (V,), "dq_lse": (D,), "dq_label": (D,), "dq": (D,)}
    if name in columns:
        assert found.shape == ROWS + columns[name]
    elif name == "loss":
        assert found.shape == ()
    elif expected.shape == (T,):
        assert found.shape == ROWS
    else:
        assert found.shape == expected.shape
    np.testing.assert_allclose(found.reshape(expected.shape), expected, rtol=1e-11, atol=1e-13)


def test_stages_are_all_named_and_each_is_computed_or_refused_with_the_reason(step):
    assert step.stages[:3] == ("q", "k", "labels") and "dk_label" in step.stages
    for name in step.stages:
        try:
            assert np.isfinite(step.stage(name)).all()
        except (KeyError, RuntimeError) as error:
            assert name in str(error), (name, error)


def test_a_stage_starts_from_what_was_captured_before_it_or_from_the_inputs_alone(tmp_path):
    inputs = head()
    lse = (formulas(inputs)["lse"] - 0.01).astype(np.float32)
    step = record(tmp_path / "run", inputs, [("lse", lse.reshape(ROWS))])
    exact, forced = formulas(inputs), formulas(inputs, lse=lse.astype(np.float64))
    np.testing.assert_allclose(step.stage("dk"), forced["dk"], rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(step.stage("dk", from_captured=False), exact["dk"], rtol=1e-11, atol=1e-13)
    # The stage itself is recomputed, captured or not.
    np.testing.assert_allclose(step.stage("lse").reshape(T), exact["lse"], rtol=1e-11)


def test_some_tokens_of_the_plane(step):
    part = step.stage("p", tokens=(9, 12))
    assert part.shape == (3, V)
    np.testing.assert_array_equal(part, step.stage("p").reshape(T, V)[9:12])
    with pytest.raises(ValueError, match="tokens 40 to 60 do not lie in 0 to 48"):
        step.stage("p", tokens=(40, 60))
    with pytest.raises(RuntimeError, match="tokens= is for logits, p and dlogits"):
        step.stage("dq", tokens=(0, 1))


def test_gradients_of_k_have_the_layout_of_the_job(tmp_path):
    inputs = head()
    stored = inputs | {"k": np.ascontiguousarray(inputs["k"].T)}
    step = record(tmp_path / "run", stored, k_layout="dv")
    np.testing.assert_allclose(step.stage("dk"), formulas(inputs)["dk"].T, rtol=1e-11, atol=1e-13)


def test_microbatches_are_told_apart_and_summed(tmp_path):
    parts = [head(seed) for seed in (3, 4)]
    total = sum(part["weights"][part["labels"] != -100].astype(np.float64).sum() for part in parts)
    with backtape.Recorder(dir=tmp_path / "run", strict=True) as recorder, recorder.step(0) as tape:
        tape.head(denominator="weights", ignore_label=-100, microbatches=2, microbatch_reduction="sum")
        tape.record("k", parts[0]["k"])
        tape.record("bias", parts[0]["bias"])
        for index, part in enumerate(parts):
            for name in ("q", "labels", "weights"):
                tape.record(name, part[name], microbatch=index)
    step = backtape.open(tmp_path / "run").step(0)
    parts[1] |= {"k": parts[0]["k"], "bias": parts[0]["bias"]}
    expected = [formulas(part, denominator=total)["dk"] for part in parts]
    np.testing.assert_allclose(step.stage("dk", 1), expected[1], rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(step.stage("reduce"), sum(expected), rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(step.stage("accumulate"), sum(expected), rtol=1e-11, atol=1e-13)
    assert backtape.open(tmp_path / "run").steps == (0,)
    with pytest.raises(RuntimeError, match="is not a dump"):
        _ = backtape.open(tmp_path / "absent").steps
    with pytest.raises(KeyError, match="microbatches 0, 1; choose one with microbatch="):
        step.stage("dk")
    with pytest.raises(KeyError, match="of microbatch 7"):
        step.stage("dk", 7)


def test_a_ranks_addend_is_its_own_tokens(tmp_path):
    inputs = head()
    settings = {"dir": tmp_path / "run", "world_size": 2, "mesh": {"data": 2}, "strict": True}
    recorders = [backtape.Recorder(rank=rank, **settings) for rank in range(2)]
    whole = formulas(inputs)
    for rank, recorder in enumerate(recorders):
        rows = slice(3 * rank, 3 * rank + 3)
        with recorder.step(0) as tape:
            tape.head(denominator="weights", ignore_label=-100)
            for name in ("q", "labels", "weights"):
                shape = (*ROWS, D) if name == "q" else ROWS
                offsets = (3 * rank,) + (0,) * (len(shape) - 1)
                tape.record(name, inputs[name][rows], global_shape=shape, offsets=offsets)
            if rank == 0:
                tape.record("k", inputs["k"])
                tape.record("bias", inputs["bias"])
            addend = np.full((V, D), rank, np.float32)
            tape.record("dk", addend, partial="sum", when="pre_reduce")
    for recorder in reversed(recorders):
        recorder.close()
    step = backtape.open(tmp_path / "run").step(0)
    parts = [step.stage("dk", rank=rank) for rank in range(2)]
    np.testing.assert_allclose(parts[0] + parts[1], whole["dk"], rtol=1e-11, atol=1e-13)
    assert np.abs(parts[0] - parts[1]).max() > 1e-4
    with pytest.raises(KeyError, match="addends were recorded by ranks 0 and 1"):
        step.stage("dk", rank=5)
    with pytest.raises(KeyError, match="rank= is for dk"):
        step.stage("dq", rank=0)


def test_a_policy_is_emulated_by_the_name_that_the_report_has(tmp_path):
    inputs = head()
    dk = formulas(inputs)["dk"].astype(np.float32).astype(ml_dtypes.bfloat16)
    step = record(tmp_path / "run", inputs, [("dk", dk)], path="fused")
    with pytest.raises(KeyError) as refused:
        step.stage("dk", policy="bf16")
    assert "nothing rounded before the output" in str(refused.value)
    report = backtape.replay(tmp_path / "run", step=0)
    (stage,) = [stage for stage in report.stages if stage.name == "dk"]
    for policy in {stage.best_member, "nothing rounded before the output", "g p rounded"}:
        emulated = step.stage("dk", policy=policy)
        error = np.linalg.norm(emulated - step.stage("dk")) / np.linalg.norm(step.stage("dk"))
        assert 0 < error < 1e-2, (policy, error)
    assert step.stage("lse", policy="g p rounded").shape == ROWS


def test_what_is_missing_is_named(tmp_path, step):
    with pytest.raises(KeyError, match='no stage "dkk": the stages are q, k, labels'):
        step.stage("dkk")
    with pytest.raises(KeyError, match="q is an input of the head"):
        step.stage("q")
    with pytest.raises(RuntimeError, match="grad_norm cannot be recomputed"):
        step.stage("grad_norm")
    inputs = head()
    del inputs["k"]
    with pytest.raises(RuntimeError, match='holds no k.*tape.record\\("k"'):
        record(tmp_path / "no-k", inputs).stage("dq")
    inputs = head()
    del inputs["bias"]
    with pytest.raises(RuntimeError, match="dbias cannot be recomputed: the dump holds no bias"):
        record(tmp_path / "no-bias", inputs).stage("dbias")
    logits = formulas(head())["logits"].astype(np.float32).reshape(*ROWS, V)
    given = {"logits": logits, "labels": head()["labels"], "weights": head()["weights"]}
    of_logits = record(tmp_path / "logits", given, loss="xent_logits")
    with pytest.raises(RuntimeError, match="holds logits and neither q nor k"):
        of_logits.stage("dk")
    assert of_logits.stage("dlogits").shape == logits.shape


def base(array):
    """What an array is a view of, at the bottom."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.base


def test_an_array_of_one_shard_is_a_view_of_the_file_and_outlives_the_run(tmp_path, step):
    array = record(tmp_path / "run", head()).tensor("k")
    memory = base(array).obj if isinstance(base(array), memoryview) else base(array)
    assert memory.mapped_file and not array.flags.writeable
    with pytest.raises(ValueError):
        array[0, 0] = 1
    assert array.tobytes() == head()["k"].tobytes()
    # Resident memory does not grow by a second copy: the same bytes twice are one mapping.
    opened = backtape.open(tmp_path / "run").step(0)
    assert opened.tensor("k").ctypes.data == opened.tensor("k").ctypes.data


def test_an_array_of_several_shards_is_one_buffer(tmp_path):
    whole = np.arange(24, dtype=np.float32).reshape(6, 4)
    settings = {"dir": tmp_path / "run", "world_size": 2, "strict": True}
    recorders = [backtape.Recorder(rank=rank, **settings) for rank in range(2)]
    for rank, recorder in enumerate(recorders):
        with recorder.step(0) as tape:
            tape.record("x", whole[3 * rank : 3 * rank + 3], global_shape=(6, 4), offsets=(3 * rank, 0))
    for recorder in reversed(recorders):
        recorder.close()
    array = backtape.open(tmp_path / "run").step(0).tensor("x")
    np.testing.assert_array_equal(array, whole)
    memory = base(array).obj if isinstance(base(array), memoryview) else base(array)
    assert not memory.mapped_file and not array.flags.writeable


def test_an_array_without_elements(tmp_path):
    with backtape.Recorder(dir=tmp_path / "run", strict=True) as recorder, recorder.step(0) as tape:
        tape.record("nothing", np.empty((0, 5), np.float32))
    array = backtape.open(tmp_path / "run").step(0).tensor("nothing")
    assert array.shape == (0, 5) and array.dtype == np.float32


def test_bytes_that_were_changed_never_come_out(tmp_path):
    step = record(tmp_path / "run", head())
    del step
    (path,) = [path for path in (tmp_path / "run").rglob("*.safetensors")]
    data = bytearray(path.read_bytes())
    at = data.find(head()["k"].tobytes())
    data[at + 10] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(RuntimeError, match="k"):
        backtape.open(tmp_path / "run").step(0).tensor("k")
