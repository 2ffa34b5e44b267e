"""The step's algebra, recorded from real torch jobs and read back: every stage bit for bit."""

import json

import numpy as np
import pytest
from pathlib import Path
from processes import free_port, run_ranks

import backtape

PROGRAM = Path(__file__).with_name("step_ranks.py")
NAMES = ["inner.weight", "inner.bias", "outer.weight", "unused.weight", "unused.bias"]


def bits(array):
    return array.dtype.itemsize, array.shape, np.ascontiguousarray(array).tobytes()


class Dump:
    """The step of a finished job, and what each of its ranks saw by itself."""

    def __init__(self, directory, world):
        self.step = backtape.open(directory / "run").step(0)
        self.expected = [dict(np.load(directory / f"expected-{rank}.npz")) for rank in range(world)]
        self.declared = [self.declaration(rank) for rank in range(world)]
        self.keys = set(self.step.keys())

    def declaration(self, rank):
        return json.loads(bytes(self.step.tensor(f"step.declared:{rank}")))

    def tensor(self, stage, name, rank=None, microbatch=None):
        when = "pre_reduce" if stage in ("grad", "stale", "accumulated") else None
        return self.step.tensor(f"step.{stage}:{name}", microbatch, when=when, rank=rank)

    def has(self, stage, name):
        return any(key[0] == f"step.{stage}:{name}" for key in self.keys)

    def check(self, *stages):
        """What each rank saw is in the dump: addends rank by rank. Returns how many tensors that were."""
        count = 0
        for rank, seen in enumerate(self.expected):
            for key, wanted in seen.items():
                stage, _, name = key.partition(":")
                if stage not in stages:
                    continue
                name, _, microbatch = name.partition("#")
                addend = stage in ("grad", "accumulated")
                index = int(microbatch) if microbatch else None
                found = self.tensor(stage, name, rank if addend else None, index)
                assert bits(found) == bits(wanted), (rank, key, found, wanted)
                count += 1
        return count

    def absent(self, rank, name):
        return self.declared[rank]["parameters"][name]["absent"]


# The scenarios of one number of ranks run one after the other in the same processes.
SCENARIOS = {
    2: [
        "ddp", "ddp-no-sync", "ddp-bf16", "fsdp2", "fsdp2-no-sync", "fsdp2-bf16", "fsdp1",
        "fsdp1-original", "fsdp1-no-sync", "tp", "zero", "same-bits",
    ],
    4: ["hsdp", "tp-fsdp2"],
}  # fmt: skip


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    done = {}

    def directory_of(world):
        if world not in done:
            done[world] = tmp_path_factory.mktemp(f"ranks-{world}")
            run_ranks(PROGRAM, world, free_port(), done[world], *SCENARIOS[world])
        return done[world]

    return directory_of


@pytest.fixture
def dump_of(jobs):
    return lambda scenario, world=2: Dump(jobs(world) / scenario, world)


def exact_mean(dump, name, ranks, dtype=np.float64):
    """The mean over ranks of the sum over microbatches, in f64."""
    addends = [dump.tensor("grad", name, rank, i).astype(dtype) for rank in ranks for i in range(2)]
    return sum(addends) / len(ranks)


def close(found, wanted, tolerance):
    error = np.abs(found.astype(np.float64) - wanted).max()
    return error <= tolerance * np.abs(wanted).max()


