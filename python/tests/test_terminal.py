"""What `replay` prints on a terminal: colours that repeat the words, and lines that fit.

Goal: a person scans colours, a pipe gets plain text, and both are the same words. Method: the real
program on a pseudo-terminal and in a pipe.
"""

import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import backtape

REPLAY = Path(sys.executable).with_name("replay")
WIDTH = 100


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    """A head whose dk is scaled by 0.9, of two microbatches, and a tensor of a long name."""
    path = tmp_path_factory.mktemp("terminal") / "run"
    rng = np.random.default_rng(20261123)
    k = rng.standard_normal((13, 8)).astype(np.float32)
    with backtape.Recorder(path, steps="0", strict=True) as recorder, recorder.step(0) as tape:
        tape.head(loss="softmax_xent", microbatches=2)
        tape.record("k", k)
        tape.record("layers." * 20 + "weight", k)
        for microbatch in range(2):
            q = rng.standard_normal((20, 8)).astype(np.float32)
            labels = rng.integers(0, 13, 20).astype(np.int32)
            p = np.exp(q @ k.T)
            p /= p.sum(-1, keepdims=True)
            p[np.arange(20), labels] -= 1
            arrays = {"q": q, "labels": labels, "dq": p @ k / 40, "dk": 0.9 * p.T @ q / 40}
            for name, array in arrays.items():
                tape.record(name, array, microbatch=microbatch)
    return path


def on_a_terminal(*command, **environment):
    """What the program writes to a terminal, and its exit code."""
    parent, child = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", **environment}
    environment.pop("CI", None)
    process = subprocess.Popen(command, stdout=child, stderr=child, env=environment)
    os.close(child)
    said = b""
    while True:
        try:
            part = os.read(parent, 1 << 16)
        except OSError:  # EIO: the program's end of the terminal is closed
            break
        if not part:
            break
        said += part
    os.close(parent)
    return said.decode().replace("\r\n", "\n"), process.wait(timeout=60)


def plain(text):
    return re.sub("\x1b\\[[0-9;]*m", "", text)


@pytest.mark.parametrize("words", [(), ("verify",), ("inspect",), ("checks",)])
def test_colours_are_for_a_terminal_and_change_no_word(dump, words):
    command = [REPLAY, *words, "--dump", dump, "--quiet"]
    piped = subprocess.run(command, capture_output=True, text=True, timeout=60)
    shown, code = on_a_terminal(*command)
    assert "\x1b" not in piped.stdout and code == piped.returncode
    assert plain(shown) == piped.stdout + piped.stderr
    if words != ("inspect",):
        assert "\x1b" in shown, "a verdict has its colour"
    bare, _ = on_a_terminal(*command, NO_COLOR="1")
    assert bare == piped.stdout + piped.stderr


@pytest.mark.parametrize("words", [(), ("verify",), ("inspect",), ("checks",), ("show", "k")])
def test_no_line_is_wider_than_a_hundred_columns_but_for_names(dump, words):
    said = subprocess.run([REPLAY, *words, "--dump", dump], capture_output=True, text=True, timeout=60)
    wide = [line for line in said.stdout.splitlines() if len(line) > WIDTH]
    named = [line for line in wide if "layers." * 20 in line or str(dump) in line]
    assert wide == named, "\n".join(set(wide) - set(named))


def test_inspect_shows_microbatches_together_with_who_holds_them(dump):
    said = subprocess.run([REPLAY, "inspect", "--dump", dump], capture_output=True, text=True, timeout=60)
    rows = [line.split() for line in said.stdout.splitlines()]
    assert ["0-1", "2", "1.2", "KiB"] in [row[-4:] for row in rows], said.stdout
    assert "held by rank 0" in said.stdout and "6 tensors" in said.stdout, said.stdout
