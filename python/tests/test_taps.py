"""Taps in traced jax code: jit, scan, remat, shard_map, on a mesh of eight devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reading
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import backtape
from backtape.jax import tap, tap_grad

KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(kind,) * 2)


def recorder(tmp_path, mesh, **options):
    options = {"strict": True, "steps": "0-99", "mesh": mesh} | options
    return backtape.Recorder(dir=tmp_path / "run", **options)


def step_of(tmp_path, step=0):
    return backtape.open(tmp_path / "run").step(step)


def records(tmp_path, name):
    return [e.record for e in reading.entries(tmp_path / "run") if e.record["tensor"] == name]


def array(mesh, spec=P("data", "fsdp"), dtype=jnp.bfloat16):
    values = np.random.default_rng(0).standard_normal((8, 6)).astype(dtype)
    return jax.device_put(values, NamedSharding(mesh, spec))


def same(found, wanted):
    return found.tobytes() == np.asarray(wanted).tobytes()


@KINDS
@pytest.mark.parametrize("spec", [P("data", "fsdp"), P(("data", "fsdp")), P(None, "fsdp"), P()], ids=str)
def test_in_jit_every_local_shard_says_where_the_compiler_put_it(tmp_path, kind, spec):
    mesh = mesh_of(kind)
    double = jax.jit(lambda x: tap("q", x * 2, microbatch=3) + 1)
    with jax.set_mesh(mesh), recorder(tmp_path, mesh) as recording, recording.step(0):
        x = array(mesh, spec)
        double(x)
    assert same(step_of(tmp_path).tensor("q", microbatch=3), x * 2)
    assert len(records(tmp_path, "q")) == 8
    by_jax = {shard.device.id: shard for shard in x.addressable_shards}
    boxes = sorted((tuple(map(tuple, r["box"])), r["replica"]) for r in records(tmp_path, "q"))
    assert boxes == sorted(
        (tuple(part.indices(n)[:2] for part, n in zip(s.index, x.shape)), s.replica_id)
        for s in by_jax.values()
    )


@KINDS
def test_in_scan_under_remat_each_microbatch_is_told_apart_and_what_runs_again_is_marked(tmp_path, kind):
    mesh = mesh_of(kind)

    @jax.checkpoint
    def body(x, i):
        x = tap_grad("dq", x, microbatch=i)
        return jnp.sin(tap("q", jnp.sin(x), microbatch=i)), None

    def loss(x):
        return lax.scan(body, x, jnp.arange(3))[0].astype(jnp.float32).sum()

    with jax.set_mesh(mesh), recorder(tmp_path, mesh) as recording, recording.step(0):
        x = array(mesh)
        gradient = jax.jit(jax.grad(loss))(x)
    step, at = step_of(tmp_path), x
    assert same(step.tensor("dq", microbatch=0), gradient)
    for i in range(3):
        at = jnp.sin(at)
        assert same(step.tensor("q", microbatch=i), at)
        assert same(step.tensor("q", microbatch=i, when="recompute"), at)
        at = jnp.sin(at)
    report = backtape.checks(tmp_path / "run")
    assert not [one for one in report.findings if one.check == "recompute"]


def test_inside_shard_map_the_job_says_how_shards_make_up_the_tensor(tmp_path):
    mesh = mesh_of()

    def local(x):
        tap("q", x * 2, spec=P("data", "fsdp"))
        tap("mean", lax.pmean(x, "data"), spec=P(None, "fsdp"))
        tap("unsaid", x)
        return x

    with jax.set_mesh(mesh), recorder(tmp_path, mesh, strict=False) as recording, recording.step(0):
        x = array(mesh, dtype=np.float32)
        jax.jit(jax.shard_map(local, in_specs=P("data", "fsdp"), out_specs=P("data", "fsdp")))(x)
    step = step_of(tmp_path)
    assert same(step.tensor("q"), x * 2)
    assert np.allclose(step.tensor("mean"), np.asarray(x).reshape(4, 2, 6).mean(0), atol=1e-6)
    (omission,) = reading.manifest(tmp_path / "run")["omissions"]
    assert omission["tensor"] == "unsaid" and "spec=P(...)" in omission["reason"]


def test_a_step_that_is_not_recorded_runs_no_callback_and_the_arithmetic_is_the_same(tmp_path):
    mesh = mesh_of()
    draw = np.random.default_rng(1)
    weight = jnp.asarray(draw.standard_normal((6, 50)), jnp.float32)
    batches = jnp.asarray(draw.standard_normal((200, 8, 6)), jnp.bfloat16)

    @jax.jit
    def train(weight, x):
        def loss(weight):
            q = tap_grad("dq", tap("q", jnp.tanh(x * 3)))
            k = tap_grad("dk", weight.astype(jnp.bfloat16))
            logits = tap("logits", (q @ k).astype(jnp.float32))
            return (jax.nn.logsumexp(logits, -1) - logits[:, 0]).mean()

        value, gradient = jax.value_and_grad(loss)(weight)
        return weight - 0.1 * gradient, value, jnp.linalg.norm(gradient)

    def run(recording):
        now, seen = weight, []
        for step, x in enumerate(batches):
            with recording.step(step):
                now, *scalars = train(now, x)
            seen += scalars
        return np.asarray(now).tobytes(), np.asarray(seen).tobytes()

    with jax.set_mesh(mesh):
        with backtape.Recorder(steps=None) as none:
            off = run(none)
        assert "callback" not in train.lower(weight, batches[0]).as_text()
        with recorder(tmp_path, mesh, steps="every:2") as recording:
            on = run(recording)
            summary = recording.close()
    assert len(summary.steps_committed) == 100 and not summary.omissions
    assert on == off


def test_several_devices_without_a_mesh_are_named_not_guessed(tmp_path):
    mesh = mesh_of()
    with recorder(tmp_path, mesh, strict=False) as recording, recording.step(0):
        jax.jit(lambda x: tap("q", x * 2))(array(mesh))
    reasons = {o["reason"] for o in reading.manifest(tmp_path / "run")["omissions"]}
    assert len(reasons) == 1 and "jax.set_mesh" in reasons.pop()


def test_on_one_device_no_mesh_is_needed(tmp_path):
    with recorder(tmp_path, None) as recording, recording.step(0):
        y = jax.jit(jax.grad(lambda x: jnp.sin(tap_grad("dq", tap("q", x * 2))).sum()))(jnp.ones((2, 3)))
    step = step_of(tmp_path)
    assert step.tensor("q").tolist() == [[2] * 3] * 2
    assert same(step.tensor("dq") * 2, y)


def test_under_vmap_a_tap_is_refused_by_name_and_the_job_goes_on(tmp_path):
    with recorder(tmp_path, None, strict=False) as recording, recording.step(0):
        y = jax.jit(jax.vmap(lambda x: tap("q", x * 2)))(jnp.ones((2, 3)))
    assert y.tolist() == [[2] * 3] * 2
    (omission,) = reading.manifest(tmp_path / "run")["omissions"]
    assert "vmap" in omission["reason"]


def test_runs_one_after_another_in_one_process_stay_apart(tmp_path):
    step = jax.jit(lambda x: tap("q", x + 1))
    for number in range(3):
        with backtape.Recorder(dir=tmp_path / f"run{number}", strict=True) as recording:
            with recording.step(0):
                step(jnp.full(2, float(number)))
    for number in range(3):
        assert backtape.open(tmp_path / f"run{number}").step(0).tensor("q").tolist() == [number + 1] * 2
