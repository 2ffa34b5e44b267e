"""One step of a job: every stage of every parameter as a whole tensor, then cut for the ranks.

All that is done element by element is done once on the whole tensor, where ranks would do it on
their parts. Optimizers run on the parts, as their real kernels are not the same for every length.
"""

import itertools
import math
from dataclasses import dataclass, field

import torch

from step_campaign import rules, sums, values
from step_campaign.draws import pick


# torch divides by a norm as it multiplies by its reciprocal. Of a smaller norm in f16 that is infinite,
# and the gradient is not clipped, which is a finding: nobody clips so.
LEAST_NORM = 2.0**-15


class NoNumbers(Exception):
    """The job is none that anybody would keep: it made numbers that are not finite."""


def is_torchs(error):
    """Whether torch itself refuses what it is given: there is no such job. Its fused SGD does so where
    some parameters have a momentum and others not yet, its foreach functions where there is nothing."""
    known = ("expected Tensor as element", "nested_tensorlist")
    return any(words in str(error) for words in known)


@dataclass
class Flow:
    """The gradient of one parameter through the stages."""

    grads: dict = field(default_factory=dict)  # by addend and microbatch
    accumulated: dict = field(default_factory=dict)  # by addend
    reduced: torch.Tensor | None = None
    unscaled: torch.Tensor | None = None
    clipped: torch.Tensor | None = None

    @property
    def last(self):
        kept = (self.clipped, self.unscaled, self.reduced)
        return next((stage for stage in kept if stage is not None), None)


@dataclass
class Step:
    """What a job did."""

    flows: dict = field(default_factory=dict)
    norms: list = field(default_factory=list)
    clip_value: float | None = None
    skipped: bool = False


def addend_of(job, parameter, rank):
    """Which addend of the gradient a rank has: its place along the summed axes."""
    return tuple(job.mesh.places[rank][axis] for axis in parameter.summed)


def run(job, draw):
    """The gradients of a step, up to what the optimizer takes."""
    step = Step()
    trained = [own for own in job.parameters if own.state == "trained" and own.same_as is None]
    for parameter in trained:
        step.flows[parameter.name] = backward(job, parameter, draw)
    if job.overflows and trained:
        step.skipped = True
    for parameter in trained:
        flow = step.flows[parameter.name]
        reduce(job, parameter, flow)
        if not step.skipped and not bool(torch.isfinite(flow.reduced).all()):
            raise NoNumbers
    unscale(job, step)
    clip(job, trained, step)
    return step


def backward(job, parameter, draw):
    """The gradients of each addend and microbatch, and their sums."""
    flow = Flow()
    addends = list(itertools.product(*(range(job.mesh.sizes[axis]) for axis in parameter.summed)))
    count = len(addends) * job.microbatches
    scale = parameter.scale * (job.loss_scale or 1.0)
    dtype = job.formats.gradient
    if dtype == torch.float16:
        scale = min(scale, 50.0)
    made = values.gradients(draw, parameter.shape, parameter.kind, scale, count, dtype)
    if job.overflows and made[0].numel() and draw.random() < 0.7:
        which = made[int(draw.integers(count))]
        which.view(-1)[int(draw.integers(which.numel()))] = float(pick(draw, ["inf", "-inf", "nan"]))
    for at, addend in enumerate(addends):
        for microbatch in range(job.microbatches):
            last = microbatch == job.microbatches - 1 and not any(key[0] == addend for key in flow.grads)
            if last or draw.random() >= parameter.skips:
                flow.grads[addend, microbatch] = made[at * job.microbatches + microbatch]
        own = [gradient for (of, _), gradient in flow.grads.items() if of == addend]
        if not job.each_reduced:
            if job.has_accumulated:
                flow.accumulated[addend] = sums.accumulate(own, job.formats.accumulator)
    return flow


def along(job, parameter, addends):
    """The addends brought together over each axis in turn. addends: by their place."""
    for _, axes, op, divisor in parameter.reduce:
        count = len(axes)
        groups = {}
        for at, addend in addends.items():
            groups.setdefault(at[count:], []).append(addend)
        size = math.prod(job.mesh.sizes[axis] for axis in axes)
        divided = divisor or (size if op == "mean" else 1)
        addends = {
            at: sums.reduce(group, job.sent, job.order, divided, job.division)
            for at, group in groups.items()
        }
    (total,) = addends.values()
    return total


