"""What goes in through `tape.record` comes back bit for bit through any safetensors reader."""

import ml_dtypes
import numpy as np
import pytest
import reading

import backtape

DTYPES = [
    np.bool_, np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.uint64, np.int64,
    ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, np.float16, ml_dtypes.bfloat16, np.float32,
    np.float64,
]  # fmt: skip


def random_bits(dtype, shape, seed=0):
    """Arbitrary bits, NaN payloads included; of bool only the two that it has."""
    width = np.dtype(dtype).itemsize
    count = int(np.prod(shape)) * width
    raw = np.random.default_rng(seed).integers(0, 256, count, np.uint8)
    if dtype is np.bool_:
        raw &= 1
    return raw.view(dtype).reshape(shape)


def record(run, **tensors):
    with backtape.Recorder(run, strict=True) as recorder, recorder.step(0) as tape:
        for name, array in tensors.items():
            tape.record(name, array)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_every_dtype_keeps_its_bits(tmp_path, dtype):
    array = random_bits(dtype, (5, 7))
    record(tmp_path / "run", x=array)
    assert reading.only(tmp_path / "run", "x").data == array.tobytes()


def test_strided_transposed_and_empty_arrays_come_back_in_c_order(tmp_path):
    base = random_bits(ml_dtypes.bfloat16, (6, 8, 4))
    arrays = {"strided": base[::2, ::-1, 1:3], "transposed": base.T, "empty": base[:0]}
    record(tmp_path / "run", **arrays)
    for name, array in arrays.items():
        entry = reading.only(tmp_path / "run", name)
        assert entry.data == array.tobytes(order="C")
        assert entry.record["shape"] == list(array.shape)


def test_numbers_and_zero_dimensional_arrays_are_scalars(tmp_path):
    record(tmp_path / "run", real=1.5, whole=7, truth=True, zero_d=np.array(2.5, np.float32))
    values = {"real": (1.5, "f64"), "whole": (7, "i64"), "truth": (True, "bool"), "zero_d": (2.5, "f32")}
    names = {"f64": np.float64, "i64": np.int64, "bool": np.bool_, "f32": np.float32}
    for name, (value, dtype) in values.items():
        entry = reading.only(tmp_path / "run", name)
        assert (entry.record["dtype"], entry.record["shape"], entry.record["box"]) == (dtype, [], [])
        assert entry.array(names[dtype])[()] == value


def test_big_endian_arrays_keep_their_values(tmp_path):
    record(tmp_path / "run", x=np.arange(5, dtype=">f4"))
    assert reading.only(tmp_path / "run", "x").array(np.float32).tolist() == [0, 1, 2, 3, 4]


def test_an_array_that_the_job_changes_after_record_is_dumped_as_it_was(tmp_path):
    array = np.arange(512 * 512, dtype=np.float32)
    before = array.tobytes()
    with backtape.Recorder(tmp_path / "run", strict=True) as recorder, recorder.step(0) as tape:
        for index in range(8):
            tape.record(f"x{index}", array)
            array += 1
    assert reading.only(tmp_path / "run", "x0").data == before


def test_a_raw_array_is_the_box_that_the_job_says(tmp_path):
    part = random_bits(np.float32, (4, 3))
    with backtape.Recorder(tmp_path / "run", strict=True) as recorder, recorder.step(0) as tape:
        tape.record("q", part, microbatch=2, global_shape=(16, 3), offsets=(8, 0))
        tape.record("dk", part, partial="sum", when="pre_reduce", role="dk")
    q = reading.only(tmp_path / "run", "q").record
    assert (q["box"], q["shape"], q["microbatch"], q["role"]) == ([[8, 12], [0, 3]], [16, 3], 2, "q")
    dk = reading.only(tmp_path / "run", "dk").record
    assert (dk["partial"], dk["when"], dk["placement"]) == ("sum", "pre_reduce", {})


def test_the_head_is_kept_as_declared(tmp_path):
    with backtape.Recorder(tmp_path / "run", strict=True) as recorder, recorder.step(0) as tape:
        tape.head(
            loss="softmax_xent", path="fused", denominator=np.float32(0.1), mask_value=-1e30, valid_vocab=9,
            microbatches=np.int64(2), tiles={"vocab": 512}, softcap=30,
            dtypes={"logits": "f32", "lse": np.float32, "dlogits": "bfloat16"},
        )  # fmt: skip
    head = reading.manifest(tmp_path / "run")["head"]
    assert head["dtypes"] == {"logits": "f32", "lse": "f32", "dlogits": "bf16"}
    assert head["denominator"] == float(np.float32(0.1))
    assert (head["microbatches"], head["softcap"], head["mask_value"]) == (2, 30.0, -1e30)
    assert head["tiles"]["vocab"] == 512 and head["reduction"] == "mean"


def test_the_summary_says_what_was_done(tmp_path):
    recorder = backtape.Recorder(tmp_path / "run", steps="0,2-3", strict=True)
    for step in range(5):
        with recorder.step(step) as tape:
            assert tape.active == (step in (0, 2, 3))
            tape.record("x", np.zeros(10, np.float32))
    summary = recorder.close()
    assert (summary.shards, summary.bytes, summary.steps_committed) == (3, 120, [0, 2, 3])
    assert (summary.omissions, summary.faults, summary.attempt) == ([], [], 0)
    assert recorder.close() is None and not recorder.active


def test_two_recorders_one_after_another_stay_apart(tmp_path):
    for name, value in (("a", 1.0), ("b", 2.0)):
        record(tmp_path / name, x=value, **{name: value})
    for name, value in (("a", 1.0), ("b", 2.0)):
        found = {e.record["tensor"]: e.array(np.float64)[()] for e in reading.entries(tmp_path / name)}
        assert found == {"x": value, name: value}
        assert reading.manifest(tmp_path / name)["run"] == name


def test_a_second_launch_of_a_run_is_a_new_attempt(tmp_path):
    for value in (1.0, 2.0):
        record(tmp_path / "run", x=value)
    assert reading.only(tmp_path / "run", "x").array(np.float64) == 1.0
    assert reading.only(tmp_path / "run" / "attempt-0001", "x").array(np.float64) == 2.0
