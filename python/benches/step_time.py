"""P3: what recording the loss head, and what recording everything, adds to a training step in torch.

    make bench-step          # a small transformer on CPU, steps interleaved

One process trains; every third step is not recorded, every third has its loss head recorded (q, k,
lse, label logits, dq, dk and their parts), every third also all parameters and gradients. Prints the
median of the ratios of neighbouring steps and the bytes recorded. Writing to disk goes on in the
background and shares the machine's cores with the training, as it does in a job.
"""

import argparse
import contextlib
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import backtape
import backtape.torch
from parameters import Shape, init_parameters
from text import Batch
from train_torch import Job, train_step
from transformer_torch import Transformer

ROUNDS = int(os.environ.get("ROUNDS", 9))


class Alone(torch.nn.Module):
    """A model of one process, where DDP would stand."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *arguments):
        return self.module(*arguments)

    def no_sync(self):
        return contextlib.nullcontext()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=1)
    rows = parser.parse_args().rows
    torch.distributed.init_process_group("gloo", init_method="tcp://127.0.0.1:0", rank=0, world_size=1)
    torch.set_num_threads(max(1, (os.cpu_count() or 2) // 2))
    shape = Shape(vocab=8448, width=256, layers=4, heads=4, length=256)
    model = Alone(Transformer(shape, init_parameters(shape)))
    job = Job(0, 1, 8300, 1, fused=True, tile=1024, gather_dtype=torch.float32, fsdp=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    draw = np.random.default_rng(0)

    def step(tape, everything):
        tokens = draw.integers(0, 8300, (1, rows, shape.length + 1)).astype(np.int32)
        weights = np.ones((1, rows, shape.length), np.float32)
        batch = Batch(tokens[..., :-1], tokens[..., 1:], weights)
        begin = time.perf_counter()
        with tape:
            train_step(model, job, batch, tape)
            if everything:
                backtape.torch.record_parameters(tape, model)
                backtape.torch.record_gradients(tape, model, when="post_reduce")
        taken = time.perf_counter() - begin
        optimizer.step()
        optimizer.zero_grad()
        return taken

    with tempfile.TemporaryDirectory(prefix="backtape-bench-") as directory:
        options = {"steps": "0-100000", "strict": True, "queue_bytes": 4 << 30}
        recorder = backtape.Recorder(dir=f"{directory}/run", mesh={"data": 1}, **options)
        silent = backtape.Recorder(steps=None)
        times = []
        for number in range(ROUNDS + 1):
            off = step(silent.step(number), False)
            head = step(recorder.step(2 * number), False)
            everything = step(recorder.step(2 * number + 1), True)
            if number:  # The first round warms up.
                times.append((head / off, everything / off))
        summary = recorder.close()
    head, everything = (statistics.median(column) for column in zip(*times))
    megabytes = summary.bytes / (2 * (ROUNDS + 1)) / 2**20
    print(f"{ROUNDS} rounds, {megabytes:.0f} MiB recorded a step on average; medians of ratios")
    print(f"loss head recorded over off    {head:.2f}x   target 1.10x")
    print(f"everything recorded over off   {everything:.2f}x")


if __name__ == "__main__":
    sys.exit(main())
