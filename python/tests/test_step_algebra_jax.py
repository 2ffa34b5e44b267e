"""`backtape.jax.step_algebra`: a step of optax is in the dump bit for bit, and is declared."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reading
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from processes import free_port, run_ranks

import backtape
import backtape.jax
from backtape.sampling import Sampling

PROGRAM = Path(__file__).with_name("step_algebra_rank.py")
ADAMW = {"name": "adamw", "lr": 1e-3, "b1": 0.9, "b2": 0.999, "eps": 1e-8, "weight_decay": 0.01}


def model():
    """Parameters of two layers, and two microbatches."""
    draw = np.random.default_rng(0)
    layers = {
        f"layer_{i}": {
            "kernel": draw.standard_normal((8, 8)).astype(np.float32),
            "bias": draw.standard_normal(8).astype(np.float32),
        }
        for i in range(2)
    }
    batches = draw.standard_normal((2, 4, 8)).astype(np.float32)
    return {"params": jax.tree.map(jnp.asarray, layers)}, batches


def loss(params, batch):
    x = batch
    for layer in params["params"].values():
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return jnp.mean(x * x)


def train_step(transform, params, opt_state, batches):
    """One step with two microbatches and clipping; all that can be recorded of it."""
    local = [jax.grad(loss)(params, batch) for batch in batches]
    grads = jax.tree.map(lambda a, b: (a + b) / 2, *local)
    norm = optax.tree.norm(grads)
    clipped = jax.tree.map(lambda g: g * jnp.minimum(1, 0.05 / norm), grads)
    updates, new_state = transform.update(clipped, opt_state, params)
    return {
        "params": params,
        "new_params": optax.apply_updates(params, updates),
        "grads": grads,
        "local_grads": local,
        "clipped": clipped,
        "updates": updates,
        "opt_state": opt_state,
        "new_opt_state": new_state,
        "norm": norm,
    }


def taken(transform, steps=2):
    """What a step of the model gives, after some that gave the state its values."""
    params, batches = model()
    opt_state = transform.init(params)
    run = jax.jit(lambda params, opt_state: train_step(transform, params, opt_state, batches))
    for _ in range(steps):
        step = run(params, opt_state)
        params, opt_state = step["new_params"], step["new_opt_state"]
    return step


def record(directory, step, strict=True, **options):
    """The dump of one step of one rank, and its declaration."""
    with backtape.Recorder(directory, strict=strict) as recorder, recorder.step(0) as tape:
        backtape.jax.step_algebra(tape, **step, **options)
    dump = backtape.open(directory).step(0)
    return dump, declared(dump)


def declared(dump, rank=0):
    return json.loads(dump.tensor(f"step.declared:{rank}").tobytes())


def names_of(params):
    """The leaves of a tree by the name of their parameter."""
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def is_bit_for_bit(dump, stage, tree, **where):
    for name, leaf in names_of(tree).items():
        recorded = dump.tensor(f"step.{stage}:{name}", **where)
        assert recorded.dtype == leaf.dtype and recorded.shape == leaf.shape, (stage, name)
        assert recorded.tobytes() == np.asarray(leaf).tobytes(), (stage, name)


def test_adamw_is_recorded_bit_for_bit_and_declared(tmp_path):
    transform = optax.adamw(1e-3, weight_decay=0.01)
    step = taken(transform)
    dump, said = record(tmp_path / "run", step, optimizer=ADAMW, max_norm=0.05)
    stages = {
        "before": "params", "after": "new_params", "reduced": "grads", "clipped": "clipped", "update": "updates",
    }  # fmt: skip
    for stage, key in stages.items():
        is_bit_for_bit(dump, stage, step[key])
    for when, key in (("before", "opt_state"), ("after", "new_opt_state")):
        is_bit_for_bit(dump, f"state_{when}.mu", step[key][0].mu)
        is_bit_for_bit(dump, f"state_{when}.nu", step[key][0].nu)
    for index, tree in enumerate(step["local_grads"]):
        is_bit_for_bit(dump, "grad", tree, microbatch=index, when="pre_reduce", rank=0)
    # 4 parameters: 5 stages, 2 tensors of the state before and after, 2 microbatches.
    assert len(dump.keys()) == 4 * (5 + 4 + 2) + 1
    assert {key[0].rsplit(":", 1)[1] for key in dump.keys()} == {*names_of(step["params"]), "0"}
    addends = [one for one in reading.entries(tmp_path / "run") if one.record["partial"]]
    assert {one.record["tensor"].split(":")[0] for one in addends} == {"step.grad"}

    assert (said["version"], said["rank"], said["microbatches"]) == (1, 0, 2)
    assert said["framework"] == f"jax {jax.__version__}"
    (norm,) = said["norms"]
    assert np.float32(norm.pop("value")) == np.asarray(step["norm"])
    names = list(names_of(step["params"]))
    assert norm == {"kind": 2.0, "max_norm": 0.05, "epsilon": 0.0, "of": "reduced", "parameters": names}
    rule = {name: value for name, value in ADAMW.items() if name != "name"}
    assert said["optimizers"] == [{"name": "adamw", "module": "optax", "groups": [rule]}]
    bias = said["parameters"]["params.layer_0.bias"]
    assert bias == {
        "optimizer": 0, "group": 0, "trainable": True, "reduce": [], "same_as": None,
        "scalars": {"count": [1, 2]}, "absent": {},
    }  # fmt: skip


def test_labels_masks_and_schedules_of_optax_are_told_apart(tmp_path):
    """adam for kernels, SGD with momentum and a schedule for biases, in one multi_transform."""
    label = lambda params: jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key, params)
    sgd = optax.sgd(optax.linear_schedule(0.1, 0.0, 10), momentum=0.9)
    transform = optax.MultiSteps(
        optax.multi_transform({"kernel": optax.adam(1e-3), "bias": optax.chain(sgd, optax.trace(0.5))}, label), 1
    )
    step = taken(transform, steps=3)
    rules = [
        {"names": "*.kernel", "name": "adam", "lr": 1e-3},
        {"names": "*.bias", "name": "sgd", "lr": jnp.float32(0.08), "momentum": 0.9},
    ]
    dump, said = record(tmp_path / "run", step, optimizer={"optimizers": rules})
    labels = step["new_opt_state"].inner_opt_state.inner_states
    tensors = {
        "state_after.mu:params.layer_1.kernel": labels["kernel"].inner_state[0].mu["params"]["layer_1"]["kernel"],
        "state_after.acc_grads:params.layer_1.kernel": step["new_opt_state"].acc_grads["params"]["layer_1"]["kernel"],
    }
    inner = "inner_opt_state.inner_states.bias.inner_state"
    for path, state in (("0.0", labels["bias"].inner_state[0][0]), ("1", labels["bias"].inner_state[1])):
        name = f"state_after.{inner}.{path}.trace:params.layer_1.bias"
        tensors[name] = state.trace["params"]["layer_1"]["bias"]
    for name, leaf in tensors.items():
        assert dump.tensor(f"step.{name}").tobytes() == np.asarray(leaf).tobytes(), name
    assert not [key for key in dump.keys() if ".mu:" in key[0] and key[0].endswith("bias")]
    kernel, bias = (said["parameters"][f"params.layer_1.{name}"] for name in ("kernel", "bias"))
    assert (kernel["optimizer"], bias["optimizer"]) == (0, 1)
    steps = {"mini_step": [0, 0], "gradient_step": [2, 3]}
    assert {**kernel["scalars"], **steps} == kernel["scalars"] and kernel["scalars"]["count"] == [2, 3]
    assert {**bias["scalars"], **steps, "count": [2, 3]} == bias["scalars"]
    assert said["optimizers"][1]["groups"] == [{"lr": float(np.float32(0.08)), "momentum": 0.9}]


def test_a_label_without_tensors_keeps_its_count_from_the_others(tmp_path):
    """Plain SGD with a schedule has a count alone: it is of the biases, which no other label has."""
    label = lambda params: jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key, params)
    sgd = optax.sgd(optax.linear_schedule(0.1, 0.0, 10))
    transform = optax.multi_transform({"kernel": optax.adam(1e-3), "bias": optax.chain(sgd)}, label)
    step = taken(transform, steps=3)
    _, said = record(tmp_path / "run", step)
    for name, parameter in said["parameters"].items():
        assert parameter["scalars"] == {"count": [2, 3]}, name


def test_the_count_beside_the_moments_is_the_one_of_that_name(tmp_path):
    """inject_hyperparams has a count of its own, and the numbers of the step."""
    transform = optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.1, 0.0, 10))
    step = taken(transform, steps=3)
    # As after a restart that gave Adam its count and not the wrapper: told apart by their values.
    step["new_opt_state"] = step["new_opt_state"]._replace(count=jnp.int32(7))
    _, said = record(tmp_path / "run", step)
    numbers = said["parameters"]["params.layer_0.bias"]["scalars"]
    assert numbers["count"] == [2, 3] and numbers["state.count"] == [2, 7], numbers
    rates = [float(step[when].hyperparams["learning_rate"]) for when in ("opt_state", "new_opt_state")]
    assert numbers["learning_rate"] == rates


def test_factors_and_what_is_no_state_of_a_parameter(tmp_path):
    """adafactor keeps rows and columns of the second moment; its placeholders are named as absent."""
    params = {"w": jnp.ones((256, 130)), "b": jnp.ones(3)}
    transform = optax.chain(optax.adafactor(1e-3), optax.add_noise(0.1, 0.5, key=jax.random.key(0)))
    state = transform.init(params)
    dump, said = record(tmp_path / "run", {"params": params, "opt_state": state, "new_opt_state": state})
    shapes = {key[0]: dump.tensor(key[0]).shape for key in dump.keys() if "state_after" in key[0]}
    assert shapes["step.state_after.v_row:w"] == (130,) and shapes["step.state_after.v_col:w"] == (256,)
    assert shapes["step.state_after.v:b"] == (3,) and "step.state_after.v:w" not in shapes
    assert "neither the parameter's nor a factor's" in said["parameters"]["w"]["absent"]["state_after.v"]
    assert any("rng_key" in name and "no parameter" in why for name, why in said["absent"].items()), said["absent"]


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("data", "fsdp"), axis_types=(AxisType.Auto,) * 2)


def sharded_step(mesh, local_axis):
    """A step of SGD with momentum over 8 devices. With `local_axis` each device's gradient is returned."""
    params, batches = model()
    kernel = NamedSharding(mesh, P(None, "fsdp"))
    place = lambda leaf: jax.device_put(leaf, kernel if leaf.ndim == 2 else NamedSharding(mesh, P()))
    params = jax.tree.map(place, params)
    batches = jax.device_put(batches, NamedSharding(mesh, P(None, "data")))
    transform = optax.sgd(0.1, momentum=0.9)
    opt_state = transform.init(params)

    def gradient(params, batch):
        if not local_axis:
            return jax.grad(loss)(params, batch)
        stacked = lambda params, batch: jax.tree.map(lambda g: g[None], jax.grad(loss)(params, batch))
        specs = P(), P("data")
        return jax.shard_map(stacked, mesh=mesh, in_specs=specs, out_specs=P("data"), check_vma=False)(params, batch)

    @jax.jit
    def run(params, opt_state):
        local = [gradient(params, batch) for batch in batches]
        grads = jax.tree.map(lambda a, b: a + b, *local)
        if local_axis:
            grads = jax.tree.map(lambda g: jnp.mean(g, 0), grads)
        updates, new_state = transform.update(grads, opt_state, params)
        new_params = optax.apply_updates(params, updates)
        return {"new_params": new_params, "grads": grads, "local_grads": local, "new_opt_state": new_state}

    return {"params": params, "opt_state": opt_state} | run(params, opt_state)


