"""A training job in jax that knows nothing of backtape but one line: docs/attach.md records it as it stands.

The loss has a z-loss and a backward pass by hand, as many trainers have it. With --bug that backward pass forgets
the z-loss: the job trains as before, on another loss than the one that it prints.
"""

import argparse
import functools

import jax
import jax.numpy as jnp
import optax

import backtape.jax

VOCABULARY, WIDTH, BATCH, LENGTH, MICROBATCHES = 256, 64, 8, 32, 2
Z_LOSS = 1e-2


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def cross_entropy(logits, labels, is_buggy):
    """The loss of each token, [B, S]."""
    lse = jax.nn.logsumexp(logits, axis=-1)
    return lse - jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0] + Z_LOSS * lse**2


def forward(logits, labels, is_buggy):
    return cross_entropy(logits, labels, is_buggy), (logits, labels)


def backward(is_buggy, kept, arrived):
    logits, labels = kept
    lse = jax.nn.logsumexp(logits, axis=-1)
    factor = 1 if is_buggy else 1 + 2 * Z_LOSS * lse[..., None]
    gradient = factor * jax.nn.softmax(logits) - jax.nn.one_hot(labels, VOCABULARY)
    return arrived[..., None] * gradient, None


cross_entropy.defvjp(forward, backward)


def loss_of(params, tokens, is_buggy):
    hidden = params["embedding"][tokens[:, :-1]]
    hidden = hidden + jnp.tanh(hidden @ params["kernel"])
    return cross_entropy(hidden @ params["head"], tokens[:, 1:], is_buggy).mean()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--bug", action="store_true")
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    keys = jax.random.split(jax.random.key(0), 3)
    params = {
        "embedding": jax.random.normal(keys[0], (VOCABULARY, WIDTH)),
        "kernel": 0.1 * jax.random.normal(keys[1], (WIDTH, WIDTH)),
        "head": 0.1 * jax.random.normal(keys[2], (WIDTH, VOCABULARY)),
    }
    optimizer = optax.adamw(1e-2)

    @functools.partial(jax.jit, donate_argnums=0)
    def train_step(state, tokens):
        params, optimizer_state = state

        def microbatch(total, tokens):
            loss, gradients = jax.value_and_grad(loss_of)(params, tokens, given.bug)
            return jax.tree.map(jnp.add, total, gradients), loss

        total, losses = jax.lax.scan(microbatch, jax.tree.map(jnp.zeros_like, params), tokens)
        gradients = jax.tree.map(lambda one: one / MICROBATCHES, total)
        updates, optimizer_state = optimizer.update(gradients, optimizer_state, params)
        return (optax.apply_updates(params, updates), optimizer_state), losses.mean()

    train_step = backtape.jax.attach(train_step)

    state = params, optimizer.init(params)
    for step in range(given.steps):
        key = jax.random.fold_in(jax.random.key(1), step)
        starts = jax.random.randint(key, (MICROBATCHES, BATCH, 1), 0, VOCABULARY)
        tokens = (starts + 3 * jnp.arange(LENGTH + 1)) % VOCABULARY
        state, loss = train_step(state, tokens)
        print(f"step {step} loss {loss:.6f}")


if __name__ == "__main__":
    main()
