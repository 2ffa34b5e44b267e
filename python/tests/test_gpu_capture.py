"""Captures from a GPU, as far as a machine without one can show: DLPack capsules and how long they
are held, the way that is taken where there is no GPU, and what the environment says."""

import ctypes
import gc
import logging
import os
import subprocess
import sys
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import backtape
from backtape import _native, gpu, jax_arrays
from backtape.shards import Shard


class Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16), ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


DELETER = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Unversioned(ctypes.Structure):
    _fields_ = [("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", DELETER)]


class Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
        ("deleter", DELETER), ("flags", ctypes.c_uint64), ("tensor", Tensor),
    ]  # fmt: skip


class Capsule:
    """A capsule whose every field can lie, and how often its deleter was called."""

    def __init__(self, protocol=Unversioned, major=1, shape=(2, 3), strides=None, ndim=None, **fields):
        self.deleted = 0
        self.bytes = (ctypes.c_uint8 * 64)(*range(64))
        self.shape = (ctypes.c_int64 * max(len(shape), 1))(*shape)
        self.strides = strides and (ctypes.c_int64 * len(strides))(*strides)
        self.deleter = DELETER(self._delete)
        self.managed = protocol()
        self.managed.deleter = self.deleter
        if protocol is Versioned:
            self.managed.major = major
        tensor = self.managed.tensor
        tensor.data = ctypes.addressof(self.bytes)
        tensor.device_type, tensor.bits, tensor.lanes = 1, 16, 1
        tensor.ndim = len(shape) if ndim is None else ndim
        tensor.shape = ctypes.cast(self.shape, ctypes.POINTER(ctypes.c_int64))
        if self.strides:
            tensor.strides = ctypes.cast(self.strides, ctypes.POINTER(ctypes.c_int64))
        for name, value in fields.items():
            setattr(tensor, name, value)
        self.name = b"dltensor_versioned" if protocol is Versioned else b"dltensor"
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        self.capsule = new(ctypes.addressof(self.managed), self.name, None)

    def _delete(self, _):
        self.deleted += 1


def sums(data, dtype, shape):
    zeros = (0,) * len(shape)
    return _native.fingerprint(Shard(np.frombuffer(data, np.uint8), dtype, shape, zeros, shape))


def whole(shape):
    return [(0, size) for size in shape]


@pytest.mark.parametrize("protocol", [Unversioned, Versioned])
def test_a_capsule_gives_its_bytes_once_and_its_deleter_is_called_once(protocol):
    one = Capsule(protocol, byte_offset=4)
    data, pair = _native._read_capsule(one.capsule, "uint16", whole((2, 3)))
    assert data == bytes(range(4, 16)) and pair == sums(data, "uint16", (2, 3))
    assert one.deleted == 1
    with pytest.raises(TypeError, match="or one that was used"):
        _native._read_capsule(one.capsule, "uint16", whole((2, 3)))
    assert one.deleted == 1


@pytest.mark.parametrize("lie, message", [
    ({"ndim": -1}, "of -1 dimensions"),
    ({"ndim": 65}, "of 65 dimensions"),
    ({"bits": 4}, "1 x 4 bits"),
    ({"bits": 0}, "1 x 0 bits"),
    ({"lanes": 2}, "2 x 16 bits"),
    ({"shape": (2, -3)}, "of the shape"),
    ({"shape": (2**62, 2**62)}, "of the shape"),
    ({"strides": (1, 2)}, "not in C order"),
    ({"data": None}, "without memory"),
    ({"byte_offset": 2**64 - 1}, "beyond all memory"),
    ({"device_type": 2}, "of a device's memory"),
    ({"protocol": Versioned, "major": 2}, "of version 2, where 1 is read"),
    ({"shape": (2, 4)}, "another size than its box"),
])  # fmt: skip
def test_a_capsule_that_lies_is_refused_with_one_sentence_and_let_go_of(lie, message):
    one = Capsule(**lie)
    with pytest.raises(BufferError, match=message):
        _native._read_capsule(one.capsule, "uint16", whole((2, 3)))
    assert one.deleted == 1


@pytest.mark.parametrize("thing", [None, 7, b"dltensor", object()])
def test_what_is_no_capsule_is_refused(thing):
    with pytest.raises(TypeError, match="no DLPack capsule"):
        _native._read_capsule(thing, "uint16", [])


@pytest.mark.parametrize("strides", [(3, 1), (7, 1)])
def test_strides_of_dimensions_of_one_index_say_nothing(strides):
    one = Capsule(shape=(1, 3), strides=strides)
    assert _native._read_capsule(one.capsule, "uint16", whole((1, 3)))[0] == bytes(range(6))


