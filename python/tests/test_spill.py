"""`replay --spill DIR`: a step that needs more memory than there is, on the disk, to the same bytes."""

import os
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import backtape

REPLAY = Path(sys.executable).parent / "replay"
MIB = 1 << 20
# A [T, D] array of f64 has 70 MiB; five of them are given, with the program.
TOKENS, VOCAB, DEPTH = 36_000, 200, 256
GIVEN = 350 * MIB


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    """A fused head of many tokens."""
    rng = np.random.default_rng(3)
    q = rng.standard_normal((TOKENS, DEPTH), np.float32).astype(ml_dtypes.bfloat16)
    k = rng.standard_normal((VOCAB, DEPTH), np.float32).astype(ml_dtypes.bfloat16)
    labels = rng.integers(0, VOCAB, TOKENS).astype(np.int32)
    wide, rows = q.astype(np.float32), k.astype(np.float32)
    logits = wide @ rows.T
    p = np.exp(logits - logits.max(1, keepdims=True))
    p = (p / p.sum(1, keepdims=True) - np.eye(VOCAB, dtype=np.float32)[labels]) / TOKENS
    directory = tmp_path_factory.mktemp("spill") / "run"
    with backtape.Recorder(dir=directory, steps="0", rank=0, world_size=1, strict=True) as recorder:
        with recorder.step(0) as tape:
            tape.head(path="fused")
            for name, value in {"q": q, "k": k, "labels": labels, "dq": p @ rows, "dk": p.T @ wide}.items():
                tape.record(name, value)
    return directory


def replay(dump, json, *more, given=None):
    """Exit code, stderr and the report of a replay with so many bytes that are not in files."""
    command = [REPLAY, "--dump", dump, "--quiet", "--threads", "2", "--json", json, *more]
    if given:
        # What is private and writable is counted, what lies in files is not (setrlimit(2)). By a
        # shell: Python code between fork and exec can hang in a process of many threads.
        command = ["sh", "-c", f'ulimit -d {given >> 10} && exec "$@"', "sh", *command]
    ended = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=300)
    return ended.returncode, ended.stderr, json.read_bytes() if json.exists() else b""


def test_a_step_larger_than_memory_is_replayed_to_the_same_bytes(dump, tmp_path):
    whole = replay(dump, tmp_path / "whole.json")
    assert whole[:2] == (0, "") and whole[2], whole[1]
    code, said, report = replay(dump, tmp_path / "none.json", given=GIVEN)
    assert code not in (0, 1) and not report, "the limit is none"
    files = tmp_path / "files"
    files.mkdir()
    assert replay(dump, tmp_path / "spilled.json", "--spill", files, given=GIVEN) == whole, said
    assert not list(files.iterdir()), "a file has stayed"


def test_a_directory_that_cannot_be_used_is_one_sentence(dump, tmp_path):
    cases = [(tmp_path / "absent", "may write to")]
    if Path("/dev/shm").is_dir() and os.access("/dev/shm", os.W_OK):
        cases.append((Path("/dev/shm"), "lies in memory"))
    for directory, words in cases:
        code, said, report = replay(dump, tmp_path / "none.json", "--spill", directory)
        assert (code, report, len(said.splitlines())) == (2, b"", 1), said
        assert words in said and str(directory) in said, said
