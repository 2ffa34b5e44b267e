"""Hosts on this machine: each a network, a mount table and a name of its own, with a real sshd.

A host sees its own folder at a path that all share, so that what lies on one is not on the other. Needs
root, ip (iproute2), unshare and sshd.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

SSHD = shutil.which("sshd") or shutil.which("sshd", path="/usr/sbin:/usr/local/sbin")

CONFIG = """\
ListenAddress {address}
Port 22
HostKey "{keys}/host"
AuthorizedKeysFile "{keys}/user.pub"
PidFile none
UsePAM no
StrictModes no
PasswordAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
SetEnv "TMPDIR={here}/tmp"
"""


def missing():
    """What this machine lacks for it, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if SSHD is None:
        return "sshd is not installed (openssh-server)"
    for tool in ("ssh", "ssh-keygen", "ip", "unshare", "setsid", "perl"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    return None


class Hosts:
    """node-0, node-1, ... on one bridge with this process."""

    def __init__(self, folder: Path, count: int) -> None:
        self.folder, self.count = folder, count
        self.here = folder / "here"  # where each host sees its own folder
        self.tag = f"bt{os.getpid() % 100000}"
        self.net = f"198.18.{os.getpid() % 250 + 1}"  # a range for tests of networks (RFC 2544)
        self.sshds: list[subprocess.Popen] = []

    def __enter__(self):
        try:
            self._make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for sshd in self.sshds:
            sshd.kill()
            sshd.wait()
        for index in range(self.count):
            name = f"{self.tag}n{index}"
            # A network lives as long as a process in it: what a failed test left, sshd's children.
            inside = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True).stdout
            for pid in inside.split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL)
        subprocess.run(["ip", "link", "del", self.tag], stderr=subprocess.DEVNULL)

    def address(self, index):
        return f"{self.net}.{index + 1}"

    def names(self):
        return [f"node-{index}" for index in range(self.count)]

    def seen_by(self, index):
        """What host `index` sees at `here`."""
        return self.folder / f"host-{index}"

    def link(self, index, state):
        """Pulls a host's cable, or puts it back: "down" or "up"."""
        subprocess.run(["ip", "link", "set", f"{self.tag}p{index}", state], check=True)

    def _make(self):
        keys = self.folder / "keys"
        for folder in (keys, self.here):
            folder.mkdir()
        for name in ("host", "user"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / name]
            subprocess.run(command, check=True)
        Path("/run/sshd").mkdir(exist_ok=True)
        subprocess.run(["ip", "link", "add", self.tag, "type", "bridge"], check=True)
        subprocess.run(["ip", "address", "add", f"{self.net}.254/24", "dev", self.tag], check=True)
        subprocess.run(["ip", "link", "set", self.tag, "up"], check=True)
        names = (f"{self.address(index)} node-{index}\n" for index in range(self.count))
        (self.folder / "etc-hosts").write_text("127.0.0.1 localhost\n" + "".join(names))
        for index in range(self.count):
            self._join(index)
            self._serve(index, keys)
        self._introduce(keys)

    def _join(self, index):
        name, end = f"{self.tag}n{index}", f"{self.tag}p{index}"
        for command in (
            f"ip netns add {name}",
            f"ip link add {end} type veth peer name eth0 netns {name}",
            f"ip link set {end} master {self.tag} up",
            f"ip -n {name} link set lo up",
            f"ip -n {name} address add {self.address(index)}/24 dev eth0",
            f"ip -n {name} link set eth0 up",
        ):
            subprocess.run(command.split(), check=True)

    def _serve(self, index, keys):
        own = self.seen_by(index)
        (own / "tmp").mkdir(parents=True)
        config = self.folder / f"sshd-{index}.conf"
        config.write_text(CONFIG.format(address=self.address(index), keys=keys, here=self.here))
        begin = 'hostname "$1" && mount --bind "$2" "$3" && mount --bind "$6" /etc/hosts && exec "$4" -D -e -f "$5"'
        own_tables = ["unshare", "--mount", "--uts", "--propagation", "private", "sh", "-c", begin, "sh"]
        words = [f"node-{index}", own, self.here, SSHD, config, self.folder / "etc-hosts"]
        with open(self.folder / f"sshd-{index}.log", "w") as log:
            command = ["ip", "netns", "exec", f"{self.tag}n{index}", *own_tables, *map(str, words)]
            self.sshds.append(subprocess.Popen(command, stdout=log, stderr=log))

    def _introduce(self, keys):
        """An ssh configuration that knows the hosts by name and key; waits until they answer."""
        public = (keys / "host.pub").read_text()
        known, lines = "", ""
        for index in range(self.count):
            known += f"{self.address(index)} {public}"
            lines += f"Host node-{index}\n    HostName {self.address(index)}\n"
        (keys / "known").write_text(known)
        lines += f'Host *\n    User root\n    IdentityFile "{keys}/user"\n    IdentitiesOnly yes\n'
        lines += f'    UserKnownHostsFile "{keys}/known"\n    StrictHostKeyChecking yes\n'
        self.ssh_config = self.folder / "ssh.conf"
        self.ssh_config.write_text(lines)
        for index, sshd in enumerate(self.sshds):
            wait_for(lambda: self._answers(index), 20, lambda: sshd.poll())

    def _answers(self, index):
        try:
            with socket.create_connection((self.address(index), 22), timeout=1) as connection:
                return connection.recv(4) == b"SSH-"
        except OSError:
            return False


def wait_for(holds, seconds, over=lambda: None):
    """Asks until it holds; AssertionError when it does not in time, or when it is over before."""
    end = time.monotonic() + seconds
    while not holds():
        assert over() is None, f"ended with {over()}"
        assert time.monotonic() < end, f"not in {seconds} s"
        time.sleep(0.02)


def processes_with(variable):
    """Processes, on any of the hosts, with this NAME=VALUE in their environment."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if variable.encode() in (place / "environ").read_bytes().split(b"\0"):
                found.append((int(place.name), (place / "cmdline").read_bytes().replace(b"\0", b" ").decode()))
        except OSError:
            continue  # it has just ended
    return found
