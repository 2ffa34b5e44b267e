"""A whole replay of a head that this GPU computed: on the GPU, and on this machine's CPU where the head is
small enough to wait for it. By the host's clock, so only ratios are printed.

The head is torch's eager one in bf16; its dump has q, k, labels, dq and dk. The replay proves the bytes,
computes the reference in f64 and the emulated policies, compares and judges; it looks for no cause, as
nothing diverges. It is a process of its own, from its start to its end.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

import backtape

from .head import Shape, random_head
from .losses import eager
from .table import Outcome, rendered, row
from .timing import Unmeasured

# Where the CPU computes too: the longest step of these tokens is a minute or two on some cores.
CPU_TOKENS = 1024
DECLARED = {"input": "bf16", "logits": "bf16", "lse": "f32", "p": "f32", "dlogits": "bf16", "output": "bf16"}


def dumped(folder: Path, shape: Shape, seed: int) -> None:
    """Forward and backward of the head, and its dump."""
    head = random_head(shape, "cuda", seed)
    q, k = (matrix.detach().requires_grad_() for matrix in (head.q, head.k))
    dq, dk = torch.autograd.grad(eager(q, k, head.labels), (q, k))
    room = 4 * (k.nbytes + q.nbytes) + (64 << 20)
    recorder = backtape.Recorder(dir=folder, steps="0", strict=True, queue_bytes=room, close_patience_s=300)
    with recorder.step(0) as tape:
        tape.head(loss="softmax_xent", path="plain", reduction="mean", dtypes=DECLARED)
        for name, tensor in {"q": q, "labels": head.labels, "dq": dq, "dk": dk}.items():
            tape.record(name, tensor.detach(), microbatch=0)
        tape.record("k", k.detach())
    summary = recorder.close()
    if summary is None or summary.omissions or 0 not in summary.steps_committed:
        raise Unmeasured(f"the head was not recorded whole: {summary}")


def replayed(folder: Path, device: str) -> float:
    """Milliseconds of the replay, which must agree and have computed where it was asked to."""
    report = folder.parent / "report.json"
    command = [sys.executable, "-m", "backtape", "replay", "--dump", str(folder), "--step", "0",
               "--device", device, "--causes", "none", "--quiet", "--json", str(report)]  # fmt: skip
    begin = time.perf_counter()
    ended = subprocess.run(command, capture_output=True, text=True)
    milliseconds = 1e3 * (time.perf_counter() - begin)
    if ended.returncode:
        said = [line for line in (ended.stdout + ended.stderr).splitlines() if line.strip()]
        raise Unmeasured(f"the replay ended with {ended.returncode}: {said[-1] if said else 'it said nothing'}")
    by = json.loads(report.read_text()).get("device") or {}
    if device != "cpu" and by.get("fallback"):
        raise Unmeasured(f"the CPU computed: {by['fallback']}")
    return milliseconds


def measure(shape: Shape, rounds: int, seed: int) -> dict[str, Outcome]:
    """A replay by the GPU and, of few tokens, by the CPU, in turn."""
    devices = {"the GPU": "cuda"} | ({"the CPU": "cpu"} if shape.tokens <= CPU_TOKENS else {})
    outcomes = {name: Outcome() for name in devices}
    folder = Path(tempfile.mkdtemp(prefix="backtape-bench-"))
    try:
        dumped(folder / "run", shape, seed)
        torch.cuda.empty_cache()
        for _ in range(rounds):
            for name, device in devices.items():
                if outcomes[name].reason is None:
                    try:
                        outcomes[name].milliseconds.append(replayed(folder / "run", device))
                    except Unmeasured as error:
                        outcomes[name].reason = str(error)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return outcomes


def lines(shape: Shape, rounds: int, seed: int, outcomes: dict[str, Outcome]) -> list[str]:
    """The small head on both, then the whole one on the GPU, over the small one's time there."""
    small = Shape(min(shape.tokens, CPU_TOKENS), shape.vocab, shape.depth)
    told = []
    found = measure(small, 1, seed)
    outcomes.update({f"replay of {small} by {name}": outcome for name, outcome in found.items()})
    told += [f"a whole replay, {small}", *rendered(found, "the GPU", times=False)]
    if shape.tokens > small.tokens:
        whole = measure(shape, rounds, seed)["the GPU"]
        outcomes[f"replay of {shape} by the GPU"] = whole
        told.append(f"a whole replay, {shape}")
        if not whole.measured or not found["the GPU"].measured:
            return [*told, row("the GPU", note=f"not measured: {whole.reason or found['the GPU'].reason}")]
        times = min(whole.milliseconds) / min(found["the GPU"].milliseconds)
        told.append(row("the GPU", f"{times:.2f}x", note=f"the time of {small.tokens} tokens"))
    return told
