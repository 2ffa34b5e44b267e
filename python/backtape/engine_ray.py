"""The tasks of a replay on a Ray cluster: `replay --engine ray` (docs/ray.md).

Ray moves bytes and decides nothing: the replay itself decides which tasks there are, what they read
and in which order their sums are added (`backtape_replayer::replay::tasks`).
"""

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterator
from typing import Any

from backtape import _native
from backtape.frameworks import load

# How many times Ray starts a task again whose worker or node was lost.
RETRIES = 3
# How long a cluster may take to answer the first call, and its nodes to say which build they have.
CONNECT_S = 5.0
PROBE_S = 120.0
# How often a wait for a task looks at the nodes; how long there may be no node with the cores of
# one task; how long all cores may be free while a task waits.
LOOK_S = 5.0
GONE_S = 120.0
DROPPED_S = 180.0
# Most nodes that one sentence names.
NAMED = 3


class ClusterError(RuntimeError):
    """The cluster cannot be used; the text is one clause: what is wrong, and what to do."""


def connect(address: str | None, task_cpus: int) -> "Cluster":
    """Connects to the cluster at HOST:PORT, or to the one that this host is part of.

    Raises ClusterError where Ray is not installed, the cluster does not answer, or no task could
    run on it.
    """
    try:
        ray = load("ray")
    except ImportError:
        raise ClusterError("Ray is not installed here: pip install 'backtape[ray]'") from None
    if address is not None and "://" not in address:
        _reach(address)
    # A task that fails is reported once, by `fetch`.
    os.environ["RAY_IGNORE_UNHANDLED_ERRORS"] = "1"
    try:
        with _quiet_core():
            ray.init(address=address or "auto", logging_level=logging.ERROR, log_to_driver=False)
    except ConnectionError:
        if address is None:
            what = "this host is part of no cluster: name one with --address HOST:PORT, or start one: ray start --head"
        else:
            what = f"no Ray cluster answers at {address}: name the head's HOST:PORT, as `ray start --head` printed it"
        raise ClusterError(what) from None
    except Exception as error:
        raise ClusterError(f"Ray does not connect: {_first_line(error)}") from None
    return Cluster(ray, task_cpus)


@contextlib.contextmanager
def _quiet_core() -> Iterator[None]:
    """A context in which Ray starts with the log of its core turned off, unless the level is set.

    Ray's core logs as an error, on stderr, that it computes again what was lost with a node; and
    while it starts it prints there that a level was set, so stderr is closed meanwhile. The nodes'
    own logs have all of it.
    """
    level = "RAY_BACKEND_LOG_LEVEL"
    if level in os.environ:
        yield
        return
    os.environ[level] = "fatal"
    stderr = os.dup(2)
    try:
        with open(os.devnull, "w") as nothing:
            os.dup2(nothing.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)


