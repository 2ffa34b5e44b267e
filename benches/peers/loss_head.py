"""The loss head forward and backward against JAX/XLA and torch, in turns in one run.

Prints ratios, never times: each round runs every contender once, and medians of the
rounds are compared. `make bench-replay`; sizes and rounds by T, D, V, REPEATS.
"""

import os
import statistics
import subprocess
import sys
import time

# Idle threads of one peer must not spin while another is measured.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("KMP_BLOCKTIME", "0")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402

REPEATS = int(os.environ.get("REPEATS", "7"))
T, D, V = (int(os.environ.get(name, usual)) for name, usual in [("T", 1024), ("D", 1024), ("V", 32768)])


class Server:
    """`replayer/benches/head_server.rs` on a pipe."""

    def __init__(self, threads=None):
        command = ["cargo", "bench", "--quiet", "--locked", "-p", "backtape-replayer", "--bench",
                   "head_server", "--", str(T), str(D), str(V)]  # fmt: skip
        environment = dict(os.environ) | ({"RAYON_NUM_THREADS": str(threads)} if threads else {})
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)

    def ask(self, command):
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().split()

    def run(self, command):
        return lambda: float(self.ask(command)[0])

    def close(self):
        self.process.stdin.close()
        self.process.wait(timeout=60)


def timed(function):
    """Wall seconds of a call whose result is ready when it returns."""

    def run():
        start = time.perf_counter()
        function()
        return time.perf_counter() - start

    return run


def numbers():
    random = np.random.default_rng(0)
    q = random.standard_normal((T, D), np.float32)
    k = random.standard_normal((V, D), np.float32) * 0.1
    return q, k, np.arange(T, dtype=np.int64) ** 2 % V


def of_jax(q, k, labels, dtype):
    def loss(q, k):
        logits = jax.lax.dot_general(
            q, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
        )
        picked = jnp.take_along_axis(logits, labels_[:, None], axis=1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=1) - picked)

    q_, k_, labels_ = jnp.asarray(q, dtype), jnp.asarray(k, dtype), jnp.asarray(labels, jnp.int32)
    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    return timed(lambda: jax.block_until_ready(step(q_, k_)))


def of_torch(q, k, labels, dtype, fused=False):
    q_ = torch.tensor(q, dtype=dtype, requires_grad=True)
    k_ = torch.tensor(k, dtype=dtype, requires_grad=True)
    labels_ = torch.tensor(labels)
    cross_entropy = torch.nn.functional.cross_entropy

    def step():
        q_.grad = k_.grad = None
        if fused:
            loss = torch.nn.functional.linear_cross_entropy(q_, k_, labels_)
        else:
            loss = cross_entropy((q_ @ k_.T).float(), labels_)
        loss.backward()

    return timed(step)


def of_torch_f64(q, k):
    q_, k_ = torch.tensor(q, dtype=torch.float64), torch.tensor(k, dtype=torch.float64)
    return timed(lambda: torch.logsumexp(q_ @ k_.T, dim=1))


def measure(contenders):
    """Median seconds of each, all run once a round."""
    found = {name: [] for name in contenders}
    for round_ in range(REPEATS + 1):
        for name, run in contenders.items():
            seconds = run()
            if round_:  # the first warms caches and compiles
                found[name].append(seconds)
    return {name: statistics.median(values) for name, values in found.items()}


def main():
    torch.set_num_threads(os.cpu_count())
    q, k, labels = numbers()
    server = Server()
    square = torch.rand(2048, 2048, dtype=torch.float64)
    scratch = {}
    for name in ("plain", "fused"):
        server.ask("release")
        scratch[name] = int(server.ask(name)[1]) / 2**20
    contenders = {
        "plain": server.run("plain"),
        "fused": server.run("fused"),
        "jax": of_jax(q, k, labels, jnp.float32),
        "torch eager": of_torch(q, k, labels, torch.float32),
        "gemm32": server.run("gemm32"),
    }
    if hasattr(torch.nn.functional, "linear_cross_entropy"):
        contenders["torch linear_cross_entropy"] = of_torch(q, k, labels, torch.float32, fused=True)
    else:
        print(f"torch {torch.__version__} has no linear_cross_entropy: not compared")
    print(f"P8: T={T} D={D} V={V} f32, {os.cpu_count()} cores, {REPEATS} rounds; "
          f"jax {jax.__version__}, torch {torch.__version__}")  # fmt: skip
    f32 = measure(contenders)
    peers = {name: f32[name] for name in f32 if name.startswith(("jax", "torch"))}
    fastest = min(peers, key=peers.get)
    for name, seconds in peers.items():
        print(f"  {name}: {seconds / f32['plain']:.2f} x the time of plain, "
              f"{seconds / f32['fused']:.2f} x of fused")  # fmt: skip
    print(f"  plain: {peers[fastest] / f32['plain']:.2f} x the speed of {fastest} (wanted 0.9)")
    print(f"  fused: {f32['fused'] / f32['plain']:.2f} x the time of plain (wanted 1.25 at most), "
          f"{scratch['fused']:.1f} MiB beyond inputs and outputs (wanted 64 at most; "
          f"plain {scratch['plain']:.1f})")  # fmt: skip
    peak = 2 * 4096**3 / f32["gemm32"]
    print(f"  floor: plain runs at {100 * 6 * T * D * V / f32['plain'] / peak:.0f} % of the GEMM "
          f"peak, fused at {100 * 6 * T * D * V / f32['fused'] / peak:.0f} %")  # fmt: skip
    if T <= 1024:
        p9(server, q, k, labels, square)
    server.close()


def p9(server, q, k, labels, square):
    contenders = {
        "plain": server.run("plain"),
        "plain_bf16": server.run("plain_bf16"),
        "fused_bf16": server.run("fused_bf16"),
        "jax bf16": of_jax(q, k, labels, jnp.bfloat16),
        "reference": server.run("reference"),
        "torch f64": of_torch_f64(q, k),
        "gemm64": server.run("gemm64"),
        "torch gemm64": timed(lambda: square @ square),
    }
    found = measure(contenders)
    print("P9: from a bf16 dump, and in f64")
    print(f"  bf16 dump: {found['plain_bf16'] / found['plain']:.2f} x the time of own f32 "
          f"(wanted 1.15 at most), {found['jax bf16'] / found['plain_bf16']:.2f} x the speed of "
          f"JAX bf16 (wanted 1.3)")  # fmt: skip
    print(f"  f64 GEMM: {found['torch gemm64'] / found['gemm64']:.2f} x the speed of torch "
          f"(wanted 0.85); f64 forward with lse: {found['torch f64'] / found['reference']:.2f} x")
    torch_bf16 = of_torch(q[:64], k, labels[:64], torch.bfloat16)
    torch_bf16()
    print(f"  torch bf16 on 64 of the {T} tokens: {torch_bf16() / found['plain_bf16']:.2f} x the "
          f"time that we need for all")  # fmt: skip
    digests = []
    for threads in (1, 2):
        one = Server(threads)
        one.ask("plain_bf16")
        digests.append(one.ask("digest")[0])
        one.close()
    print(f"  bits with 1 and 2 threads: {'equal' if digests[0] == digests[1] else 'DIFFERENT'}")
    if digests[0] != digests[1]:
        sys.exit(1)


if __name__ == "__main__":
    main()
