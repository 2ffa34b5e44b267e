"""One process with several devices, as most people try shard_map first.

Goal: a reduced gradient that lacks what other devices added is named as that, with the devices whose tokens it holds;
the devices of one rank are told apart in words. Method: a head in JAX over a mesh of four CPU devices, whose gradient of
k is summed over one axis of the mesh instead of both. BACKTAPE_SEED draws another job.
"""

import os
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from named import named

import backtape

SEED = int(os.environ.get("BACKTAPE_SEED", 4))
AXES = ("data", "fsdp")


def step(mesh, summed, tokens):
    """Loss, dq and dk of a mean over all tokens; dk is summed over these axes alone."""

    @jax.jit
    @partial(
        jax.shard_map, mesh=mesh, in_specs=(P(AXES, None), P(), P(AXES)), out_specs=(P(), P(AXES, None), P()),
        check_vma=False,
    )  # fmt: skip
    def run(q, k, labels):
        def loss(q, k):
            logits = q @ k.T
            own = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
            return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - own) / tokens

        found, (dq, dk) = jax.value_and_grad(loss, (0, 1))(q, k)
        return jax.lax.psum(found, AXES), dq, jax.lax.psum(dk, summed)

    return run


def recorded(directory, summed, held=lambda dk: dk):
    """`held`: what is recorded of the array of the sum."""
    rng = np.random.default_rng(SEED)
    rows, classes, depth = (int(rng.integers(*of)) for of in ((20, 40), (60, 90), (12, 20)))
    mesh = jax.make_mesh((2, 2), AXES)
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    q = put(rng.standard_normal((4 * rows, depth)).astype(np.float32), AXES, None)
    labels = put(rng.integers(0, classes, 4 * rows).astype(np.int32), AXES)
    k = put(rng.standard_normal((classes, depth)).astype(np.float32))
    recorder = backtape.Recorder(directory, steps="0", mesh=mesh)
    with recorder.step(0) as tape:
        tape.head(loss="softmax_xent", path="plain", denominator="all")
        loss, dq, dk = step(mesh, summed, 4 * rows)(q, k, labels)
        for name, x in {"q": q, "labels": labels, "loss": loss, "dq": dq}.items():
            tape.record(name, x, microbatch=0)
        tape.record("k", k)
        tape.record("dk", held(dk), when="post_reduce")
    recorder.close()
    return backtape.replay(directory, step=0), rows


def test_a_gradient_that_is_summed_over_all_axes_agrees(tmp_path):
    report, _ = recorded(tmp_path, AXES)
    assert report.verdict == "agreed", report


def test_a_sum_of_what_each_device_rounded_to_bf16_agrees_in_f32(tmp_path):
    """k is an f32 master that the head casts: each device's gradient is bf16, and their sum f32."""
    rng = np.random.default_rng(SEED)
    rows, classes, depth = (int(rng.integers(*of)) for of in ((20, 40), (60, 90), (12, 20)))
    mesh = jax.make_mesh((2, 2), AXES)
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
    q = put(jnp.asarray(rng.standard_normal((4 * rows, depth)), jnp.bfloat16), AXES, None)
    labels = put(rng.integers(0, classes, 4 * rows).astype(np.int32), AXES)
    k = put(rng.standard_normal((classes, depth)).astype(np.float32))

    @jax.jit
    @partial(
        jax.shard_map, mesh=mesh, in_specs=(P(AXES, None), P(), P(AXES)), out_specs=(P(AXES, None), P()),
        check_vma=False,
    )  # fmt: skip
    def run(q, k, labels):
        def loss(q, k):
            logits = jnp.einsum("td,vd->tv", q, k.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
            own = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
            return jnp.sum(jax.nn.logsumexp(logits, axis=-1) - own) / (4 * rows)

        dq, dk = jax.grad(loss, (0, 1))(q, k)
        return dq, jax.lax.psum(dk, AXES)

    recorder = backtape.Recorder(tmp_path, steps="0", mesh=mesh)
    with recorder.step(0) as tape:
        f32 = dict.fromkeys(("logits", "lse", "p", "dlogits", "accumulate", "reduce"), "f32")
        tape.head(loss="softmax_xent", path="plain", denominator="all", dtypes={"output": "bf16", **f32})
        dq, dk = run(q, k, labels)
        for name, x in {"q": q, "labels": labels, "dq": dq, "k": k.astype(jnp.bfloat16)}.items():
            tape.record(name, x)
        tape.record("dk", dk, when="post_reduce")
    recorder.close()
    report = backtape.replay(tmp_path, step=0)
    assert report.verdict == "agreed", report


@pytest.mark.parametrize("summed", AXES)
def test_a_gradient_that_is_summed_over_one_axis_is_named_with_the_devices_that_it_holds(tmp_path, summed):
    report, rows = recorded(tmp_path, (summed,))
    told = named(report, "partial-not-reduced")
    assert told["of"] == "dk over devices", told
    assert all(box in told["holds only"] for box in boxes(summed, rows)), told
    assert "2 devices of rank 0 against 2 devices of rank 0" in str(report), report


def boxes(summed, rows):
    """Of q, on the devices whose tokens the first device's sum holds."""
    return [f"q microbatch 0 [{at * rows}:{(at + 1) * rows}, " for at in ([0, 2] if summed == "data" else [0, 1])]


@pytest.mark.parametrize("summed", AXES)
def test_one_copy_that_lacks_the_tokens_of_some_devices_is_named_with_those_that_it_holds(tmp_path, summed):
    """A job that records its sum from one device alone shows no copies that differ."""
    report, rows = recorded(tmp_path, (summed,), lambda dk: np.asarray(dk.addressable_data(0)))
    told = named(report, "partial-not-reduced")
    wanted = boxes(summed, rows)
    assert told["of"] == "dk over devices" and told["holds only"].count("q microbatch 0") == len(wanted), told
    assert all(box in told["holds only"] for box in wanted), told
