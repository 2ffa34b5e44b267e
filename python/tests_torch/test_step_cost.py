"""What a recorded step costs the job, counted and not timed: calls of the recorder, copies, and a job
that is not recorded. `make bench-step-cost` measures the time."""

import math
import sys
from collections import Counter
from contextlib import contextmanager

import pytest
import reading
import torch
import torch.nn as nn
from torch.nn.utils import clip_grad_norm_

import backtape
import backtape.torch
from backtape._native import sums_of
from backtape.step_torch.capture import bits_of
from backtape.step_torch.choice import note_squares
from backtape.step_torch.parts import Part
from backtape.torch_arrays import is_plain

# Blocks of neighbours of a sampled parameter; see backtape.sampling.
BLOCKS = 8

LAYERS = 4


@contextmanager
def calls_of_the_recorder():
    """Counts the calls of compiled code of backtape in this thread, in which torch runs hooks on the
    CPU, by their names."""
    counted = Counter()

    def look(_, event, called):
        owner = type(getattr(called, "__self__", None))
        if event == "c_call" and owner.__module__ == "backtape._native":
            counted[f"{owner.__name__}.{called.__name__}"] += 1

    sys.setprofile(look)
    try:
        yield counted
    finally:
        sys.setprofile(None)


def trained(recorder, **options):
    """A step after one that is not recorded, so that there is a state; what it called of the recorder."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    for step in range(2):
        with calls_of_the_recorder() as counted, recorder.step(step) as tape:
            backtape.torch.step_algebra(tape, module, optimizer, **options)
            for _ in range(2):
                module(torch.randn(16, 64)).square().mean().backward()
            clip_grad_norm_(module.parameters(), 0.01)
            optimizer.step()
        optimizer.zero_grad()
    return counted


@pytest.mark.parametrize("options", [{}, {"sample": 512}], ids=["everything", "sampled"])
def test_a_tensor_of_a_stage_costs_one_call_however_many_blocks_it_has(
    tmp_path, options
):
    with backtape.Recorder(dir=tmp_path, strict=True, steps="1") as recorder:
        counted = trained(recorder, **options)
    shards = [entry.record for entry in reading.entries(tmp_path, 1)]
    tensors = Counter((one["tensor"], one["microbatch"], one["when"]) for one in shards)
    matrices = {count for (name, *_), count in tensors.items() if name.endswith(".weight")}
    assert matrices == {BLOCKS if options else 1}, "each block is a shard of its own"
    # Two gradients, reduced, clipped, before and after, and two states before and after.
    stages = 10
    assert len(tensors) == stages * 2 * LAYERS + 1, "and the declaration"
    # That call copies the tensor too. The declaration lies in memory that nobody else changes.
    assert counted["Tape.record_plain"] == len(tensors) - 1
    assert counted["Tape.record"] == 1
    often = {name for name, count in counted.items() if count > 1}
    assert often == {"Tape.record_plain"}, counted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("count", [0, 1, 15, 16, 1000])
def test_the_sums_of_a_gradient_are_those_of_torch(dtype, count):
    gradient = torch.randn(count, dtype=torch.float64).to(dtype)
    part = Part("w", 0, True, lambda: gradient)
    note_squares(part, "reduced", gradient, {})
    exact = math.fsum(float(number) ** 2 for number in gradient.double())
    assert float(part.squares["reduced"]) == pytest.approx(exact, rel=1e-13)
    before = int(bits_of(gradient))
    for index in range(min(count, 3)):
        changed = gradient.clone()
        changed[index] = -changed[index]
        assert int(bits_of(changed)) != before


def test_bytes_that_are_not_aligned_are_summed_too():
    memory = bytearray(1 + 4 * 20)
    numbers = torch.frombuffer(memory, dtype=torch.float32, offset=1)
    numbers.fill_(3.0)
    assert is_plain(numbers) and numbers.data_ptr() % 4
    assert sums_of(numbers.data_ptr(), numbers.nbytes, "float32")[0] == 180.0
    with pytest.raises(ValueError, match="float64 is not summed"):
        sums_of(numbers.data_ptr(), numbers.nbytes, "float64")


def test_a_step_that_is_not_recorded_calls_nothing(tmp_path):
    assert not trained(backtape.Recorder(steps=None), sample=512)
    with backtape.Recorder(dir=tmp_path, strict=True, steps="7") as recorder:
        counted = trained(recorder, sample=512)
    # It is not known before which step the recorder begins to write.
    assert counted.keys() <= {"Recorder.wants", "Recorder.trouble"}, counted
