"""`placement=` of a local array: the parts that the ranks of a mesh hold make up one tensor."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from processes import run_ranks

import backtape
from backtape.shards import Mesh, shards_of

PROGRAM = Path(__file__).with_name("placed_rank.py")
AXES = {"data": 2, "fsdp": 3, "tensor": 2}


def ranks(sizes):
    """The mesh as each of its ranks sees it."""
    for rank, here in enumerate(itertools.product(*map(range, sizes.values()))):
        yield Mesh(sizes, dict(zip(sizes, here)), rank, int(np.prod(list(sizes.values()))))


def cut(whole, placement, mesh):
    """What the rank holds, by numpy's own cutting, axis after axis."""
    for axis, size in mesh.sizes.items():
        if isinstance(placement.get(axis), int):
            whole = np.split(whole, size, placement[axis])[mesh.here[axis]]
    return whole


@pytest.mark.parametrize(
    "placement",
    [{"data": 0}, {"fsdp": 1}, {"data": 0, "fsdp": 1}, {"data": 0, "tensor": 0}, {"tensor": 0, "data": 0}, {}],
    ids=str,
)
def test_equal_parts_cover_the_tensor_once_and_their_copies_are_counted(placement):
    whole = np.arange(12 * 6).reshape(12, 6)
    found, seen = np.zeros_like(whole), {}
    for mesh in ranks(AXES):
        (shard,) = shards_of(cut(whole, placement, mesh), placement=placement, mesh=mesh)
        assert shard.shape == whole.shape
        box = tuple(slice(o, o + n) for o, n in zip(shard.offsets, shard.extent))
        found[box] = shard.data.view(whole.dtype).reshape(shard.extent)
        seen.setdefault(shard.offsets, []).append(shard.replica)
        assert shard.placement == {axis: placement.get(axis, "replicate") for axis in AXES}
    assert np.array_equal(found, whole)
    copies = len(list(ranks(AXES))) // len(seen)
    assert all(sorted(replicas) == list(range(copies)) for replicas in seen.values())


def test_addends_say_how_they_are_reduced_and_replicas_of_one_are_told_apart(tmp_path):
    shards = [
        shards_of(np.ones(4), placement={"data": "mean"}, mesh=mesh)[0] for mesh in ranks(AXES)
    ]
    assert {shard.partial for shard in shards} == {"mean"}
    assert sorted(shard.replica for shard in shards) == sorted([*range(6)] * 2)


def test_without_a_mesh_the_one_axis_named_is_the_ranks():
    mesh = Mesh({}, {}, 2, 4)
    (shard,) = shards_of(np.ones((3, 2)), placement={"data": 0}, mesh=mesh)
    assert (shard.shape, shard.offsets) == ((12, 2), (6, 0))


def test_parts_of_jax_arrays_are_proved_wherever_they_lie(tmp_path):
    """jax counts from the part's own first row: every rank but the first was called damaged."""
    run_ranks(PROGRAM, 2, tmp_path / "run")
    (step,) = backtape.checks(tmp_path / "run").json["steps"]
    assert (step["shards"], step["damage"]) == (8, [])
    step = backtape.open(tmp_path / "run").step(0)
    whole = np.arange(24, dtype=np.float32).reshape(4, 6)
    for name in ("jax_rows", "jax_whole", "numpy_rows", "numpy_whole"):
        assert np.array_equal(step.tensor(name), whole), name


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"placement": {"rows": 0}}, "no axis 'rows'"),
        ({"placement": {"data": 5}}, "no dimension 5"),
        ({"placement": {"data": 0}, "global_shape": (4,), "offsets": (0,)}, "leave out global_shape"),
        ({"placement": {"data": "mean"}, "partial": "sum"}, "twice"),
    ],
)
def test_what_cannot_be_true_is_refused_by_name(options, said):
    options = {"mesh": Mesh({"data": 2}, {"data": 0}, 0, 2)} | options
    with pytest.raises(ValueError, match=said):
        shards_of(np.ones(2), **options)
