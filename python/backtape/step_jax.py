"""The algebra of a step in jax: its gradients, the optimizer's state and the parameters, recorded
after the step ran.

    state, taped = steps[tape.active](state, batch)
    backtape.jax.step_algebra(tape, params=old.params, new_params=state.params, grads=taped.grads,
                              opt_state=old.opt_state, new_opt_state=state.opt_state,
                              optimizer={"name": "adamw", "lr": 1e-3, "b1": 0.9, "b2": 0.999,
                                         "eps": 1e-8, "weight_decay": 0.01},
                              norm=taped.grad_norm, max_norm=1.0)

docs/step-format.md says which tensors that are, docs/step.md how `replay` judges them. The step
that is recorded returns what is to be recorded, and must not donate the arrays that it takes
(`donate_argnums`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from backtape import step_jax_ranks as ranks
from backtape._native import RecorderError
from backtape.failopen import CAUGHT, describe
from backtape.sampling import Sampling, sampling_of
from backtape.shards import Key
from backtape.shards import Mesh as RankMesh
from backtape.step_jax_declaration import Declaration, Options, fits, holders_in
from backtape.step_jax_sample import squares_of
from backtape.step_jax_trees import (
    Parameter,
    Path,
    dotted,
    leaves_of,
    number_of,
    parameters_of,
    states_of,
)
from backtape.tape import Tape

# The stages that a norm can be of.
NORMED = ("reduced", "unscaled", "clipped")

REDUCED_BY_XLA = (
    "the gradient of each microbatch is reduced inside the compiled program: "
    'step.grad has it with when="post_reduce"'
)
SEVERAL_DEVICES = (
    "this process drives several devices, and an addend is recorded for one rank: "
    "the addends of all devices are in {}"
)
ONE_OF_SEVERAL = (
    "its gradient lies on one device of several that this process drives: "
    "return the gradients of all of them from shard_map, and say local_axis="
)
UNREDUCED = (
    "jax hands out no shard of an unreduced array: "
    "return it from shard_map with a dimension in front, and say local_axis="
)


def step_algebra(
    tape: Tape,
    *,
    params: Any,
    new_params: Any = None,
    grads: Any = None,
    local_grads: Sequence[Any] | None = None,
    accumulated: Any = None,
    local_axis: str | Sequence[str] | None = None,
    unscaled: Any = None,
    clipped: Any = None,
    updates: Any = None,
    opt_state: Any = None,
    new_opt_state: Any = None,
    master: Any = None,
    new_master: Any = None,
    names: str | Sequence[str] = "*",
    groups: int | str | Sequence[int | str] | None = None,
    sample: int | float | None = None,
    sample_seed: int = 0,
    **options: Any,
) -> None:
    """Records what became of the gradients of a step, from the arrays that it took and returned.

    params, new_params: before and after the step. Their paths in the tree, joined by dots, are
        their names: `layers_0.kernel`. `names` is a glob, or several, of those that are recorded;
        `groups` are indices or names of the rules in `optimizer`, whose parameters are recorded.
    sample: how many elements of each parameter are recorded, as 4096, or their share, as 0.01: the
        same blocks of neighbours in all processes and in every stage, drawn from `sample_seed`. A
        smaller parameter is recorded whole. Norms are judged by sums of squares over all elements,
        which each process then declares. docs/step.md says what is not seen.
    grads: the gradient after communication; unscaled: the same without the loss scale; clipped:
        the one that the optimizer takes, where it is another one than these.
    local_grads: one tree for each microbatch, of gradients before communication; accumulated: their
        sum, before communication. An array on one device is this rank's addend.
    local_axis: each array of these two has a first dimension along this axis (these axes) of the
        mesh, as shard_map returns it with out_specs=P("data", ...): index i of it is the addend of
        the devices at i. Without it an array on several devices is the gradient of one microbatch,
        which the compiled program has reduced.
    opt_state, new_opt_state: before and after the step, of optax, or any tree that has trees like
        the parameters below a key, as {"mu": ..., "nu": ..., "count": 7}.
    updates: what is added to the parameters.
    master, new_master: the copies of more bits that the optimizer updates.

    options: what the arrays do not tell.
        optimizer={"name": "adamw", "lr": 1e-3, ...} with the numbers of this step, or a list of
            such dicts, each with "names": the first whose glob fits a parameter holds it;
        norm=, max_norm=: the gradient norm that the job computed, and by which it clips; or norm=
            a list of {"value", "max_norm", "kind", "epsilon", "of", "names"};
        clip_value=, loss_scale=, skipped=, microbatches=: numbers of the step;
        accumulation="sum" or "mean": what becomes of the gradients of microbatches; without it
            either is taken for right;
        reduce={"*": [{"axis": "data", "op": "mean"}]}: by glob, the communications that bring the
            addends together, with "dtype" and "ranks" where the shardings do not tell them, and
            "divisor" where a sum is divided by another number than that of the addends;
        rules={"mine": "adamw"}, or {"mine": function}: by which rule an optimizer is judged that no
            rule is known of, by its "name" in optimizer=: the name of a known one, or a function
            `f(param, grad, state, hyper)` that returns the new parameter and a dict of what changes
            in the state; backtape.rule has the functions to write it with.

    Call it outside jit, in every process. It waits for the values of the step. What is not given,
    or cannot be recorded, is declared as absent with the reason.
    """
    if not tape.active:
        return
    stages = {
        "before": params, "after": new_params, "reduced": grads, "unscaled": unscaled,
        "clipped": clipped, "update": updates, "master_before": master, "master_after": new_master,
    }  # fmt: skip
    step = StepCapture(tape)
    with step.part("parameters"):
        step.choose(params if params is not None else new_params, names)
        step.narrow(groups, options.get("optimizer"), sampling_of(sample, sample_seed))
    if step.parameters:
        step.record_stages(stages)
        step.record_gradients(local_grads or (), accumulated, ranks.axes_of(local_axis))
        step.record_states({"before": opt_state, "after": new_opt_state})
        step.declare(stages, local_grads, options)


class StepCapture:
    """What is known of one step on this rank while it is recorded."""

    def __init__(self, tape: Tape) -> None:
        self.tape = tape
        self.rank_mesh = tape._mesh or RankMesh({}, {}, jax.process_index(), jax.process_count())
        self.parameters: dict[Path, Parameter] = {}
        self.known: dict[Path, Parameter] = {}  # also those that `names` leaves out
        self.sampling: Sampling | None = None
        self.absent: dict[str, str] = {}  # what belongs to no parameter, and is not recorded

    @contextmanager
    def part(self, what: str) -> Iterator[None]:
        """Keeps what goes wrong in one part of the step from the others and from the job; the dump
        names it."""
        with self.tape.guarded("step_algebra", what):
            try:
                yield
            except CAUGHT as error:
                if not isinstance(error, RecorderError):
                    self.tape.leave_out(f"step.{what}", None, describe(error))
                raise

    def narrow(self, groups: Any, optimizer: Any, sampling: Sampling | None) -> None:
        """Leaves out the parameters of other groups, and chooses what stands for each of the others."""
        if groups is not None:
            held = holders_in(groups, optimizer, [one.name for one in self.known.values()])
            self.parameters = {
                path: one for path, one in self.parameters.items() if one.name in held
            }
        for parameter in self.parameters.values():
            if sampling is not None:
                parameter.regions = sampling.regions(parameter.name, parameter.shape)
        self.sampling = sampling

    def choose(self, tree: Any, names: str | Sequence[str]) -> None:
        """Names the parameters. Leaves that would have one name are refused."""
        self.known, doubled = parameters_of(tree)
        self.parameters = {
            path: parameter
            for path, parameter in self.known.items()
            if fits(parameter.name, names)
        }
        for name, paths in doubled.items():
            listed = ", ".join("/".join(path) for path in paths)
            reason = f"{len(paths)} leaves would have this name, rename one: {listed}"
            self.tape.leave_out(f"step.before:{name}", None, reason)
            for path in paths:
                self.absent["/".join(path)] = reason

    def leaves(self, stage: str, tree: Any) -> Iterator[tuple[Parameter, Any]]:
        """Each parameter with its leaf in a tree, None where the tree has none."""
        leaves = dict(leaves_of(tree))
        for path in leaves.keys() - self.known.keys():
            if "/".join(path) not in self.absent:
                self.absent[f"{stage}.{dotted(path)}"] = "it has the path of no parameter"
        for path, parameter in self.parameters.items():
            yield parameter, leaves.get(path)

    def record_stages(self, stages: Mapping[str, Any]) -> None:
        """Records the trees of values, by stage; a tree that is None was not given."""
        for stage, tree in stages.items():
            with self.part(stage):
                if tree is None:
                    continue
                for parameter, leaf in self.leaves(stage, tree):
                    self.record_value(stage, parameter, leaf, parameter.shape)
                if stage in NORMED:
                    self.note_squares(stage, tree)

    def note_squares(self, stage: str, tree: Any) -> None:
        """Notes the sum of the squares of each gradient that is not recorded whole."""
        leaves = dict(leaves_of(tree))
        for path, parameter in self.known.items():
            is_whole = path in self.parameters and parameter.regions is None
            leaf = leaves.get(path)
            if is_whole or leaf is None or parameter.refuses(leaf, parameter.shape):
                continue
            if found := squares_of(leaf):
                parameter.squares[stage], held = found
                dtype = np.dtype(leaf.dtype).name
                parameter.held = {"shape": parameter.shape, "held": held, "dtype": dtype}

    def record_value(
        self, stage: str, parameter: Parameter, leaf: Any, shape: tuple[int, ...]
    ) -> None:
        """Records a tensor of a parameter, or says why it is absent."""
        reason = parameter.refuses(leaf, shape)
        if reason:
            parameter.absent[stage] = reason
        else:
            # A state of another shape, such as sums over rows, has no such elements.
            regions = parameter.regions if shape == parameter.shape else None
            self.tape.record(f"step.{stage}:{parameter.name}", leaf, regions=regions)

    def record_gradients(self, microbatches: Sequence[Any], sums: Any, axes: ranks.Axes) -> None:
        """Records the gradients before communication: of each microbatch, and their sums."""
        addends = [("grad", index, tree) for index, tree in enumerate(microbatches)]
        for stage, microbatch, tree in [*addends, ("accumulated", None, sums)]:
            with self.part(stage):
                if tree is None:
                    continue
                for parameter, leaf in self.leaves(stage, tree):
                    with self.part(f"{stage}:{parameter.name}"):
                        reason = self.record_addend(stage, parameter, leaf, microbatch, axes)
                        if reason:
                            parameter.absent[stage] = reason

    def record_addend(
        self, stage: str, parameter: Parameter, leaf: Any, microbatch: int | None, axes: ranks.Axes
    ) -> str | None:
        """Records one gradient before communication. Returns why it is not recorded as an addend of
        this rank, where it is not."""
        name, tape = f"step.{stage}:{parameter.name}", self.tape
        if ranks.is_unreduced(leaf):
            return UNREDUCED
        wrong = ranks.refuses_axes(leaf, axes) if axes and leaf is not None else None
        shape = (*np.shape(leaf)[:1], *parameter.shape) if axes else parameter.shape
        reason = wrong or parameter.refuses(leaf, shape)
        if reason:
            return reason
        parameter.addend_dtype = np.dtype(leaf.dtype).name
        if not axes and ranks.devices_of(leaf) == 1:
            if ranks.devices_of(parameter.array, local=True) > 1:
                return ONE_OF_SEVERAL
            when = {"when": "pre_reduce", "partial": "sum"}
            tape.record(name, leaf, microbatch=microbatch, regions=parameter.regions, **when)
            return None
        if not axes:
            when = {"when": "post_reduce"}
            tape.record(name, leaf, microbatch=microbatch, regions=parameter.regions, **when)
            return REDUCED_BY_XLA
        if ranks.is_one_addend(leaf):
            key = Key(name, None, microbatch, "pre_reduce")
            for shard in ranks.addend_shards(leaf, axes, parameter.regions):
                tape.record_shards(key, lambda: shard)
            return None
        name = f"step.{stage}_by.{ranks.joined(axes)}:{parameter.name}"
        regions = parameter.regions
        if regions is not None:  # of the addend at each index
            regions = tuple(((0, leaf.shape[0]), *region) for region in regions)
        tape.record(name, leaf, microbatch=microbatch, when="pre_reduce", regions=regions)
        return SEVERAL_DEVICES.format(name)

    def record_states(self, trees: Mapping[str, Any]) -> None:
        """Records the tensors of the optimizer's state before and after the step, and keeps its
        numbers for the declaration."""
        for when, tree in trees.items():
            with self.part(f"state_{when}"):
                if tree is None:
                    option = "opt_state" if when == "before" else "new_opt_state"
                    for parameter in self.parameters.values():
                        reason = f"the optimizer's state was not given ({option}=)"
                        parameter.absent[f"state_{when}"] = reason
                    continue
                # The state of a parameter that is not chosen is told from other leaves, too.
                states = states_of(tree, self.known)
                self.absent |= {f"state.{name}": why for name, why in states.others.items()}
                for path, parameter in self.parameters.items():
                    for name, why in states.absent[path].items():
                        parameter.absent[f"state_{when}.{name}"] = why
                    for name, leaf in states.tensors[path].items():
                        stage = f"state_{when}.{name}"
                        self.record_value(stage, parameter, leaf, np.shape(leaf))
                    for name, leaf in states.scalars[path].items():
                        numbers = parameter.scalars.setdefault(name, [None, None])
                        numbers[when == "after"] = number_of(leaf)

    def declare(self, stages: Mapping[str, Any], local_grads: Any, options: dict[str, Any]) -> None:
        """Records the declaration: what the job says, and what is absent and why."""
        chosen, known = list(self.parameters.values()), list(self.known.values())
        declaration = Declaration(chosen, self.rank_mesh, self.absent, known, self.sampling)
        with self.part("options"):
            unscaled = stages["unscaled"] is not None
            for part in declaration.parts(Options(**options), local_grads, unscaled):
                with self.part(part.__name__):
                    part()
        declaration.explain(stages, bool(local_grads))
        with self.part("declared"):
            values = np.frombuffer(declaration.text().encode(), np.uint8)
            self.tape.record(f"step.declared:{self.rank_mesh.rank}", values)
