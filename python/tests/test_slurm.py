"""deploy/slurm/backtape.sbatch under a real Slurm: controller, two nodes and munge on this machine.

Goal: the coordinator and the ranks find each other and end together. Method: daemons of our own, with
their own configuration, on ports of their own; nothing of the machine's is touched. What this does not show:
that a child which left its rank's session is ended, which is proctrack/cgroup's affair; here it is linuxproc.
"""

import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from processes import free_port
from ssh_hosts import processes_with, wait_for
from test_deploy import RANK, REPLAY, ROOT, coordinator, required

SCRIPT = ROOT / "deploy" / "slurm" / "backtape.sbatch"
SBIN = os.pathsep.join(["/usr/sbin", os.environ["PATH"]])

CONFIG = """\
ClusterName=backtape
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={at}/munge.sock
SlurmUser=root
SlurmdUser=root
StateSaveLocation={at}/state
SlurmdSpoolDir={at}/spool-%n
SlurmctldPidFile={at}/ctld.pid
SlurmdPidFile={at}/%n.pid
SlurmctldLogFile={at}/ctld.log
SlurmdLogFile={at}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
KillWait=5
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2 State=UNKNOWN
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.2 Port={second} CPUs=2 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES OverSubscribe=FORCE State=UP
"""


def missing():
    if os.geteuid() != 0:
        return "Slurm's daemons need root"
    for tool in ("slurmctld", "slurmd", "munged", "sbatch", "srun", "sinfo", "perl"):
        if shutil.which(tool, path=SBIN) is None:
            return f"{tool} is not installed (slurmctld, slurmd, slurm-client, munge)"
    return None if coordinator() else "no coordinator: cargo build --bin coordinator"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """The environment in which sbatch reaches a cluster of two nodes."""
    required(missing())
    at = tmp_path_factory.mktemp("slurm")
    (at / "key").write_bytes(secrets.token_bytes(128))
    (at / "key").chmod(0o400)
    ports = {"port": free_port(), "first": free_port(), "second": free_port()}
    (at / "slurm.conf").write_text(CONFIG.format(at=at, host=socket.gethostname().split(".")[0], **ports))
    environment = os.environ | {"SLURM_CONF": str(at / "slurm.conf"), "PATH": SBIN}
    files = {name: f"--{name}-file={at}/munge.{name}" for name in ("pid", "log", "seed")}
    daemons = [
        ["munged", "--foreground", "--force", f"--key-file={at}/key", f"--socket={at}/munge.sock", *files.values()],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", "n0"],
        ["slurmd", "-D", "-N", "n1"],
    ]
    running = []
    try:
        for words in daemons:
            with open(at / f"{'-'.join(words[:1] + words[3:4])[:20].replace('/', '-')}.out", "w") as log:
                running.append(subprocess.Popen(words, env=environment, stdout=log, stderr=log))
            if words[0] == "munged":
                wait_for((at / "munge.sock").exists, 20, running[0].poll)

        def idle():
            asked = subprocess.run(["sinfo", "-h", "-o", "%t %D"], env=environment, capture_output=True, text=True)
            return asked.stdout.split() == ["idle", "2"]

        wait_for(idle, 60, lambda: next((daemon.poll() for daemon in running if daemon.poll() is not None), None))
        yield environment
    finally:
        for daemon in reversed(running):
            daemon.terminate()
            daemon.wait()


def submit(slurm, folder, *mode, during=lambda: None, **more):
    """Runs it to its end: its exit code and its log."""
    words = ["sbatch", "--wait", "--nodes=2", "--ntasks-per-node=2", "--output", folder / "log", SCRIPT]
    own = {
        "BACKTAPE_STEPS": "0-1", "BACKTAPE_ADDRESS": "127.0.0.1", "BACKTAPE_PORT": str(free_port()),
        "BACKTAPE_RUN": "run-a", "BACKTAPE_COORDINATOR_BIN": coordinator(),
    }  # fmt: skip
    job = subprocess.Popen(
        list(map(str, [*words, sys.executable, RANK, *mode])), cwd=folder, env=slurm | own | more,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        during()
        said, _ = job.communicate(timeout=120)
    finally:
        job.kill()
    log = (folder / "log").read_text()
    assert "Submitted" in said, said
    # Nothing is left, neither processes nor credentials.
    wait_for(lambda: not processes_with(f"BACKTAPE_DIR={folder}/dumps/run-a"), 15)
    assert not list(folder.glob(".backtape-*")), log
    return job.returncode, log


def test_two_nodes_record_over_mutual_tls(slurm, tmp_path):
    code, log = submit(slurm, tmp_path, "record", BACKTAPE_TRANSPORT="stream")
    assert code == 0, log
    for rank in range(4):
        host = rank // 2
        assert f"[backtape][H{host}][R{rank}] LOCAL_RANK={rank % 2} " in log, log
        assert f"[backtape][H{host}][R{rank}] secrets on command lines: 0\n" in log
        assert f"[backtape][H{host}][R{rank}] a line that no newline ends\n" in log
    assert "run run-a attempt 0 step 1: committed" in log, log
    for step in range(2):
        verify = [REPLAY, "verify", "--dump", tmp_path / "dumps" / "run-a", "--step", str(step)]
        subprocess.run(verify, check=True, stdout=subprocess.DEVNULL)


def test_a_rank_that_fails_ends_the_job_with_its_code(slurm, tmp_path):
    def all_up():
        wait_for(lambda: (tmp_path / "log").exists() and (tmp_path / "log").read_text().count("] up\n") == 4, 60)
        (tmp_path / "go").touch()

    code, log = submit(slurm, tmp_path, "fail-alone", "2", during=all_up)
    assert code == 7, log
    assert re.search(r"rank 2 on H1 \(n1\) ended with 7: the others were ended", log), log


def test_a_coordinator_that_cannot_start_starts_no_rank(slurm, tmp_path):
    (tmp_path / "file").touch()
    code, log = submit(slurm, tmp_path, "record", BACKTAPE_STORE=str(tmp_path / "file"))
    assert code == 2 and "no coordinator answers" in log and "] up\n" not in log, log


def test_every_task_that_srun_starts_under_backtape_run_is_attached(slurm, tmp_path):
    script = (
        "import os, sys, sitecustomize; "
        "print(os.environ['SLURM_PROCID'], os.environ['BACKTAPE_STEPS'], os.environ['BACKTAPE_DIR'], sitecustomize.__file__)"
    )
    options = ["--steps", "3", "--dir", str(tmp_path / "dumps")]
    srun = ["srun", "--nodes=2", "--ntasks=2", sys.executable, "-c", script]
    done = subprocess.run(
        [sys.executable, "-m", "backtape", "run", *options, "--", *srun], env=slurm, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = sorted(line.split(" ", 3) for line in done.stdout.splitlines())
    assert [task[:3] for task in told] == [[rank, "3", str(tmp_path / "dumps")] for rank in ("0", "1")]
    assert all(task[3].endswith("backtape/startup/sitecustomize.py") for task in told), told
