"""Four real torch processes over gloo: every kind of sharding comes back as torch gathers it."""

import subprocess
import sys
from pathlib import Path

import backtape
import numpy as np
import pytest

REPLAY = Path(sys.executable).with_name("replay")


def expected(directory):
    """What torch itself gathered, by tensor."""
    prefix = "expected-"
    return {path.stem.removeprefix(prefix): np.load(path) for path in directory.glob(f"{prefix}*")}


def step_of(directory):
    """The dumped step, once `replay verify` has proved it."""
    command = [REPLAY, "verify", "--dump", directory / "run", "--step", "0"]
    proved = subprocess.run(command, capture_output=True, text=True)
    assert proved.returncode == 0, proved.stdout + proved.stderr
    return backtape.open(directory / "run").step(0), proved.stdout


def equal(found, wanted):
    """Bit for bit, as f32 or f64 holds both."""
    return np.array_equal(np.asarray(found).astype(np.float64), wanted.astype(np.float64))


def test_every_placement_of_a_dtensor_comes_back_as_the_tensor_it_is_part_of(launch):
    directory = launch("placements")
    step, said = step_of(directory)
    wanted = expected(directory)
    addends = [step.tensor("addends", rank=rank) for rank in range(4)]
    assert len(wanted) == 43
    for name, values in wanted.items():
        if name != "addends":
            found = step.tensor(name)
            assert found.dtype.name in name and found.shape == values.shape
            assert equal(found, values), name
    # Ranks 0 and 2 hold the upper half's addends, 1 and 3 the lower half's.
    assert [one.sum() for one in addends] == [4 * 3 * (rank + 1) for rank in range(4)]
    assert "declaration" not in said, "torch itself says where shards lie"


def test_under_ddp_gradients_before_and_after_the_all_reduce_are_told_apart(launch):
    directory = launch("ddp")
    step, _ = step_of(directory)
    wanted = expected(directory)
    for rank in range(4):
        own = step.tensor("grad.outer.weight", microbatch=0, when="pre_reduce", rank=rank)
        assert equal(own, wanted[f"own-{rank}"])
    parts = [
        step.tensor("grad.outer.weight", microbatch=i, when="pre_reduce", rank=rank)
        for i in range(2) for rank in range(4)
    ]  # fmt: skip
    reduced = step.tensor("grad.outer.weight", when="post_reduce")
    assert equal(reduced, wanted["grad.outer.weight"])
    assert np.allclose(sum(parts) / 4, reduced, rtol=1e-5, atol=1e-8)
    for name in ("embed.weight", "inner.weight", "head.weight"):
        assert equal(step.tensor(f"grad.{name}", when="post_reduce"), wanted[f"grad.{name}"])
        assert equal(step.tensor(name), wanted[name])
    taps = [step.tensor("dk", microbatch=i, rank=rank) for i in range(2) for rank in range(4)]
    assert np.allclose(sum(taps) / 4, wanted["grad.head.weight"], rtol=1e-5, atol=1e-8)
    assert step.tensor("q", microbatch=1).shape == (4 * 5, 6)


@pytest.mark.parametrize("scenario", ["fsdp2", "fsdp1", "fsdp1-original"])
def test_sharded_parameters_and_their_reduced_gradients_come_back_whole(launch, scenario):
    directory = launch(scenario)
    step, _ = step_of(directory)
    wanted = expected(directory)
    for name in ("embed.weight", "inner.weight", "outer.weight", "head.weight"):
        assert equal(step.tensor(name), wanted[name]), name
        found, gradient = step.tensor(f"grad.{name}", when="post_reduce"), wanted[f"grad.{name}"]
        # FSDP1 averages four equal gradients: sum and division by four are exact or nearly so.
        assert np.allclose(found, gradient, rtol=0 if scenario == "fsdp2" else 1e-6, atol=0), name
