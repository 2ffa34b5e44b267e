"""Records a run of jobs in jax and optax: chains as people write them, on one device or with the
addends of several side by side."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402

import backtape  # noqa: E402
import backtape.jax  # noqa: E402
from step_campaign.draws import chance, pick  # noqa: E402

# Few shapes: each is compiled for every operation.
SHAPES = ((), (1,), (7,), (64,), (5, 8), (33, 16), (3, 2, 2, 4), (1, 40), (0,))
MEAN = {"op": "mean", "axis": "data"}


def gradient(draw, shape, scale, dtype):
    kind = pick(draw, ["normal", "normal", "rows", "outliers", "zeros", "wide"])
    values = draw.standard_normal(shape)
    if kind == "rows" and shape:
        values[draw.random(shape[0]) < 0.7] = 0
    elif kind == "outliers":
        values = np.where(draw.random(shape) < 0.05, 1e4 * values, values)
    elif kind == "wide":
        values = values * 10 ** draw.uniform(-8, 0, shape)
    elif kind == "zeros":
        values = np.zeros(shape)
    return jnp.asarray(values * scale, dtype)


def betas(draw):
    return {"b1": pick(draw, [0.9, 0.9, 0.95, 0.0]), "b2": pick(draw, [0.999, 0.999, 0.95, 0.99])}


def eps(draw):
    return {"eps": pick(draw, [1e-8, 1e-8, 1e-6, 1e-3])}


def decay(draw):
    return {"weight_decay": pick(draw, [0.0, 0.01, 0.1])}


# Settings of each of optax's optimizers that are drawn, all under optax's names.
SETTINGS = {
    "sgd": lambda draw: {"momentum": pick(draw, [None, 0.9, 0.5]), "nesterov": chance(draw, 0.3)},
    "adam": lambda draw: betas(draw) | eps(draw) | {"eps_root": pick(draw, [0.0, 0.0, 1e-8])},
    "adamw": lambda draw: betas(draw) | eps(draw) | decay(draw),
    "nadam": lambda draw: betas(draw) | eps(draw),
    "nadamw": lambda draw: betas(draw) | eps(draw) | decay(draw),
    "radam": lambda draw: betas(draw) | eps(draw),
    "adamax": lambda draw: betas(draw) | eps(draw),
    "adamaxw": lambda draw: betas(draw) | eps(draw) | decay(draw),
    "adagrad": lambda draw: eps(draw) | {"initial_accumulator_value": pick(draw, [0.1, 0.0, 1.0])},
    "rmsprop": lambda draw: eps(draw) | {
        "decay": pick(draw, [0.9, 0.99]), "centered": chance(draw, 0.3), "momentum": pick(draw, [None, 0.9]),
        "nesterov": chance(draw, 0.2), "initial_scale": pick(draw, [0.0, 1.0]),
    },
    "lion": lambda draw: betas(draw) | decay(draw),
}  # fmt: skip


def rule(draw):
    """A transformation of optax, and what is declared of it."""
    name = pick(draw, list(SETTINGS) + ["adam", "adamw", "adamw", "sgd"])
    settings = {"learning_rate": float(10 ** draw.uniform(-6, 0))} | SETTINGS[name](draw)
    told = {"name": name} | {key: value for key, value in settings.items() if value is not None}
    return getattr(optax, name)(**settings), told


def label(params):
    return {name: "one" if index % 2 else "other" for index, name in enumerate(sorted(params))}


def optimizer(draw, names):
    """A transformation for all parameters, and what is declared."""
    way = pick(draw, ["plain", "plain", "plain", "multi", "masked", "every"])
    transform, told = rule(draw)
    if way == "multi":
        other, told_other = rule(draw)
        labels = label(dict.fromkeys(names))
        told = [
            {**own, "names": [name for name in names if labels[name] == word]}
            for own, word in ((told, "one"), (told_other, "other"))
            if any(labels[name] == word for name in names)
        ]
        return optax.multi_transform({"one": transform, "other": other}, label), told
    if way == "masked" and told["name"] in ("adamw", "nadamw", "lion"):
        mask = lambda params: {name: index % 2 == 0 for index, name in enumerate(sorted(params))}  # noqa: E731
        settings = {key: value for key, value in told.items() if key != "name"}
        masked = mask(dict.fromkeys(names))
        told = [
            {**told, "names": [name for name in names if masked[name]]},
            {**told, "weight_decay": 0.0, "names": [name for name in names if not masked[name]]},
        ]
        told = [own for own in told if own["names"]]
        return getattr(optax, told[0]["name"])(**settings, mask=mask), told
    if way == "every":
        return optax.MultiSteps(transform, pick(draw, [1, 2, 3])), told
    return transform, told


class Job:
    """One job: its parameters, gradients, and the step that is recorded."""

    def __init__(self, draw):
        self.draw = draw
        self.dtype = pick(draw, [jnp.float32] * 4 + [jnp.bfloat16])
        shapes = [pick(draw, SHAPES) for _ in range(int(draw.integers(1, 6)))]
        self.params = {f"layer{i}": gradient(draw, shape, 1.0, self.dtype) for i, shape in enumerate(shapes)}
        self.params = {name: jnp.asarray(draw.standard_normal(p.shape), p.dtype) for name, p in self.params.items()}
        self.scale = float(10 ** draw.uniform(-8, 4))
        self.microbatches, self.devices = pick(draw, [1, 2, 3, 4]), pick(draw, [1, 1, 2, 4])
        self.averages = self.microbatches > 1 and chance(draw, 0.4)
        self.transform, self.told = optimizer(draw, list(self.params))
        self.clip = pick(draw, ["none", "norm", "norm", "inside"])
        self.share = pick(draw, [0.3, 0.99, 3.0, float(10 ** draw.uniform(-3, 0))])
        self.clipper = None

    def tree(self):
        """The gradient of one microbatch; of several devices with one dimension in front."""
        front = (self.devices,) if self.devices > 1 else ()
        return {
            name: gradient(self.draw, front + own.shape, self.scale, self.dtype)
            for name, own in self.params.items()
        }

    def step(self, params, state):
        """One step, and all of it that can be recorded."""
        local = [self.tree() for _ in range(self.microbatches)]
        total = local[0]
        for tree in local[1:]:
            total = jax.tree.map(jnp.add, total, tree)
        if self.averages:
            total = jax.tree.map(lambda g: g / self.microbatches, total)
        grads = total
        if self.devices > 1:
            grads = jax.tree.map(lambda g: g.mean(0), total)
        taken = {"params": params, "opt_state": state, "local_grads": local, "grads": grads}
        if self.clip != "none":
            norm = optax.tree.norm(grads)
            taken |= {"norm": norm, "max_norm": float(norm) * self.share}
            clipper = optax.clip_by_global_norm(taken["max_norm"])
            grads, _ = clipper.update(grads, clipper.init(params))
            if self.clip == "norm":
                taken["clipped"] = grads
        updates, new_state = self.transform.update(grads, state, params)
        new_params = optax.apply_updates(params, updates)
        return taken | {"updates": updates, "new_params": new_params, "new_opt_state": new_state}

    def run(self):
        params, state = self.params, self.transform.init(self.params)
        for _ in range(pick(self.draw, [0, 0, 1, 2])):
            taken = self.step(params, state)
            params, state = taken["new_params"], taken["new_opt_state"]
        taken = self.step(params, state)
        leaves = jax.tree.leaves((taken["new_params"], taken["new_opt_state"], taken["grads"]))
        return taken, all(bool(jnp.isfinite(leaf).all()) for leaf in leaves)

    def record(self, tape, taken):
        several = {"local_axis": "data", "reduce": {"*": [MEAN | {"ranks": [0], "addends": self.devices}]}}
        accumulation = {"accumulation": "mean" if self.averages else "sum"} if chance(self.draw, 0.7) else {}
        backtape.jax.step_algebra(
            tape, optimizer=self.told, microbatches=self.microbatches, **taken, **accumulation,
            **(several if self.devices > 1 else {}),
        )  # fmt: skip


def record(seed, number, indices, directory, attempts):
    """Records the jobs of these indices as steps of one run; says what each is."""
    described = []
    steps = f"0-{len(indices) - 1}"
    with backtape.Recorder(directory, steps=steps, strict=True) as recorder:
        for at, index in enumerate(indices):
            for attempt in range(attempts):
                job = Job(np.random.default_rng([seed, index, attempt, 11]))
                taken, is_finite = job.run()
                if is_finite:
                    break
            with recorder.step(at) as tape:
                job.record(tape, taken)
            described.append(f"jax, {job.told}, {job.dtype.__name__}, {job.devices} devices, clip {job.clip}")
    return described
