"""Pictures of the causes that no cell of one captured tensor shows.

- lse-cancellation: the loss is one number, and what is right beside it, the gradients, is the other half
  of what there is to see. Bars: how far each captured stage is off, with the fault and without.
- replica-divergence, sync-wrong-microbatch: no stage of the head is off; ranks that should hold the same bits
  do not. Cells: the largest difference between two ranks' copies.
- duplicate-batch: the corpus plants it in the data, where the arithmetic is right and only `replay checks` can
  see it. The picture is of the other half of that cause, gradients of another microbatch's data.
"""

import json
from dataclasses import replace

import numpy as np

import backtape

# pictures.py has put tests/ on the path.
from corpus.case import Case
from corpus.families.data import on_other_data
from corpus.families.scale import code_for, kept_for
from corpus.job import draw_job
from drawing import LEVELS, cells, svg

# What is captured of each microbatch, in the order of the computation.
STAGES = ("lse", "label_logits", "loss", "dq", "dk")
# Decades of the bars: from the rounding of f32 to as large as the stage itself.
DECADES = (-8, 0)


def second_microbatch_of_the_first_data(rng, seed) -> Case:
    """The loader hands out the first microbatch twice, after the second one was recorded."""
    job = draw_job(rng, seed, microbatches=2)
    used = replace(job, microbatches=[job.microbatches[0], dict(job.microbatches[0])])
    code = code_for(rng, job)
    return on_other_data("duplicate-batch", job, kept_for(rng, code), code, used, {})


def errors(dump):
    """How far what was captured is off, for each tensor and microbatch: relative, Frobenius norm."""
    step, found = backtape.open(dump).step(0), {}
    keys = [key for key in step.keys() if key[0] in STAGES and key[1] is not None]
    for name, microbatch, when in sorted(keys, key=lambda key: (STAGES.index(key[0]), key[1])):
        captured = step.tensor(name, microbatch, when=when).astype(np.float64)
        reference = step.stage(name, microbatch)
        off = np.linalg.norm(captured - reference) / np.linalg.norm(reference)
        found[f"{name} mb {microbatch}"] = float(off)
    return found


def bars(cause, pair):
    """Two columns of bars, logarithmic, each with its number beside it."""
    label, room, value, line, top = 96, 150, 64, 18, 52
    column = label + room + value
    text = 'font-family="sans-serif" font-size="11" fill="#333"'
    height = top + line * len(pair[0]) + 34
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * column + 40}" height="{height}">',
        f"<title>{cause}: error of each captured stage</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
        f'<text x="20" y="18" {text} font-weight="bold">{cause}</text>',
        f'<text x="20" y="34" {text}>error of what was captured against the stage recomputed in f64, relative</text>',
    ]
    for index, (title, found) in enumerate(zip(("with the fault", "without"), pair)):
        left = 20 + index * column
        out.append(f'<text x="{left + label}" y="{top - 4}" {text}>{title}</text>')
        for at, (name, off) in enumerate(found.items()):
            y = top + at * line
            share = (np.log10(max(off, 1e-300)) - DECADES[0]) / (DECADES[1] - DECADES[0])
            width = room * min(max(share, 0.0), 1.0)
            out.append(f'<text x="{left + label - 6}" y="{y + 13}" {text} text-anchor="end">{name}</text>')
            colour = "#dd6b3a" if name.startswith("loss") else "#6d9fcb"
            out.append(f'<rect x="{left + label}" y="{y + 3}" width="{width:.1f}" height="12" fill="{colour}"/>')
            out.append(f'<text x="{left + label + width + 5:.1f}" y="{y + 13}" {text}>{off:.1e}</text>')
    small = text.replace('"11"', '"9"')
    out.append(f'<text x="20" y="{height - 12}" {small}>logarithmic, from 1e{DECADES[0]} to 1</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def copies(dump):
    """What each rank holds of the reduced dk, from its own shard file."""
    found = {}
    for path in sorted(dump.glob("step-*/rank-?????.safetensors")):
        raw = path.read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        (record,) = [
            shard
            for shard in json.loads(header["__metadata__"]["backtape"])["shards"]
            if (shard["tensor"], shard["when"]) == ("dk", "post_reduce")
        ]
        entry = header[record["entry"]]
        begin, end = entry["data_offsets"]
        bits = np.frombuffer(raw[8 + length + begin : 8 + length + end], {"f32": "<f4"}[record["dtype"]])
        found[record["rank"]] = bits.reshape(entry["shape"]).astype(np.float64)
    return found


def furthest(held):
    """The rank whose copy differs most from the others', and another to hold it against."""
    apart = {rank: sum(np.linalg.norm(copy - other) for other in held.values()) for rank, copy in held.items()}
    odd = max(apart, key=apart.get)
    return odd, next(rank for rank in held if rank != odd)


def of_losses(cause, report, dump, twin):
    """The stages as bars: only the loss has one number."""
    return bars(cause, [errors(dump), errors(twin)])


def of_replicas(cause, report, dump, twin):
    """What two ranks hold of one tensor, which should be the same bits."""
    held, right = copies(dump), copies(twin)
    odd, other = furthest(held)
    shape = held[odd].shape
    title = f"the reduced dk, {shape[0]} x {shape[1]}: rank {odd}'s copy and rank {other}'s"
    pair = [cells(of[odd], of[other]) for of in (held, right)]
    if not pair[0].max() >= LEVELS[0][0]:
        return None  # Copies may differ by less than any colour shows.
    return svg(cause, title, title + "; classes down", pair, "largest difference in a cell, over the rms of dk")


# Causes whose run is not the corpus's own, and causes that are drawn otherwise.
PLANTS = {"duplicate-batch": second_microbatch_of_the_first_data}
DRAWN = {"lse-cancellation": of_losses, "replica-divergence": of_replicas, "sync-wrong-microbatch": of_replicas}
