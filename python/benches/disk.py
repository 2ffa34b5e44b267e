"""What the benchmarks of durable writes share: a quiet disk before each side, fsync, the floor."""

import mmap
import os
import statistics
import time
from pathlib import Path

BLOCK = 16 << 20


# What is so of the page cache before each side, given that sides delete what they wrote.
CACHE = "all dirty pages synced, files of the sides before deleted and so out of the page cache"


def settle():
    """Everything dirty is on disk: no side pays for what another left behind."""
    os.sync()


def fsync(path):
    """Makes a file's bytes, or a directory's entries, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def fsync_tree(root):
    """Makes everything below a directory durable, and its own name: what a writer that does not
    fsync still owes."""
    for folder, _, files in os.walk(root):
        for name in files:
            fsync(os.path.join(folder, name))
        fsync(folder)
    fsync(Path(root).parent)


class Floor:
    """The same number of bytes past the page cache, in 16 MiB aligned writes, then fsync."""

    def __init__(self, count):
        self.count = count
        self.memory = mmap.mmap(-1, BLOCK)
        self.memory.write(os.urandom(BLOCK))

    def __call__(self, here):
        here.mkdir()
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_DIRECT
        begin = time.perf_counter()
        descriptor = os.open(here / "floor", flags, 0o600)
        for index in range(self.count):
            os.pwrite(descriptor, self.memory, index * BLOCK)
        os.fsync(descriptor)
        os.close(descriptor)
        fsync(here)
        return time.perf_counter() - begin


def ratios(rows, name, over):
    """Median of the ratios of two sides, each within a round, and how far they spread."""
    found = sorted(row[name] / row[over] for row in rows)
    return statistics.median(found), found[0], found[-1]