def _reach(address: str) -> None:
    """Raises ClusterError where nothing answers at HOST:PORT; Ray itself would wait for a minute."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ClusterError(f"--address {address!r} is not HOST:PORT")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
    except OSError as error:
        raise ClusterError(f"nothing answers at {address} ({error.strerror or error}): name the head's HOST:PORT") from None


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _most_cores(nodes: list[dict[str, Any]]) -> int:
    return max((int(node["Resources"].get("CPU", 0)) for node in nodes), default=0)


def build() -> str:
    """The build of backtape in this process. Tasks go only to processes of the same build."""
    return f"{_native.__version__} {_native.__build__}"


def perform(task: bytes, threads: int, *sums: bytes | None) -> Any:
    """Performs one task on a worker, and returns the sums that it makes, as bytes: one, or a tuple."""
    found = _native.perform_task(task, list(sums), threads)
    return found[0] if len(found) == 1 else tuple(found)


class Cluster:
    """A connected cluster: starts tasks, and holds Ray's references to their sums under numbers."""

    def __init__(self, ray: Any, task_cpus: int) -> None:
        self._ray = ray
        self._task_cpus = task_cpus
        self._held: dict[int, Any] = {}
        self._next = 0
        self._check_nodes()
        self._perform = ray.remote(perform)
        self._options = {
            "num_cpus": task_cpus, "max_retries": RETRIES, "retry_exceptions": False, "scheduling_strategy": "SPREAD"
        }  # fmt: skip

    def _check_nodes(self) -> None:
        """Raises ClusterError unless some node has the cores of one task, and every such node has this
        build."""
        nodes = self._alive()
        most = _most_cores(nodes)
        if most < self._task_cpus:
            lower = "lower --task-cpus" if most else "start nodes with cores"
            raise ClusterError(f"no node has the {self._task_cpus} cores of one task, the largest has {most}: {lower}")
        strategies = load("ray.util.scheduling_strategies")
        asked = {}
        for node in nodes:
            if node["Resources"].get("CPU", 0) >= self._task_cpus:
                there = strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                probe = self._ray.remote(build).options(num_cpus=0, max_retries=0, scheduling_strategy=there)
                asked[probe.remote()] = node["NodeManagerAddress"]
        self._ray.wait(list(asked), num_returns=len(asked), timeout=PROBE_S)
        wrong = [f"{host} {what}" for ref, host in asked.items() if (what := self._other_build(ref))]
        if wrong:
            more = f" and {len(wrong) - NAMED} more nodes" if len(wrong) > NAMED else ""
            every = "install the same backtape on every node"
            raise ClusterError(f"{', '.join(wrong[:NAMED])}{more}: {every}")

    def _alive(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _other_build(self, ref: Any) -> str | None:
        try:
            found = self._ray.get(ref, timeout=0.1)
        except self._ray.exceptions.GetTimeoutError:
            return f"does not answer in {PROBE_S:.0f} s"
        except Exception as error:
            return f"cannot import backtape ({_first_line(getattr(error, 'cause', None) or error)})"
        return None if found == build() else f"has backtape {found}, this host {build()}"

    def start(self, task: bytes, sums: list[int | None], gives: int) -> list[int]:
        """Starts a task that goes on from the sums of others, which cannot be used again. Returns the
        numbers of the sums that it will make, `gives` of them."""
        given = [None if held is None else self._held.pop(held) for held in sums]
        started = self._perform.options(num_returns=gives, **self._options).remote(task, self._task_cpus, *given)
        names = []
        for ref in [started] if gives == 1 else started:
            self._next += 1
            self._held[self._next] = ref
            names.append(self._next)
        return names

    def fetch(self, held: int) -> bytes:
        """Waits for sums and returns their bytes; the number cannot be used again. Raises ClusterError
        with one clause where they will not come."""
        ref = self._held.pop(held)
        try:
            self._wait(ref)
            return bytes(self._ray.get(ref))
        except self._ray.exceptions.RayError as error:
            raise ClusterError(self._why(error)) from None

    def _wait(self, ref: Any) -> None:
        """Waits for what a task makes. Raises ClusterError where it will not come.

        Ray itself waits for ever in two cases: for cores that no node has any more (nodes may still
        be added), and for a task that is neither queued nor running anywhere, which Ray 2.60 was
        seen to do where workers are killed as fast as they start.
        """
        seen = busy = time.monotonic()
        while not self._ray.wait([ref], timeout=LOOK_S)[0]:
            now = time.monotonic()
            if _most_cores(self._alive()) >= self._task_cpus:
                seen = now
            if not self._is_idle():
                busy = now
            if now - seen > GONE_S:
                raise ClusterError(
                    f"for {GONE_S:.0f} s no node has had the {self._task_cpus} cores of one task: "
                    "start nodes (ray start --address), then replay again"
                )
            if now - busy > DROPPED_S:
                raise ClusterError(
                    f"Ray has dropped a task: for {DROPPED_S:.0f} s it has waited while every core was free; "
                    "Ray's logs say which workers died: replay again"
                )

    def _is_idle(self) -> bool:
        """True where the cluster has cores and none of them is in use."""
        cores: float = self._ray.cluster_resources().get("CPU", 0)
        free: float = self._ray.available_resources().get("CPU", 0)
        return 0 < cores <= free

    def _why(self, error: BaseException) -> str:
        """Why a task failed, in one clause. A task also fails when one whose sums it goes on from does,
        so the first error in the chain is the reason."""
        exceptions = self._ray.exceptions
        while isinstance(error, exceptions.RayTaskError) and getattr(error, "cause", None) is not None:
            error = error.cause
        times = f"{RETRIES + 1} times"
        if isinstance(error, exceptions.OutOfMemoryError):
            return f"its host ran out of memory, {times}: cut it smaller with --task-tokens and --task-classes"
        if isinstance(error, exceptions.WorkerCrashedError):
            return f"its worker died, {times}: Ray's logs say why"
        if isinstance(error, exceptions.NodeDiedError | exceptions.ObjectLostError):
            return f"its node was lost, and with it what others had computed: {_first_line(error)}"
        # Ray spills what does not fit into its object store to the disk, up to 95 % of the disk.
        if isinstance(error, exceptions.OutOfDiskError | exceptions.ObjectStoreFullError):
            more = "give the nodes more of either (ray start --object-store-memory)"
            return f"a node's object store is full, and its disk has no room for the rest: {more}"
        return _first_line(error)
