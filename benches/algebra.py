"""The replay of a step's algebra beside a copy of the same bytes in the same run.

Records a step of AdamW on one parameter with two microbatches: gradients, their sum, the gradient after communication,
and parameter and moments before and after. Then `cargo bench --bench algebra` judges the dump and copies its bytes, in
turn, and prints ratios. `make bench-algebra`; SIZE is the number of elements (default 2^24), REPEATS the rounds.

The parameter is recorded in shards of 2^24 elements at most, so that a large SIZE needs no more memory here.
"""

import json
import os
import subprocess
import sys
import tempfile

import numpy as np

import backtape

SIZE = int(float(os.environ.get("SIZE", str(1 << 24))))
COLUMNS, SHARD = 1 << 12, 1 << 24
STEP, LR, BETAS, EPS, DECAY = 7, 1e-3, (0.9, 0.999), 1e-8, 0.01
HYPER = {"lr": LR, "betas": list(BETAS), "eps": EPS, "weight_decay": DECAY}


def declaration():
    parameter = {"optimizer": 0, "group": 0, "trainable": True, "reduce": [], "scalars": {"step": [STEP - 1, STEP]}}
    return {
        "version": 1,
        "rank": 0,
        "framework": "numpy",
        "microbatches": 2,
        "accumulation": "sum",
        "loss_scale": None,
        "skipped": False,
        "norms": [],
        "clip_value": None,
        "parameters": {"weight": parameter | {"same_as": None, "absent": {}}},
        "optimizers": [{"name": "AdamW", "module": "", "skipped": False, "groups": [HYPER]}],
        "absent": {},
    }


def step(random, rows):
    """What one shard of the parameter goes through, in f32."""
    normal = lambda scale: random.standard_normal((rows, COLUMNS), np.float32) * np.float32(scale)
    one = np.float32(1)
    b1, b2 = (np.float32(beta) for beta in BETAS)
    first, second, before, m, v = normal(1e-3), normal(1e-3), normal(0.02), normal(1e-3), normal(1e-3) ** 2
    grad = first + second
    m_after, v_after = b1 * m + (one - b1) * grad, b2 * v + (one - b2) * (grad * grad)
    root = np.sqrt(v_after / np.float32(1 - BETAS[1] ** STEP)) + np.float32(EPS)
    change = np.float32(LR) * ((m_after / np.float32(1 - BETAS[0] ** STEP)) / root)
    after = before * np.float32(1 - LR * DECAY) - change
    states = {"exp_avg": (m, m_after), "exp_avg_sq": (v, v_after)}
    return (first, second), grad, (before, after), states


def recorded(directory):
    random = np.random.default_rng(0)
    rows = max(1, SIZE // COLUMNS)
    shape = (rows, COLUMNS)
    recorder = backtape.Recorder(directory, steps="0", rank=0, world_size=1, strict=True)
    with recorder.step(0) as tape:
        text = json.dumps(declaration()).encode()
        tape.record("step.declared:0", np.frombuffer(text, np.uint8))
        for start in range(0, rows, SHARD // COLUMNS):
            here = min(SHARD // COLUMNS, rows - start)
            place = {"global_shape": shape, "offsets": (start, 0)}
            addends, grad, parameter, states = step(random, here)
            partial = place | {"partial": "sum", "when": "pre_reduce"}
            for microbatch, addend in enumerate(addends):
                tape.record("step.grad:weight", addend, microbatch=microbatch, **partial)
            tape.record("step.accumulated:weight", grad, **partial)
            tape.record("step.reduced:weight", grad, **place)
            for when, value in zip(("before", "after"), parameter):
                tape.record(f"step.{when}:weight", value, **place)
            for name, both in states.items():
                for when, value in zip(("before", "after"), both):
                    tape.record(f"step.state_{when}.{name}:weight", value, **place)
    recorder.close()


def main():
    with tempfile.TemporaryDirectory(prefix="backtape-algebra-") as directory:
        recorded(directory)
        command = ["cargo", "bench", "--quiet", "--locked", "-p", "backtape-replayer", "--bench", "algebra"]
        done = subprocess.run(command, env=os.environ | {"DUMP": directory})
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