def test_the_gradients_of_the_devices_of_one_process_stand_one_below_the_other(tmp_path, mesh):
    step = sharded_step(mesh, "data")
    both = {"axis": ["data", "fsdp"], "op": "sum", "divisor": 60}
    reduce = {"*.kernel": [{"axis": "data", "op": "mean"}], "*": [both]}
    with jax.set_mesh(mesh):
        dump, said = record(tmp_path / "run", step, local_axis="data", reduce=reduce)
    for index, tree in enumerate(step["local_grads"]):
        is_bit_for_bit(dump, "grad_by.data", tree, microbatch=index, when="pre_reduce")
    is_bit_for_bit(dump, "reduced", step["grads"])
    is_bit_for_bit(dump, "after", step["new_params"])
    is_bit_for_bit(dump, "state_after.trace", step["new_opt_state"][0].trace)
    kernel, bias = (said["parameters"][f"params.layer_0.{name}"] for name in ("kernel", "bias"))
    assert "step.grad_by.data:params.layer_0.kernel" in kernel["absent"]["grad"]
    assert kernel["reduce"] == [{"axis": "data", "op": "mean", "ranks": [0], "addends": 4, "dtype": "float32"}]
    summed = {"axis": "data+fsdp", "op": "sum", "ranks": [0], "addends": 8, "dtype": "float32", "divisor": 60.0}
    assert bias["reduce"] == [summed]
    trace = [one for one in reading.entries(tmp_path / "run") if one.record["tensor"].endswith("0.kernel")]
    assert {one.record["fingerprint_source"] for one in trace} == {"framework"}


