"""`backtape doctor`: what works on this machine, and what to do about what does not.

    backtape doctor [--store DIR|URL] [--coordinator HOST:PORT] [--credentials DIR] [--json]

Each line is ok, absent (it is not there, and nobody asked for it) or broken (it is there or was
asked for, and does not work). The exit code is 0, or 1 when something that was asked for is broken.
"""

import argparse
import ctypes
import json
import os
import platform
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from backtape import _native, cuda_wheels

OK, ABSENT, BROKEN = "ok", "absent", "broken"

# The port on which a coordinator listens by default.
PORT = 7447

# A framework that takes longer than this to import is reported to hang.
IMPORT_DEADLINE_S = 60.0

# Fewer open files than this are too few: a rank writes several files at once, and the coordinator
# has a connection and files open for each rank.
FEW_FILES = 4096

# Less shared memory than this is too little: NCCL, and jax between processes of a host, transfer
# through it.
FEW_SHARED_BYTES = 64 << 20

# A clock that shows an earlier time is not set; leases, deadlines and manifests depend on it.
EARLIEST_TIME = 1_700_000_000

SCHEMA = "backtape.doctor/1"


@dataclass(frozen=True)
class Line:
    """One thing that was looked at, and what was found."""

    group: str
    name: str
    status: str
    found: str
    todo: str = ""
    asked: bool = False
    """True where somebody asked for it: broken then means that the exit code is 1."""


def examine(
    store: str | None = None,
    coordinator: str | None = None,
    credentials: str | None = None,
    deadline_s: float = IMPORT_DEADLINE_S,
) -> list[Line]:
    """Looks at everything, and returns what was found in the order of the groups.

    store, coordinator, credentials: what to try; by default BACKTAPE_DIR, BACKTAPE_COORDINATOR and
        BACKTAPE_CREDENTIALS.
    deadline_s: how many seconds jax and torch may take to import.

    It never raises: a look that fails is a broken line.
    """
    environment = os.environ
    store = store or environment.get("BACKTAPE_DIR")
    coordinator = coordinator or environment.get("BACKTAPE_COORDINATOR")
    credentials = credentials or environment.get("BACKTAPE_CREDENTIALS")
    groups: list[tuple[str, Callable[[], Iterator[Line]]]] = [
        ("python", _python),
        ("jax", lambda: _framework("jax", JAX, deadline_s)),
        ("torch", lambda: _framework("torch", TORCH, deadline_s)),
        ("gpu", _gpu),
        ("store", lambda: _store(store)),
        ("coordinator", lambda: _coordinator(coordinator, credentials, store)),
        ("limits", _limits),
    ]
    found: list[Line] = []
    for group, look in groups:
        try:
            found.extend(look())
        except Exception as error:  # A look that fails is one line, and the others go on.
            found.append(Line(group, "doctor", BROKEN, f"{type(error).__name__}: {error}",
                              "this is a bug of the doctor: report it with this line"))
    return found


def _python() -> Iterator[Line]:
    version = platform.python_version()
    yield Line("python", "interpreter", OK, f"{version} at {sys.executable}")
    build = f"{_native.__version__} build {_native.__build__}"
    yield Line("python", "backtape", OK, f"{build}, {Path(__file__).parent}")
    installed = _version("backtape")
    if installed not in (None, _native.__version__):
        yield Line("python", "installed", BROKEN, f"pip knows backtape {installed}",
                   "pip install --force-reinstall backtape: two versions lie over each other", True)
    for name in ("numpy", "ml_dtypes"):
        found = _version(name)
        if found is None:
            yield Line("python", name, BROKEN, "not installed", f"pip install {name}", True)
        else:
            yield Line("python", name, OK, found)
    for name in ("replay", "coordinator", "backtape"):
        beside = shutil.which(name, path=str(Path(sys.executable).parent))
        path = shutil.which(name)
        if path is None and beside is None:
            yield Line("python", f"command {name}", ABSENT, "no such command",
                       f"python -m backtape {'' if name == 'backtape' else name + ' '}... does the same")
        elif path is None:
            yield Line("python", f"command {name}", ABSENT, f"{beside} is not on PATH",
                       f"add {Path(sys.executable).parent} to PATH")
        else:
            yield Line("python", f"command {name}", OK, path)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


# These programs run in processes of their own, so that an import that hangs, or that ends its
# process, becomes a line.
JAX = """
import json, jax
devices = [f"{device.device_kind} {device.id}" for device in jax.devices()]
print(json.dumps([jax.__version__, jax.default_backend(), devices]))
"""
TORCH = """
import json, torch
devices = []
if torch.cuda.is_available():
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
print(json.dumps([torch.__version__, f"cuda {torch.version.cuda}" if torch.version.cuda else "cpu", devices]))
"""


