"""A replay on three nodes of Ray gives the report of one process, byte for byte, whatever dies."""

import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jobs import KINDS

REPLAY = Path(sys.executable).parent / "replay"
# No command here takes a tenth of it, and a task that Ray drops less than half.
LIMIT_S = 600
FEW = ("--task-tokens", "4096", "--task-classes", "16384")
CUT = ("--task-tokens", "256", "--task-classes", "2048")


def start(dump, *more):
    json = dump.parent / f"{dump.name}-{time.monotonic_ns()}.json"
    command = [REPLAY, "--dump", dump, "--quiet", "--json", json, *more]
    env = os.environ | {"PYTHONFAULTHANDLER": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)
    return process, json


def end(started):
    """Exit code, the report's bytes, what was said on stderr."""
    process, json = started
    try:
        _, said = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise AssertionError(stuck(process)) from None
    return process.returncode, json.read_bytes() if json.exists() else b"", said


def stuck(process):
    """What a command that does not end says of where it is: its threads' stacks, by faulthandler."""
    process.send_signal(signal.SIGABRT)
    return f"no end in {LIMIT_S} s: {process.communicate()[1]}"


def until(happened, process):
    """Waits for what happens while a command runs."""
    given_up = time.monotonic() + LIMIT_S
    while not happened():
        assert process.poll() is None, process.communicate()[1]
        if time.monotonic() > given_up:
            raise AssertionError(stuck(process))
        time.sleep(0.01)


def replay(dump, *more):
    return end(start(dump, *more))


def same(found, wanted):
    """Exit code, what was said and every byte of the report; a report is megabytes, so its first difference is named."""
    assert (found[0], found[2]) == (wanted[0], wanted[2])
    if found[1] != wanted[1]:
        at = next((at for at, (a, b) in enumerate(zip(found[1], wanted[1])) if a != b), min(len(found[1]), len(wanted[1])))
        there = slice(max(at - 200, 0), at + 100)
        raise AssertionError(f"byte {at} of {len(found[1])}:\n{found[1][there]}\nand not\n{wanted[1][there]}")


def on(nodes, *more, cut=CUT):
    return ("--engine", "ray", "--address", nodes.address, *cut, *more)


def running():
    """Processes that compute a task right now: Ray names them after it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                name = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if name.startswith(b"ray::perform"):
                found.append(int(entry.name))
    return found


def killed_in_the_middle(process, count):
    """Kills that many workers, each by its id while it computes."""
    killed = set()

    def enough():
        for pid in set(running()) - killed:
            # In the middle: it runs, and runs on a moment later.
            time.sleep(0.05)
            if pid in running() and len(killed) < count:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
        return len(killed) == count or process.poll() is not None

    until(enough, process)
    return len(killed)


def test_reports_of_every_dump_are_those_of_one_process(nodes, dumps):
    for name in KINDS:
        if name not in ("large", "wide"):
            local = replay(dumps[name])
            same(replay(dumps[name], *on(nodes)), local)
            assert local[0] == (1 if name == "wrong" else 0) and local[1], (name, local)


def test_wrong_gradients_are_found_with_the_same_verdict(nodes, dumps):
    code, report, _ = replay(dumps["wrong"], *on(nodes, "--task-cpus", "1"))
    assert code == 1 and b"label-scatter-low-precision" in report


def test_workers_killed_in_the_middle_of_a_tile_change_no_byte(nodes, dumps):
    local = replay(dumps["large"])
    started = start(dumps["large"], *on(nodes))
    assert killed_in_the_middle(started[0], 3) == 3
    same(end(started), local)


def test_a_node_that_is_lost_with_its_sums_changes_no_byte(nodes, dumps):
    local = replay(dumps["large"])
    started = start(dumps["large"], *on(nodes))
    until(running, started[0])
    time.sleep(1.0)
    nodes.remove_node(nodes.workers.pop(), allow_graceful=False)
    assert started[0].poll() is None
    same(end(started), local)


def test_a_dump_larger_than_the_drivers_memory_is_replayed_with_its_arrays_on_disk(nodes, dumps, tmp_path):
    """The driver gets less than its arrays take; nodes were started before and have what they need."""
    given = 900 << 20
    local, files = replay(dumps["wide"]), tmp_path / "files"
    files.mkdir()
    old = resource.getrlimit(resource.RLIMIT_DATA)
    # What is private and writable is counted, what lies in files is not (setrlimit(2)).
    resource.setrlimit(resource.RLIMIT_DATA, (given, old[1]))
    try:
        without = replay(dumps["wide"], *on(nodes, "--threads", "2"))
        spilled = replay(dumps["wide"], *on(nodes, "--threads", "2", "--spill", files))
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, old)
    assert without[0] not in (0, 1) and not without[1], "the limit is none"
    same(spilled, local)
    assert not list(files.iterdir())


def test_a_full_store_beside_a_full_disk_is_one_sentence(full_nodes, dumps):
    """The dq that a task of a plausible policy leaves takes 78 MiB; a node's store has 200."""
    one_sentence(replay(dumps["wide"], *on(full_nodes)), "object store is full", "--object-store-memory")