def test_a_gradient_that_xla_reduces_is_a_value_after_the_reduction(tmp_path, mesh):
    step = sharded_step(mesh, None)
    dump, said = record(tmp_path / "run", step)
    for index, tree in enumerate(step["local_grads"]):
        is_bit_for_bit(dump, "grad", tree, microbatch=index, when="post_reduce")
    for parameter in said["parameters"].values():
        assert parameter["reduce"] == [] and "inside the compiled program" in parameter["absent"]["grad"]
    del step["local_grads"]
    _, said = record(tmp_path / "again", step)
    assert "reduced inside the compiled program" in said["parameters"]["params.layer_0.bias"]["absent"]["grad"]


def test_every_rank_records_its_addend(tmp_path):
    """Four processes, data 2 x fsdp 2: an addend is two boxes, of two ranks."""
    run_ranks(PROGRAM, 4, free_port(), tmp_path, without=("XLA_FLAGS",))
    dump = backtape.open(tmp_path / "run").step(0)
    expected = np.load(tmp_path / "expected.npz")
    for stage in ("grad", "accumulated"):
        index = 0 if stage == "grad" else None
        for rank in range(4):
            key = {"microbatch": index, "when": "pre_reduce", "rank": rank}
            mine = expected[stage][rank // 2][:, 3 * (rank % 2) :][:, :3]
            assert np.array_equal(dump.tensor(f"step.{stage}:w", **key), mine), (stage, rank)
    addends = [one.record for one in reading.entries(tmp_path / "run") if one.record["partial"]]
    for record in addends:
        column = 3 * (record["rank"] % 2)
        assert (record["shape"], record["box"]) == ([4, 6], [[0, 4], [column, column + 3]])
        assert (record["partial"], record["replica"]) == ("sum", 0)
        assert record["placement"] == {"data": {"partial": "sum"}, "fsdp": {"shard": 1}}
    assert len(addends) == 8
    for rank in range(4):
        said = declared(dump, rank)
        group = {"axis": "data", "op": "sum", "ranks": [rank % 2, 2 + rank % 2], "dtype": "float32"}
        assert said["rank"] == rank and said["parameters"]["w"]["reduce"] == [group]
        assert "grad" not in said["parameters"]["w"]["absent"], said
    assert np.array_equal(dump.tensor("step.reduced:w"), expected["grad"].sum(0))
    assert not reading.omissions(tmp_path / "run")


def test_recording_changes_no_bit(tmp_path):
    def train(recorder):
        params, batches = model()
        transform = optax.adamw(1e-2)
        opt_state = transform.init(params)
        run = jax.jit(lambda params, opt_state: train_step(transform, params, opt_state, batches))
        for number in range(5):
            with recorder.step(number) as tape:
                step = run(params, opt_state)
                backtape.jax.step_algebra(tape, **step, optimizer=ADAMW)
                params, opt_state = step["new_params"], step["new_opt_state"]
        return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((params, opt_state))]

    plain = train(backtape.Recorder.from_env())
    with backtape.Recorder(tmp_path / "run", steps="0-4", strict=True) as recorder:
        assert train(recorder) == plain
    assert backtape.open(tmp_path / "run").steps == (0, 1, 2, 3, 4)


