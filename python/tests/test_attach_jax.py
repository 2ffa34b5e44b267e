"""A jax job recorded as it stands: its loss head is found in the program of the step, and the job keeps its bits."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reading
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import backtape
import backtape.jax
from backtape.jax import losses

D, V, B, S = 16, 37, 8, 6
SGD = optax.sgd(1e-2)


def parameters():
    draw = np.random.default_rng(0)
    shapes = {"kernel": (D, D), "head": (D, V), "bias": (V,)}
    return {name: jnp.asarray(0.4 * draw.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}


def batch(seed):
    """Hidden states, labels, and which tokens count."""
    draw = np.random.default_rng(seed)
    x = jnp.asarray(draw.standard_normal((B, S, D)), jnp.float32)
    return x, jnp.asarray(draw.integers(0, V, (B, S)), jnp.int32), jnp.asarray(draw.random((B, S)) < 0.8)


def hidden(params, x):
    return jnp.tanh(x @ params["kernel"])


def mean(loss, counts):
    return (loss * counts).sum() / counts.sum()


def integer(params, x, labels, counts):
    logits = hidden(params, x) @ params["head"]
    return mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels), counts)


def shifted(params, x, labels, counts):
    logits = (hidden(params, x) @ params["head"])[:, :-1]
    logs = jax.nn.log_softmax(logits)
    taken = jnp.take_along_axis(logs, labels[:, 1:, None], axis=-1)
    return -jnp.where(counts[:, 1:], taken.squeeze(-1), 0).mean()


def capped(params, x, labels, counts):
    """Bias, a cap by tanh, padding of the vocabulary, one-hot labels."""
    logits = jnp.einsum("bsd,dv->bsv", hidden(params, x), params["head"]) + params["bias"]
    logits = jnp.where(jnp.arange(V) < 31, 5 * jnp.tanh(logits / 5), -1e9)
    return mean(-jnp.einsum("bsv,bsv->bs", jax.nn.one_hot(labels % 31, V), jax.nn.log_softmax(logits)), counts)


def smoothed(params, x, labels, counts):
    """Label smoothing and a temperature, and one sum over classes and tokens at once."""
    targets = optax.smooth_labels(jax.nn.one_hot(labels, V), 0.1)
    return -jnp.sum(targets * jax.nn.log_softmax(hidden(params, x) @ params["head"] / 0.7)) / labels.size


def ignoring(params, x, labels, counts):
    """bf16 operands, labels of which some are -100, a z-loss, a head with k as [V, D]."""
    labels = jnp.where(counts, labels, -100)
    k = params["head"].T.astype(jnp.bfloat16)
    logits = jnp.einsum("bsd,vd->bsv", hidden(params, x).astype(jnp.bfloat16), k).astype(jnp.float32)
    lse = jax.nn.logsumexp(logits, axis=-1)
    loss = lse - jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0] + 1e-2 * lse**2
    return mean(loss, labels != -100)


def chunked(params, x, labels, counts):
    """Chunks of tokens, each computed again in the backward pass."""

    @jax.checkpoint
    def chunk(total, given):
        x, labels, counts = given
        logits = hidden(params, x) @ params["head"]
        return total + (optax.softmax_cross_entropy_with_integer_labels(logits, labels) * counts).sum(), None

    return lax.scan(chunk, 0.0, (x, labels, counts))[0] / counts.sum()


def checkpointed(params, x, labels, counts):
    """The model with its bias in bf16 is computed again in the backward pass, and the loss is not."""

    @jax.checkpoint
    def model(params, x):
        narrow = {name: one.astype(jnp.bfloat16) for name, one in params.items()}
        product = hidden(narrow, x.astype(jnp.bfloat16)) @ narrow["head"]
        return (product + narrow["bias"]).astype(jnp.float32)

    loss = optax.softmax_cross_entropy_with_integer_labels(model(params, x), labels)
    return mean(loss, counts)


def by_sequence(params, x, labels, counts):
    def one(x, label):
        return -jax.nn.log_softmax(params["head"].T @ jnp.tanh(params["kernel"].T @ x))[label]

    return jax.vmap(jax.vmap(one))(x, labels).mean()


def by_hand(fault=None):
    """A loss of logits and one-hot labels with a backward pass of its own and a z-loss, as trainers have it."""

    @jax.custom_vjp
    def cross_entropy(logits, targets):
        return forward(logits, targets)[0]

    def forward(logits, targets):
        lse = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
        z_loss = 1e-2 * lax.square(lse.squeeze(-1))
        return (-jnp.sum(targets * (logits - lse), axis=-1) + z_loss, z_loss), (logits, targets, lse)

    def backward(kept, arrived):
        logits, targets, lse = kept
        if fault == "shifted":
            targets = jnp.roll(targets, 1, axis=1)
        factor = 1 + 2e-2 * lse if fault != "z-loss" else 1.0
        label = targets * (fault != "label")
        return arrived[0][..., None] * (factor * jnp.exp(logits - lse) - label), None

    cross_entropy.defvjp(forward, backward)

    def loss(params, x, labels, counts):
        value, _ = cross_entropy(hidden(params, x) @ params["head"], jax.nn.one_hot(labels, V))
        return mean(value, counts)

    return loss


def fused(fault=None):
    """Hidden states and unembedding go in, and one number comes out."""

    @jax.custom_vjp
    def head(q, k, labels, counts):
        logits = q.reshape(-1, D) @ k
        taken = jnp.take_along_axis(logits, labels.reshape(-1, 1), axis=-1)[:, 0]
        return mean(jax.nn.logsumexp(logits, axis=-1) - taken, counts.reshape(-1))

    def forward(q, k, labels, counts):
        return head(q, k, labels, counts), (q, k, labels, counts)

    def backward(kept, arrived):
        q, k, labels, counts = kept
        rows, weights = q.reshape(-1, D), counts.reshape(-1, 1) / counts.sum()
        dlogits = arrived * weights * (jax.nn.softmax(rows @ k) - jax.nn.one_hot(labels.reshape(-1), V))
        dk = rows.T @ dlogits
        return (dlogits @ k.T).reshape(q.shape), dk * (2 if fault == "doubled" else 1), None, None

    head.defvjp(forward, backward)
    return lambda params, x, labels, counts: head(hidden(params, x), params["head"], labels, counts)


def trainer(loss):
    """A step as trainers write it: jitted, its state donated."""

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, *given):
        value, gradients = jax.value_and_grad(loss)(state[0], *given)
        updates, optimizer_state = SGD.update(gradients, state[1])
        return (optax.apply_updates(state[0], updates), optimizer_state), value

    return step


def trained(step, given, start=None):
    """The bits of all losses and of the state after three steps."""
    state, values = start or (parameters(), SGD.init(parameters())), []
    for one in given:
        state, value = step(state, *one)
        values.append(np.asarray(value))
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((values, state))]


def attached(tmp_path, make, given=None, start=None, steps="1"):
    """The same training without and with backtape, which has the same bits; and the manifest of what it records."""
    given = given or [batch(seed) for seed in range(3)]
    copy, own = functools.partial(jax.tree.map, jnp.copy), make()
    plain = trained(own, given, copy(start))
    step = backtape.jax.attach(own, recorder=backtape.Recorder(tmp_path / "run", steps=steps))
    assert trained(step, given, copy(start)) == plain
    step.close()
    return reading.manifest(tmp_path / "run", step=int(steps[0]))


def reasons(manifest):
    return {one["reason"] for one in manifest["omissions"]}


FORMS = {
    "integer": (integer, 1), "shifted": (shifted, 1), "capped": (capped, 1), "smoothed": (smoothed, 1),
    "ignoring": (ignoring, 1), "chunked": (chunked, B), "checkpointed": (checkpointed, 1),
    "by sequence": (by_sequence, 1),
    "by hand": (by_hand(), 1), "fused": (fused(), 1),
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_a_loss_is_found_whatever_its_form_and_a_right_one_agrees(tmp_path, form):
    loss, microbatches = FORMS[form]
    assert not reasons(attached(tmp_path, lambda: trainer(loss)))
    report = backtape.replay(tmp_path / "run", step=1)
    assert report.verdict == "agreed", str(report)
    assert f"{microbatches} microbatch" in str(report)
    assert {"loss", "dq", "dk"} <= set(re.findall(r"^(\w+) +pass", str(report), re.M))


FAULTS = {
    "label": (by_hand("label"), "part-missing"), "z-loss": (by_hand("z-loss"), "zloss-mismatch"),
    "shifted": (by_hand("shifted"), ""), "doubled": (fused("doubled"), ""),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_a_backward_pass_by_hand_is_told(tmp_path, fault):
    loss, cause = FAULTS[fault]
    attached(tmp_path, lambda: trainer(loss))
    report = backtape.replay(tmp_path / "run", step=1)
    assert report.verdict == "diverged" and cause in str(report), str(report)


@jax.custom_vjp
def halved(value):
    """Hands a value on, and half of its gradient."""
    return value


halved.defvjp(lambda value: (value, None), lambda _, gradient: (gradient / 2,))


def of_halved_weight(params, x, labels, counts):
    return integer(params | {"head": halved(params["head"])}, x, labels, counts)


def of_halved_logits(params, x, labels, counts):
    logits = halved(hidden(params, x) @ params["head"])
    return mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels), counts)


def test_a_gradient_that_is_changed_on_purpose_is_no_fault_of_the_head(tmp_path):
    assert not reasons(attached(tmp_path, lambda: trainer(of_halved_weight)))
    assert backtape.replay(tmp_path / "run", step=1).verdict == "agreed"


def detached(params, x, labels, counts):
    return integer(params | {"head": lax.stop_gradient(params["head"])}, x, labels, counts)


def entropy(params, x, labels, counts):
    logits = hidden(params, x) @ params["head"]
    bonus = -(jax.nn.softmax(logits) * jax.nn.log_softmax(logits)).sum(-1).mean()
    return mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels), counts) - 0.01 * bonus


def narrow(params, x, labels, counts):
    logits = (hidden(params, x) @ params["head"]).astype(jnp.bfloat16)
    return mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels).astype(jnp.float32), counts)


def distilled(params, x, labels, counts):
    logits = hidden(params, x) @ params["head"]
    return optax.softmax_cross_entropy(logits, jax.nn.softmax(x @ jnp.ones((D, V)) + jnp.arange(V) % 3)).mean()


def printing(params, x, labels, counts):
    """Its shadow would call Python twice, and so has none."""
    loss = integer(params, x, labels, counts)
    jax.debug.callback(called.append, loss)
    return loss


called = []


def squared(params, x, labels, counts):
    return ((hidden(params, x) @ params["head"]) ** 2).mean()


REFUSED = {
    detached: "dk is not recorded: the unembedding takes no gradient",
    entropy: "something else than the loss takes the logits too",
    narrow: "its softmax is computed in bfloat16",
    distilled: "its targets are probabilities and not labels",
    of_halved_logits: "a function with a custom_vjp changes the gradient of the logits",
    printing: "the compiled step calls Python back",
    squared: "no gradient came from a softmax cross-entropy that backtape finds",
}


@pytest.mark.parametrize("loss", REFUSED, ids=lambda loss: loss.__name__)
def test_what_cannot_be_recorded_is_named_and_the_job_goes_on(tmp_path, loss):
    called.clear()
    found = reasons(attached(tmp_path, lambda: trainer(loss)))
    assert any(reason.startswith(REFUSED[loss]) for reason in found), found
    jax.effects_barrier()
    assert len(called) == (6 if loss is printing else 0), "three steps without backtape, and three with it"


class Keys:
    """Keys that are counted in Python while the loss is traced, as trainers have them."""

    def __init__(self, key):
        self.key = key

    def __call__(self):
        self.key, taken = jax.random.split(self.key)
        return taken


def test_a_loss_that_changes_what_python_holds_is_traced_once_in_the_job(tmp_path):
    traces = []

    def make():
        @jax.jit
        def step(state, x, labels, counts):
            traces.append(1)
            keys = Keys(jax.random.wrap_key_data(state[2]))

            def loss(params):
                kept = jax.random.bernoulli(keys(), 0.9, x.shape)
                return integer(params, jnp.where(kept, x, 0), labels, counts), {"kept": kept}

            (value, _), gradients = jax.value_and_grad(loss, has_aux=True)(state[0])
            updates, optimizer_state = SGD.update(gradients, state[1])
            return (optax.apply_updates(state[0], updates), optimizer_state, jax.random.key_data(keys())), value

        return step

    start = parameters(), SGD.init(parameters()), jax.random.key_data(jax.random.key(3))
    assert not reasons(attached(tmp_path, make, start=start))
    # Once for the steps that are not recorded, and twice for the one that is: for itself and for its shadow.
    assert len(traces) == 1 + 2
    assert backtape.replay(tmp_path / "run", step=1).verdict == "agreed"


def test_steps_that_are_not_recorded_run_the_program_of_the_job(tmp_path):
    step = trainer(integer)
    watched = backtape.jax.attach(step, recorder=backtape.Recorder(tmp_path / "run", steps="1"))
    start, given = (parameters(), SGD.init(parameters())), batch(0)
    before = step.lower(start, *given).as_text()
    assert watched.lower(start, *given).as_text() == before and "callback" not in before
    own = jax.vjp, jax._src.api.vjp, jax._src.pjit._run_python_pjit
    trained(watched, [given] * 3, jax.tree.map(jnp.copy, start))
    assert own == (jax.vjp, jax._src.api.vjp, jax._src.pjit._run_python_pjit)
    assert step.lower(start, *given).as_text() == before
    watched.close()


def test_a_jax_without_the_doors_that_are_needed_is_named_and_the_job_goes_on(tmp_path, monkeypatch):
    monkeypatch.delattr(jax._src.pjit, "_get_fastpath_data")
    found = []
    step = backtape.jax.attach(lambda: found.append(1), recorder=backtape.Recorder(tmp_path / "run"))
    step()
    step.close()
    (reason,) = reasons(reading.manifest(tmp_path / "run"))
    assert found == [1] and "has no _get_fastpath_data" in reason


def test_what_the_step_raises_goes_to_the_job_and_the_next_step_is_recorded(tmp_path):
    step = trainer(integer)

    def failing(state, *given):
        if len(given) == 1:
            raise KeyError("data")
        return step(state, *given)

    watched = backtape.jax.attach(failing, recorder=backtape.Recorder(tmp_path / "run", steps="0,1"))
    start = parameters(), SGD.init(parameters())
    with pytest.raises(KeyError):
        watched(start, batch(0)[0])
    watched(start, *batch(0))
    watched.close()
    assert backtape.replay(tmp_path / "run", step=1).verdict == "agreed"


def in_a_loop(gradient, update):
    """Microbatches in Python: a compiled function that is called several times a step."""

    def step(state, x, labels, counts):
        total = None
        for at in range(2):
            given = (x[at::2], labels[at::2], counts[at::2])
            value, found = gradient(state[0], *given)
            total = found if total is None else jax.tree.map(jnp.add, total, found)
        return update(state, total), value

    return step


@jax.jit
def update(state, gradients):
    updates, optimizer_state = SGD.update(jax.tree.map(lambda one: one / 2, gradients), state[1])
    return optax.apply_updates(state[0], updates), optimizer_state


def in_a_scan():
    @jax.jit
    def step(state, *given):
        def microbatch(total, given):
            value, found = jax.value_and_grad(integer)(state[0], *given)
            return jax.tree.map(jnp.add, total, found), value

        parts = jax.tree.map(lambda one: one.reshape(2, B // 2, *one.shape[1:]), given)
        total, values = lax.scan(microbatch, jax.tree.map(jnp.zeros_like, state[0]), parts)
        return update(state, total), values.mean()

    return step


@pytest.mark.parametrize("kind", ["scan", "loop"])
def test_each_microbatch_is_one_of_the_report(tmp_path, kind):
    makes = {"scan": in_a_scan, "loop": lambda: in_a_loop(jax.jit(jax.value_and_grad(integer)), update)}
    assert not reasons(attached(tmp_path, makes[kind], steps="1,2"))
    for step in (1, 2):
        report = backtape.replay(tmp_path / "run", step=step)
        assert report.verdict == "agreed" and "2 microbatches" in str(report)


def test_an_unembedding_that_changes_within_a_call_is_recorded_once(tmp_path):
    def make():
        inner = trainer(integer)
        return jax.jit(lambda state, *given: lax.scan(lambda s, one: inner(s, *one), state, given))

    given = [jax.tree.map(lambda *some: jnp.stack(some), batch(seed), batch(seed + 9)) for seed in range(3)]
    (reason,) = reasons(attached(tmp_path, make, given))
    assert "after the unembedding was changed" in reason
    assert backtape.replay(tmp_path / "run", step=1).verdict == "agreed"


def mapped(mesh, check):
    def local(params, *given):
        value, gradients = jax.value_and_grad(integer)(params, *given)
        if not check:
            gradients = lax.pmean(gradients, "data")
        return lax.pmean(value, "data"), gradients

    split = P("data")
    compute = jax.shard_map(
        local, mesh=mesh, in_specs=(P(), split, split, split), out_specs=P(), check_vma=check
    )

    @jax.jit
    def step(state, *given):
        value, gradients = compute(state[0], *given)
        return update(state, gradients), value

    return step


@pytest.mark.parametrize("kind", ["jit", "shard_map", "shard_map unchecked"])
def test_on_a_mesh_the_shards_are_put_together(tmp_path, kind):
    mesh = jax.make_mesh((4, 2), ("data", "other"), axis_types=(AxisType.Auto,) * 2)
    put = lambda tree, spec: jax.tree.map(lambda one: jax.device_put(one, NamedSharding(mesh, spec)), tree)
    given = [put(batch(seed), P("data")) for seed in range(3)]
    start = put((parameters(), SGD.init(parameters())), P())
    makes = {
        "jit": lambda: trainer(integer),
        "shard_map": lambda: mapped(mesh, True),
        "shard_map unchecked": lambda: mapped(mesh, False),
    }
    assert not reasons(attached(tmp_path, makes[kind], given, start))
    report = backtape.replay(tmp_path / "run", step=1)
    assert report.verdict == "agreed", str(report)


def test_the_drop_ins_have_the_bits_of_optax():
    draw = np.random.default_rng(5)
    logits = jnp.asarray(3 * draw.standard_normal((4, 6, V)), jnp.float32)
    labels = jnp.asarray(draw.integers(0, V, (4, 6)))
    own, theirs = losses.softmax_cross_entropy_with_integer_labels, optax.softmax_cross_entropy_with_integer_labels
    where, across = logits > -2, jnp.asarray(draw.integers(0, 6, (4, V)))
    for jit in (lambda function: function, jax.jit):
        for mine, other in [
            (lambda z: own(z, labels), lambda z: theirs(z, labels)),
            (jax.grad(lambda z: own(z, labels).sum()), jax.grad(lambda z: theirs(z, labels).sum())),
            (lambda z: own(z, across, axis=1, where=where), lambda z: theirs(z, across, axis=1, where=where)),
            (lambda z: losses.softmax_cross_entropy(z, jax.nn.one_hot(labels, V)),
             lambda z: optax.softmax_cross_entropy(z, jax.nn.one_hot(labels, V))),
        ]:  # fmt: skip
            assert np.asarray(jit(mine)(logits)).tobytes() == np.asarray(jit(other)(logits)).tobytes()


def of_logits(params, x, labels, counts):
    loss = losses.softmax_cross_entropy_with_integer_labels(hidden(params, x) @ params["head"], labels)
    return mean(loss, counts)


def of_both(params, x, labels, counts):
    return mean(losses.linear_cross_entropy(hidden(params, x), params["head"].T, labels), counts)


@pytest.mark.parametrize(("loss", "stages"), [(of_logits, "2 of 2"), (of_both, "3 of 3")])
def test_a_drop_in_registers_its_head_in_a_step_that_is_recorded(tmp_path, loss, stages):
    with backtape.Recorder(steps=None) as none:
        plain = recorded(trainer(loss), none)
    with backtape.Recorder(tmp_path / "run", steps="1", strict=True) as recorder:
        assert recorded(trainer(loss), recorder) == plain
    report = backtape.replay(tmp_path / "run", step=1)
    assert f"AGREED on {stages} stages" in str(report), str(report)


def recorded(step, recorder):
    numbers = iter(range(3))

    def one(state, *given):
        with recorder.step(next(numbers)):
            return step(state, *given)

    return trained(one, [batch(seed) for seed in range(3)])


def test_a_loss_that_is_attached_needs_its_steps_marked(tmp_path):
    loss = backtape.jax.attach(integer, recorder=backtape.Recorder(tmp_path / "run", steps="1"))
    step, state = trainer(loss), (parameters(), SGD.init(parameters()))
    for seed in range(3):
        with loss.step():
            state, _ = step(state, *batch(seed))
    loss.close()
    assert backtape.replay(tmp_path / "run", step=1).verdict == "agreed"


def test_a_gradient_that_is_taken_outside_of_jit_is_named(tmp_path):
    step = backtape.jax.attach(jax.grad(integer), recorder=backtape.Recorder(tmp_path / "run"))
    step(parameters(), *batch(0))
    step.close()
    (reason,) = reasons(reading.manifest(tmp_path / "run"))
    assert "jit" in reason


def test_where_nothing_is_asked_for_it_does_nothing(monkeypatch):
    monkeypatch.delenv("BACKTAPE_STEPS", raising=False)
    step = backtape.jax.attach(trainer(integer))
    assert trained(step, [batch(0)]) == trained(trainer(integer), [batch(0)]) and step.recorder is None
