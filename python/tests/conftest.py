"""Eight devices in one process, so that shardings are real without a cluster."""

import os
import pathlib
import subprocess
import sys

import pytest
from browser import Browser, missing

# Before anything imports jax.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
# What would steer the recorders; these two are the tests' own.
KEPT = {"BACKTAPE_SEED", "BACKTAPE_CASES"}
for name in [name for name in os.environ if name.startswith("BACKTAPE_") and name not in KEPT]:
    del os.environ[name]
ROOT = pathlib.Path(__file__).resolve().parents[2]

# One step of examples/train_jax.py on four processes; a quarter of its tokens, an eighth of its vocabulary. The guide
# (docs/guide.md) has these very words.
TRAIN = "examples/train_jax.py --launch 4 --steps 1 --length 64 --vocab 1030 --padded-vocab 1056"


@pytest.fixture(scope="module")
def browser():
    """One window for all tests of a module. Without a browser they are skipped, which fails in CI."""
    if why := missing():
        if os.environ.get("CI"):
            pytest.fail(why)
        pytest.skip(why)
    found = Browser()
    yield found
    found.close()


def train(directory, *options):
    """Records a run of a real job into `directory`; its last line of output."""
    command = [sys.executable, *TRAIN.split(), *options]
    recording = {"BACKTAPE_STEPS": "0", "BACKTAPE_DIR": str(directory), "BACKTAPE_STRICT": "1"}
    # The eight devices above are for arrays inside pytest; a rank has one.
    inherited = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    ended = subprocess.run(
        command, cwd=ROOT, env=inherited | recording, capture_output=True, text=True, timeout=400
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="session")
def dumps(tmp_path_factory):
    """Two runs of one job: `new` gathers the labels' rows in bf16, `old` does not."""
    store = tmp_path_factory.mktemp("trained") / "dumps"
    store.mkdir()
    for name, dtype in (("new", "bf16"), ("old", "f32")):
        (store / f"{name}.log").write_text(train(store / name, "--label-gather", dtype))
    return store
