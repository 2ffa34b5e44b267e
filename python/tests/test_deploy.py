"""deploy/run.sh and collect.sh on hosts with a real sshd.

Goal: ranks start where they should, end together, and leave nothing behind, however it ends. Method: two
hosts in namespaces of this machine (ssh_hosts.py), the coordinator with mutual TLS on the first.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ssh_hosts
from ssh_hosts import Hosts, processes_with, wait_for

import backtape

ROOT = Path(__file__).resolve().parents[2]
RUN, COLLECT = ROOT / "deploy" / "run.sh", ROOT / "deploy" / "collect.sh"
RANK = Path(__file__).with_name("deployed_rank.py")
REPLAY = Path(sys.executable).with_name("replay")


def coordinator():
    """The program, from where cargo put it or from PATH."""
    built = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "debug" / "coordinator"
    found = os.environ.get("COORDINATOR") or (built if built.exists() else shutil.which("coordinator"))
    return found and str(found)


def required(lacks):
    """Skips, and says why; in CI it is a failure: nothing there may be left out in silence."""
    if lacks is None:
        return
    if os.environ.get("CI") == "true":
        pytest.fail(f"deploy/ cannot be tested here: {lacks}")
    pytest.skip(f"NOT TESTED, deploy/run.sh: {lacks}")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    required(ssh_hosts.missing())
    required(None if coordinator() else "no coordinator: cargo build --bin coordinator")
    with Hosts(tmp_path_factory.mktemp("hosts with spaces"), 2) as made:
        yield made


@pytest.fixture
def job(hosts, request):
    """One launch: its directory on both hosts, empty."""
    name = re.sub(r"[^a-z0-9_]", "-", request.node.name)[-60:].strip("-")
    for index in range(2):
        (hosts.seen_by(index) / name).mkdir()
    return Job(hosts, name)


def hears_signals():
    """Tests that run under nohup, or behind an &, ignore signals; a shell never traps what it was started ignoring."""
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(name, signal.SIG_DFL)


class Job:
    def __init__(self, hosts, name):
        self.hosts, self.name = hosts, name
        self.dir = hosts.here / name
        self.variable = f"BACKTAPE_DIR={self.dir}/dumps/{name}"

    def at(self, index):
        """The job's directory on a host, as this process sees it."""
        return self.hosts.seen_by(index) / self.name

    def start(self, *mode, options=(), ranks=2, environment=None):
        hosts = self.hosts
        words = [
            RUN, "--hosts", "node-0,node-1", "--ranks-per-host", ranks, "--run", self.name, "--dir", self.dir,
            "--coordinator-bin", coordinator(), "--grace", 2, "--lost-after", 15,
            "--ssh-config", hosts.ssh_config, *options, "--", sys.executable, RANK, *mode,
        ]  # fmt: skip
        log = hosts.folder / f"{self.name}.log"
        with open(log, "ab") as out:
            process = subprocess.Popen(
                list(map(str, words)), stdin=subprocess.PIPE, stdout=out, stderr=subprocess.STDOUT,
                env=os.environ | {"BACKTAPE_STEPS": "0-1", "TMPDIR": str(hosts.folder)} | (environment or {}),
                preexec_fn=hears_signals,
            )  # fmt: skip
        self.process, self.log = process, log
        return self

    def text(self):
        return self.log.read_text()

    def up(self, ranks=4):
        wait_for(lambda: self.text().count("] up\n") == ranks, 60, self.process.poll)
        return self

    def ended(self):
        """Its exit code; nothing of it is left on any host."""
        try:
            code = self.process.wait(timeout=90)
        finally:
            self.process.kill()
        self.nothing_is_left()
        return code

    def nothing_is_left(self, seconds=5):
        wait_for(lambda: not processes_with(self.variable), seconds, lambda: None)
        wait_for(lambda: not self.private(), seconds, lambda: None)

    def private(self):
        return [path for index in range(2) for path in (self.hosts.seen_by(index) / "tmp").iterdir()]


