"""Records a run of simulated torch jobs."""

import functools

import numpy as np
import torch

from step_campaign import job as jobs
from step_campaign import captured, recording, step

torch.set_num_threads(1)


def record(seed, number, indices, directory, attempts):
    """Records the jobs of these indices as steps of one run; says what each is."""
    draw = np.random.default_rng([seed, number, 0xABCD])
    kind, mesh = jobs.meshes(draw)
    ranks = recording.Ranks(directory, mesh, len(indices))
    described = []
    try:
        for at, index in enumerate(indices):
            if kind == "captured":
                described.append(captured.record(seed, index, ranks.recorders[0], at, attempts))
                continue
            job, write = simulated(seed, index, kind, mesh, attempts)
            ranks.record(at, write)
            described.append(description(kind, job))
    finally:
        ranks.close()
    return described


def simulated(seed, index, kind, mesh, attempts):
    """A job whose numbers are finite, and what records it."""
    for attempt in range(attempts):
        draw, job = jobs.job_of(seed, index, attempt, kind, mesh)
        try:
            done = step.run(job, draw)
            start, warm = step.initial(job, draw), step.warm_gradients(job, draw)
            optimized = functools.cache(functools.partial(step.optimize, job, done, start, warm))
            first = {}
            by_boxes = {}
            for rank in range(mesh.world):
                boxes = tuple(own.box(own.value_cut, mesh, rank) for own in job.parameters)
                first[rank] = by_boxes.setdefault(boxes, rank)
                optimized(first[rank])
        except step.NoNumbers:
            continue
        return job, recording.writer(job, done, lambda rank: optimized(first[rank]))
    raise RuntimeError(f"job {index}: no finite numbers in {attempts} draws")


def description(kind, job):
    """A job in a few words."""
    names = ", ".join(f"{rule[0]} {rule[2]}" for rule, _ in job.optimizers)
    formats = job.formats
    dtypes = [formats.working, formats.gradient, formats.accumulator, job.sent, formats.reduced, formats.updated]
    short = "/".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return (
        f"{kind} {job.mesh.sizes}, {names}, {short}, {job.microbatches} microbatches, {job.order}, "
        f"{job.division}, clip {job.clip['way']}"
    )
