"""What `backtape.torch.step_algebra` costs a job: nothing recorded, a sample, everything.

    make bench-step-cost     # a small transformer under DDP, eight ranks over gloo

The ranks train together. Blocks of steps take turns: of the first step of a block everything is
recorded, or a sample, or nothing, and the others are never recorded; so a block has the recorder's
writing in it that goes on after the step. What a block takes longer than one of a job without
backtape is added by the one recorded step. Beside it stands the floor: the time that all ranks take
to copy as many bytes as were recorded. Prints medians over the rounds.

    ROUNDS, RANKS, TOKENS    rounds (7), ranks (8), tokens of a rank in a microbatch (512)
"""

import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROUNDS = int(os.environ.get("ROUNDS", 7))
RANKS = int(os.environ.get("RANKS", 8))
TOKENS = int(os.environ.get("TOKENS", 512))
MICROBATCHES = 2
VOCABULARY, WIDTH, LAYERS = 2048, 256, 4

# Steps of a block; the first one may be recorded.
STEPS = 3

# What is recorded of the first step, beside a job that never calls backtape.
KINDS = {"absent": None, "inactive": None, "sampled": {"sample": 4096}, "everything": {}}
TARGETS = {"inactive": 1.0, "sampled": 1.1, "everything": 1.5}


def model(torch):
    """A transformer from tokens to logits."""
    nn = torch.nn
    torch.manual_seed(0)
    options = {"dropout": 0.0, "batch_first": True}
    layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, **options)
    layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), layers, nn.Linear(WIDTH, VOCABULARY))


class Job:
    """One rank of the job."""

    def __init__(self, directory):
        import backtape
        import backtape.torch
        import torch

        self.torch, self.backtape, self.directory = torch, backtape, directory
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo")
        self.rank = torch.distributed.get_rank()
        self.module = torch.nn.parallel.DistributedDataParallel(model(torch))
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-3)
        options = {"strict": True, "queue_bytes": 4 << 30, "mesh": {"data": RANKS}}
        self.recorder = backtape.Recorder.from_env(dir=directory, steps="0-1000000", **options)
        self.silent = backtape.Recorder(steps=None)
        self.draw = torch.Generator().manual_seed(self.rank)
        self.number = 0

    def train(self, tape, options):
        """One step, recorded where the tape is active; without a tape backtape is never called."""
        torch = self.torch
        if tape is not None:
            self.backtape.torch.step_algebra(tape, self.module, self.optimizer, **options)
        for _ in range(MICROBATCHES):
            tokens = torch.randint(VOCABULARY, (TOKENS // 128, 129), generator=self.draw)
            logits = self.module(tokens[:, :-1]).flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
            (loss / MICROBATCHES).backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()

    def step(self, kind, first):
        """One step of a block of this kind."""
        if kind == "absent":
            self.train(None, {})
        elif first and KINDS[kind] is not None:
            with self.recorder.step(self.number) as tape:
                self.train(tape, KINDS[kind])
            self.number += 1
        else:
            with self.silent.step(self.number) as tape:
                self.train(tape, {})
        self.optimizer.zero_grad()

    def block(self, kind):
        """The seconds of a block, of its first step, and of processor time, the recorder's included."""
        self.torch.distributed.barrier()
        begin, used = time.perf_counter(), time.process_time()
        self.step(kind, True)
        recorded = time.perf_counter() - begin
        for _ in range(STEPS - 1):
            self.step(kind, False)
        return time.perf_counter() - begin, recorded, time.process_time() - used

    def floor(self, size):
        """The seconds in which every rank copies so many bytes into memory that was written before."""
        torch = self.torch
        into = torch.zeros(16 << 20, dtype=torch.uint8)
        source = torch.ones_like(into)
        torch.distributed.barrier()
        begin = time.perf_counter()
        for _ in range(max(1, round(size / into.nbytes))):
            into.copy_(source)
        torch.distributed.barrier()
        return time.perf_counter() - begin

    def written(self):
        """Bytes of each recorded step of this rank."""
        pattern = f"step-*/rank-{self.rank:05}*.safetensors"
        sizes = {}
        for path in Path(self.directory).glob(pattern):
            sizes[path.parent.name] = sizes.get(path.parent.name, 0) + path.stat().st_size
        return [size for _, size in sorted(sizes.items())]


def measure(directory):
    """All rounds of one rank; rank 0 prints."""
    job = Job(directory)
    times = {kind: [] for kind in KINDS}
    for number in range(ROUNDS + 1):
        for kind in KINDS:
            taken = job.block(kind)
            if number:  # The first round warms up.
                times[kind].append(taken)
    job.recorder.close()
    sizes = job.written()
    of_kind = {"sampled": sizes[0::2], "everything": sizes[1::2]}
    copied = {kind: job.floor(statistics.median(own)) for kind, own in of_kind.items()}
    of_ranks = [None] * RANKS
    job.torch.distributed.all_gather_object(of_ranks, job_time(times))
    if job.rank == 0:
        report(times, of_kind, copied, of_ranks)
    job.torch.distributed.barrier()
    job.torch.distributed.destroy_process_group()


def job_time(times):
    """How many times the processor time of a step one rank's recorded step takes, by kind."""
    step = statistics.median(used for *_, used in times["absent"]) / STEPS
    pairs = {kind: zip(times[kind], times["absent"]) for kind in TARGETS}
    added = {kind: [own[2] - other[2] for own, other in both] for kind, both in pairs.items()}
    return {kind: 1 + statistics.median(more) / step for kind, more in added.items()}


def report(times, sizes, copied, of_ranks):
    """Prints what each kind adds to a step. of_ranks: `job_time` of every rank. That of rank 0, which has
    the coordinator in it, and that of the others stand apart: processor time says what recording costs
    also on a machine that other work loads."""
    step = statistics.median(whole for whole, *_ in times["absent"]) / STEPS
    print(f"{RANKS} ranks, {ROUNDS} rounds; a step without backtape takes {step:.2f} s")
    for kind, target in TARGETS.items():
        pairs = list(zip(times[kind], times["absent"]))
        added = statistics.median(own[0] - other[0] for own, other in pairs)
        blocked = statistics.median(own[1] / (other[0] / STEPS) for own, other in pairs)
        first, *others = [of_rank[kind] for of_rank in of_ranks]
        apart = f", {statistics.mean(others):5.2f}x of another rank's" if others else ""
        print(
            f"{kind:<11} {1 + added / step:5.2f}x with what follows, {blocked:5.2f}x until the tape ends, "
            f"{first:5.2f}x of rank 0's processor time{apart}   target {target:.1f}x"
        )
        if kind in sizes:
            size = statistics.median(sizes[kind]) / 2**20
            ratio = copied[kind] / step
            print(f"{'':<11} {size:.1f} MiB a rank; to copy as much takes {ratio:.2f} of a step")


def main():
    if "RANK" in os.environ:
        measure(sys.argv[1])
        return 0
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="backtape-bench-") as directory:
        shared = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, f"{directory}/run"],
                env=os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(RANKS)
        ]
        codes = [rank.wait() for rank in ranks]
    return max(map(abs, codes))


if __name__ == "__main__":
    sys.exit(main())
