"""What a rank of a jax job declares of its step: `step.declared:RANK` of docs/step-format.md."""

import fnmatch
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from backtape import rule_declared
from backtape import step_jax_ranks as ranks
from backtape.sampling import Sampling
from backtape.shards import Mesh as RankMesh
from backtape.step_jax_trees import Parameter, in_json, number_of
from backtape.step_reductions import divisor_of

VERSION = 1

# Why a stage is not in the dump, where its tree was not given.
NOT_GIVEN = {
    "before": "the parameters before the step were not given (params=)",
    "after": "the parameters after the step were not given (new_params=)",
    "reduced": "the gradient after communication was not given (grads=)",
}
NOT_LOCAL = "no gradient before communication was given (local_grads=)"
IN_ONE_PROGRAM = f"{NOT_LOCAL}: it is reduced inside the compiled program"
CLIPPED_INSIDE = "it is clipped inside the step, which returned no clipped gradient (clipped=)"
NO_RULE = (
    "a transformation of optax does not say its rule: "
    'declare it, as optimizer={"name": "adamw", "lr": 1e-3, ...}'
)


@dataclass
class Options:
    """What the job says of a step beside its arrays: the options of `step_algebra`."""

    optimizer: Any = None
    norm: Any = None
    max_norm: Any = None
    clip_value: Any = None
    loss_scale: Any = None
    skipped: Any = False
    microbatches: int | None = None
    accumulation: Any = None
    reduce: Mapping[str, Sequence[Mapping[str, Any]]] | None = None
    rules: Mapping[str, Any] | None = None


