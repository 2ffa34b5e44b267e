"""Real processes with real jax.distributed: what a job on one machine does."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import oracle
import reading
from processes import free_port, run_ranks

import backtape

PROGRAM = Path(__file__).with_name("four_ranks.py")
HOST = np.arange(8 * 16).reshape(8, 16).astype(jnp.bfloat16)


def launch(world, directory, mode):
    """Runs every rank to its end; a hang fails the test."""
    run_ranks(PROGRAM, world, free_port(), directory, mode, without=("XLA_FLAGS",))


def test_four_ranks_record_one_sharded_array_and_the_step_is_committed(tmp_path):
    launch(4, tmp_path, "together")
    manifest = reading.manifest(tmp_path / "run")
    assert (manifest["world_size"], manifest["omissions"]) == (4, [])
    assert manifest["mesh"] == [["data", 2], ["fsdp", 2]]
    by_tensor = {}
    for entry in reading.entries(tmp_path / "run"):
        by_tensor.setdefault(entry.record["tensor"], []).append(entry)
    for tensor, boxes in (("q", 4), ("k", 2)):
        whole, total = np.zeros_like(HOST), [0, 0]
        assert len({str(entry.record["box"]) for entry in by_tensor[tensor]}) == boxes
        for entry in by_tensor[tensor]:
            box = tuple(slice(lo, hi) for lo, hi in entry.record["box"])
            whole[box] = entry.array(jnp.bfloat16)
            assert entry.record["fingerprint_source"] == "framework"
            if entry.record["replica"] == 0:
                total = [(x + y) % 2**32 for x, y in zip(total, entry.record["fingerprint"])]
        assert whole.tobytes() == HOST.tobytes()
        assert tuple(total) == oracle.fingerprint(HOST)
    places = {(e.record["mesh"]["data"], e.record["mesh"]["fsdp"]) for e in by_tensor["q"]}
    assert places == {(0, 0), (0, 1), (1, 0), (1, 1)}
    addends = {e.record["rank"]: e.array(np.float32)[0, 0] for e in by_tensor["dk"]}
    assert addends == {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0}


def test_one_process_can_prove_the_place_of_its_shards_alone(tmp_path):
    launch(2, tmp_path, "alone")
    lanes = json.loads((tmp_path / "lanes-of-rank-0").read_text())
    assert tuple(lanes) == oracle.fingerprint(HOST[:4])


def test_taps_in_a_program_of_four_processes_record_each_shard_once_with_its_place(tmp_path):
    launch(4, tmp_path, "tapped")
    step = backtape.open(tmp_path / "run").step(0)
    assert step.manifest["omissions"] == []
    at = jnp.asarray(HOST)
    for i in range(2):
        at = jnp.sin(at)
        assert step.tensor("q", microbatch=i).tobytes() == np.asarray(at).tobytes()
        assert step.tensor("q", microbatch=i, when="recompute").tobytes() == np.asarray(at).tobytes()
    assert step.tensor("dq", microbatch=0).tobytes() == step.tensor("gradient").tobytes()
    assert step.tensor("columns").tobytes() == np.asarray(jnp.asarray(HOST) * 2).tobytes()
    holders = [e.record["rank"] for e in reading.entries(tmp_path / "run") if e.record["tensor"] == "columns"]
    assert sorted(holders) == [0, 1, 2, 3]