@pytest.mark.parametrize("shape", [(), (0, 4), (5,), (3, 4, 2)])
@pytest.mark.parametrize("dtype", ["uint8", "float16", "float32", "float64", "int64", "bool"])
def test_numpys_capsules_give_its_bytes_and_its_array_back(shape, dtype):
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    references = sys.getrefcount(array)
    data, pair = _native._read_capsule(array.__dlpack__(), dtype, whole(shape))
    assert data == array.tobytes() and pair == sums(data, dtype, shape)
    assert sys.getrefcount(array) == references


def test_the_versioned_protocol_of_numpy_is_read_too():
    array = np.arange(6, dtype=np.int32)
    capsule = array.__dlpack__(max_version=(1, 0))
    assert "dltensor_versioned" in repr(capsule)
    assert _native._read_capsule(capsule, "int32", whole((6,)))[0] == array.tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8", "bool"])
def test_jaxs_capsules_give_its_bytes(dtype):
    array = jnp.arange(12).reshape(3, 4).astype(dtype)
    data, pair = _native._read_capsule(array.__dlpack__(), dtype, whole((3, 4)))
    assert data == np.asarray(array).tobytes() and pair == sums(data, dtype, (3, 4))


def test_a_jax_array_that_is_donated_while_a_capsule_holds_it_keeps_its_bytes():
    array = jnp.arange(4096, dtype=jnp.float32)
    expected = np.arange(4096, dtype=np.float32).tobytes()
    capsule = array.__dlpack__()
    changed = jax.jit(lambda x: x * 2 + 1, donate_argnums=0)(array)
    changed.block_until_ready()
    assert _native._read_capsule(capsule, "float32", whole((4096,)))[0] == expected


def test_the_memory_of_a_capsule_that_was_read_is_free_again():
    class Owner(np.ndarray):
        pass

    array = np.arange(10, dtype=np.uint8).view(Owner)
    gone = weakref.ref(array)
    _native._read_capsule(array.__dlpack__(), "uint8", whole((10,)))
    del array
    gc.collect()
    assert gone() is None


def test_the_environment_says_how_much_memory_captures_take():
    assert gpu.sizes({}) == (256 << 20, 256 << 20)
    assert gpu.sizes({"BACKTAPE_GPU_PINNED": "1GiB", "BACKTAPE_GPU_SNAPSHOTS": "0"}) == (1 << 30, 0)
    assert gpu.sizes({"BACKTAPE_GPU_PINNED": "0"})[0] == 0
    with pytest.raises(ValueError, match="BACKTAPE_GPU_PINNED"):
        gpu.sizes({"BACKTAPE_GPU_PINNED": "plenty"})


@pytest.fixture
def quiet(monkeypatch):
    monkeypatch.setattr(gpu, "_told", set())


def opened(ordinal):
    """A door whose thread has ended."""
    import threading

    door = gpu.Door(ordinal)
    for thread in threading.enumerate():
        if thread.name == "backtape-gpu":
            thread.join(60)
    return door


def test_a_gpu_that_cannot_be_opened_is_said_once_and_captures_go_the_other_way(
    quiet, caplog, monkeypatch
):
    for name in gpu.DEFAULTS:
        monkeypatch.delenv(name, raising=False)
    with caplog.at_level(logging.WARNING, "backtape"):
        # No machine has as many.
        assert [opened(4096).gpu, opened(4096).gpu] == [None, None]
    (line,) = caplog.messages
    assert "captures from GPU 4096 wait for their copies: RuntimeError: no GPU can be captured" in line
    assert "\n" not in line


def test_captures_are_turned_off_without_a_word_and_a_wrong_size_is_named(
    quiet, caplog, monkeypatch
):
    with caplog.at_level(logging.WARNING, "backtape"):
        monkeypatch.setenv("BACKTAPE_GPU_PINNED", "0")
        assert opened(0).gpu is None and not caplog.messages
        monkeypatch.setenv("BACKTAPE_GPU_PINNED", "plenty")
        assert opened(0).gpu is None
    assert "BACKTAPE_GPU_PINNED" in caplog.text


class Refusing:
    """A GPU whose calls end in what a real one may end in; it takes the capsule as a real one."""

    stream = 1

    def __init__(self, outcome):
        self.outcome, self.asked = outcome, []

    def capture(self, capsule, dtype, ranges, **options):
        self.asked.append((dtype, ranges, options))
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class OnGpu:
    """A jax array that says it lies on GPU 3; no machine here has one."""

    platform = "gpu"
    memory_kind = "device"
    nbytes, shape = 24, (2, 3)

    sharding = property(lambda self: self)

    def devices(self):
        return {self}

    def __dlpack_device__(self):
        return 2, 3

    def __dlpack__(self, *, stream):
        assert stream == 1
        return "capsule"


