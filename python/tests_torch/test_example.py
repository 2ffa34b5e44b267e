"""examples/train_torch.py, as a user runs it: clean runs agree, planted faults are named."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
REPLAY = Path(sys.executable).with_name("replay")
SMALL = (
    "--launch 4 --steps 1 --rows 2 --length 48 --vocab 900 --padded-vocab 960 --width 48 --tile 320"
).split()


def train(program, directory, *arguments):
    """Trains one step on four ranks and records it."""
    environment = {"BACKTAPE_STEPS": "0", "BACKTAPE_DIR": str(directory), "BACKTAPE_STRICT": "1"}
    environment |= {"PATH": "/usr/bin:/bin", "JAX_PLATFORMS": "cpu", "HOME": str(directory.parent)}
    command = [sys.executable, EXAMPLES / program, *SMALL, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def report(directory, *arguments):
    """Exit code and JSON of `replay` on the dump."""
    path = directory.parent / f"{directory.name}.json"
    command = [REPLAY, "--dump", directory, "--step", "0", "--compare", "dq,dk,label_logits"]
    command += ["--json", path, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    return done.returncode, json.loads(path.read_text())


@pytest.mark.parametrize("parallel", ["ddp", "fsdp2"])
@pytest.mark.parametrize("fused", ["true", "false"])
def test_a_clean_run_agrees_down_to_its_grad_norm(tmp_path, parallel, fused):
    train("train_torch.py", tmp_path / "run", "--parallel", parallel, "--use-fused-xent-loss", fused)
    code, found = report(tmp_path / "run")
    assert (code, found["verdict"]) == (0, "agreed")
    norm = found["grad_norm"]
    assert abs(norm["gap"]) < 1e-3 * norm["captured"], "gradients are averaged over ranks"


FAULTS = {
    "label-scatter-low-precision": ("--label-gather", "bf16", "--rows", "16"),
    "microbatch-mean-of-means": ("--mean-of-means",),
    "rank-mean-vs-sum": ("--sum-for-mean",),
    "partial-not-reduced": ("--sync", "never"),
    "sync-wrong-microbatch": ("--sync", "first"),
}


@pytest.mark.parametrize("cause", FAULTS)
def test_a_planted_fault_is_named(tmp_path, cause):
    train("train_torch.py", tmp_path / "run", *FAULTS[cause])
    code, found = report(tmp_path / "run")
    assert code in (1, 3) and found["causes"][0]["id"] == cause, found["causes"]


def test_of_the_same_weights_and_batch_in_jax_and_torch_only_the_backbones_rounding_differs(tmp_path):
    train("train_torch.py", tmp_path / "torch")
    train("train_jax.py", tmp_path / "jax")
    command = [REPLAY, "--dump", tmp_path / "torch", "--against", tmp_path / "jax", "--step", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    said = done.stdout
    # q comes out of two compilers' bf16 transformers, so the inputs of the heads differ.
    assert done.returncode == 1 and "DIVERGED at q in run torch and jax" in said, said
    both = said[said.index("both runs") :]
    for name in ("k", "labels", "weights"):
        rows = [line for line in both.splitlines() if line.split()[:1] == [name]]
        assert rows and all("equal bit for bit" in line for line in rows), rows
    for name in ("dk", "reduce"):
        # The tables of the step have a stage of the same name, and counts in place of a verdict.
        rows = [line.split()[:2] for line in both.splitlines() if line.split()[:1] == [name]]
        judged = [row for row in rows if row[1] in ("pass", "FAIL")]
        assert judged and all(row[1] == "pass" for row in judged), both
    assert "other run agrees with its own reference at every stage compared" in said