def test_two_hosts_record_over_mutual_tls_and_the_dump_is_collected(job, tmp_path):
    into = tmp_path / "dumps of today"
    job.start("record", options=["--collect", into, "--replay", REPLAY])
    assert job.ended() == 0, job.text()
    text = job.text()
    assert not [line for line in text.splitlines() if not line.startswith("[backtape]")], text
    for rank in range(4):
        host = rank // 2
        line = next(line for line in text.splitlines() if f"[R{rank}] LOCAL_RANK" in line)
        assert line == (
            f"[backtape][H{host}][R{rank}] LOCAL_RANK={rank % 2} LOCAL_WORLD_SIZE=2 NODE_RANK={host} NNODES=2 "
            f"MASTER_ADDR=node-0 JAX_PROCESS_ID={rank}"
        )
        assert f"[backtape][H{host}][R{rank}] secrets on command lines: 0\n" in text
        assert f"[backtape][H{host}][R{rank}] a line that no newline ends\n" in text
    assert re.search(r"^\[backtape\]\[Hnode-0\]\[coordinator\] INFO .*step 1: committed", text, re.M), text
    for step in range(2):
        assert f"verified: --step {step}\n" in text
        q = backtape.open(into / job.name).step(step).tensor("q", microbatch=0)
        assert q.tolist() == [[float(8 * row + column + step) for column in range(8)] for row in range(16)]
    # Host 1 sent its files: nothing of the store is on it.
    assert not (job.at(1) / "dumps").exists()
    ranks = {entry["rank"]: entry["host"] for entry in manifest_files(into / job.name)}
    assert ranks == {0: "node-0", 1: "node-0", 2: "node-1", 3: "node-1"}


def manifest_files(run):
    shards = []
    for file in backtape.open(run).step(0).manifest["files"]:
        shards += file["shards"]
    return shards


