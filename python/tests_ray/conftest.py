"""Tests that need Ray, in an environment of its own (`make test-ray`): three nodes on loopback."""

import contextlib
import os
import sys
from pathlib import Path

import pytest

for name in [name for name in os.environ if name.startswith(("BACKTAPE_", "RAY_"))]:
    del os.environ[name]
# No reports home, no dashboard, and dead nodes noticed in seconds.
os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_health_check_period_ms": "500"}
os.environ |= {"RAY_health_check_failure_threshold": "3", "RAY_DEDUP_LOGS": "0"}
# What does not fit into an object store goes to a disk, which Ray takes to be full at 95 % otherwise:
# these tests run where little of it is left.
os.environ["RAY_local_fs_capacity_threshold"] = "1"
# Workers import nothing of the tests, and start in the environment of this interpreter.
os.environ["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"

from ray.cluster_utils import Cluster  # noqa: E402

import jobs  # noqa: E402

# Tasks run on the other two: the head holds the driver.
NODE = {"num_cpus": 1, "object_store_memory": 200 << 20}


@contextlib.contextmanager
def started():
    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "num_cpus": 0, "include_dashboard": False})
    cluster.workers = [cluster.add_node(**NODE) for _ in range(2)]
    cluster.wait_for_nodes()
    try:
        yield cluster
    finally:
        cluster.shutdown()


@pytest.fixture
def nodes():
    """A head without cores and two nodes with one each; `add_node` and `remove_node` change it."""
    with started() as cluster:
        yield cluster


@pytest.fixture
def full_nodes(monkeypatch):
    """Nodes whose disks Ray takes to be full: only what fits into their object stores is kept."""
    monkeypatch.setenv("RAY_local_fs_capacity_threshold", "0.0001")
    with started() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def dumps(tmp_path_factory):
    """Dumps of every kind of jobs.py, by name."""
    store = tmp_path_factory.mktemp("dumps")
    return {name: jobs.record(store / name, **kind) for name, kind in jobs.KINDS.items()}
