"""Several processes of one test program."""

import os
import socket
import subprocess
import sys


def free_port():
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ended(program, world, *words, without=(), **variables):
    """Runs `program RANK WORLD WORDS...` for every rank to its end: exit codes and what each wrote to
    stderr. A hang fails the test.

    `variables` are set in the environment, those of `without` are not.
    """
    environment = {name: of for name, of in os.environ.items() if name not in without} | variables
    ranks = [
        subprocess.Popen(
            [sys.executable, program, *map(str, (rank, world, *words))],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(world)
    ]  # fmt: skip
    try:
        errors = [rank.communicate(timeout=180)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], errors


def run_ranks(program, world, *words, **environment):
    """The same, of ranks that must all end well."""
    for code, text in zip(*ended(program, world, *words, **environment)):
        assert code == 0, text