def _framework(name: str, program: str, deadline_s: float) -> Iterator[Line]:
    if _version(name) is None:
        yield Line(name, name, ABSENT, "not installed", f"pip install {name}, where the job uses it")
        return
    begin = time.monotonic()
    ended = _run([sys.executable, "-c", program], deadline_s)
    took = time.monotonic() - begin
    if ended is None:
        yield Line(name, name, BROKEN, f"{_version(name)}: importing it and asking for its devices "
                   f"hangs ({deadline_s:.0f} s)",
                   f'run {sys.executable} -c "import {name}" by hand: a driver or a plugin waits for something')
        return
    code, out, err = ended
    if code != 0:
        last = err.strip().splitlines()[-1:] or [f"exit code {code}"]
        yield Line(name, name, BROKEN, f"{_version(name)}: {last[0]}",
                   f'run {sys.executable} -c "import {name}" by hand, and mend what it says')
        return
    version, backend, devices = json.loads(out.strip().splitlines()[-1])
    shown = ", ".join(devices[:4]) + (f" and {len(devices) - 4} more" if len(devices) > 4 else "")
    yield Line(name, name, OK, f"{version}, {backend}, imported in {took:.1f} s")
    yield Line(name, "devices", OK if devices else ABSENT, shown or "none beside the CPU")


