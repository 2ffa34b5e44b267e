"""The loss head in jax, compiled by XLA: a program of its own, asked by `children.Child`.

    python -m gpu.xla FOLDER [cpu]     # FOLDER has small.npz and timed.npz: q, k, labels

{"do": "check", "head": "small"} leaves loss, dq and dk, at the rows that the file names, in
FOLDER/small-result.npz. {"do": "run"} runs the timed head once unmeasured, then once between two
events of the driver in the default stream, of a device that was idle before and is idle behind.
XLA's stream is another and cannot be marked from here, so the launch of one program is in its time.
"""

import ctypes
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np


class Driver:
    """Events of libcuda, in the device's primary context, which XLA uses too."""

    def __init__(self) -> None:
        self.cuda = ctypes.CDLL("libcuda.so.1")
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.events = [ctypes.c_void_p(), ctypes.c_void_p()]
        for event in self.events:
            self.call("cuEventCreate", ctypes.byref(event), 0)

    def call(self, name: str, *arguments: object) -> None:
        code = getattr(self.cuda, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} of the driver failed with code {code}")

    def __call__(self, run: Callable[[], object]) -> float:
        begin, end = self.events
        self.call("cuEventRecord", begin, None)
        run()
        self.call("cuEventRecord", end, None)
        self.call("cuEventSynchronize", end)
        milliseconds = ctypes.c_float()
        self.call("cuEventElapsedTime", ctypes.byref(milliseconds), begin, end)
        return milliseconds.value


def by_host(run: Callable[[], object]) -> float:
    """On a CPU, where only the protocol is tested."""
    begin = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - begin)


def loss(q: jax.Array, k: jax.Array, labels: jax.Array) -> jax.Array:
    logits = jax.lax.dot_general(q, k, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    picked = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=1) - picked)


STEP = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))


class Server:
    """The heads of a folder, put on the device when they are asked for."""

    def __init__(self, folder: Path, clock: Callable[[Callable[[], object]], float]) -> None:
        self.folder, self.clock = folder, clock
        self.timed: tuple[jax.Array, ...] | None = None

    def put(self, name: str) -> tuple[jax.Array, ...]:
        """q, k and labels of a file; bf16 lies in it as its bits."""
        with np.load(self.folder / f"{name}.npz") as file:
            q, k = (file[key].view(jnp.bfloat16) for key in ("q", "k"))
            return tuple(map(jnp.asarray, (q, k, file["labels"].astype(np.int32))))

    def check(self, name: str) -> dict[str, object]:
        with np.load(self.folder / f"{name}.npz") as file:
            tokens, classes = file["tokens"], file["classes"]
        value, (dq, dk) = STEP(*self.put(name))
        rows = {"dq": dq[tokens], "dk": dk[classes]}
        arrays = {key: np.asarray(row.astype(jnp.float32)) for key, row in rows.items()}
        np.savez(self.folder / f"{name}-result.npz", loss=np.asarray(value), **arrays)
        return {"done": name}

    def run(self) -> dict[str, object]:
        if self.timed is None:
            self.timed = self.put("timed")
        step = lambda: jax.block_until_ready(STEP(*self.timed))
        step()
        milliseconds = self.clock(step)
        statistics = jax.devices()[0].memory_stats() or {}
        peak, held = statistics.get("peak_bytes_in_use"), sum(array.nbytes for array in self.timed)
        return {"milliseconds": milliseconds, "peak_bytes": None if peak is None else peak - held}

    def answer(self, question: dict[str, str]) -> dict[str, object]:
        if question["do"] == "about":
            return {"jax": jax.__version__, "device": jax.devices()[0].device_kind}
        if question["do"] == "check":
            return self.check(question["head"])
        return self.run()


def main(folder: str, platform: str = "cuda") -> None:
    try:
        jax.config.update("jax_platforms", platform)
        jax.devices()
        server = Server(Path(folder), by_host if platform == "cpu" else Driver())
    except Exception as error:
        server, failed = None, f"{type(error).__name__}: {' '.join(str(error).split())[:240]}"
    for line in sys.stdin:
        try:
            found = {"error": failed} if server is None else server.answer(json.loads(line))
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:240]}"}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