@pytest.mark.parametrize("failing", [0, 3])
def test_a_rank_that_fails_ends_all_and_is_named(job, failing):
    job.start("fail", failing).up()
    (job.at(failing // 2) / "go").touch()
    assert job.ended() == 7, job.text()
    host = failing // 2
    assert f"rank {failing} on H{host} (node-{host}) ended with 7: ending the others" in job.text()
    # Each had a child in another session, which ignores TERM.
    assert len(re.findall(r"processes that outlived their ranks", job.text())) == 2


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_launch_that_is_stopped_ends_its_ranks(job, how):
    job.start("wait").up()
    job.process.send_signal(how)
    assert job.ended() == 128 + how, job.text()
    assert job.text().count("] TERM\n") == 4, job.text()
    assert f"stopped by {how.name}" in job.text()


def test_a_launch_that_is_killed_leaves_nothing_on_the_hosts(job):
    # Sooner than silence would end them: its end of the connections closes.
    job.start("fail", 9, options=["--lost-after", 120]).up()
    job.process.kill()
    job.process.wait()
    job.nothing_is_left(40)


def test_a_host_that_is_cut_off_ends_its_ranks_by_itself(job):
    alive = ["--ssh-option", "ServerAliveInterval=1", "--ssh-option", "ConnectTimeout=2"]
    job.start("wait", options=alive).up()
    job.hosts.link(1, "down")
    try:
        assert job.process.wait(timeout=60) == 255, job.text()
        assert "H1 (node-1) is lost" in job.text()
        assert "H1 (node-1) cannot be asked whether ranks are left" in job.text()
        wait_for(lambda: not processes_with(job.variable), 40)
    finally:
        job.hosts.link(1, "up")
    job.nothing_is_left(20)


@pytest.mark.parametrize("whole", [False, True], ids=["itself", "whole"])
def test_ranks_whose_guard_was_killed_are_ended_all_the_same(job, whole):
    """The guard itself, whose listener takes over; or every process of it, which run.sh misses."""
    job.start("fail", 9, options=["--lost-after", 15 if whole else 120]).up()
    at_a_host = f"TMPDIR={job.hosts.here}/tmp"
    guards = {pid for pid, line in processes_with(at_a_host) if line == "bash -s "}
    first = [pid for pid in guards if parent(pid) not in guards]
    assert len(first) == 3 and len(guards) > 6, guards
    for pid in guards if whole else first:
        os.kill(pid, signal.SIGKILL)
    assert job.process.wait(timeout=60) == 255, job.text()
    job.nothing_is_left()
    assert "was looked at again" in job.text()


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_training_goes_on_without_its_coordinator(job):
    for index in range(2):
        (job.at(index) / "wait-for-go").touch()
    job.start("record", environment={"WITHOUT_RECORD": "1"}, options=["--env", "WITHOUT_RECORD"]).up()
    [(pid, _)] = [found for found in processes_with(job.variable) if "--world-size 4" in found[1]]
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: "training goes on, recording does not" in job.text(), 20, job.process.poll)
    for index in range(2):
        (job.at(index) / "go").touch()
    assert job.ended() == 0, job.text()


def test_a_coordinator_that_cannot_start_starts_no_rank(job):
    (job.at(0) / "file").touch()
    job.start("record", options=["--store", job.dir / "file"])
    assert job.ended() == 2
    assert "did not start" in job.text() and "] up\n" not in job.text(), job.text()


def test_a_host_that_cannot_be_used_is_named_and_nobody_stays(job):
    options = ["--ssh-option", "ConnectTimeout=2"]
    job.at(1).rmdir()
    assert job.start("wait", options=options).ended() == 2
    assert f"H1 (node-1) cannot go to {job.dir}: there is no such directory" in job.text()
    job.hosts.link(1, "down")
    try:
        assert job.start("wait", options=options).ended() == 255
    finally:
        job.hosts.link(1, "up")
    assert "H1 (node-1) cannot be used: ssh ended with 255" in job.text()
    assert "looked at again" not in job.text()


def test_a_coordinator_that_is_not_there_is_said(job):
    job.start("record", options=["--coordinator-bin", "/no/such/coordinator"])
    assert job.ended() == 2
    said = "the coordinator's host node-0 cannot run /no/such/coordinator: there is no such program"
    assert said in job.text() and "] up\n" not in job.text(), job.text()


@pytest.mark.parametrize("without_perl", ["", "command() { return 1; }; "], ids=["perl", "bash"])
def test_lines_are_the_same_with_perl_and_without(without_perl):
    source = f"launch=x unit=y; source {ROOT}/deploy/guard.sh; {without_perl}prefixed '[p]'"
    lines = b"a\n10%\r20%\r30%\n\nwith spaces  \tand \\ tab\r\nlast"
    done = subprocess.run(["bash", "-c", source], input=lines, capture_output=True)
    assert done.stdout == b"[p] a\n[p] 30%\n[p] \n[p] with spaces  \tand \\ tab\n[p] last\n", done


def test_a_line_that_takes_longer_than_one_read_keeps_its_first_word():
    """What a read that ran out of time has taken from the queue stands at the front of the line."""
    lines = "exec {q}<> <(:); printf '1 ' >&$q; next_line 0.1 $q; echo $(($? > 128)); "
    lines += "printf 'ended 2 0\nnext\n' >&$q; next_line 9 $q; echo $line; next_line 9 $q; echo $line"
    done = subprocess.run(
        ["bash", "-c", f"source {ROOT}/deploy/queue.sh; {lines}"], capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["1", "1 ended 2 0", "next"], done


def test_plain_text_is_possible_and_said_loudly(job):
    job.start("record", options=["--insecure"], ranks=1)
    assert job.ended() == 0, job.text()
    assert "INSECURE" in job.text() and "step 1: committed" in job.text()


def git(place, *words):
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    command = ["git", *who, "-C", str(place), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def test_every_host_is_at_the_same_commit_or_none_is(job):
    """One repository of the origin, a clone on each host that is a commit behind."""
    origin = job.hosts.folder / "origin"
    subprocess.run(["git", "init", "--quiet", "-b", "main", origin], check=True)
    (origin / "file").write_text("old")
    git(origin, "add", "file")
    git(origin, "commit", "--quiet", "-m", "old")
    old = git(origin, "rev-parse", "HEAD")
    for index in range(2):
        job.at(index).rmdir()
        git(job.hosts.folder, "clone", "--quiet", str(origin), str(job.at(index)))
    (origin / "file").write_text("new")
    git(origin, "commit", "--quiet", "-am", "new")
    new = git(origin, "rev-parse", "HEAD")

    def heads():
        return [git(job.at(index), "rev-parse", "HEAD") for index in range(2)]

    (job.at(1) / "file").write_text("mine")
    job.start("wait", options=["--ref", "main"])
    assert job.ended() == 2
    assert "H1 (node-1): " in job.text() and "has changes that are not committed" in job.text()
    assert heads() == [old, old] and "] up" not in job.text()

    git(job.at(1), "checkout", "--quiet", "file")
    assert job.start("wait", options=["--ref", "no-such"]).ended() == 2
    assert f"has no commit no-such" in job.text() and heads() == [old, old]

    git(job.at(0), "branch", "mine", old)
    git(job.at(1), "branch", "mine", new)
    assert job.start("wait", options=["--ref", "mine"]).ended() == 2
    assert f"mine means {old} on H0 (node-0) and {new} on H1 (node-1)" in job.text() and heads() == [old, old]

    job.start("record", options=["--ref", "main"], ranks=1)
    assert job.ended() == 0, job.text()
    assert f"every host is at {new}" in job.text() and heads() == [new, new]


def collect(job, *words):
    """With a stdin that stays open, as a terminal's does."""
    command = [COLLECT, "--replay", REPLAY, "--ssh-config", job.hosts.ssh_config, *words]
    ours, theirs = os.pipe()
    try:
        return subprocess.run(list(map(str, command)), stdin=ours, capture_output=True, text=True, timeout=60)
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_collection_goes_on_where_it_was_interrupted_and_replaces_nothing(job, tmp_path):
    job.start("record")
    assert job.ended() == 0, job.text()
    there, run = job.at(0) / "dumps" / job.name, job.dir / "dumps" / job.name
    part = tmp_path / f".{job.name}.part"
    shutil.copytree(there, part)
    files = sorted(part.rglob("*.safetensors"))
    files[0].unlink()
    files[1].write_bytes(files[1].read_bytes()[:-1])
    kept = os.stat(files[2]).st_ino
    done = collect(job, "node-0", run, tmp_path)
    assert done.returncode == 0, done
    whole = tmp_path / job.name
    assert contents(whole) == contents(there) and not part.exists()
    assert os.stat(whole / files[2].relative_to(part)).st_ino == kept
    again = collect(job, "node-0", run, tmp_path)
    assert again.returncode == 2 and "is there already" in again.stderr
    away = collect(job, "node-0", job.dir / "no-such", tmp_path)
    assert away.returncode == 1 and f"there is no {job.dir}/no-such on node-0" in away.stderr, away
    assert sorted(path.name for path in tmp_path.iterdir()) == [job.name]


def test_a_step_that_is_not_whole_there_is_fetched_and_said(job, tmp_path):
    job.start("record")
    assert job.ended() == 0, job.text()
    there = job.at(0) / "dumps" / job.name
    shard = next((there / "step-00000001").glob("rank-00002*.safetensors"))
    shard.unlink()
    done = collect(job, "node-0", job.dir / "dumps" / job.name, tmp_path)
    assert done.returncode == 3, done
    assert "verified: --step 0" in done.stderr and "--step 1 is not whole" in done.stderr
    assert contents(tmp_path / job.name) == contents(there)


def contents(folder):
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


REFUSED = {
    "an option for a host": (["--hosts", "-oProxyCommand=touch x", "--", "true"], "is no name of a host"),
    "a command in a host": (["--hosts", "a;b", "--", "true"], "is no name of a host"),
    "a host twice": (["--hosts", "a,a", "--", "true"], "listed twice"),
    "no host": (["--", "true"], "no hosts"),
    "no command": (["--hosts", "a"], "no command"),
    "a run that is a path": (["--hosts", "a", "--run", "../x", "--", "true"], "--run '../x'"),
    "a reference that is an option": (["--hosts", "a", "--ref", "--upload-pack=x", "--", "true"], "--ref"),
    "arithmetic for a number": (["--hosts", "a", "--port", "a[$(touch x)]", "--", "true"], "whole number"),
    "an option without its value": (["--hosts"], "wants a value"),
    "an unknown option": (["--host", "a", "--", "true"], "is no option"),
}


@pytest.mark.parametrize("words, says", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_before_anything_starts(words, says, tmp_path):
    done = subprocess.run([RUN, *words], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and says in done.stderr, done
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_says_what_would_be_and_reaches_nobody(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("# the cluster\nuser@no-such-host 2\n\n  other-host # one rank\n")
    words = ["--hosts-file", hosts, "--run", "fused", "--dir", "/job dir", "--dry-run", "--", "echo", "a b"]
    done = subprocess.run([RUN, *words], capture_output=True, text=True)
    assert done.returncode == 0, done
    assert "H0 is user@no-such-host: ranks 0 to 1 in /job dir" in done.stderr
    assert "H1 is other-host: ranks 2 to 2" in done.stderr
    assert "called no-such-host:7447" in done.stderr and "command: echo a\\ b" in done.stderr


def test_the_scripts_are_clean_by_shellcheck():
    required(None if shutil.which("shellcheck") else "shellcheck is not installed")
    scripts = [*(ROOT / "deploy").rglob("*.sh"), *(ROOT / "deploy").rglob("*.sbatch")]
    assert len(scripts) > 4
    done = subprocess.run(["shellcheck", "-x", *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    for script in scripts:
        assert max(map(len, script.read_text().splitlines())) <= 120, script
