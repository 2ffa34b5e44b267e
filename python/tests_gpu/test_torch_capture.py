"""What a dump holds of torch tensors on a GPU: the bytes that stood there when they were captured,
whatever the job does next, without the training thread waiting for the device."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

import backtape
import backtape.torch as bt

DTYPES = [
    torch.bfloat16, torch.float16, torch.float32, torch.float64,
    torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool,
]  # fmt: skip
VIEWS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.t(),
    "every second row": lambda x: x[::2],
    "every third column": lambda x: x[:, 1::3],
    "a block in the middle": lambda x: x[5:-7, 9:-11],
    "one number": lambda x: x[3, 4],
    "no element": lambda x: x[:0],
    "broadcast": lambda x: x[:1].expand(50, -1),
}


def random_bits(shape, dtype, seed=0):
    """Any bit pattern of the type, NaN included; a bool is 0 or 1."""
    generator = torch.Generator("cuda").manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator, device="cuda").bool()
    bytes = (*shape[:-1], shape[-1] * dtype.itemsize)
    return torch.randint(0, 256, bytes, generator=generator, device="cuda", dtype=torch.uint8).view(dtype)


def bits(tensor):
    """The bytes of a tensor in the order of its rows, on the host."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes()


def busy(milliseconds=300):
    """Has the current stream do nothing for about so long; an event behind it."""
    torch.cuda._sleep(int(milliseconds * 1e-3 * 1.5e9))
    event = torch.cuda.Event()
    event.record()
    return event


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_view_lands_as_it_was_though_the_job_overwrites_it_at_once(recorded, dtype):
    source = random_bits((61, 96), dtype)
    wanted = {name: bits(view(source)) for name, view in VIEWS.items()}

    def use(tape):
        for number, view in enumerate(VIEWS.values()):
            mine = source.clone()
            tape.record(f"x{number}", view(mine))
            mine.zero_()

    step = recorded(use)
    for number, name in enumerate(VIEWS):
        assert step.tensor(f"x{number}").tobytes() == wanted[name], name


def test_large_tensors_that_are_freed_and_taken_again_at_once_land_as_they_were(recorded):
    wanted = []

    def use(tape):
        for number in range(12):
            tensor = random_bits((1024, 16 << 10), torch.bfloat16, number)
            wanted.append(bits(tensor))
            tape.record(f"x{number}", tensor)
            # torch hands the freed memory to the next tensor of its size.
            del tensor

    step = recorded(use)
    for number, was in enumerate(wanted):
        assert step.tensor(f"x{number}").tobytes() == was, number


def test_the_training_thread_does_not_wait_for_the_device(recorded):
    tensor = random_bits((1024, 1024), torch.bfloat16)
    was = bits(tensor)
    late = []

    def use(tape):
        event = busy()
        tape.record("x", tensor)
        late.append(event.query())
        tensor.zero_()
        late.append(event.query())

    assert recorded(use).tensor("x").tobytes() == was
    assert late == [False, False], "the call of record returned when the device was done"


def test_a_tensor_of_another_stream_is_read_behind_what_that_stream_does(recorded):
    side = torch.cuda.Stream()
    tensor = torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()

    def use(tape):
        with torch.cuda.stream(side):
            busy(100)
            tensor.fill_(7.0)
            tape.record("x", tensor)
            tensor.fill_(9.0)

    assert (recorded(use).tensor("x") == 7.0).all()


def test_the_static_output_of_a_replayed_graph_is_captured_each_time(recorded):
    static = torch.zeros(4096, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static += 1.0
    static.zero_()

    def use(tape):
        for number in range(4):
            graph.replay()
            tape.record("x", static, microbatch=number)

    step = recorded(use)
    for number in range(4):
        assert (step.tensor("x", microbatch=number) == number + 1.0).all()


def test_gradients_are_those_that_autograd_gave(recorded):
    q, k = (random_bits((64, 48), torch.uint8, seed).float().bfloat16().requires_grad_() for seed in (1, 2))

    def use(tape):
        given = bt.tap_grad("dq", bt.tap("q", q, microbatch=0), microbatch=0)
        (given @ k.T).float().logsumexp(1).sum().backward()
        tape.record("dk", k.grad)

    step = recorded(use)
    assert step.tensor("dq", microbatch=0).tobytes() == bits(q.grad)
    assert step.tensor("dk").tobytes() == bits(k.grad)
    assert step.tensor("q", microbatch=0).tobytes() == bits(q.detach())


def test_the_dump_is_proved_by_the_fingerprints_that_the_device_computed(recorded, tmp_path):
    recorded(lambda tape: tape.record("x", random_bits((512, 512), torch.float32)))
    command = [sys.executable, "-m", "backtape", "replay", "verify", "--dump", str(tmp_path / "run")]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr


SMALL_MEMORY = """
import os, sys, time
import torch
import backtape
from backtape import gpu

torch.zeros(1, device="cuda")
door = gpu.door(0)
# With no pinned memory it never opens.
until = time.monotonic() + (60 if gpu.sizes(os.environ)[0] else 0)
while door.gpu is None and not gpu._told and time.monotonic() < until:
    time.sleep(0.05)
recorder = backtape.Recorder(dir=sys.argv[1], steps="0", strict=True)
with recorder.step(0) as tape:
    for number in range(8):
        tensor = torch.full((1 << 20,), float(number), device="cuda")
        tape.record(f"x{number}", tensor)
        tensor.fill_(-1.0)
summary = recorder.close()
step = backtape.open(sys.argv[1]).step(0)
assert not summary.omissions, summary
assert all((step.tensor(f"x{number}") == number).all() for number in range(8))
print("told:", *gpu._told)
"""


@pytest.mark.parametrize(
    "pinned, snapshots, full",
    [("0", "0", False), ("1MiB", "0", True), ("6MiB", "0", True), ("64MiB", "0", False), ("64MiB", "5MiB", False)],
)
def test_with_little_or_no_memory_for_captures_the_bytes_are_the_same(tmp_path, pinned, snapshots, full):
    memory = {"BACKTAPE_GPU_PINNED": pinned, "BACKTAPE_GPU_SNAPSHOTS": snapshots}
    command = [sys.executable, "-c", SMALL_MEMORY, str(tmp_path / "run")]
    ended = subprocess.run(command, env=os.environ | memory, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ("where pinned memory is full: BACKTAPE_GPU_PINNED says" in ended.stdout) == full, ended.stdout
    assert full or ended.stdout.strip() == "told:", ended.stdout


def test_a_ring_of_steps_keeps_what_the_gpu_held(tmp_path, door):
    recorder = backtape.Recorder(dir=tmp_path / "run", steps="none", ring=3, strict=True)
    until = time.monotonic() + 30
    for number in range(10_000):
        with recorder.step(number) as tape:
            tensor = torch.full((1 << 16,), float(number), device="cuda")
            tape.record("q", tensor, microbatch=0)
            tensor.fill_(-1.0)
        if number >= 4:
            recorder.watch(number, loss=float("nan"))
            if list((tmp_path / "run").glob("**/manifest*.json")):
                break
            assert time.monotonic() < until, "no step of the ring was written within 30 s of a loss that is no number"
            time.sleep(0.02)
    recorder.close()
    dump = backtape.open(tmp_path / "run")
    assert dump.steps
    for number in dump.steps:
        assert (np.asarray(dump.step(number).tensor("q", microbatch=0)) == number).all()
