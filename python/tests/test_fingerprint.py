"""Three definitions of the fingerprint agree: Rust, XLA on the sharded array, Python integers."""

import itertools
import random

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

from backtape import _native
from backtape.jax_arrays import lanes_by_device, to_pair
from backtape.shards import shards_of

DTYPES = [
    jnp.bool_, jnp.uint8, jnp.int8, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int16, jnp.float16,
    jnp.bfloat16, jnp.int32, jnp.uint32, jnp.float32,
]  # fmt: skip
WIDE = [np.int64, np.uint64, np.float64]
SPECS = [
    P(), P("a"), P("b"), P(None, "a"), P(None, "b"), P("a", "b"), P("b", "a"), P(("a", "b")),
    P(None, ("b", "a")), P("b", None),
]  # fmt: skip
RAMP = np.arange(12, dtype=np.uint16) * 1000


def mesh(axis_type=AxisType.Auto):
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"), axis_types=(axis_type,) * 2)


def random_bits(dtype, shape, seed):
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.random.default_rng(seed).integers(0, 256, count, np.uint8)
    return (raw & 1 if dtype == jnp.bool_ else raw).view(dtype).reshape(shape)


def text(pair):
    return f"{pair[0]:08x}{pair[1]:08x}"


@pytest.mark.parametrize(
    "array, known",
    [
        (RAMP.view(ml_dtypes.bfloat16).reshape(3, 4), "ba525846ab4c17c3"),
        (np.float32(1.5), "0b7bb7b0ec119ab4"),
        (RAMP[:8].view(np.float64), "c8edd5c944923f1d"),
    ],
    ids=["bf16", "scalar", "f64"],
)
def test_known_values_tie_all_three_definitions(array, known):
    assert text(oracle.fingerprint(array)) == known
    (shard,) = shards_of(array)
    assert text(_native.fingerprint(shard)) == known
    with jax.enable_x64(True):
        (shard,) = shards_of(jax.device_put(array, jax.devices()[0]))
    assert text(shard.fingerprint) == known


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def test_xla_agrees_with_the_oracle_shard_by_shard_in_every_layout(dtype, axis_type):
    grid = mesh(axis_type)
    for seed, spec in enumerate(SPECS):
        host = random_bits(dtype, (8, 16), seed)
        for shard in shards_of(jax.device_put(host, NamedSharding(grid, spec))):
            box = tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.extent))
            expected = oracle.fingerprint(host[box], shard.offsets)
            assert shard.fingerprint == expected == _native.fingerprint(shard), spec


def test_any_shape_and_layout_agrees():
    rng = random.Random(1)
    grid = mesh()
    for seed in range(25):
        rank = rng.randrange(0, 5)
        axes = [None] * rank
        for axis in rng.sample(["a", "b"], min(rank, rng.randrange(0, 3))):
            axes[rng.choice([dim for dim in range(rank) if axes[dim] is None])] = axis
        size = {None: 1, "a": 2, "b": 4}
        shape = tuple(size[axis] * rng.randrange(1, 4) for axis in axes)
        host = random_bits(rng.choice(DTYPES), shape, seed)
        for shard in shards_of(jax.device_put(host, NamedSharding(grid, P(*axes)))):
            box = tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.extent))
            assert shard.fingerprint == oracle.fingerprint(host[box], shard.offsets), (shape, axes)


@pytest.mark.parametrize("dtype", WIDE, ids=lambda dtype: np.dtype(dtype).name)
def test_64_bit_elements_count_as_two_words(dtype):
    with jax.enable_x64(True):
        for seed, spec in enumerate(SPECS):
            host = random_bits(dtype, (8, 8), seed)
            for shard in shards_of(jax.device_put(host, NamedSharding(mesh(), spec))):
                box = tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.extent))
                assert shard.fingerprint == oracle.fingerprint(host[box], shard.offsets), spec


def test_the_shards_of_one_copy_add_up_to_the_whole():
    host = random_bits(jnp.bfloat16, (8, 16), 0)
    total = [0, 0]
    for shard in shards_of(jax.device_put(host, NamedSharding(mesh(), P("b", None)))):
        if shard.replica == 0:
            total = [(x + y) % 2**32 for x, y in zip(total, shard.fingerprint)]
    assert tuple(total) == oracle.fingerprint(host)


def test_the_jobs_mesh_context_is_no_obstacle():
    x = jax.device_put(np.ones((8, 16), np.float32), NamedSharding(mesh(), P("a", "b")))
    one = jax.device_put(np.float32(1.5), jax.devices()[3])
    half = Mesh(np.array(jax.devices()[:4]), ("c",))
    y = jax.device_put(np.ones(8, np.float32), NamedSharding(half, P("c")))
    for axis_type in (AxisType.Auto, AxisType.Explicit):
        with jax.set_mesh(mesh(axis_type)), jax.transfer_guard("disallow"):
            for shard in itertools.chain(shards_of(x), shards_of(one), shards_of(y)):
                assert shard.fingerprint == _native.fingerprint(shard)


def test_a_wrong_box_does_not_agree():
    x = jax.device_put(random_bits(jnp.float32, (8, 16), 3), NamedSharding(mesh(), P("a", "b")))
    one, other, *_ = shards_of(x)
    one.offsets, other.offsets = other.offsets, one.offsets
    for shard in (one, other):
        assert shard.fingerprint != _native.fingerprint(shard)


def test_no_collective_is_compiled_in():
    from backtape.jax_arrays import fingerprinting

    for spec in SPECS:
        x = jax.device_put(np.ones((8, 16), np.float32), NamedSharding(mesh(), spec))
        with jax.set_mesh(mesh()):
            compiled = fingerprinting(x.shape, x.dtype, mesh(), spec).lower(x).compile()
        program = compiled.as_text()
        for word in ("all-", "collective", "reduce-scatter", "send", "recv", "custom-call"):
            assert word not in program, (spec, word)


def test_programs_are_compiled_once_for_a_layout():
    from backtape.jax_arrays import fingerprinting

    sharding = NamedSharding(mesh(), P("a"))
    for value in range(3):
        before = fingerprinting.cache_info().misses
        x = jax.device_put(np.full((6, 22), value, np.float32), sharding)
        assert len({to_pair(sums) for sums in lanes_by_device(x).values()}) == 2
        assert fingerprinting.cache_info().misses - before == (value == 0)
