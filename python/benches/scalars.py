"""What recording scalars costs a job, beside the step that computes them.

    python python/benches/scalars.py

Prints nanoseconds of one `recorder.scalars(step, loss=..., grad_norm=..., learning_rate=...)`, the
best of 20 rounds: inactive, active with Python numbers, active with jax arrays; and the last as a
share of a small training step (two layers of 256, batch 64) on this machine.
"""

import tempfile
import timeit

import jax
import jax.numpy as jnp

import backtape

ROUNDS, CALLS = 20, 1000


def nanoseconds(call) -> float:
    return min(timeit.repeat(call, number=CALLS, repeat=ROUNDS)) / CALLS * 1e9


@jax.jit
def train(weights, batch):
    def loss_of(weights):
        hidden = jnp.tanh(batch @ weights[0])
        return jnp.square(hidden @ weights[1] - batch).mean()

    loss, grads = jax.value_and_grad(loss_of)(weights)
    norm = jnp.sqrt(sum(jnp.square(g).sum() for g in grads))
    return [w - 1e-3 * g for w, g in zip(weights, grads)], loss, norm


def main() -> None:
    inactive = backtape.Recorder.from_env()
    key = jax.random.key(0)
    weights = [jax.random.normal(key, (256, 256)) * 0.05 for _ in range(2)]
    batch = jax.random.normal(key, (64, 256))
    _, loss, norm = jax.block_until_ready(train(weights, batch))
    steps = iter(range(10**9))

    def record(recorder, loss, norm):
        return lambda: recorder.scalars(next(steps), loss=loss, grad_norm=norm, learning_rate=1e-3)

    alone = nanoseconds(lambda: jax.block_until_ready(train(weights, batch)))
    print(f"inactive:                       {nanoseconds(record(inactive, 1.0, 2.0)):8.0f} ns a call")
    with tempfile.TemporaryDirectory() as directory:
        with backtape.Recorder(f"{directory}/run", steps=None, scalars=True) as recorder:
            python = nanoseconds(record(recorder, 1.0, 2.0))
            arrays = nanoseconds(record(recorder, loss, norm))
    print(f"active, Python numbers:         {python:8.0f} ns a call")
    print(f"active, jax arrays:             {arrays:8.0f} ns a call")
    print(f"one small training step:        {alone:8.0f} ns, of which that is {arrays / alone:.1%}")


if __name__ == "__main__":
    main()