def test_an_inactive_tape_looks_at_nothing():
    class Touched(BaseException):
        """What no guard of backtape keeps from the job."""

    class Untouchable:
        """Raises at whatever is done with it."""

        def __getattribute__(self, name):
            raise Touched(name)

    with backtape.Recorder.from_env().step(0) as tape:
        backtape.jax.step_algebra(tape, params=Untouchable(), grads=Untouchable(), optimizer=Untouchable())


def test_what_is_wrong_is_named_and_costs_only_itself(tmp_path):
    """Donated parameters, a rule that is a function, a name twice, a gradient of another shape."""
    donated = {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}
    new = jax.tree.map(lambda leaf: leaf + 1, donated)
    donated["w"].delete()
    params = donated | {"x.y": jnp.ones(2), "x": {"y": jnp.zeros(2)}}
    step = {
        "params": params, "new_params": new, "grads": {"w": jnp.ones((3, 2)), "more": jnp.ones(1)}, "norm": np.inf,
        "optimizer": optax.adam(1e-3), "max_norm": 1.0, "reduce": {"*": [{"axis": "data", "op": "max"}]},
    }  # fmt: skip
    dump, said = record(tmp_path / "run", step, strict=False)
    w, b = said["parameters"]["w"], said["parameters"]["b"]
    assert "donate_argnums" in w["absent"]["before"] and "before" not in b["absent"]
    assert "(3, 2), not (2, 3)" in w["absent"]["reduced"] and "no array at its path" in b["absent"]["reduced"]
    assert "clipped inside the step" in b["absent"]["clipped"]
    assert said["optimizers"] == [{"name": None, "module": "optax", "groups": [{}]}] and b["optimizer"] == 0
    assert said["norms"][0]["value"] == "inf" and "path of no parameter" in said["absent"]["reduced.more"]
    assert "x/y, x.y" in said["absent"]["x.y"] and "x.y" not in said["parameters"]
    reasons = dict(reading.omissions(tmp_path / "run"))
    assert set(reasons) == {"step.before:x.y", "step.optimizers", "step.reduce"}, reasons
    assert "declare it" in reasons["step.optimizers"] and '"op"' in reasons["step.reduce"]
    is_bit_for_bit(dump, "after", new)
    with pytest.raises(backtape.RecorderError, match="does not say its rule"):
        record(tmp_path / "strict", {"params": new, "optimizer": optax.adam(1e-3)})


