"""Tests that need an NVIDIA GPU: `deploy/gpu/first-light.sh` runs them. Without a GPU they are skipped, with a
sentence; where BACKTAPE_TEST_GPU is set, a GPU that torch does not see is an error."""

import os
import time

import pytest

# jax would take most of the GPU's memory at its first array, and torch has tensors there too.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
# Opening compiles a kernel and reserves memory; it is done in the background.
OPENS_WITHIN_S = 60

torch = pytest.importorskip("torch")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    if os.environ.get("BACKTAPE_TEST_GPU"):
        pytest.exit(f"BACKTAPE_TEST_GPU is set, and torch {torch.__version__} sees no GPU", returncode=1)
    for item in items:
        item.add_marker(pytest.mark.skip(reason="no GPU: nothing was tested"))


@pytest.fixture(scope="session")
def door():
    """The way from the GPU to the recorder, opened: a capture before that would copy as on a CPU."""
    from backtape import gpu

    torch.zeros(1, device="cuda")
    opened = gpu.door(torch.cuda.current_device())
    until = time.monotonic() + OPENS_WITHIN_S
    while opened.gpu is None:
        assert not gpu._told, f"the GPU did not open for captures: {gpu._told}"
        assert time.monotonic() < until, f"the GPU did not open for captures within {OPENS_WITHIN_S} s"
        time.sleep(0.05)
    return opened


@pytest.fixture
def recorded(tmp_path, door):
    """Records what a function tapes in one step, and opens the step; the GPU must still be open behind it."""
    import backtape

    def of(use):
        recorder = backtape.Recorder(dir=tmp_path / "run", steps="0", strict=True)
        with recorder.step(0) as tape:
            use(tape)
        summary = recorder.close()
        assert summary is not None and 0 in summary.steps_committed and not summary.omissions, summary
        assert door.gpu is not None, "the GPU was shut for captures by an error of its driver"
        return backtape.open(tmp_path / "run").step(0)

    return of
