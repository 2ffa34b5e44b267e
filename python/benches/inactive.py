"""What backtape costs a job that records nothing, or not this step.

    python python/benches/inactive.py

Prints nanoseconds for one `with recorder.step(n)` with one `tape.record`, the best of 20 rounds.
"""

import tempfile
import timeit

import numpy as np

import backtape

ROUNDS, CALLS = 20, 20_000


def nanoseconds(recorder: backtape.Recorder) -> float:
    array = np.ones(3)

    def step() -> None:
        with recorder.step(7) as tape:
            tape.record("x", array, microbatch=0)

    return min(timeit.repeat(step, number=CALLS, repeat=ROUNDS)) / CALLS * 1e9


def main() -> None:
    print(f"BACKTAPE_STEPS unset:        {nanoseconds(backtape.Recorder.from_env()):6.0f} ns a step")
    with tempfile.TemporaryDirectory() as directory:
        with backtape.Recorder(f"{directory}/run", steps="0", strict=True) as recorder:
            print(f"another step is recorded:    {nanoseconds(recorder):6.0f} ns a step")


if __name__ == "__main__":
    main()
