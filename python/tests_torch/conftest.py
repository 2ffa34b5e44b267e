"""Tests that need torch, in an environment of its own (`make test-torch`)."""

import os
import sys
from pathlib import Path

import pytest

for name in [name for name in os.environ if name.startswith("BACKTAPE_")]:
    del os.environ[name]
os.environ["JAX_PLATFORMS"] = "cpu"

# What reads a dump without backtape, shared with the tests of jax.
sys.path.append(str(Path(__file__).parents[1] / "tests"))

from processes import free_port, run_ranks  # noqa: E402

PROGRAM = Path(__file__).with_name("ranks.py")


@pytest.fixture
def launch(tmp_path):
    """Runs every rank of a scenario of ranks.py to its end; a hang fails the test."""

    def run(scenario, world=4):
        run_ranks(PROGRAM, world, free_port(), tmp_path, scenario)
        return tmp_path

    return run