def test_a_directory_that_workers_do_not_have_is_one_sentence(nodes, dumps, tmp_path):
    files = tmp_path / "files"
    files.mkdir()
    started = start(dumps["large"], *on(nodes, "--spill", files))
    until(running, started[0])
    # The command has made its files; a worker that starts from now on finds no place.
    files.rmdir()
    for pid in running():
        os.kill(pid, signal.SIGKILL)
    one_sentence(end(started), "on a worker's host", "--spill", "may write to")


def test_a_task_whose_workers_die_every_time_is_one_sentence(nodes, dumps):
    # Of many tasks each needs four workers before the first has had its four.
    started = start(dumps["large"], *on(nodes, cut=FEW))
    killed_in_the_middle(started[0], 1000)
    code, report, said = end(started)
    assert (code, report, len(said.splitlines())) == (2, b"", 1), said
    # In one run of some ten Ray loses count, and the task with it.
    assert "its worker died, 4 times" in said or "Ray has dropped a task" in said, said


def test_a_shard_that_is_not_there_is_named_as_in_one_process(nodes, dumps, tmp_path):
    import shutil

    dump = tmp_path / "torn"
    shutil.copytree(dumps["fused"], dump)
    for file in dump.rglob("*.safetensors"):
        size = file.stat().st_size
        with open(file, "r+b") as opened:
            opened.seek(size - 3)
            opened.write(b"xyz")
    same(replay(dump, *on(nodes)), replay(dump))


def test_a_dump_that_workers_do_not_see_is_one_sentence(nodes, dumps, tmp_path):
    import shutil

    dump = tmp_path / "moved"
    shutil.copytree(dumps["large"], dump)
    started = start(dump, *on(nodes))
    until(running, started[0])
    # The driver has its files open; a worker that starts from now on has not.
    dump.rename(tmp_path / "elsewhere")
    for pid in running():
        os.kill(pid, signal.SIGKILL)
    code, report, said = end(started)
    assert (code, report, len(said.splitlines())) == (2, b"", 1), said
    assert "same path" in said, said


def one_sentence(ended, *words):
    code, report, said = ended
    assert (code, report) == (2, b"") and len(said.splitlines()) == 1, said
    assert all(word in said for word in words), said


def test_what_cannot_be_reached_or_does_not_suffice_is_one_sentence(nodes, dumps):
    few = ("--engine", "ray", "--address", nodes.address, "--task-cpus", "64")
    one_sentence(replay(dumps["fused"], *few), "64 cores", "--task-cpus")
    for address, word in (("127.0.0.1:1", "nothing answers"), ("here", "HOST:PORT"), ("127.0.0.1:x", "HOST:PORT")):
        one_sentence(replay(dumps["fused"], "--engine", "ray", "--address", address), word)


def test_a_wait_that_would_not_end_is_one_sentence(nodes, monkeypatch):
    """Ray would wait for ever for a node that may come, and for a task that it has dropped: here one whose sums never
    come."""
    import ray

    from backtape import engine_ray

    # What `connect` sets for its process ends with the test.
    for name, value in (("RAY_BACKEND_LOG_LEVEL", "fatal"), ("RAY_IGNORE_UNHANDLED_ERRORS", "1")):
        monkeypatch.setenv(name, value)
    for name, seconds in (("LOOK_S", 0.2), ("GONE_S", 2.0), ("DROPPED_S", 2.0)):
        monkeypatch.setattr(engine_ray, name, seconds)
    cluster = engine_ray.connect(nodes.address, 1)
    try:
        cluster._held[0] = ray.remote(lambda: time.sleep(1000)).options(num_cpus=0).remote()
        held = cluster.start(b"", [0], 1)
        with pytest.raises(engine_ray.ClusterError, match="Ray has dropped a task: for 2 s .* every core was free"):
            cluster.fetch(held[0])
        monkeypatch.setattr(engine_ray, "DROPPED_S", 60.0)
        while nodes.workers:
            nodes.remove_node(nodes.workers.pop(), allow_graceful=False)
        held = cluster.start(b"", [], 1)
        with pytest.raises(engine_ray.ClusterError, match="for 2 s no node has had the 1 cores .*ray start --address"):
            cluster.fetch(held[0])
    finally:
        ray.shutdown()


def test_without_an_address_it_is_the_cluster_of_this_host_or_a_sentence(dumps):
    one_sentence(replay(dumps["fused"], "--engine", "ray"), "--address HOST:PORT", "ray start --head")


def test_without_ray_it_says_what_to_install(dumps, tmp_path):
    (tmp_path / "ray.py").write_text("raise ImportError('not here')")
    command = [REPLAY, "--dump", dumps["fused"], "--engine", "ray"]
    ended = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and "pip install 'backtape[ray]'" in ended.stderr, ended.stderr
    assert len(ended.stderr.splitlines()) == 1


@pytest.mark.parametrize("more", [("--threads", "2"), ("--compare", "dq")])
def test_other_options_mean_the_same(nodes, dumps, more):
    same(replay(dumps["fused"], *on(nodes, *more)), replay(dumps["fused"], *more))
