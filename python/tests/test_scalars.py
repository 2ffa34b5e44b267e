"""Scalars: from a job's numbers to the files of each rank, and what the trajectory says."""

import csv
import json
import math
import os
import signal
import struct
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes import ended

import backtape
from backtape.scalars import Rows, find, of_jax

PROGRAM = Path(__file__).with_name("one_scalar_rank.py")


def launch(world, directory, steps, ending="end"):
    """Runs every rank to its end; their exit codes and errors."""
    return ended(PROGRAM, world, directory, steps, ending)


def recorder(directory, **more):
    return backtape.Recorder(directory, steps=None, scalars=True, strict=True, **more)


def rows(run, rank=0):
    lines = (run / "scalars" / f"rank-{rank:05}.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if "step" in line]


def crc32c(data):
    """Bit by bit, sharing nothing with what is tested."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data):
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def varint(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        at, value, shift = at + 1, value | (byte & 0x7F) << shift, shift + 7
        if byte < 0x80:
            return value, at


def fields(data):
    """Number and value of every field of a protobuf message."""
    at = 0
    while at < len(data):
        key, at = varint(data, at)
        size = {1: 8, 5: 4}.get(key & 7)
        if key & 7 == 0:
            value, at = varint(data, at)
        else:
            if key & 7 == 2:
                size, at = varint(data, at)
            value, at = data[at : at + size], at + size
        yield key >> 3, value


def events(path):
    """Wall time, step and scalars of every record of a TensorBoard file, checked."""
    data, at, found = path.read_bytes(), 0, []
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        assert struct.unpack_from("<I", data, at + 8)[0] == masked(data[at : at + 8])
        message = data[at + 12 : at + 12 + length]
        assert struct.unpack_from("<I", data, at + 12 + length)[0] == masked(message)
        at += 16 + length
        event = dict(fields(message))
        values = {}
        for number, value in fields(event.get(5, b"")):
            assert number == 1
            one = dict(fields(value))
            values[one[1].decode()] = struct.unpack("<f", one[2])[0]
        version = event.get(3)
        found.append((struct.unpack("<d", event[1])[0], event.get(2), version, values))
    return found


def test_four_processes_write_every_step_and_the_odd_rank_is_named(tmp_path):
    codes, errors = launch(4, tmp_path, 60)
    assert codes == [0] * 4, errors
    for rank in range(4):
        found = rows(tmp_path / "run", rank)
        assert [row["step"] for row in found] == list(range(60))
        assert found[7]["values"]["loss"] == 5.0 - 7 / 50 + rank / 1000
        assert found[7]["values"]["learning_rate"] == 1e-3
    report = backtape.trajectory(tmp_path / "run")
    assert report.verdict == "flagged"
    (found,) = [one for one in report.findings if one.severity == "flag"]
    assert (found.flag, found.scalar, found.step, found.ranks) == ("ranks", "grad_norm", 30, [2])
    assert report.ranks == [0, 1, 2, 3] and report.rows == 240
    assert "grad_norm of rank 2 leaves the other 3 ranks at step 30" in str(report)


def test_what_a_killed_rank_wrote_is_read_and_its_torn_line_is_left_out(tmp_path):
    codes, errors = launch(1, tmp_path, 20, "kill")
    assert codes == [-signal.SIGKILL], errors
    path = tmp_path / "run/scalars/rank-00000.jsonl"
    with open(path, "ab") as file:
        file.write(b'{"step":20,"time":1.0,"val')
    report = backtape.trajectory(tmp_path / "run")
    assert (report.rows, report.last_step, report.damage) == (20, 19, [])
    assert any("torn" in remark for remark in report.remarks)
    damaged = path.read_bytes().replace(b'{"step":7,', b'{"stop":7,')
    path.write_bytes(damaged)
    report = backtape.trajectory(tmp_path / "run")
    assert report.verdict == "incomplete" and "line 9" in report.damage[0]


def test_the_three_files_hold_the_same_numbers_also_those_that_are_none(tmp_path):
    values = {
        "loss": math.nan, "a": math.inf, "b": -math.inf, 'c,"d': np.float32(0.1),
        "e": jnp.float32(2.5), "f": jnp.bfloat16(1.5), "g": np.int64(3), "layer/x": True,
    }  # fmt: skip
    with recorder(tmp_path / "run") as one:
        one.scalars(3, values, nothing=None)
        one.scalars(4, loss=1.0)
    first, second = rows(tmp_path / "run")
    text = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
    back = {name: text.get(value, value) for name, value in first["values"].items()}
    wanted = {name: float(value) for name, value in values.items()}
    assert str(back) == str(dict(sorted(wanted.items()))) or str(back) == str(wanted)
    with open(tmp_path / "run/scalars/rank-00000.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert {line["name"]: str(float(line["value"])) for line in table[:8]} == {
        name: str(value) for name, value in wanted.items()
    }
    assert (table[8]["step"], table[8]["rank"], table[8]["value"]) == ("4", "0", "1")
    (path,) = (tmp_path / "run/scalars/rank-00000").glob("events.out.tfevents.*")
    (version, *records) = events(path)
    assert version[2] == b"brain.Event:2"
    assert [step for _, step, _, _ in records] == [3, 4]
    assert records[0][0] == first["time"]
    kept = {name: struct.unpack("<f", struct.pack("<f", x))[0] for name, x in wanted.items()}
    assert {name: str(x) for name, x in records[0][3].items()} == {
        name: str(x) for name, x in kept.items()
    }


def test_a_value_that_is_no_number_is_left_out_and_the_job_goes_on(tmp_path, caplog):
    with backtape.Recorder(tmp_path / "run", steps=None, scalars=True) as one:
        one.scalars(0, loss=1.0, wrong="x", wide=jnp.zeros(3))
        one.scalars("no step", loss=1.0)
        one.scalars(1, loss=2.0)
    assert [(row["step"], row["values"]) for row in rows(tmp_path / "run")] == [
        (0, {"loss": 1.0}), (1, {"loss": 2.0}),
    ]  # fmt: skip
    assert "wrong" in caplog.text and "wide" in caplog.text
    with recorder(tmp_path / "strict") as one:
        with pytest.raises(backtape.RecorderError, match="wrong"):
            one.scalars(0, wrong="x")


def test_an_inactive_recorder_takes_scalars_and_does_nothing(tmp_path):
    one = backtape.Recorder.from_env()
    one.scalars(0, loss=object())
    assert not one.active and one.close() is None


def test_a_recorder_of_tensors_takes_scalars_of_all_steps(tmp_path):
    with backtape.Recorder(tmp_path / "run", steps="1", strict=True) as one:
        for step in range(3):
            one.scalars(step, loss=float(step))
            with one.step(step) as tape:
                tape.record("x", np.ones(3))
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 1, 2]
    assert (tmp_path / "run/step-00000001/manifest.json").exists()


class Late:
    """A device's number that is not there yet."""

    def __init__(self):
        self.there = False

    def ready(self):
        return self.there


def test_rows_wait_for_their_device_and_keep_their_order():
    handed = []
    waiting = Rows(lambda step, time, values: handed.append((step, values)))
    late = backtape.scalars.Part(Late(), 0)
    late._vector.numbers = lambda: [7.0]
    waiting.add(0, [("loss", late)])
    waiting.add(1, [("loss", 1.0)])
    assert handed == []
    late._vector.there = True
    waiting.add(2, [("loss", 2.0)])
    assert handed == [(0, [("loss", 7.0)]), (1, [("loss", 1.0)]), (2, [("loss", 2.0)])]


def test_statistics_of_pytrees_are_those_of_numpy_inside_and_outside_of_jit(tmp_path):
    draw = np.random.default_rng(5)
    tree = {"a": draw.normal(size=(3, 4)), "b": {"c": draw.normal(size=5) * 1e3}}
    grads = jax.tree.map(jnp.float32, tree)
    Adam = namedtuple("Adam", ["count", "mu", "nu"])
    nu = jax.tree.map(lambda x: x * x, grads)
    state = ((), (Adam(jnp.int32(3), grads, nu),))
    flat = np.concatenate([np.asarray(x).ravel() for x in jax.tree.leaves(grads)]).astype(np.float64)
    wanted = {
        "grad_norm": np.linalg.norm(flat),
        "grad_norm/a": np.linalg.norm(tree["a"]),
        "grad_norm/b.c": np.linalg.norm(tree["b"]["c"]),
        "param_norm": np.linalg.norm(flat),
        "exp_avg_mean": flat.mean(),
        "exp_avg_max": np.abs(flat).max(),
        "exp_avg_rms": np.sqrt((flat**2).mean()),
        "exp_avg_sq_mean": (flat**2).mean(),
        "exp_avg_sq_max": (flat**2).max(),
        "exp_avg_sq_rms": np.sqrt((flat**4).mean()),
    }
    apart = of_jax(grads, state, params=grads, total="grad_norm")
    inside = jax.jit(lambda g, s: of_jax(g, s, params=g, total="grad_norm"))(grads, state)
    for found in (apart, inside):
        assert set(found) == set(wanted) | {"param_norm/a", "param_norm/b.c"}
        for name, value in wanted.items():
            assert float(found[name]) == pytest.approx(value, rel=1e-5), name
    with recorder(tmp_path / "run") as one:
        one.scalars(0, apart, loss=1.0)
        one.scalars(1, inside)
    first, second = (row["values"] for row in rows(tmp_path / "run"))
    assert first["grad_norm/b.c"] == second["grad_norm/b.c"] == float(apart["grad_norm/b.c"])
    assert find({"x": [1, {"mu": 5}]}, "mu") == 5 and find([()], "count") is None


def test_statistics_of_a_torch_model_are_those_of_its_tensors(tmp_path):
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    found = backtape.scalars.of_torch(model, optimizer, total="grad_norm")
    grads = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    squares = torch.cat([s["exp_avg_sq"].reshape(-1) for s in optimizer.state.values()])
    assert float(found["grad_norm"]) == pytest.approx(float(grads.norm()), rel=1e-6)
    assert float(found["grad_norm/weight"]) == pytest.approx(float(model.weight.grad.norm()))
    assert float(found["exp_avg_sq_max"]) == float(squares.max())
    assert float(found["exp_avg_sq_mean"]) == pytest.approx(float(squares.mean()))
    loss = torch.tensor(2.0, requires_grad=True)
    with recorder(tmp_path / "run") as one:
        one.scalars(0, found, loss=loss)
        loss.data.fill_(9.0)
    assert rows(tmp_path / "run")[0]["values"]["loss"] == 2.0


def test_statistics_that_cannot_be_computed_are_none_and_the_job_goes_on(caplog):
    assert of_jax({"a": jnp.ones(3)}, mean=object(), params={"b": Late()}) != {}
    assert backtape.scalars.of_torch(object()) == {}
    assert "of_torch failed and the job goes on" in caplog.text


def test_importing_backtape_imports_no_framework():
    code = "import sys, backtape; print(sorted({'jax', 'torch'} & set(sys.modules)))"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.stdout.strip() == "[]", done.stderr
