"""Tests that need torch, in an environment of its own (`make test-torch`)."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

for name in [name for name in os.environ if name.startswith("BACKTAPE_")]:
    del os.environ[name]
os.environ["JAX_PLATFORMS"] = "cpu"

# What reads a dump without backtape, shared with the tests of jax.
sys.path.append(str(Path(__file__).parents[1] / "tests"))

PROGRAM = Path(__file__).with_name("ranks.py")


@pytest.fixture
def launch(tmp_path):
    """Runs every rank of a scenario of ranks.py to its end; a hang fails the test."""

    def run(scenario, world=4):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        ranks = [
            subprocess.Popen(
                [sys.executable, PROGRAM, *map(str, (rank, world, port, tmp_path, scenario))],
                stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            )
            for rank in range(world)
        ]  # fmt: skip
        try:
            errors = [rank.communicate(timeout=180)[1] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
        for rank, text in zip(ranks, errors):
            assert rank.returncode == 0, text
        return tmp_path

    return run