def reduce(job, parameter, flow):
    """The gradient after communication."""
    dtype = job.formats.reduced
    places = sorted({addend for addend, _ in flow.grads})
    if job.each_reduced:
        each = [
            along(job, parameter, {at: flow.grads[at, index] for at in places}).to(dtype)
            for index in range(job.microbatches)
        ]
        flow.reduced = sums.accumulate(each, dtype)
        return
    summed = flow.accumulated or {
        at: sums.accumulate([own for (of, _), own in flow.grads.items() if of == at], job.formats.accumulator)
        for at in places
    }
    flow.reduced = along(job, parameter, summed).to(dtype)


def unscale(job, step):
    """The loss scale taken out, by the function of torch's GradScaler."""
    if job.loss_scale is None:
        return
    found, inverse = torch.zeros(()), torch.tensor(1.0 / job.loss_scale, dtype=torch.float64).float()
    for flow in step.flows.values():
        dtype = torch.float32 if flow.reduced.dtype == torch.float16 else flow.reduced.dtype
        flow.unscaled = flow.reduced.to(dtype, copy=True)
        if flow.unscaled.numel():
            torch._amp_foreach_non_finite_check_and_unscale_([flow.unscaled], found, inverse)
    step.skipped = bool(found)


def pieces(job, parameters, step):
    """The parts of the last gradients, by the rank that counts them: each element once."""
    found, seen = {}, set()
    for rank in range(job.mesh.world):
        for parameter in parameters:
            box = parameter.box(parameter.value_cut, job.mesh, rank)
            if (parameter.name, box) not in seen:
                seen.add((parameter.name, box))
                found.setdefault(rank, []).append(box.cut(step.flows[parameter.name].last))
    return found


def norm_of(job, parameters, step):
    """The norm as some job computes it: in the gradients' format, in f32, or on the host."""
    kind, way = job.clip["kind"], job.clip["norm"]
    own = pieces(job, parameters, step)
    if math.isinf(kind):
        # torch has no largest element of none.
        own = {rank: kept for rank, all_ in own.items() if (kept := [one for one in all_ if one.numel()])}
    if not own:
        return torch.zeros(())
    norm = torch.nn.utils.get_total_norm
    if way == "torch" and len(own) == 1:
        return norm(next(iter(own.values())), kind)
    longer = torch.promote_types(job.formats.reduced, torch.float32)
    each = [norm([tensor.to(longer) for tensor in tensors], kind) for tensors in own.values()]
    if math.isinf(kind):
        return torch.stack(each).max()
    if way == "host":
        return torch.tensor(math.fsum(float(one) ** kind for one in each) ** (1 / kind), dtype=torch.float64)
    return torch.stack([one**kind for one in each]).sum() ** (1 / kind)


def clip(job, trained, step):
    """Clipping as the job does it, of all parameters or of each optimizer's."""
    way = job.clip["way"]
    if way == "none" or not trained:
        return
    if way == "value":
        largest = max((float(flow.last.abs().max()) for flow in step.flows.values() if flow.last.numel()), default=1.0)
        step.clip_value = job.clip["bound"] * largest if math.isfinite(largest) else 1.0
        if step.clip_value == 0 or not math.isfinite(step.clip_value):
            step.clip_value = 1.0
        for flow in step.flows.values():
            # torch does not clamp to what the format of the gradient does not hold.
            step.clip_value = min(step.clip_value, torch.finfo(flow.last.dtype).max)
        for flow in step.flows.values() if not step.skipped else ():
            flow.clipped = flow.last.clamp(-step.clip_value, step.clip_value)
        return
    groups = {}
    for parameter in trained:
        groups.setdefault(parameter.place if way == "groups" else 0, []).append(parameter)
    for parameters in groups.values():
        clip_to_norm(job, parameters, step)


def clip_to_norm(job, parameters, step):
    """One norm, and the gradients that are clipped by it."""
    flows = [step.flows[parameter.name] for parameter in parameters]
    norm = norm_of(job, parameters, step)
    if not step.skipped and not math.isfinite(float(norm)):
        raise NoNumbers
    bound = job.clip["bound"]
    largest = bound * float(norm) if math.isfinite(bound) and math.isfinite(float(norm)) else bound
    applied = job.clip["applied"]
    if applied == "divided" and flows[0].last.dtype == torch.float16:
        # The quotient by the norm vanishes in f16: nobody clips so.
        applied = "torch"
    epsilon = 0.0 if applied == "divided" else 1e-6
    measured = job.clip["way"] == "measured" or (applied == "divided" and float(norm) == 0)
    measured |= applied == "torch" and norm.dtype == torch.float16 and float(norm) < LEAST_NORM
    step.norms.append({
        "value": float(norm), "kind": job.clip["kind"],
        "max_norm": None if measured else largest, "epsilon": None if measured else epsilon,
        "of": "unscaled" if flows[0].unscaled is not None else "reduced",
        "parameters": parameters,
    })  # fmt: skip
    for flow in () if measured or step.skipped else flows:
        flow.clipped = clipped(flow.last, norm, largest, applied)


