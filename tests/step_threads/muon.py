"""A job in jax with an optimizer whose update is an orthogonal matrix."""

import jax
import jax.numpy as jnp

import backtape
import backtape.jax

LR, BETA, ITERATIONS, COEFFICIENTS = 0.02, 0.95, 5, (3.4445, -4.7750, 2.0315)


def orthogonal(matrix):
    """The iteration of Newton and Schulz, of a matrix of any shape."""
    a, b, c = COEFFICIENTS
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / (jnp.linalg.norm(x) + 1e-8)
    for _ in range(ITERATIONS):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


def loss(params, inputs, targets):
    for name in ("first", "second"):
        inputs = jnp.tanh(inputs @ params[name]["kernel"])
    return jnp.mean((inputs - targets) ** 2)


def step_of(fixed):
    """One step: the new parameters, the new state, gradients and updates."""

    @jax.jit
    def step(params, state, inputs, targets):
        grads = jax.grad(loss)(params, inputs, targets)
        count = state["count"] + 1
        mu = jax.tree.map(lambda m, g: BETA * m + (1 - BETA) * g, state["mu"], grads)
        corrected = jax.tree.map(lambda m: m / (1 - BETA**count), mu)
        rate = lambda u: LR * max(1.0, u.shape[1] / u.shape[0]) ** 0.5
        updates = jax.tree.map(lambda u: -rate(u) * orthogonal(u), corrected if fixed else grads)
        new = jax.tree.map(jnp.add, params, updates)
        return new, {"mu": mu, "count": count}, grads, updates

    return step


def optax_1170(directory, last, fixed):
    keys = jax.random.split(jax.random.key(7), 2)
    params = {
        "first": {"kernel": 0.3 * jax.random.normal(keys[0], (6, 10))},
        "second": {"kernel": 0.3 * jax.random.normal(keys[1], (10, 4))},
    }
    state = {"mu": jax.tree.map(jnp.zeros_like, params), "count": jnp.int32(0)}
    step = step_of(fixed)
    muon = {
        "name": "muon", "lr": LR, "beta": BETA, "ns_steps": ITERATIONS,
        "ns_coeffs": COEFFICIENTS, "nesterov": False, "weight_decay": 0.0,
    }  # fmt: skip
    with backtape.Recorder.from_env(dir=directory, strict=True, steps=str(last)) as recorder:
        for index in range(last + 1):
            data = jax.random.split(jax.random.key(100 + index), 2)
            inputs = jax.random.normal(data[0], (8, 6))
            targets = jax.random.normal(data[1], (8, 4))
            with recorder.step(index) as tape:
                new, new_state, grads, updates = step(params, state, inputs, targets)
                backtape.jax.step_algebra(
                    tape, params=params, new_params=new, grads=grads, local_grads=[grads],
                    updates=updates, opt_state=state, new_opt_state=new_state, optimizer=muon,
                )  # fmt: skip
            params, state = new, new_state
