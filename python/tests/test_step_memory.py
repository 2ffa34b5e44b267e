"""The step's algebra in memory that does not grow with a parameter."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

REPLAY = Path(sys.executable).with_name("replay")
ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
# Nine tensors of a parameter of 2^23 elements are 288 MiB as they were recorded, and 64 MiB each in f64.
ELEMENTS, GIVEN = 1 << 23, 160 * MIB


def bench(monkeypatch, elements):
    """The bench that records a step of one parameter, with another size; shards of a quarter of it."""
    monkeypatch.setenv("SIZE", str(elements))
    spec = importlib.util.spec_from_file_location("algebra_bench", ROOT / "benches" / "algebra.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.SHARD = elements // 4
    return module


def replayed(directory, report):
    """The report of a replay with little memory of its own; what lies in files is not counted (setrlimit(2))."""
    command = [REPLAY, "--dump", directory, "--step", "0", "--compare", "step", "--threads", "2", "--json", report]
    command = ["sh", "-c", f'ulimit -d {GIVEN >> 10} && exec "$@"', "sh", *command]
    ended = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=300)
    assert ended.returncode in (0, 1), ended.stdout + ended.stderr
    return json.loads(report.read_text())["algebra"]


def test_a_parameter_that_is_larger_than_memory_is_judged(tmp_path, monkeypatch):
    """Goal: one part of a parameter at a time is in memory. Method: less memory than its tensors have bytes, for a step
    that agrees and for one in which an addend counts twice, which is solved for."""
    record = bench(monkeypatch, ELEMENTS)
    record.recorded(tmp_path / "right")
    report = replayed(tmp_path / "right", tmp_path / "right.json")
    stages = {stage["stage"]: (stage["agreed"], stage["diverged"], stage["unchecked"]) for stage in report["stages"]}
    assert stages["accumulate"] == stages["update"] == stages["state"] == (1, 0, 0), stages
    step = record.step

    def twice(random, rows):
        addends, grad, parameter, states = step(random, rows)
        return addends, grad + addends[0], parameter, states

    monkeypatch.setattr(record, "step", twice)
    record.recorded(tmp_path / "wrong")
    report = replayed(tmp_path / "wrong", tmp_path / "wrong.json")
    assert "accumulate" in [group["stage"] for group in report["diverged"]], report["diverged"]