def clipped(gradient, norm, largest, applied):
    """The gradient clipped to a norm: as torch does it, by a number of the host, or divided."""
    if applied == "torch":
        return gradient * (largest / (norm + 1e-6)).clamp(max=1.0)
    if applied == "host":
        coefficient = largest / (float(norm) + 1e-6)
        return gradient * coefficient if coefficient < 1 else gradient.clone()
    if float(norm) <= largest:
        return gradient.clone()
    return gradient / norm.to(gradient.dtype) * largest


def finite(tensor):
    if not bool(torch.isfinite(tensor).all()):
        raise NoNumbers
    return tensor


def warm_gradients(job, draw):
    """Gradients of steps before this one, by step and parameter; what a later step has not is None."""
    other = float(10 ** draw.uniform(-1, 1))
    kept = []
    for _ in range(job.warm_steps):
        each = {}
        for parameter in job.parameters:
            scale = parameter.scale * other
            made = values.gradients(draw, parameter.shape, parameter.kind, scale, 1, torch.float32)[0]
            each[parameter.name] = made if parameter.state == "trained" or draw.random() < 0.5 else None
        kept.append(each)
    return kept


def initial(job, draw):
    """The parameters before the first step, in the optimizer's format."""
    formats, made = job.formats, {}
    for parameter in job.parameters:
        made[parameter.name] = values.parameter(draw, parameter.shape, formats.working).to(formats.updated)
    return made


def optimize(job, step, start, warm, rank):
    """Runs the optimizers on what a rank holds: for each parameter what is recorded of it."""
    dtype, own = job.formats.updated, {}
    for parameter in job.parameters:
        box = parameter.box(parameter.value_cut, job.mesh, rank)
        value = box.cut(start[parameter.name]).clone()
        if parameter.transposed and value.ndim == 2:
            value = value.t().contiguous().t()
        own[parameter.name] = (parameter, box, value)
    optimizers = []
    for at, (rule, settings) in enumerate(job.optimizers):
        groups = [
            ([value for p, _, value in own.values() if p.place == (at, group) and p.same_as is None], other)
            for group, other in enumerate(settings)
        ]
        optimizers.append(rules.build(rule, groups) if any(params for params, _ in groups) else None)
    built = [optimizer for optimizer in optimizers if optimizer is not None]
    for gradients in warm:
        for name, (_, box, value) in own.items():
            gradient = gradients[name]
            value.grad = None if gradient is None else laid(box.cut(gradient).to(dtype), value)
        step_all(built)
    for optimizer in built:
        rules.advance(optimizer, job.late_steps)
    records = {
        name: {"before": value.clone(), "state": state_of(optimizers, parameter, value)}
        for name, (parameter, _, value) in own.items()
    }
    if not step.skipped:
        for name, (_, box, value) in own.items():
            flow = step.flows.get(name)
            value.grad = None if flow is None else laid(box.cut(flow.last).to(dtype), value)
        step_all(built)
    for name, (parameter, _, value) in own.items():
        state = state_of(optimizers, parameter, value)
        # Weights that the working copy cannot hold are none that anybody would keep either.
        finite(value.to(job.formats.working))
        [finite(entry) for entry in state.values()]
        records[name] |= {"after": value.clone(), "state_after": state}
    return optimizers, records


def step_all(optimizers):
    try:
        for optimizer in optimizers:
            optimizer.step()
    except TypeError as error:
        if is_torchs(error):
            raise NoNumbers from error
        raise


def laid(gradient, value):
    """A gradient that lies in memory as the parameter does."""
    return gradient.clone() if value.is_contiguous() else gradient.t().contiguous().t()


def state_of(optimizers, parameter, value):
    """Copies of the optimizer's state of a parameter."""
    optimizer = optimizers[parameter.place[0]]
    state = {} if optimizer is None else optimizer.state.get(value, {})
    return {
        name: entry.clone() if isinstance(entry, torch.Tensor) else torch.tensor(float(entry))
        for name, entry in state.items()
        if entry is not None
    }
