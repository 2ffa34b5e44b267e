"""The commands that the wheel brings, run as a user runs them: replay, coordinator, backtape."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import backtape

BIN = Path(sys.executable).parent


def run(*command, **options):
    environment = os.environ | options.pop("env", {})
    return subprocess.run(
        [str(word) for word in command], env=environment, capture_output=True, text=True, timeout=120, **options
    )


def free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return trial.getsockname()[1]


class Coordinator:
    """`coordinator` of the wheel, serving; its log as it comes."""

    def __init__(self, store, *more, world_size=1):
        command = [BIN / "coordinator", "--listen", "127.0.0.1:0", "--store", store, "--world-size", world_size, *more]
        self.process = subprocess.Popen([str(word) for word in command], stderr=subprocess.PIPE, text=True)
        self.log = []
        self.address = None
        while self.address is None:
            line = self.process.stderr.readline()
            assert line, "".join(self.log)
            self.log.append(line)
            found = re.search(r"listening on (\S+),", line)
            self.address = found and found[1]

    def end(self, with_signal):
        self.process.send_signal(with_signal)
        _, rest = self.process.communicate(timeout=30)
        return self.process.returncode, "".join(self.log) + rest

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.mark.parametrize("with_signal", [signal.SIGINT, signal.SIGTERM])
def test_the_coordinator_of_the_wheel_serves_a_job_and_ends_on_a_signal(tmp_path, with_signal):
    with Coordinator(tmp_path) as coordinator:
        settings = {"dir": tmp_path / "run-a", "coordinator": coordinator.address, "strict": True}
        with backtape.Recorder(**settings) as recorder, recorder.step(0) as tape:
            tape.record("x", np.arange(4.0))
        status = run(BIN / "coordinator", "status", "--coordinator", coordinator.address, "--run", "run-a")
        assert status.returncode == 0 and "steps: 1 committed" in status.stdout, status.stderr
        code, log = coordinator.end(with_signal)
    assert code == 0 and "what was acknowledged is in the journal" in log, log
    assert "Traceback" not in log and "KeyboardInterrupt" not in log, log


def test_a_replay_that_is_interrupted_ends_at_once(tmp_path):
    rng = np.random.default_rng(0)
    with backtape.Recorder(dir=tmp_path / "run", strict=True) as recorder, recorder.step(0) as tape:
        tape.head()
        q, k = (rng.standard_normal((6000, 512), np.float32) for _ in range(2))
        for name, value in {"q": q, "k": k, "dq": q, "dk": k}.items():
            tape.record(name, value)
        tape.record("labels", np.arange(6000, dtype=np.int32))
    process = subprocess.Popen(
        [BIN / "replay", "--dump", tmp_path / "run"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        # Into the replay: past the interpreter's start, which has its own handler, and once the dump is mapped.
        while process.poll() is None and ".safetensors" not in Path(f"/proc/{process.pid}/maps").read_text():
            time.sleep(0.01)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        begin = time.monotonic()
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -signal.SIGINT and time.monotonic() - begin < 2, (process.returncode, err)


def test_one_command_holds_the_others(tmp_path):
    assert run(BIN / "backtape", "version").stdout.startswith(f"backtape {backtape.__version__} build ")
    helped = run(BIN / "backtape", "--help")
    assert helped.returncode == 0 and "backtape doctor" in helped.stdout
    assert run(BIN / "backtape").returncode == 2
    assert run(BIN / "backtape", "nonsense").returncode == 2
    listed = run(BIN / "backtape", "replay", "causes")
    assert listed.returncode == 0 and "label-scatter-low-precision" in listed.stdout
    assert run(sys.executable, "-m", "backtape", "replay", "causes").stdout == listed.stdout
    refused = run(BIN / "backtape", "coordinator", "--listen", "0.0.0.0:0", "--store", tmp_path, "--world-size", "1")
    assert refused.returncode == 2 and "--insecure" in refused.stderr, refused.stderr
    wrong = run(BIN / "coordinator", "--nonsense")
    assert wrong.returncode == 2 and "Usage: coordinator" in wrong.stderr, wrong.stderr


def doctor(*arguments, **options):
    ended = run(BIN / "backtape", "doctor", *arguments, **options)
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended


def lines(ended):
    found = json.loads(ended.stdout)
    assert found["schema"] == "backtape.doctor/1"
    return {(line["group"], line["name"]): line for line in found["lines"]}


def test_the_doctor_says_what_works(tmp_path):
    with Coordinator(tmp_path) as coordinator:
        ended = doctor("--store", tmp_path / "runs", "--coordinator", coordinator.address, "--json")
        table = doctor("--store", tmp_path, "--coordinator", coordinator.address)
    found = lines(ended)
    assert ended.returncode == 0, ended.stdout
    status = {key: line["status"] for key, line in found.items()}
    assert status["python", "backtape"] == "ok" and status["jax", "jax"] == "ok"
    for name in ("directory", "write, fsync and name", "never replaces", "direct writes", "space"):
        assert status["store", name] == "ok", found["store", name]
    assert found["coordinator", "version"]["found"].startswith(backtape.__version__)
    assert " ms; " in found["coordinator", "answer"]["found"]
    assert not (tmp_path / "runs").exists(), "the doctor makes nothing"
    assert table.returncode == 0 and "write, fsync and name" in table.stdout
    assert not [path for path in tmp_path.iterdir() if "tmp" in path.name], "and leaves nothing"


def test_the_doctor_says_what_is_broken_and_what_to_do(tmp_path):
    (tmp_path / "file").write_text("no directory")
    ended = doctor("--store", "/proc", "--coordinator", f"127.0.0.1:{free_port()}", "--json")
    found = lines(ended)
    assert ended.returncode == 1
    assert found["store", "write, fsync and name"]["status"] == "broken"
    answer = found["coordinator", "answer"]
    assert answer["status"] == "broken" and "no coordinator answers" in answer["found"] and answer["todo"]


def test_the_doctor_outlives_an_import_that_hangs_or_fails(tmp_path):
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("import time; time.sleep(1000)")
    begin = time.monotonic()
    ended = doctor("--json", "--deadline", "3", env={"PYTHONPATH": str(tmp_path)})
    assert time.monotonic() - begin < 60
    assert "hangs" in lines(ended)["jax", "jax"]["found"], ended.stdout
    assert ended.returncode == 0, "nobody asked for jax"
    (tmp_path / "jax" / "__init__.py").write_text("raise RuntimeError('no such plugin')")
    found = lines(doctor("--json", env={"PYTHONPATH": str(tmp_path)}))["jax", "jax"]
    assert found["status"] == "broken" and "no such plugin" in found["found"]


def test_the_doctor_tries_a_bucket(tmp_path):
    found = lines(doctor("--json", "--store", "memory://doctor/prefix"))
    assert found["store", "conditional put"]["status"] == "ok"
    unreachable = {"AWS_ENDPOINT": f"http://127.0.0.1:{free_port()}", "AWS_ALLOW_HTTP": "true",
                   "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "none"}
    ended = doctor("--json", "--store", "s3://nowhere/prefix", env=unreachable)
    assert ended.returncode == 1 and lines(ended)["store", "conditional put"]["status"] == "broken"


def test_importing_backtape_imports_no_framework():
    program = "import sys, backtape, backtape.command; print(*{'jax', 'torch', 'IPython'} & set(sys.modules))"
    assert run(sys.executable, "-c", program).stdout.strip() == ""


def test_libraries_of_cuda_are_found_in_wheels_by_their_own_names(tmp_path):
    """Goal: what pip installed is loaded by its path, and then by its name, as the loader has it;
    in the order in which the libraries need each other."""
    folder = tmp_path / "nvidia/cu13/lib"
    folder.mkdir(parents=True)
    for name, needs in (("libcublasLt.so.13", None), ("libcublas.so.13", "libcublasLt.so.13"), ("libnvrtc.so.13", None)):
        source = tmp_path / "empty.c"
        source.write_text(f"int version_{len(name)}(void) {{ return 13; }}\n")
        link = [folder / needs] if needs else []
        command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-Wl,--no-as-needed", "-o", folder / name, source, *link]
        subprocess.run(command, check=True, timeout=60)
    about = tmp_path / "nvidia_cublas-13.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: nvidia-cublas\nVersion: 13.0\n")
    (about / "RECORD").write_text("".join(f"nvidia/cu13/lib/{path.name},,\n" for path in folder.iterdir()))
    program = (
        "import ctypes; from backtape import cuda_wheels; print(*cuda_wheels.preload(), sep='\\n');"
        "ctypes.CDLL('libcublas.so.13'); ctypes.CDLL('libnvrtc.so.13')"
    )
    loaded = run(sys.executable, "-c", program, env={"PYTHONPATH": str(tmp_path)})
    assert loaded.returncode == 0, loaded.stderr
    names = [Path(line).name for line in loaded.stdout.split()]
    assert names == ["libnvrtc.so.13", "libcublasLt.so.13", "libcublas.so.13"]


def test_the_installed_replay_says_why_no_gpu_computes():
    asked = run(BIN / "replay", "--step", "0", "--device", "cuda:4096", "--dump", "nowhere")
    assert asked.returncode == 2
    assert "no CUDA device can be used: " in asked.stderr, asked.stderr
