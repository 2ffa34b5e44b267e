"""What an attachment costs a job at the steps that it does not record, as a share of the step.

    python python/benches/attached.py

One small model is trained in rounds, attached and not, in turn; each round is timed as a whole, and the
ratio of the two medians is printed. ROUNDS and STEPS choose how many.
"""

import os
import statistics
import tempfile
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

import backtape
import backtape.torch

ROUNDS, STEPS = int(os.environ.get("ROUNDS", "21")), int(os.environ.get("STEPS", "100"))


def main():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 64), *(nn.Linear(64, 64) for _ in range(4)), nn.Linear(64, 256))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.randint(256, (8, 32))

    def steps():
        begun = time.perf_counter()
        for _ in range(STEPS):
            F.cross_entropy(model(tokens).view(-1, 256), tokens.view(-1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return time.perf_counter() - begun

    steps()
    times = {"plain": [], "attached": []}
    with tempfile.TemporaryDirectory() as directory:
        for _ in range(ROUNDS):
            times["plain"].append(steps())
            recorder = backtape.Recorder(dir=directory, steps=str(10**9))
            with backtape.torch.attach(model, optimizer, recorder=recorder):
                steps()
                times["attached"].append(steps())
    plain, attached = (statistics.median(times[name]) for name in ("plain", "attached"))
    print(f"a step takes {plain / STEPS * 1e6:.0f} us; attached and not recording: {attached / plain:.4f} of it")


main()