def test_names_choose_parameters_and_characters_are_replaced(tmp_path):
    params = {"mlp/~/linear": {"w:0": jnp.ones(2)}, "norm": {"scale": jnp.ones(3)}}
    transform = optax.adam(1e-3)
    state = transform.init(params)
    step = {"params": params, "opt_state": state, "new_opt_state": state}
    dump, said = record(tmp_path / "run", step, names="mlp*")
    recorded = {key[0] for key in dump.keys()} - {"step.declared:0"}
    assert {name.rsplit(":", 1)[1] for name in recorded} == {"mlp_~_linear.w_0".replace("~", "_")}
    assert "step.state_before.nu:mlp___linear.w_0" in recorded and list(said["parameters"]) == ["mlp___linear.w_0"]
    assert said["parameters"]["mlp___linear.w_0"]["scalars"] == {"count": [0, 0]}


def test_a_master_copy_of_more_bits_and_a_loss_scale(tmp_path):
    master = {"w": jnp.linspace(0, 1, 6, dtype=jnp.float32)}
    working = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), master)
    grads = jax.tree.map(lambda leaf: leaf * 1024, working)
    step = {"params": working, "new_params": working, "master": master, "new_master": master, "grads": grads}
    step |= {"unscaled": master, "loss_scale": jnp.float32(1024), "skipped": jnp.bool_(True), "norm": 2.0}
    dump, said = record(tmp_path / "run", step)
    is_bit_for_bit(dump, "before", working)
    is_bit_for_bit(dump, "master_after", master)
    is_bit_for_bit(dump, "unscaled", master)
    assert (said["loss_scale"], said["skipped"], said["norms"][0]["of"]) == (1024.0, True, "unscaled")


def sampled_regions(step, elements, seed=0):
    """The regions of the parameters of which no more than a sample is recorded."""
    sampling = Sampling(elements, seed)
    chosen = {name: sampling.regions(name, leaf.shape) for name, leaf in names_of(step["params"]).items()}
    return {name: regions for name, regions in chosen.items() if regions is not None}


