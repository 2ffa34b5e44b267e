"""jax arrays are recorded as jax holds them: boxes, replicas, placement, bits."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reading
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import backtape
from backtape.jax_arrays import copied
from backtape.shards import shards_of


@pytest.fixture(scope="module")
def mesh():
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "tensor"))


def put(mesh, spec, shape=(8, 16), dtype=jnp.bfloat16):
    host = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    return host, jax.device_put(host, NamedSharding(mesh, spec))


LAYOUTS = {
    "dim 0": (P("data"), {"data": {"shard": 0}, "tensor": "replicate"}, 2),
    "dim 1": (P(None, "tensor"), {"data": "replicate", "tensor": {"shard": 1}}, 4),
    "two axes": (P("tensor", "data"), {"data": {"shard": 1}, "tensor": {"shard": 0}}, 8),
    "two axes on one dim": (P(("data", "tensor")), {"data": {"shard": 0}, "tensor": {"shard": 0}}, 8),
    "replicated": (P(), {"data": "replicate", "tensor": "replicate"}, 1),
}


@pytest.mark.parametrize("spec, placement, boxes", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_boxes_replicas_and_placement_are_those_of_jax(tmp_path, mesh, spec, placement, boxes):
    host, array = put(mesh, spec)
    with backtape.Recorder(tmp_path / "run", mesh=mesh, strict=True) as recorder:
        with recorder.step(0) as tape:
            tape.record("q", array)
    found = reading.entries(tmp_path / "run")
    assert len(found) == 8 and len({str(entry.record["box"]) for entry in found}) == boxes
    held = sorted((str(entry.record["box"]), entry.record["replica"]) for entry in found)
    assert len(set(held)) == 8
    for entry in found:
        box = tuple(slice(lo, hi) for lo, hi in entry.record["box"])
        assert entry.data == host[box].tobytes()
        assert entry.record["placement"] == placement
        assert entry.record["fingerprint_source"] == "framework"
        assert entry.record["shape"] == [8, 16] and entry.record["dtype"] == "bf16"
    assert reading.manifest(tmp_path / "run")["mesh"] == [["data", 2], ["tensor", 4]]


def test_an_array_on_a_part_of_the_mesh_is_whole_in_the_dump(tmp_path, mesh):
    """A pipeline stage has a mesh of its own: half of the devices, in another order."""
    stage = Mesh(mesh.devices[1][::-1].reshape(2, 2), ("data", "tensor"))
    host, array = put(stage, P("tensor", "data"))
    with backtape.Recorder(tmp_path / "run", mesh=mesh, strict=True) as recorder:
        with recorder.step(0) as tape:
            tape.record("q", array)
    found = reading.entries(tmp_path / "run")
    assert len(found) == 4 and len({str(entry.record["box"]) for entry in found}) == 4
    for entry in found:
        box = tuple(slice(lo, hi) for lo, hi in entry.record["box"])
        assert entry.data == host[box].tobytes()
        assert entry.record["fingerprint_source"] == "framework"
    whole = backtape.open(tmp_path / "run").step(0).tensor("q")
    assert whole.tobytes() == host.tobytes()


def test_the_host_arrays_of_jax_are_not_copied(mesh):
    _, array = put(mesh, P("data", "tensor"), dtype=jnp.float32)
    for shard, piece in zip(shards_of(array), array.addressable_shards):
        assert shard.data.ctypes.data == piece.data.unsafe_buffer_pointer()


def test_an_array_that_the_job_donates_after_record_is_dumped_as_it_was(tmp_path, mesh):
    host, array = put(mesh, P("data", "tensor"), (512, 512), jnp.float32)
    bump = jax.jit(lambda x: x + 1, donate_argnums=0)
    with backtape.Recorder(tmp_path / "run", strict=True) as recorder, recorder.step(0) as tape:
        for index in range(4):
            tape.record(f"x{index}", array)
            array = bump(array)
    assert np.array_equal(np.asarray(array), host + 4)
    for entry in reading.entries(tmp_path / "run"):
        box = tuple(slice(lo, hi) for lo, hi in entry.record["box"])
        expected = host[box] + int(entry.record["tensor"][1:])
        assert np.array_equal(entry.array(np.float32), expected)


def test_the_bytes_are_let_go_once_the_step_is_written(tmp_path, monkeypatch):
    class Watched(np.ndarray):
        """An array that can be referred to weakly."""

    def shards(array, **_options):
        (shard,) = shards_of(array)
        shard.data = shard.data.view(Watched)
        held.append(weakref.ref(shard.data))
        return [shard]

    held = []
    monkeypatch.setattr("backtape.tape.shards_of", shards)
    with backtape.Recorder(tmp_path / "run", strict=True) as recorder, recorder.step(0) as tape:
        for index in range(10):
            tape.record(f"x{index}", jnp.arange(1000.0))
    gc.collect()
    assert len(held) == 10 and [ref() for ref in held] == [None] * 10
    assert len(reading.entries(tmp_path / "run")) == 10


def test_arrays_on_one_device_are_one_box_and_addends_have_no_place(tmp_path, mesh):
    part = jnp.ones((4, 16), jnp.float32)
    with backtape.Recorder(tmp_path / "run", strict=True) as recorder, recorder.step(0) as tape:
        tape.record("q", part, global_shape=(16, 16), offsets=(8, 0))
        tape.record("dk", part, partial="sum", when="pre_reduce")
        tape.record("loss", jnp.float32(1.5))
    q = reading.only(tmp_path / "run", "q").record
    assert (q["box"], q["fingerprint_source"]) == ([[8, 12], [0, 16]], "recorder")
    dk = reading.only(tmp_path / "run", "dk").record
    assert (dk["box"], dk["partial"], dk["fingerprint_source"]) == ([[0, 4], [0, 16]], "sum", "recorder")
    assert reading.only(tmp_path / "run", "loss").record["fingerprint_source"] == "framework"


def test_what_jax_cannot_give_is_an_omission_with_its_reason(tmp_path, mesh):
    _, gone = put(mesh, P("data"))
    gone.delete()
    _, sharded = put(mesh, P("data"))
    with backtape.Recorder(tmp_path / "run") as recorder, recorder.step(0) as tape:
        tape.record("gone", gone)
        tape.record("key", jax.random.key(0))
        tape.record("boxed", sharded, global_shape=(16, 16), offsets=(0, 0))
        jax.jit(lambda x: tape.record("traced", x))(jnp.ones(3))
        tape.record("good", sharded)
    reasons = dict(reading.omissions(tmp_path / "run"))
    assert set(reasons) == {"gone", "key", "boxed", "traced"}
    assert "deleted" in reasons["gone"] and "jitted" in reasons["traced"]
    assert "one device" in reasons["boxed"] and "key<fry>" in reasons["key"]


def test_a_failing_place_proof_costs_the_proof_not_the_shard(tmp_path, mesh, monkeypatch):
    def fail(_array):
        raise MemoryError("no room on the device")

    monkeypatch.setattr("backtape.jax_arrays.lanes_by_device", fail)
    _, array = put(mesh, P("data"))
    with backtape.Recorder(tmp_path / "run") as recorder, recorder.step(0) as tape:
        tape.record("q", array)
    sources = {entry.record["fingerprint_source"] for entry in reading.entries(tmp_path / "run")}
    assert sources == {"recorder"}


def test_the_place_proof_can_be_left_out(tmp_path, mesh):
    _, array = put(mesh, P("data"))
    with backtape.Recorder(tmp_path / "run", place_proof=False) as recorder:
        with recorder.step(0) as tape:
            tape.record("q", array)
    sources = {entry.record["fingerprint_source"] for entry in reading.entries(tmp_path / "run")}
    assert sources == {"recorder"}


def test_a_shard_is_copied_on_its_device_whatever_mesh_the_job_has_set(mesh):
    host, array = put(mesh, P("data", "tensor"))
    with jax.set_mesh(mesh):
        for piece in array.addressable_shards:
            copy = copied(piece.data)
            assert copy.devices() == {piece.device}
            assert np.asarray(copy).tobytes() == host[piece.index].tobytes()


def test_recording_changes_no_bit_of_the_job(tmp_path, mesh):
    @jax.jit
    def step(x):
        return jnp.tanh(x @ x.T) @ x * 0.01

    def train(recorder):
        _, x = put(mesh, P("data", "tensor"), (64, 64), jnp.float32)
        for number in range(4):
            with recorder.step(number) as tape:
                tape.record("x", x)
                x = step(x)
        return np.asarray(x).tobytes()

    plain = train(backtape.Recorder.from_env())
    with backtape.Recorder(tmp_path / "run", steps="0-3", strict=True) as recorder:
        assert train(recorder) == plain
