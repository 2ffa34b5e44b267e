"""What a dump holds of jax arrays on a GPU: their bytes, though they are donated right behind the capture."""

import numpy as np
import pytest

jax = pytest.importorskip("jax")
jnp = jax.numpy

DTYPES = ["bfloat16", "float16", "float32", "int8", "uint8", "int16", "int32", "bool"]


@pytest.fixture(autouse=True)
def on_gpu():
    if jax.default_backend() != "gpu":
        pytest.skip(f"jax {jax.__version__} computes on {jax.default_backend()}: no capture of its arrays was tested")


@pytest.mark.parametrize("dtype", DTYPES)
def test_arrays_of_every_type_land_with_their_bits(recorded, dtype):
    array = (jax.random.normal(jax.random.key(1), (61, 96)) * 50).astype(dtype)
    step = recorded(lambda tape: tape.record("x", array))
    assert step.tensor("x").tobytes() == np.asarray(array).tobytes()


def donated(recorded, array, count):
    """Records an array of zeros, and donates it to a program that adds 1, so many times; the step is right."""
    plus_one = jax.jit(lambda x: x + 1, donate_argnums=0)

    def use(tape):
        held = array
        for number in range(count):
            tape.record("x", held, microbatch=number)
            held = plus_one(held)

    step = recorded(use)
    for number in range(count):
        assert (step.tensor("x", microbatch=number) == number).all()


def test_an_array_that_is_donated_behind_its_capture_lands_as_it_was(recorded):
    donated(recorded, jnp.zeros((2048, 2048), jnp.float32), 6)


def test_what_exceeds_the_memory_for_copies_waits_and_lands_as_it_was_though_it_is_donated(recorded, door):
    donated(recorded, jnp.zeros(door.copies.size // 4 + 1024, jnp.float32), 3)


def test_an_array_that_is_still_being_computed_lands_when_it_is_there(recorded):
    product = jax.jit(lambda x: jax.lax.fori_loop(0, 50, lambda _, y: jnp.tanh(y @ x), x))
    start = jax.random.normal(jax.random.key(2), (2048, 2048)) / 45
    product(start).block_until_ready()
    later = []

    def use(tape):
        later.append(product(start))
        tape.record("x", later[0])

    step = recorded(use)
    assert step.tensor("x").tobytes() == np.asarray(later[0]).tobytes()


def test_gradients_of_a_jitted_head_are_recorded_where_they_lie(recorded):
    keys = jax.random.split(jax.random.key(3), 2)
    q, k = (jax.random.normal(key, (128, 64), jnp.bfloat16) for key in keys)
    dq, dk = jax.jit(jax.grad(lambda q, k: jax.nn.logsumexp((q @ k.T).astype(jnp.float32), 1).sum(), (0, 1)))(q, k)

    def use(tape):
        tape.record("dq", dq, microbatch=0)
        tape.record("dk", dk)

    step = recorded(use)
    assert step.tensor("dq", microbatch=0).tobytes() == np.asarray(dq).tobytes()
    assert step.tensor("dk").tobytes() == np.asarray(dk).tobytes()


def test_the_training_thread_does_not_wait_for_an_array_that_is_still_being_computed(recorded):
    product = jax.jit(lambda x: jax.lax.fori_loop(0, 4000, lambda _, y: jnp.tanh(y @ x), x))
    start = jax.random.normal(jax.random.key(2), (2048, 2048)) / 45
    product(start).block_until_ready()
    # What recording compiles of a shape, it compiles at the first of it.
    there = []

    def use(tape):
        tape.record("warm", start)
        later = product(start)
        tape.record("x", later)
        there.append(later.is_ready())

    recorded(use)
    assert there == [False], "the call of record returned when the array was there"