def test_a_sample_holds_the_same_blocks_at_every_stage_and_sums_of_squares_of_all(tmp_path):
    step = taken(optax.adamw(1e-3, weight_decay=0.01))
    _, said = record(tmp_path / "run", step, optimizer=ADAMW, max_norm=0.05, sample=24, sample_seed=4)
    regions = sampled_regions(step, 24, 4)
    assert {*said["sampled"]["parameters"]} == {*regions} == {*said["squares"]}
    trees = {"reduced": "grads", "clipped": "clipped", "before": "params", "after": "new_params"}
    for name, blocks in regions.items():
        assert said["sampled"]["parameters"][name]["boxes"] == json.loads(json.dumps(blocks))
        of = [entry for entry in reading.entries(tmp_path / "run") if entry.record["tensor"].endswith(f":{name}")]
        assert len(of) == len(blocks) * (2 + 3 + 2 + 4), "addends, gradients and update, values, states"
        for stage, key in trees.items():
            leaf = np.asarray(names_of(step[key])[name])
            found = [entry for entry in of if entry.record["tensor"] == f"step.{stage}:{name}"]
            for entry in found:
                place = tuple(slice(*ends) for ends in entry.record["box"])
                assert entry.data == np.ascontiguousarray(leaf[place]).tobytes()
            if stage in ("reduced", "clipped"):
                exact = np.square(leaf.astype(np.float64)).sum()
                assert said["squares"][name][stage] == pytest.approx(exact, rel=1e-12)


def test_groups_are_rules_of_the_optimizer_and_an_unknown_one_is_told(tmp_path):
    step = taken(optax.adam(1e-3))
    rules = [{"names": "*.kernel", "name": "adam", "lr": 1e-3}, {"name": "sgd", "lr": 0.1}]
    dump, said = record(tmp_path / "run", step, optimizer=rules, groups="sgd")
    recorded = {key[0].partition(":")[2] for key in dump.keys()} - {"0"}
    assert recorded == {name for name in names_of(step["params"]) if name.endswith("bias")}
    assert {*said["squares"]} == {name for name in names_of(step["params"]) if name.endswith("kernel")}
    # The norm is of all gradients, also of those that are not recorded.
    assert said["norms"][0]["parameters"] == [*names_of(step["params"])]
    record(tmp_path / "other", step, strict=False, optimizer=rules, groups="lion")
    ((_, reason),) = reading.omissions(tmp_path / "other")
    assert "no rule of optimizer= is 'lion', but 0 (adam), 1 (sgd)" in reason


def test_a_sample_of_sharded_parameters_and_addends_of_devices_is_cut_from_each_shard(tmp_path):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    draw = np.random.default_rng(3)
    value = draw.standard_normal((16, 12)).astype(np.float32)
    addends = draw.standard_normal((4, 16, 12)).astype(np.float32)
    params = {"w": jax.device_put(value, NamedSharding(mesh, P("model", None)))}
    grads = {"w": jax.device_put(addends.mean(0), NamedSharding(mesh, P(None, "model")))}
    local = {"w": jax.device_put(addends, NamedSharding(mesh, P("data", "model")))}
    _, said = record(
        tmp_path / "run", {"params": params, "grads": grads}, local_grads=[local], local_axis="data",
        reduce={"*": [{"axis": "data", "op": "mean"}]}, sample=40, optimizer={"name": "sgd", "lr": 0.1},
    )  # fmt: skip
    (blocks,) = sampled_regions({"params": params}, 40).values()
    wanted = {"step.before:w": value, "step.reduced:w": addends.mean(0), "step.grad_by.data:w": addends}
    seen = {name: np.zeros(array.shape, bool) for name, array in wanted.items()}
    for entry in reading.entries(tmp_path / "run"):
        name = entry.record["tensor"]
        if name in wanted:
            place = tuple(slice(*ends) for ends in entry.record["box"])
            assert entry.data == np.ascontiguousarray(wanted[name][place]).tobytes()
            seen[name][place] = True
    inside = np.zeros((16, 12), bool)
    for block in blocks:
        inside[tuple(slice(*ends) for ends in block)] = True
    assert all((held == inside).all() for held in seen.values())
    assert sorted(said["squares"]["w"]["held"]) == [[[0, 16], [0, 6]], [[0, 16], [6, 12]]]
    exact = np.square(addends.mean(0).astype(np.float64)).sum()
    assert said["squares"]["w"]["reduced"] == pytest.approx(exact, rel=1e-12)
