"""Writes the steps of simulated ranks by the real recorder, one recorder for each rank, as docs/step.md says."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch

import backtape
from backtape.step_torch.optimizers import as_json, hyper_parameters, number_of
from step_campaign import step as steps
from step_campaign.values import name_of

SKIPPED = "GradScaler left the optimizer's step out"


class Ranks:
    """The recorders of all ranks of a run, of which each step is a job."""

    def __init__(self, directory, mesh, count):
        self.recorders = [
            backtape.Recorder(
                directory, steps=f"0-{count - 1}", rank=rank, world_size=mesh.world,
                mesh=mesh.sizes or None, strict=True,
            )
            for rank in range(mesh.world)
        ]  # fmt: skip

    def record(self, index, write):
        """Calls `write(rank, tape)` for each rank."""
        for rank, recorder in enumerate(self.recorders):
            with recorder.step(index) as tape:
                write(rank, tape)

    def close(self):
        with ThreadPoolExecutor(len(self.recorders)) as pool:
            list(pool.map(lambda recorder: recorder.close(), self.recorders))


def writer(job, step, optimized):
    """What records a step. optimized: by rank, the optimizers and what they did."""

    def write(rank, tape):
        optimizers, records = optimized(rank)
        parameters = {}
        for parameter in job.parameters:
            if parameter.same_as is None:
                gradients(job, parameter, step.flows.get(parameter.name), rank, tape)
            own = records[parameter.name]
            scalars = {} if parameter.same_as else values(job, parameter, own, rank, tape, step.skipped)
            parameters[parameter.name] = declared(job, parameter, rank, scalars, step.skipped)
        text = json.dumps(declaration(job, step, rank, parameters, optimizers), allow_nan=False)
        tape.record(f"step.declared:{rank}", np.frombuffer(text.encode(), np.uint8))

    return write


def put(tape, stage, parameter, tensor, place, **key):
    """Records a tensor; of a run that has no elements nothing."""
    if "flat_offset" in place and not tensor.numel():
        return
    tape.record(f"step.{stage}:{parameter.name}", tensor, **place, **key)


def addend_place(job, parameter, rank):
    """Where an addend lies, as options of `record`."""
    if parameter.gradient_cut is None:
        return {"partial": "sum"}
    axis, dimension = parameter.gradient_cut
    return {"placement": {own: "sum" for own in parameter.summed} | {axis: dimension}}


def value_place(job, parameter, rank):
    """Where values lie: as a box, or as a dimension that an axis cuts."""
    box = parameter.box(parameter.value_cut, job.mesh, rank)
    if parameter.value_cut and parameter.value_cut[1] is not None and job.by_placement:
        axis, dimension = parameter.value_cut
        return {"placement": {axis: dimension}}
    return box.where(parameter.shape)


def gradients(job, parameter, flow, rank, tape):
    """The gradient of a parameter as this rank has it at each stage."""
    if flow is None:
        return
    at, box = steps.addend_of(job, parameter, rank), parameter.box(parameter.gradient_cut, job.mesh, rank)
    place = addend_place(job, parameter, rank) | {"when": "pre_reduce"}
    for (addend, microbatch), gradient in sorted(flow.grads.items(), key=lambda item: item[0]):
        if addend == at:
            put(tape, "grad", parameter, box.cut(gradient), place, microbatch=microbatch)
    if at in flow.accumulated:
        put(tape, "accumulated", parameter, box.cut(flow.accumulated[at]), place)
    if job.stale_zeros:
        put(tape, "stale", parameter, torch.zeros_like(box.cut(next(iter(flow.grads.values())))), place)
    box, place = parameter.box(parameter.value_cut, job.mesh, rank), value_place(job, parameter, rank)
    for stage in ("reduced", "unscaled", "clipped"):
        tensor = getattr(flow, stage)
        if tensor is not None:
            put(tape, stage, parameter, box.cut(tensor), place)


def values(job, parameter, own, rank, tape, skipped):
    """Parameter and state before and after the step; the numbers of the state are returned."""
    place, scalars = value_place(job, parameter, rank), {}
    if skipped:
        return scalars
    for when, state in (("before", own["state"]), ("after", own["state_after"])):
        value = own[when]
        if job.formats.has_master:
            put(tape, f"master_{when}", parameter, value, place)
        put(tape, when, parameter, value.to(job.formats.working), place)
        for name, entry in state.items():
            number = number_of(entry, name, value)
            if number is None:
                put(tape, f"state_{when}.{name}", parameter, entry, place)
            else:
                scalars.setdefault(name, [None, None])[when == "after"] = number
    return scalars


def declared(job, parameter, rank, scalars, skipped):
    """What a rank declares of a parameter."""
    reduce = []
    for axis, axes, op, divisor in parameter.reduce if parameter.state == "trained" else ():
        entry = {"axis": axis, "op": op, "ranks": job.mesh.group(rank, axes), "dtype": name_of(job.sent)}
        reduce.append(entry | ({"divisor": divisor} if divisor else {}))
    absent = {}
    if parameter.state != "trained":
        absent = {"grad": "no backward pass reached it", "reduced": "it has no .grad"}
    if skipped:
        absent |= {"before": SKIPPED, "after": SKIPPED, "state": SKIPPED}
    return {
        "optimizer": parameter.place[0], "group": parameter.place[1],
        "trainable": parameter.state != "frozen", "reduce": reduce, "same_as": parameter.same_as,
        "scalars": scalars, "absent": absent,
    }  # fmt: skip


def declaration(job, step, rank, parameters, optimizers):
    """What a rank declares."""
    norms = [
        {name: as_json(value) for name, value in norm.items() if name != "parameters"}
        | {"parameters": [own.name for own in norm["parameters"]]}
        for norm in step.norms
    ]
    told = [
        {
            "name": rule[0], "module": "torch.optim", "skipped": step.skipped, "steps": 1,
            "groups": [] if optimizer is None else [hyper_parameters(group) for group in optimizer.param_groups],
        }
        for (rule, _), optimizer in zip(job.optimizers, optimizers)
    ]  # fmt: skip
    return {
        "version": 1, "rank": rank, "framework": f"torch {torch.__version__}",
        "microbatches": job.microbatches, "loss_scale": job.loss_scale, "skipped": step.skipped,
        "norms": norms, "clip_value": step.clip_value, "parameters": parameters, "optimizers": told,
    }  # fmt: skip