@pytest.mark.parametrize("no_sync", [False, True])
def test_under_ddp_gradients_of_microbatches_their_sum_and_all_that_follows_are_recorded(dump_of, no_sync):
    dump = dump_of("ddp-no-sync" if no_sync else "ddp")
    assert dump.check("grad") == 2 * 2 * len(NAMES)
    # Each rank alone has gradients of its own.
    assert bits(dump.tensor("grad", "outer.weight", 0, 0)) != bits(dump.tensor("grad", "outer.weight", 1, 0))
    assert dump.check("reduced", "clipped", "before", "after", "state_after.exp_avg") == 2 * 5 * len(NAMES)
    for name in NAMES:
        assert close(dump.tensor("reduced", name), exact_mean(dump, name, (0, 1)), 1e-6)
    if no_sync:
        assert dump.check("accumulated") == 2 * len(NAMES)
    else:
        assert not dump.has("accumulated", "inner.weight")
        assert "each of several backward passes" in dump.absent(0, "inner.weight")["accumulated"]
    for rank, told in enumerate(dump.declared):
        assert (told["rank"], told["microbatches"]) == (rank, 2)
        assert told["parameters"]["inner.bias"]["reduce"] == [
            {"axis": "data", "op": "mean", "ranks": [0, 1], "dtype": "float32"}
        ]
        (norm,) = told["norms"]
        assert norm["value"] == float(dump.expected[rank]["norm"]) and norm["parameters"] == NAMES
        assert (norm["max_norm"], norm["epsilon"], norm["kind"], norm["of"]) == (0.05, 1e-6, 2.0, "reduced")


def test_a_hook_of_torch_that_compresses_says_the_dtype_that_is_sent(dump_of):
    dump = dump_of("ddp-bf16")
    (reduce,) = dump.declared[0]["parameters"]["outer.weight"]["reduce"]
    assert reduce == {"axis": "data", "op": "mean", "ranks": [0, 1], "dtype": "bfloat16"}
    assert not close(dump.tensor("reduced", "outer.weight"), exact_mean(dump, "outer.weight", (0, 1)), 1e-6)
    assert close(dump.tensor("reduced", "outer.weight"), exact_mean(dump, "outer.weight", (0, 1)), 2e-2)


@pytest.mark.parametrize("scenario", ["fsdp2", "fsdp2-no-sync", "fsdp2-bf16"])
def test_under_fsdp2_the_whole_gradients_before_the_reduce_scatter_are_recorded(dump_of, scenario):
    dump = dump_of(scenario)
    assert dump.check("grad") == 2 * 2 * len(NAMES)
    assert dump.check("reduced", "clipped", "before", "after", "state_after.exp_avg_sq") == 2 * 5 * len(NAMES)
    assert dump.check("accumulated") == (2 * len(NAMES) if scenario == "fsdp2-no-sync" else 0)
    sent = "bfloat16" if scenario == "fsdp2-bf16" else "float32"
    for name in NAMES:
        tolerance = 2e-2 if sent == "bfloat16" else 1e-6
        assert close(dump.tensor("reduced", name), exact_mean(dump, name, (0, 1)), tolerance)
        assert dump.declared[1]["parameters"][name]["reduce"] == [
            {"axis": "shard", "op": "mean", "ranks": [0, 1], "dtype": sent}
        ]
    parts = []
    for rank, told in enumerate(dump.declared):
        kept, gathered, clipped = told["norms"]
        assert clipped["value"] == float(dump.expected[rank]["norm"]) and clipped["parameters"] == NAMES
        assert gathered["value"] == float(dump.expected[rank]["outer-norm"])
        assert kept["value"] is None and kept["parameters"] == gathered["parameters"] == ["outer.weight"]
        parts.append(kept["local"])
    assert np.isclose(np.hypot(*parts), dump.expected[0]["outer-norm"], rtol=1e-6)


def test_under_hsdp_both_axes_are_named_and_every_rank_has_its_addend(dump_of):
    dump = dump_of("hsdp", 4)
    assert dump.check("grad", "accumulated") == 4 * 3 * len(NAMES)
    assert dump.check("reduced", "clipped", "before", "after") == 4 * 4 * len(NAMES)
    for name in NAMES:
        assert close(dump.tensor("reduced", name), exact_mean(dump, name, range(4)), 1e-6)
    assert dump.declared[1]["parameters"]["outer.weight"]["reduce"] == [
        {"axis": "shard", "op": "mean", "ranks": [0, 1], "dtype": "float32"},
        {"axis": "copies", "op": "mean", "ranks": [1, 3], "dtype": "float32"},
    ]


