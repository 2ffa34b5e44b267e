"""A training loop in jax and optax, with the places where its faults are planted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import backtape
import backtape.jax

CHOSEN = {
    "all": lambda name: True,
    "biases": lambda name: name.endswith("bias"),
    "kernels": lambda name: name.endswith("kernel"),
    "embedding": lambda name: "embed" in name,
}


def parameters(job):
    """A tree of parameters, none of which is 0 as a whole."""
    draw = np.random.default_rng(job.seed)
    matrix = lambda *shape: jnp.asarray(
        draw.standard_normal(shape) / np.sqrt(shape[0]), jnp.float32
    )
    vector = lambda size: jnp.asarray(0.1 * draw.standard_normal(size), jnp.float32)
    tree = {"embed": {"table": matrix(job.vocabulary, job.width)}}
    for i in range(job.depth):
        layer = {"kernel": matrix(job.width, job.width), "bias": vector(job.width)}
        if job.gated:
            layer["gate_kernel"] = matrix(job.width, job.width)
        tree[f"layer_{i}"] = layer
    tree["head"] = {"kernel": matrix(job.width, job.vocabulary), "bias": vector(job.vocabulary)}
    return tree


def loss_of(job, tree, tokens, labels):
    x = tree["embed"]["table"][tokens]
    for i in range(job.depth):
        layer = tree[f"layer_{i}"]
        y = x @ layer["kernel"] + layer["bias"]
        x = x + (jax.nn.silu(x @ layer["gate_kernel"]) * y if job.gated else jnp.tanh(y))
    logits = x @ tree["head"]["kernel"] + tree["head"]["bias"]
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean() / job.microbatches
    return loss * job.scale if job.scale else loss


def named(function, *trees):
    """Maps over trees with the name of each leaf."""
    path_of = lambda path: ".".join(str(key.key) for key in path)
    return jax.tree_util.tree_map_with_path(
        lambda path, *leaves: function(path_of(path), *leaves), *trees
    )


class Trainer:
    """One job."""

    def __init__(self, job, directory):
        self.job = job
        self.active = False
        self.compiled = {}  # the step with the fault, and that without
        self.mesh = Mesh(np.array(jax.devices()[: job.devices]), ("data",))
        self.params = parameters(job)
        self.transform = self.optimizer(faulty=False)
        self.state = self.transform.init(self.params)
        self.recorder = backtape.Recorder(directory, steps=str(job.step), strict=True)
        self.kept = {}

    def hits(self, fault, name=None):
        if not (self.active and self.job.fault == fault):
            return False
        return name is None or CHOSEN[self.job.scope](name)

    def batch(self, step, microbatch):
        job = self.job
        draw = np.random.default_rng([job.seed, step, microbatch])
        size = (job.devices * job.rows,)
        return [jnp.asarray(draw.integers(job.vocabulary, size=size)) for _ in range(2)]

    def run(self):
        job = self.job
        with self.recorder:
            for step in range(job.step + 1):
                self.active = job.fault is not None and step == job.step
                with self.recorder.step(step) as tape:
                    self.train(step, tape, step == job.step)

    def train(self, step, tape, last):
        batches = [self.batch(step, i) for i in range(self.job.microbatches)]
        if self.active not in self.compiled:
            self.compiled[self.active] = jax.jit(functools.partial(self.step))
        taken = self.compiled[self.active](self.params, self.state, batches)
        if last:
            self.record(tape, taken)
            self.keep(taken)
        self.params, self.state = taken["new_params"], taken["new_opt_state"]

    def step(self, params, state, batches):
        """The step: all that it took and gave."""
        job = self.job
        local = [self.local_gradients(params, batch) for batch in batches]
        total = self.accumulated(local)
        grads = named(self.reduced, total)
        taken = {
            "params": params,
            "opt_state": state,
            "local_grads": local,
            "accumulated": total,
            "grads": grads,
        }
        if job.scale:
            grads = taken["unscaled"] = named(self.unscaled, grads)
        if job.clip:
            limited = named(
                lambda name, g: None if self.hits("norm-misses-group", name) else g, grads
            )
            norm = taken["norm"] = optax.tree.norm(
                [leaf for leaf in jax.tree.leaves(limited) if leaf is not None]
            )
            if self.hits("norm-low-precision"):
                norm = taken["norm"] = norm.astype(jnp.bfloat16).astype(jnp.float32)
            limit = taken["max_norm"] = job.limit * optax.tree.norm(grads)
            coefficient = jnp.minimum(1.0, limit / norm)
            if self.hits("clip-recorded-not-applied"):
                coefficient = jnp.float32(1.0)
            if self.hits("clip-twice"):
                coefficient = coefficient * coefficient
            taken["clipped"] = jax.tree.map(lambda g: g * coefficient, grads)
            if not self.hits("update-from-other-gradient"):
                grads = taken["clipped"]
            else:
                grads = named(
                    lambda name, g, c: g if CHOSEN[job.scope](name) else c, grads, taken["clipped"]
                )
        if self.hits("state-reset"):
            state = self.transform.init(params)
        updates, new_state = self.optimizer(faulty=True).update(grads, state, params)
        if self.hits("step-counter"):
            new_state = self.miscounted(state, new_state)
        new_params = optax.apply_updates(params, updates)
        keep = lambda name, old, new: old if self.hits("update-is-no-op", name) else new
        taken["updates"], taken["new_params"] = updates, named(keep, params, new_params)
        taken["new_opt_state"] = new_state
        return taken

    def local_gradients(self, params, batch):
        """Of each device, with one dimension in front."""
        job = self.job
        gradient = jax.grad(functools.partial(loss_of, job))
        if job.devices == 1:
            return gradient(params, *batch)
        each = lambda tree, tokens, labels: jax.tree.map(
            lambda g: g[None], gradient(tree, tokens, labels)
        )
        specs = {"in_specs": (P(), P("data"), P("data")), "out_specs": P("data")}
        return jax.shard_map(each, mesh=self.mesh, check_vma=False, **specs)(params, *batch)

    def accumulated(self, local):
        """The sum over microbatches."""
        job = self.job
        total = jax.tree.map(jnp.zeros_like, local[0])
        for i, tree in enumerate(local):
            total = named(functools.partial(self.add, i), total, tree)
        scale = job.microbatches if job.variant % 2 else 1 / job.microbatches
        return named(lambda name, g: g * scale if self.hits("microbatch-scale", name) else g, total)

    def add(self, i, name, total, gradient):
        if self.hits("accumulate-window", name) and i == self.job.facts["lost"]:
            return total
        if self.hits("accumulate-doubles", name):
            return total + (total + gradient)
        if self.hits("accumulate-low-precision", name):
            low = total.astype(jnp.bfloat16) + gradient.astype(jnp.bfloat16)
            return low.astype(jnp.float32)
        return total + gradient

    def reduced(self, name, total):
        """Over the devices."""
        job = self.job
        if job.devices > 1:
            if self.hits("ranks-weighted", name):
                shares = jnp.arange(1.0, job.devices + 1) + job.variant % 3
                total = total * (shares / shares.mean()).reshape(-1, *[1] * (total.ndim - 1))
            if self.hits("rank-left-out", name):
                total = total.at[-1].set(0.0)
            total = total.sum(0)
            mean = job.operation == "mean"
            if self.hits("reduce-sum-for-mean", name) or self.hits("reduce-mean-for-sum", name):
                mean = not mean
            total = total / job.devices if mean else total
        if self.hits("reduced-mean-twice", name):
            total = total / job.devices
        return total * job.factor if self.hits("gradient-scaled", name) else total

    def unscaled(self, name, gradient):
        if self.hits("loss-scale-left-in", name):
            return gradient
        times = 2 if self.hits("loss-scale-taken-out-twice", name) else 1
        return gradient * (1 / self.job.scale) ** times

    def optimizer(self, faulty):
        """What the job declares, or has in its place."""
        job = self.job
        hits = self.hits if faulty else lambda *_: False
        lr = job.lr * (job.facts["lr_factor"] if hits("lr-scaled") else 1.0)
        lr = -lr if hits("update-ascends") else lr
        if job.rule == "sgd":
            return optax.sgd(lr, momentum=job.momentum or None, nesterov=job.nesterov)
        b1, b2 = job.betas
        adam = optax.scale_by_adam(b1, b2, job.eps)
        if hits("eps-inside-sqrt"):
            adam = optax.scale_by_adam(b1, b2, eps=0.0, eps_root=job.eps)
        if hits("bias-correction-missing") or hits("bias-correction-twice"):
            adam = corrected(b1, b2, job.eps, 0 if hits("bias-correction-missing") else 2)
        if job.rule == "adam":
            return optax.chain(adam, optax.scale(-lr))
        mask = None
        if job.masked and not hits("decay-on-excluded"):
            mask = lambda params: named(lambda name, _: not name.endswith("bias"), params)
        decay = optax.add_decayed_weights(job.decay, mask)
        if hits("decay-coupled"):
            # The same state in another order of the chain.
            return reordered(decay, adam, lr)
        return optax.chain(adam, decay, optax.scale(-lr))

    def miscounted(self, state, new_state):
        """The count as it was, or once more for each microbatch."""
        times = self.job.microbatches if self.job.variant % 2 else 0
        adam = new_state[0]._replace(count=state[0].count + times)
        return (adam, *new_state[1:])

    def declared(self):
        """What the job says of its optimizer."""
        job = self.job
        if job.rule == "sgd":
            return {"name": "sgd", "lr": job.lr, "momentum": job.momentum, "nesterov": job.nesterov}
        adam = {
            "name": job.rule,
            "lr": job.lr,
            "b1": job.betas[0],
            "b2": job.betas[1],
            "eps": job.eps,
        }
        if job.rule == "adam":
            return adam
        if not job.masked:
            return adam | {"weight_decay": job.decay}
        return [
            adam | {"names": "*bias", "weight_decay": 0.0},
            adam | {"names": "*", "weight_decay": job.decay},
        ]

    def record(self, tape, taken):
        job = self.job
        names = (
            "params",
            "new_params",
            "opt_state",
            "new_opt_state",
            "grads",
            "local_grads",
            "updates",
        )
        given = {name: taken[name] for name in (*names, "unscaled", "clipped") if name in taken}
        if job.accumulates and job.microbatches > 1:
            given["accumulated"] = taken["accumulated"]
        if job.devices > 1:
            given |= {
                "local_axis": "data",
                "reduce": {"*": [{"axis": "data", "op": job.operation}]},
            }
        if job.clip:
            # The limit that was drawn as a share of the norm is a number that the job has.
            given |= {"norm": taken["norm"], "max_norm": float(taken["max_norm"])}
        if job.scale:
            given["loss_scale"] = job.scale
        backtape.jax.step_algebra(
            tape, optimizer=self.declared(), microbatches=job.microbatches, **given
        )

    def keep(self, taken):
        """What the step came to, for the measure of what the fault changes."""
        for stage in ("grads", "unscaled", "clipped", "updates", "new_params"):
            if stage in taken:
                named(
                    lambda name, leaf: self.kept.update({f"{stage}:{name}": np.asarray(leaf)}),
                    taken[stage],
                )
        if "norm" in taken:
            self.kept["norm:"] = np.asarray(taken["norm"]).reshape(1)
        for entry in taken["new_opt_state"]:
            for kind in ("mu", "nu", "trace"):
                if hasattr(entry, kind):
                    named(
                        lambda name, leaf: self.kept.update({f"{kind}:{name}": np.asarray(leaf)}),
                        getattr(entry, kind),
                    )
            if hasattr(entry, "mu"):
                # The count is of every parameter.
                count = np.asarray(entry.count, np.float32).reshape(1)
                named(lambda name, _: self.kept.update({f"count:{name}": count}), taken["params"])


def corrected(b1, b2, eps, times):
    """Adam with its bias corrected `times` times."""
    right = optax.scale_by_adam(b1, b2, eps)

    def update(grads, state, params=None):
        _, new = right.update(grads, state, params)
        one, two = (1 - b1**new.count) ** times, (1 - b2**new.count) ** times
        step = lambda m, v: (m / one) / (jnp.sqrt(v / two) + eps)
        return jax.tree.map(step, new.mu, new.nu), new

    return optax.GradientTransformation(right.init, update)


def reordered(decay, adam, lr):
    """Decay before Adam, with the state of the right chain."""
    right = optax.chain(adam, decay, optax.scale(-lr))

    def update(grads, state, params=None):
        grads, second = decay.update(grads, state[1], params)
        updates, first = adam.update(grads, state[0], params)
        return jax.tree.map(lambda u: -lr * u, updates), (first, second, state[2])

    return optax.GradientTransformation(right.init, update)


def run(job, directory):
    """Trains a job to its recorded step; what that came to, and which parameters the fault concerns."""
    trainer = Trainer(job, directory)
    trainer.run()
    names = {key.partition(":")[2] for key in trainer.kept if key.startswith("grads:")}
    return trainer.kept, sorted(name for name in names if CHOSEN[job.scope](name))