@pytest.fixture
def door(quiet, monkeypatch):
    monkeypatch.setenv("BACKTAPE_GPU_PINNED", "0")
    gpu.door.cache_clear()
    yield gpu.door(3)
    gpu.door.cache_clear()


def test_what_a_gpu_refuses_goes_the_other_way_and_only_a_fault_of_the_gpu_ends_its_captures(
    door, caplog, monkeypatch
):
    door.copies = gpu.Room(100)
    monkeypatch.setattr(jax_arrays, "copied", lambda array: array)
    with caplog.at_level(logging.WARNING, "backtape"):
        for outcome, stays in [(None, True), (BufferError("strided"), True), (RuntimeError("x"), False)]:
            door.gpu = refusing = Refusing(outcome)
            assert jax_arrays.from_gpu(OnGpu(), "float32", (4, 0), None) is None
            ((dtype, ranges, more),) = refusing.asked
            assert (dtype, ranges, more["sums"]) == ("float32", [(4, 6), (0, 3)], None)
            # What is held counts until it is dropped.
            assert more["hold"].size == OnGpu.nbytes and door.copies.take(100) is None
            assert (door.gpu is not None) == stays
        assert jax_arrays.from_gpu(OnGpu(), "float32", (4, 0), None) is None
    assert [line.split(":")[0] for line in caplog.messages] == [
        "[backtape] captures from GPU 3 wait for their copies where pinned memory is full",
        "[backtape] a capture from a GPU waits for its copy",
        "[backtape] captures from GPU 3 wait for their copies",
    ]


def test_a_copy_of_a_jax_array_is_none_of_its_memory_and_outlives_its_donation():
    array = jnp.arange(4096, dtype=jnp.float32)
    mine = jax_arrays.copied(array)
    assert mine.unsafe_buffer_pointer() != array.unsafe_buffer_pointer()
    capsule = mine.__dlpack__()
    jax.jit(lambda x: x * 2 + 1, donate_argnums=0)(array).block_until_ready()
    expected = np.arange(4096, dtype=np.float32).tobytes()
    assert _native._read_capsule(capsule, "float32", whole((4096,)))[0] == expected


def test_room_for_copies_is_given_back_when_what_took_it_is_dropped():
    room = gpu.Room(10)
    taken = room.take(7)
    assert taken is not None and room.take(4) is None and room.take(3) is not None
    del taken
    assert room.take(10) is not None


def test_gpus_that_the_job_uses_already_are_opened_with_its_recorder_and_no_others(door, monkeypatch):
    def device(number, platform="gpu", version="PJRT C API\ncuda 12090"):
        client = types.SimpleNamespace(platform_version=version)
        return types.SimpleNamespace(platform=platform, local_hardware_id=number, client=client)

    devices = [device(1), device(5, "cpu"), device(6, version="rocm 60300"), device(7)]
    bridge = types.SimpleNamespace(backends_are_initialized=lambda: False)
    monkeypatch.setitem(sys.modules, "jax._src.xla_bridge", bridge)
    monkeypatch.setitem(sys.modules, "jax", types.SimpleNamespace(local_devices=lambda: devices))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert gpu.in_use() == set()
    bridge.backends_are_initialized = lambda: True
    assert gpu.in_use() == {1, 7}
    cuda = types.SimpleNamespace(is_initialized=lambda: True, current_device=lambda: 2)
    torch = types.SimpleNamespace(version=types.SimpleNamespace(cuda="13.0"), cuda=cuda)
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert gpu.in_use() == {2}
    before = gpu.door.cache_info().currsize
    gpu.expect()
    assert gpu.door.cache_info().currsize == before + 1
    # What cannot be asked is no fault of the job's.
    del cuda.current_device
    gpu.expect()


def test_a_job_on_the_cpu_opens_no_gpu_and_starts_no_thread():
    source = """
import sys, threading, jax.numpy as jnp, backtape
jnp.ones(1)
with backtape.Recorder(dir=sys.argv[1], steps="0") as recorder:
    with recorder.step(0) as tape:
        tape.record("w", jnp.ones((4, 4)))
from backtape import gpu
assert gpu.door.cache_info().currsize == 0
assert not [t for t in threading.enumerate() if t.name == "backtape-gpu"]
"""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        run = [sys.executable, "-c", source, os.path.join(folder, "run")]
        subprocess.run(run, check=True, timeout=120, env=os.environ | {"JAX_PLATFORMS": "cpu"})
        step = backtape.open(os.path.join(folder, "run")).step(0)
        assert np.array_equal(step.tensor("w"), np.ones((4, 4), np.float32))