class Declaration:
    """The declaration of one step of one rank while it is put together."""

    def __init__(
        self,
        parameters: list[Parameter],
        rank_mesh: RankMesh,
        absent: dict[str, str],
        known: list[Parameter] | None = None,
        sampling: Sampling | None = None,
    ) -> None:
        self.parameters = parameters
        self.known = parameters if known is None else known  # also those that are not recorded
        self.rank_mesh = rank_mesh
        # Which optimizer holds a parameter, by name: one without a name until the job says a rule.
        self.holders = {parameter.name: 0 for parameter in parameters}
        self.reductions: dict[str, list[dict[str, Any]]] = {}
        self.contents: dict[str, Any] = {
            "version": VERSION,
            "rank": rank_mesh.rank,
            "framework": f"jax {jax.__version__}",
            "microbatches": None,
            "loss_scale": None,
            "skipped": False,
            "norms": [],
            "clip_value": None,
            "optimizers": [{"name": None, "module": "optax", "groups": [{}]}],
            "absent": absent,
        }
        self.declare_sample(sampling)

    def declare_sample(self, sampling: Sampling | None) -> None:
        """Notes what stands for each sampled parameter, and sums of squares of the gradients that are not
        recorded whole."""
        if sampling is not None:
            sampled = {
                parameter.name: {"shape": parameter.shape, "boxes": parameter.regions}
                for parameter in self.parameters
                if parameter.regions is not None
            }
            told = {"sample": sampling.amount, "seed": sampling.seed, "parameters": sampled}
            self.contents["sampled"] = told
        squares = {
            parameter.name: parameter.held
            | {stage: number_of(total) for stage, total in parameter.squares.items()}
            for parameter in self.known
            if parameter.squares
        }
        if squares:
            self.contents["squares"] = squares

    def parts(self, options: Options, local_grads: Any, unscaled: bool) -> list[Callable[[], None]]:
        """The parts of the declaration, each to be called on its own: one that the job has said
        wrongly costs no other."""

        def numbers() -> None:
            count = len(local_grads or ()) or None
            count = options.microbatches if options.microbatches is not None else count
            self.contents["microbatches"] = number_of(count)
            self.contents["loss_scale"] = number_of(options.loss_scale)
            self.contents["clip_value"] = number_of(options.clip_value)
            self.contents["skipped"] = bool(number_of(options.skipped))
            if options.accumulation is not None:
                if options.accumulation not in ("sum", "mean"):
                    raise ValueError(f"accumulation={options.accumulation!r}: it is 'sum' or 'mean'")
                self.contents["accumulation"] = options.accumulation

        def norms() -> None:
            stage = "unscaled" if unscaled else "reduced"
            self.declare_norms(options.norm, options.max_norm, stage)

        def optimizers() -> None:
            if options.optimizer is not None:
                self.declare_optimizers(options.optimizer)

        def rules() -> None:
            self.declare_rules(options.rules)

        def reduce() -> None:
            self.declare_reductions(options.reduce or {})

        return [numbers, norms, optimizers, rules, reduce]

    def declare_norms(self, norm: Any, max_norm: Any, stage: str) -> None:
        """Notes the norms that the job computed. `stage`: what is normed where the job does not say
        it."""
        if norm is None and max_norm is None:
            return
        for call in norm if isinstance(norm, (list, tuple)) else [norm]:
            call = call if isinstance(call, Mapping) else {"value": call}
            bound = in_json(call.get("max_norm", max_norm), "max_norm")
            globs = call.get("names", "*")
            epsilon = None if bound is None else in_json(call.get("epsilon", 0.0), "epsilon")
            entry = {
                "value": number_of(call.get("value")),
                "kind": number_of(float(call.get("kind", 2.0))),
                "max_norm": bound,
                "epsilon": epsilon,  # optax adds nothing to the norm by which it divides
                "of": str(call.get("of", stage)),
                "parameters": [p.name for p in self.known if fits(p.name, globs)],
            }
            self.contents["norms"].append(entry)

    def declare_optimizers(self, optimizer: Any) -> None:
        """Notes the rules that the job says, and which of them holds each parameter."""
        rules: list[dict[str, Any]] = []
        globs: list[Any] = []
        for given in rules_of(optimizer):
            options = {key: in_json(value, key) for key, value in given.items() if key != "names"}
            name, module = str(options.pop("name")), str(options.pop("module", "optax"))
            rules.append({"name": name, "module": module, "groups": [options]})
            globs.append(given.get("names", "*"))
        self.contents["optimizers"] = rules
        self.holders = {}
        for parameter in self.parameters:
            fitting = (index for index, glob in enumerate(globs) if fits(parameter.name, glob))
            index = next(fitting, None)
            if index is not None:
                self.holders[parameter.name] = index

    def declare_rules(self, rules: Mapping[str, Any] | None) -> None:
        """Notes the rules of the job's own. Raises RuleError where one is no formula, after all
        were noted."""
        errors = []
        for optimizer in self.contents["optimizers"]:
            name, groups = str(optimizer["name"]), optimizer["groups"]
            told, error = rule_declared.declared(rule_declared.checked(rules), name, groups)
            optimizer |= told
            errors += [error] if error is not None else []
        if errors:
            raise errors[0]

    def declare_reductions(self, reduce: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
        """Notes for each parameter the communications under the first glob that fits it."""
        for parameter in self.parameters:
            glob = next((glob for glob in reduce if fits(parameter.name, glob)), None)
            if glob is not None:
                self.reductions[parameter.name] = [
                    self.reduction(parameter, communication) for communication in reduce[glob]
                ]

    def reduction(self, parameter: Parameter, options: Mapping[str, Any]) -> dict[str, Any]:
        """One communication as the declaration has it."""
        axes = ranks.axes_of(options.get("axis"))
        if not axes or options.get("op") not in ("sum", "mean"):
            raise ValueError(f'reduce of {parameter.name}: say "axis", and "op" as "sum" or "mean"')
        dtype = options.get("dtype")
        entry = {
            "axis": ranks.joined(axes),
            "op": options["op"],
            "ranks": options.get("ranks"),
            "dtype": parameter.addend_dtype if dtype is None else np.dtype(dtype).name,
        }
        if options.get("divisor") is not None:
            entry["divisor"] = divisor_of(options)
        if entry["ranks"] is None:
            group, addends = ranks.group_along(parameter.array, axes, self.rank_mesh)
            entry |= {"ranks": group} | ({"addends": addends} if addends != len(group) else {})
        return entry

    def explain(self, stages: Mapping[str, Any], has_local: bool) -> None:
        """Says of each stage that was not given why it is not in the dump."""
        reasons = {stage: why for stage, why in NOT_GIVEN.items() if stages[stage] is None}
        bounds = [norm["max_norm"] for norm in self.contents["norms"]]
        bounds.append(self.contents["clip_value"])
        if stages["clipped"] is None and any(bound is not None for bound in bounds):
            reasons["clipped"] = CLIPPED_INSIDE
        for parameter in self.parameters:
            mine = dict(reasons)
            if not has_local:
                spread = ranks.devices_of(parameter.array) > 1
                declared = parameter.name in self.reductions
                mine["grad"] = IN_ONE_PROGRAM if spread and not declared else NOT_LOCAL
            parameter.absent = mine | parameter.absent

    def text(self) -> str:
        """The declaration as JSON."""
        parameters = {parameter.name: self.entry(parameter) for parameter in self.parameters}
        return json.dumps(self.contents | {"parameters": parameters}, allow_nan=False)

    def entry(self, parameter: Parameter) -> dict[str, Any]:
        """What is declared of one parameter."""
        holder = self.holders.get(parameter.name)
        return {
            "optimizer": holder,
            "group": None if holder is None else 0,
            "trainable": holder is not None,
            "reduce": self.reductions.get(parameter.name, []),
            "same_as": None,
            "scalars": parameter.scalars,
            "absent": parameter.absent,
        }


def rules_of(optimizer: Any) -> list[Mapping[str, Any]]:
    """The rules of a job, as it says them. Raises ValueError for what is no rule with a name."""
    if isinstance(optimizer, Mapping):
        optimizer = optimizer.get("optimizers", [optimizer])
    # A transformation of optax is a tuple of two functions.
    if not isinstance(optimizer, (list, tuple)) or hasattr(optimizer, "_fields"):
        raise ValueError(NO_RULE)
    for rule in optimizer:
        if not isinstance(rule, Mapping) or "name" not in rule:
            raise ValueError('each optimizer is declared as a dict with its "name", as "adamw"')
    return list(optimizer)


def holders_in(groups: Any, optimizer: Any, names: Sequence[str]) -> set[str]:
    """The parameters that the rules of these groups hold. Raises ValueError for a group that is none of
    the rules'."""
    rules = [] if optimizer is None else rules_of(optimizer)
    asked = [groups] if isinstance(groups, (int, str)) else list(groups)
    chosen = {
        index
        for index, rule in enumerate(rules)
        if index in asked or (isinstance(rule["name"], str) and rule["name"] in asked)
    }
    known = {*range(len(rules)), *(rule["name"] for rule in rules)}
    if unknown := [group for group in asked if group not in known]:
        listed = ", ".join(f"{index} ({rule['name']})" for index, rule in enumerate(rules))
        raise ValueError(f"groups={groups!r}: no rule of optimizer= is {unknown[0]!r}, but {listed or 'none'}")
    held = set()
    for name in names:
        fitting = (index for index, rule in enumerate(rules) if fits(name, rule.get("names", "*")))
        if next(fitting, None) in chosen:
            held.add(name)
    return held


def fits(name: str, globs: str | Sequence[str]) -> bool:
    """True for a name that a glob, or one of several, fits."""
    return any(fnmatch.fnmatchcase(name, glob) for glob in ranks.axes_of(globs))
