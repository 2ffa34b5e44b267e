"""A recorded step of jax arrays under XLA's profiler: a program of its own, in XLA's environment.

    python -m gpu.xla_capture MEGABYTES ROUNDS [cpu]

Prints one JSON object: what the device did in each of ROUNDS recorded steps. The proof of place is
computed there by XLA on the arrays (backtape/jax_arrays.py); what is dumped is compared with the
arrays first.
"""

import dataclasses
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import backtape

from .activity import Activity, Event, activity_of

# Elements of one tensor in bf16: 64 MiB.
ELEMENTS = 32 << 20


def device_events(folder: Path) -> Iterator[Event]:
    """The events of the streams of GPUs in a profile; other lines of a plane sum the same ones up."""
    for file in folder.glob("**/*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
            for line in plane.lines if plane.name.startswith("/device:GPU") else ():
                for event in line.events if line.name.startswith("Stream") else ():
                    begin = event.start_ns / 1e3
                    yield event.name, begin, begin + event.duration_ns / 1e3


def step(recorder: backtape.Recorder, number: int, arrays: dict[str, jax.Array]) -> None:
    with recorder.step(number) as tape:
        for name, array in arrays.items():
            tape.record(name, array)


def agree(folder: Path, number: int, arrays: dict[str, jax.Array]) -> None:
    dumped = backtape.open(folder).step(number)
    for name, array in arrays.items():
        if dumped.tensor(name).tobytes() != np.asarray(array).tobytes():
            raise RuntimeError(f"wrong: the dump of {name} has other bytes than the device")


def recorded(arrays: dict[str, jax.Array]) -> Activity:
    """One step under the profiler, behind another that compiles the fingerprint of these shapes."""
    here = Path(tempfile.mkdtemp(prefix="backtape-bench-"))
    try:
        room = 3 * sum(array.nbytes for array in arrays.values()) + (64 << 20)
        recorder = backtape.Recorder(dir=here / "run", steps="0,1", strict=True, queue_bytes=room)
        step(recorder, 0, arrays)
        # jax keeps the bytes that it fetched of an array: of these it has none yet.
        fresh = jax.block_until_ready({name: jnp.copy(array) for name, array in arrays.items()})
        with jax.profiler.trace(str(here / "profile")):
            step(recorder, 1, fresh)
        recorder.close()
        agree(here / "run", 1, arrays)
        return activity_of(device_events(here / "profile"))
    finally:
        shutil.rmtree(here, ignore_errors=True)


def main(megabytes: str, rounds: str, platform: str = "cuda") -> None:
    jax.config.update("jax_platforms", platform)
    count = max(1, (int(megabytes) << 20) // (2 * ELEMENTS))
    size = min(ELEMENTS, (int(megabytes) << 20) // 2)
    keys = jax.random.split(jax.random.key(0), count)
    arrays = {f"x{i}": jax.random.normal(key, (size,), jnp.bfloat16) for i, key in enumerate(keys)}
    seen = [dataclasses.asdict(recorded(arrays)) for _ in range(int(rounds))]
    print(json.dumps({"bytes": sum(array.nbytes for array in arrays.values()), "steps": seen}))


if __name__ == "__main__":
    main(*sys.argv[1:])