def _run(command: list[str], deadline_s: float) -> tuple[int, str, str] | None:
    """The exit code and output of a process; None where it has not ended in time. It is then killed
    with its children."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=deadline_s)
        return process.returncode, out, err
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None


def _gpu() -> Iterator[Line]:
    device = Path("/dev/nvidiactl").exists()
    driver = _library("libcuda.so.1")
    if driver is None:
        if device:
            yield Line("gpu", "driver", BROKEN, "/dev/nvidiactl is there, libcuda.so.1 is not",
                       "mount the driver's libraries into the container (nvidia-container-toolkit)")
        else:
            yield Line("gpu", "driver", ABSENT, "no NVIDIA driver", "nothing: recording and replay run on the CPU")
        return
    yield _driver(driver)
    cuda_wheels.preload()
    for name, found in (
        ("NVRTC", ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")),
        ("cuBLAS", ("libcublas.so.13", "libcublas.so.12", "libcublas.so")),
    ):
        loaded = next((one for one in found if _library(one) is not None), None)
        if loaded:
            yield Line("gpu", name, OK, loaded)
        else:
            yield Line("gpu", name, ABSENT, "no such library",
                       "pip install 'backtape[cuda]', or leave out --device: the CPU replays too")
            return
    try:
        yield Line("gpu", "replay --device cuda", OK, _native.probe_device(0))
    except RuntimeError as error:
        yield Line("gpu", "replay --device cuda", BROKEN, str(error), "leave out --device: the CPU replays too")


def _library(name: str) -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(name)
    except OSError:
        return None


def _driver(cuda: ctypes.CDLL) -> Line:
    code = cuda.cuInit(0)
    if code != 0:
        return Line("gpu", "driver", BROKEN, f"cuInit says {code}",
                    "the driver and the kernel module differ, or no device may be used: see dmesg")
    version, count = ctypes.c_int(), ctypes.c_int()
    cuda.cuDriverGetVersion(ctypes.byref(version))
    cuda.cuDeviceGetCount(ctypes.byref(count))
    name = ctypes.create_string_buffer(100)
    names = []
    for index in range(count.value):
        device = ctypes.c_int()
        if cuda.cuDeviceGet(ctypes.byref(device), index) == 0:
            cuda.cuDeviceGetName(name, len(name), device)
            names.append(name.value.decode(errors="replace"))
    cuda_version = f"{version.value // 1000}.{version.value % 1000 // 10}"
    status = OK if names else BROKEN
    return Line("gpu", "driver", status, f"CUDA {cuda_version}, {', '.join(names) or 'no device'}",
                "" if names else "no device may be used: look at CUDA_VISIBLE_DEVICES")


def _store(place: str | None) -> Iterator[Line]:
    if place is None:
        yield Line("store", "store", ABSENT, "none named", "give --store DIR|URL, or set BACKTAPE_DIR")
        return
    for name, works, found in _native.probe_store(place):
        todo = "" if works else f"{place} cannot hold dumps as it is: mend that, or choose another store (docs/stores.md)"
        yield Line("store", name, OK if works else BROKEN, found, todo, True)


def _coordinator(address: str | None, credentials: str | None, store: str | None) -> Iterator[Line]:
    if address is None:
        yield Line("coordinator", "coordinator", ABSENT, "none named: rank 0 carries one",
                   "nothing for one host; for several give --coordinator HOST:PORT, or set BACKTAPE_COORDINATOR")
    else:
        run = os.environ.get("BACKTAPE_RUN") or Path(store or "run").name or "run"
        try:
            version, build, seconds, says = _native.probe_coordinator(address, run, credentials)
        except RuntimeError as error:
            yield Line("coordinator", "answer", BROKEN, str(error),
                       "start it (coordinator --help), or mend the address, the way to it or the credentials (docs/security.md)", True)
        else:
            yield Line("coordinator", "answer", OK, f"{address} in {seconds * 1e3:.1f} ms; {says}", asked=True)
            same = version == _native.__version__
            todo = "" if same else f"this is {_native.__version__}: bring both to one version"
            yield Line("coordinator", "version", OK if same else BROKEN, f"{version} build {build}", todo, True)
    # On the default port the coordinator that was asked for may listen itself.
    if address is None or not address.endswith(f":{PORT}"):
        yield _port()


def _port() -> Line:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(("127.0.0.1", PORT))
        except OSError as error:
            return Line("coordinator", f"port {PORT}", BROKEN, f"{error.strerror or error}",
                        "a coordinator may run there already; give another port with --listen")
    return Line("coordinator", f"port {PORT}", OK, "free on this host")


def _limits() -> Iterator[Line]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft != resource.RLIM_INFINITY and soft < FEW_FILES
    yield Line("limits", "open files", OK if not few else BROKEN, f"{_limit(soft)} (at most {_limit(hard)})",
               f"ulimit -n {FEW_FILES}: a coordinator of many ranks needs more" if few else "")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    yield Line("limits", "locked memory", OK, _limit(locked, "bytes"))
    yield from _shared_memory()
    yield from _temporary()
    now = time.time()
    ahead = time.get_clock_info("monotonic").monotonic and now >= EARLIEST_TIME
    shown = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now))
    yield Line("limits", "clock", OK if ahead else BROKEN, shown,
               "" if ahead else "set the clock (NTP): manifests and certificates carry times")


def _shared_memory() -> Iterator[Line]:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        yield Line("limits", "/dev/shm", ABSENT, "not there")
        return
    free = shutil.disk_usage(shm).free
    few = free < FEW_SHARED_BYTES
    yield Line("limits", "/dev/shm", BROKEN if few else OK, f"{_size(free)} free",
               "give the container more (docker run --shm-size=1g): NCCL and data loaders use it" if few else "")


def _temporary() -> Iterator[Line]:
    directory = tempfile.gettempdir()
    free = shutil.disk_usage(directory).free
    yield Line("limits", "temporary files", OK, f"{directory}, {_size(free)} free; a step read from a bucket must fit there")


def _limit(value: int, unit: str = "") -> str:
    return "no limit" if value == resource.RLIM_INFINITY else f"{value} {unit}".strip()


def _size(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def table(lines: list[Line]) -> str:
    """The lines as a table: group, name, status and what was found; below each what to do about it."""
    width = max(len(line.name) for line in lines)
    out, group = [], ""
    for line in lines:
        shown = line.group if line.group != group else ""
        group = line.group
        out.append(f"{shown:<12} {line.name:<{width}}  {line.status:<6}  {line.found}")
        if line.todo and line.status != OK:
            out.append(f"{'':<12} {'':<{width}}  {'':<6}  To do: {line.todo}")
    broken = [line for line in lines if line.status == BROKEN]
    asked = sum(line.asked for line in broken)
    end = "nothing is broken" if not broken else f"{len(broken)} broken, {asked} of what was asked for"
    return "\n".join([*out, "", end])


def _object(lines: list[Line]) -> dict[str, Any]:
    broken = [line for line in lines if line.status == BROKEN]
    asked = [line for line in broken if line.asked]
    return {
        "schema": SCHEMA,
        "version": _native.__version__,
        "verdict": "broken" if asked else "ok",
        "broken": len(broken),
        "lines": [asdict(line) for line in lines],
    }


def main(arguments: list[str]) -> int:
    """Runs the command and returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="backtape doctor", description="Says what works on this machine, and what to do about the rest."
    )
    parser.add_argument("--store", metavar="DIR|URL", help="a store to try; by default BACKTAPE_DIR")
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="one to ask; by default BACKTAPE_COORDINATOR")
    parser.add_argument("--credentials", metavar="DIR", help="a rank's folder; by default BACKTAPE_CREDENTIALS")
    parser.add_argument("--deadline", type=float, default=IMPORT_DEADLINE_S, metavar="SECONDS",
                        help="how long jax and torch may take to import")
    parser.add_argument("--json", action="store_true", help=f"one object, schema {SCHEMA}")
    given = parser.parse_args(arguments)
    lines = examine(given.store, given.coordinator, given.credentials, given.deadline)
    try:
        print(json.dumps(_object(lines), indent=1) if given.json else table(lines), flush=True)
    except BrokenPipeError:
        # Whoever has closed the pipe has read enough.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1 if any(line.asked and line.status == BROKEN for line in lines) else 0
