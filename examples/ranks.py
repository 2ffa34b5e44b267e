"""Starts the ranks of an example on this machine, or says which rank this process is.

    python train_jax.py --launch 4      # four processes on loopback, log lines prefixed
    RANK=0 WORLD_SIZE=4 COORDINATOR_ADDRESS=host:port python train_jax.py     # one rank by hand

Not a job scheduler: one machine, no restarts.
"""

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import traceback

# A rank that waits in a collective does not notice SIGTERM (jax turns it into a preemption
# notice), so it gets this long before SIGKILL.
GRACE_SECONDS = 3.0


def add_arguments(parser):
    """Adds the options that say who this process is; the environment gives their defaults."""
    env = os.environ.get
    parser.add_argument("--launch", type=int, metavar="N", help="start N ranks on this machine")
    parser.add_argument("--rank", type=int, default=int(env("RANK", 0)))
    parser.add_argument("--world-size", type=int, default=int(env("WORLD_SIZE", 1)))
    address = env("COORDINATOR_ADDRESS")
    parser.add_argument("--coordinator-address", default=address, metavar="HOST:PORT")


def without_launch(argv):
    """The arguments of one rank: all but --launch and its number."""
    at = next(i for i, word in enumerate(argv) if word.startswith("--launch"))
    return argv[:at] + argv[at + (1 if "=" in argv[at] else 2) :]


def run(train, args):
    """Runs `train(args)` as this rank; the process ends at once when it fails.

    At an ordinary exit jax waits up to five minutes for the other ranks to shut down too, and they
    wait in a collective for this one.
    """
    try:
        train(args)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    else:
        return 0
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def launch(world_size, arguments):
    """Runs this script once per rank with `arguments`; the exit code of the first rank to fail."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    address = f"127.0.0.1:{free_port()}"
    ended = queue.Queue()
    ranks = []
    try:
        for rank in range(world_size):
            ranks.append(start(rank, world_size, address, arguments, ended))
        return wait(ranks, ended)
    finally:
        for process in ranks:
            process.kill()  # does nothing to one that has ended


def free_port():
    """A port that nothing listens on now. Rank 0 binds it a moment later: a small race."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(rank, world_size, address, arguments, ended):
    """Starts one rank; its exit code is put into `ended` once its last line is printed."""
    place = {"RANK": str(rank), "WORLD_SIZE": str(world_size), "COORDINATOR_ADDRESS": address}
    process = subprocess.Popen(
        [sys.executable, "-u", sys.argv[0], *arguments],
        env=os.environ | place,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )

    def follow():
        for line in process.stdout:
            # One write per line: print() would let two ranks' lines run into each other.
            sys.stdout.write(f"[rank {rank}] {line.rstrip()}\n")
            sys.stdout.flush()
        ended.put(process.wait())

    threading.Thread(target=follow, daemon=True).start()
    return process


def wait(ranks, ended):
    """Waits for every rank; when one fails, stops the others. 0 or the first failure's code."""
    failure = 0
    for _ in ranks:
        try:
            code = ended.get(timeout=GRACE_SECONDS if failure else None)
        except queue.Empty:
            break  # the caller kills what is left
        if code and not failure:
            failure = code if code > 0 else 128 - code  # a signal, as a shell reports it
            for process in ranks:
                process.terminate()
    return failure
