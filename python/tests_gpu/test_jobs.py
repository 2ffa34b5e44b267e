"""Heads that a GPU computed: right ones agree with what docs/dtypes.md says to declare, planted faults are
found; and a replay on the GPU says what the CPU's says."""

import json
import subprocess
import sys

import jobs
import numpy as np
import pytest
import torch

TF32 = jobs.ALL_F32 | {"input": "tf32"}


def replay(folder, *options, wanted=None, report="report.json"):
    """The report of a replay; `wanted` are the exit codes that are right."""
    report = folder.parent / report
    command = [sys.executable, "-m", "backtape", "replay", "--dump", str(folder), "--step", "0",
               "--json", str(report), *options]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True)
    if wanted is not None:
        assert ended.returncode in wanted, ended.stdout + ended.stderr
    return json.loads(report.read_text()) | {"said": ended.stdout + ended.stderr, "code": ended.returncode}


def autocast(dtype):
    return lambda: torch.autocast("cuda", dtype)


RIGHT = {
    "bf16, eager": dict(loss=jobs.eager, declared=jobs.EAGER),
    "bf16, in chunks": dict(loss=jobs.chunked, declared={"input": "bf16", "logits": "bf16", "p": "f32"}),
    "bf16, nothing declared": dict(loss=jobs.eager, declared={}),
    "bf16, torch.compile": dict(loss=torch.compile(jobs.eager), declared={"input": "bf16", "output": "bf16"}),
    "f32": dict(loss=jobs.eager, declared=jobs.ALL_F32, dtype=torch.float32),
    "f32 in TF32": dict(loss=jobs.eager, declared=TF32, dtype=torch.float32, around=jobs.tf32),
    "f16, scaled": dict(
        loss=jobs.eager, dtype=torch.float16, scale=1024.0,
        declared={name: "f16" if to == "bf16" else to for name, to in jobs.EAGER.items()},
    ),
    "bf16 by autocast": dict(
        loss=lambda q, k, labels: torch.nn.functional.cross_entropy(torch.nn.functional.linear(q, k), labels),
        declared=jobs.EAGER, dtype=torch.float32, around=autocast(torch.bfloat16), autocast="bf16",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_head_of_torch_on_the_gpu_agrees(tmp_path, door, name):
    folder = jobs.torch_job(tmp_path / "run", **RIGHT[name])
    replay(folder, "--causes", "none", wanted=[0])


def test_a_planted_fault_of_a_head_on_the_gpu_diverges(tmp_path, door):
    folder = jobs.torch_job(tmp_path / "run", jobs.LostLabels.apply, jobs.EAGER)
    assert "DIVERGED" in replay(folder, wanted=[1])["said"]


@pytest.mark.parametrize("precision", ["bf16", "f32", "f32, highest"])
def test_a_right_head_of_jax_on_the_gpu_agrees(tmp_path, door, precision):
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip(f"jax {jax.__version__} computes on {jax.default_backend()}")
    jnp = jax.numpy
    dtype = jnp.bfloat16 if precision == "bf16" else jnp.float32
    q, k, labels = (tensor.detach() for tensor in jobs.inputs(torch.float32))
    q, k = (jnp.asarray(tensor.cpu().numpy()).astype(dtype) for tensor in (q, k))
    labels = jnp.asarray(labels.cpu().numpy().astype(np.int32))

    def loss(q, k):
        logits = (q @ k.T).astype(jnp.float32)
        picked = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
        return (jax.nn.logsumexp(logits, 1) - picked).mean()

    with jax.default_matmul_precision("highest" if "highest" in precision else "default"):
        gradients = jax.jit(jax.grad(loss, (0, 1)))(q, k)
    declared = {"bf16": {"input": "bf16", "accumulate": "f32", "output": "bf16"}, "f32": TF32,
                "f32, highest": jobs.ALL_F32}[precision]  # fmt: skip
    import backtape

    recorder = backtape.Recorder(dir=tmp_path / "run", steps="0", strict=True)
    with recorder.step(0) as tape:
        tape.head(loss="softmax_xent", path="plain", reduction="mean", dtypes=declared)
        for name, array in {"q": q, "labels": labels, "dq": gradients[0]}.items():
            tape.record(name, array, microbatch=0)
        tape.record("k", k)
        tape.record("dk", gradients[1])
    recorder.close()
    replay(tmp_path / "run", "--causes", "none", wanted=[0])


def numbers(stage):
    """Every number that a report says of a stage, by its path."""
    found = {}

    def walk(path, value):
        if isinstance(value, dict):
            for key, inner in value.items():
                walk(f"{path}.{key}", inner)
        elif isinstance(value, list):
            for index, inner in enumerate(value):
                walk(f"{path}[{index}]", inner)
        elif isinstance(value, float):
            found[path] = value

    walk("", stage)
    return found


@pytest.mark.parametrize("fault", [False, True], ids=["right", "with a fault"])
def test_a_replay_on_the_gpu_says_what_the_cpus_says(tmp_path, door, fault):
    loss = jobs.LostLabels.apply if fault else jobs.eager
    folder = jobs.torch_job(tmp_path / "run", loss, jobs.EAGER)
    cpu = replay(folder, "--device", "cpu")
    gpu = replay(folder, "--device", "cuda", report="gpu.json")
    assert gpu["code"] == cpu["code"] == (1 if fault else 0), cpu["said"] + gpu["said"]
    assert "NVIDIA" in gpu["device"]["name"] and gpu["device"]["fallback"] is None, gpu["device"]
    assert gpu.get("verdict") == cpu.get("verdict")
    first = [report["first_divergence"] and report["first_divergence"]["stage"] for report in (cpu, gpu)]
    assert first[0] == first[1]
    one, other = (numbers(report["stages"]) for report in (cpu, gpu))
    assert one.keys() == other.keys()
    apart = {path: (value, other[path]) for path, value in one.items() if not alike(path, value, other[path])}
    assert not apart, dict(list(apart.items())[:8])


def alike(path, value, other):
    """Floors are the errors of emulated policies, whose products are summed in another order here and there: of
    policies that round much they differ by some percent. Everything else is f64 arithmetic on the same bytes."""
    of_floors = path.endswith((".floor", ".ratio"))
    return np.isclose(value, other, rtol=0.3 if of_floors else 1e-4, atol=1e-9, equal_nan=True)


LSE = """
// backtape: head_lse(q: f32, k: f32, labels: i32, lse: f32, n: i32, d: i32, valid: i32)
//           grid(n / 4) block(128) shared(0)
extern "C" __global__ void head_lse(const float *q, const float *k, const int *labels, float *lse, int n, int d,
                                    int valid) {
    int t = blockIdx.x * 4 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (t >= n) return;
    float top = -3e38f, sum = 0.0f;
    for (int v = lane; v < valid; v += 32) {
        float z = 0.0f;
        for (int i = 0; i < d; i++) z += q[t * d + i] * k[(size_t)v * d + i];
        if (z > top) { sum *= expf(top - z); top = z; }
        sum += expf(z - top);
    }
    for (int step = 16; step; step /= 2) {
        float other = __shfl_xor_sync(~0u, top, step), part = __shfl_xor_sync(~0u, sum, step);
        float both = fmaxf(top, other);
        sum = sum * expf(top - both) + part * expf(other - both);
        top = both;
    }
    if (lane == 0) lse[t] = FAULT top + logf(sum);
}
"""


@pytest.mark.parametrize("fault, right", [("", True), ("0.1f +", False), ("t % 7 == 0 ? lse[t] :", False)])
def test_a_kernel_of_the_users_is_judged_on_the_gpu(tmp_path, door, fault, right):
    folder = jobs.torch_job(tmp_path / "run", jobs.eager, jobs.EAGER)
    source = tmp_path / "mine.cu"
    source.write_text(LSE.replace("FAULT", fault))
    found = replay(folder, "--device", "cuda", "--causes", "none", "--kernel", f"lse={source}:head_lse")
    stages = found["variants"]
    assert [stage["stage"] for stage in stages] == ["lse"], found["said"]
    findings = [one for kernel in found["kernels"] for one in kernel["findings"]]
    assert (stages[0]["agrees"] and not findings) == right, (stages, findings)