@pytest.mark.parametrize("scenario", ["fsdp1", "fsdp1-original", "fsdp1-no-sync"])
def test_flat_parameters_of_fsdp1_are_recorded_as_those_that_they_were_made_of(dump_of, scenario):
    dump = dump_of(scenario)
    assert dump.check("grad") == 2 * 2 * len(NAMES)
    assert dump.check("before", "after") == 2 * 2 * len(NAMES)
    for name in NAMES:
        assert close(dump.tensor("reduced", name), dump.expected[0][f"near-reduced:{name}"], 1e-6)
        assert dump.tensor("state_after.exp_avg", name).shape == dump.tensor("after", name).shape
        total = sum(dump.tensor("grad", name, 1, i).astype(np.float64) for i in range(2))
        if scenario == "fsdp1-no-sync":
            assert close(dump.tensor("accumulated", name, 1), total, 1e-6)
    (norm,) = dump.declared[0]["norms"]
    assert norm["value"] == float(dump.expected[0]["norm"]) and norm["max_norm"] == 0.05
    assert dump.declared[0]["parameters"]["inner.weight"]["reduce"] == [
        {"axis": "data", "op": "mean", "ranks": [0, 1], "dtype": "float32"}
    ]
    ratio = dump.tensor("clipped", "outer.weight") / dump.tensor("reduced", "outer.weight")
    assert np.allclose(ratio, 0.05 / (norm["value"] + 1e-6), rtol=1e-5)


@pytest.mark.parametrize("scenario, world", [("tp", 2), ("tp-fsdp2", 4)])
def test_of_tensor_parallelism_each_rank_records_its_box_and_partial_gradients_say_so(dump_of, scenario, world):
    dump = dump_of(scenario, world)
    assert dump.check("reduced", "after") >= world * 5
    for name in ("inner.weight", "outer.weight"):
        shape = dump.tensor("after", name).shape
        assert dump.tensor("grad", name, 0, 0).shape != shape, "the box of one rank"
    told = dump.declared[0]["parameters"]["norm.weight"]
    axes = [(one["axis"], one["op"], one["ranks"]) for one in told["reduce"]]
    assert axes == [("tp", "sum", [0, 1])] + ([("dp", "mean", [0, 2])] if world == 4 else [])
    assert ("still Partial over the mesh axis tp" in told["absent"].get("reduced", "")) == (world == 2)
    if world == 2:
        sums = sum(dump.tensor("accumulated", "norm.weight", rank) for rank in (0, 1))
        assert np.allclose(sums, dump.expected[0]["whole:norm.weight"], rtol=1e-4, atol=1e-7)
    whole = sum(dump.tensor("grad", "norm.weight", rank, 0) for rank in (0, 1))
    assert np.allclose(whole, dump.expected[0]["whole:norm.weight"], rtol=1e-4, atol=1e-7)


def test_of_a_zero_redundancy_optimizer_each_rank_records_the_state_that_it_holds(dump_of):
    dump = dump_of("zero")
    assert dump.check("before", "after") == 2 * 2 * len(NAMES)
    shares = [{key for key in seen if key.startswith("state_after")} for seen in dump.expected]
    assert all(shares) and not shares[0] & shares[1]
    assert dump.check("state_after.exp_avg") == len(NAMES)
    for rank, other in ((0, 1), (1, 0)):
        for key in shares[other]:
            assert "another rank" in dump.absent(rank, key.partition(":")[2])["state"]
    (optimizer,) = dump.declared[0]["optimizers"]
    assert (optimizer["name"], optimizer["sharded_by"]) == ("AdamW", "ZeroRedundancyOptimizer")


def test_recording_changes_no_bit_in_50_steps_under_ddp_fsdp2_and_fsdp1(jobs):
    """The scenario compares the bits itself; the last step is recorded like the first."""
    for wrapped in ("DistributedDataParallel", "fully_shard", "flat"):
        run = backtape.open(jobs(2) / "same-bits" / wrapped)
        assert run.steps == tuple(range(50))
        keys = run.step(49).keys()
        assert {key[1] for key in keys if key[0] == "step.grad:unused.bias"} == {0, 1}
        assert len([key for key in keys if key[0].startswith("step.grad:")]) == 2 * len(NAMES)
