"""Pictures of the causes of a step, as SVG, each from the two dumps of a plant: with the fault and without.

- of a sum: what each gradient is multiplied by in it, solved from the captured numbers, as bars;
- of a norm: what was reported, beside the squares of the parameters of which it is the norm, as bars;
- of all other stages: each element as it was captured over what it is without the fault, as points. Where
  the two are nearly the same, their difference.
"""

import json

import numpy as np

import backtape

WRONG, RIGHT, GREY = "#dd6b3a", "#6d9fcb", "#999"
TEXT = 'font-family="sans-serif" font-size="11" fill="#333"'
WIDTH = 440
# Points of a picture: an even choice of the elements.
MOST_POINTS = 160
# A difference that is smaller beside the largest value is drawn by itself.
NEAR = 0.02
# A number that is smaller beside the largest is what rounding leaves of zero.
NOTHING = 1e-6


class Dump:
    """What each rank holds of the step, from its own files: copies may differ, that is the fault."""

    def __init__(self, folder, step):
        self.whole = backtape.open(folder).step(step)
        self.held = {}
        for path in sorted(folder.glob(f"step-{step:08}/rank-*.safetensors")):
            raw = path.read_bytes()
            length = int.from_bytes(raw[:8], "little")
            header = json.loads(raw[8 : 8 + length])
            for shard in json.loads(header["__metadata__"]["backtape"])["shards"]:
                entry = header[shard["entry"]]
                begin, end = (8 + length + at for at in entry["data_offsets"])
                key = shard["tensor"], shard["rank"], shard["microbatch"]
                self.held[key] = values(raw[begin:end], shard["dtype"]).reshape(entry["shape"])

    def names(self, prefix=""):
        return sorted({name for name, _, _ in self.held if name.startswith(prefix)})

    def tensor(self, name, rank, microbatch=None):
        """A tensor of one rank in f64."""
        return self.held[name, rank, microbatch]

    def declared(self, rank):
        return json.loads(bytes(self.held[f"step.declared:{rank}", rank, None].astype(np.uint8)))


def values(raw, dtype):
    """The numbers of a shard in f64."""
    if dtype == "bf16":
        return (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return np.frombuffer(raw, {"f32": "<f4", "u8": "u1", "i64": "<i8"}[dtype]).astype(np.float64)


def addends(dump, parameter, ranks):
    """The gradients that may be in a sum, with a label for each."""
    found = []
    for rank in range(ranks):
        label = f"rank {rank} " if ranks > 1 else ""
        own = [key for key in dump.held if key[:2] == (f"step.grad:{parameter}", rank)]
        found += [(f"{label}mb {key[2]}", dump.held[key]) for key in sorted(own)]
        stale = dump.held.get((f"step.stale:{parameter}", rank, None))
        found += [(f"{label}before", stale)] if stale is not None else []
    return found


def coefficients(dump, parameter, ranks, rank):
    """What each gradient is multiplied by in the reduced one: the least-squares solution."""
    named = addends(dump, parameter, ranks)
    total = dump.tensor(f"step.reduced:{parameter}", rank).ravel()
    matrix = np.stack([gradient.ravel() for _, gradient in named], axis=1)
    solved = np.linalg.lstsq(matrix, total, rcond=None)[0]
    return {label: float(value) for (label, _), value in zip(named, solved)}


def reported(dump, ranks):
    """The norm that each rank has; one entry where all have the same."""
    found = {}
    for rank in range(ranks):
        norm = dump.declared(rank)["norms"][0]
        found[f"rank {rank}"] = float(norm["value"] if norm["value"] is not None else norm["local"])
    return found if len({f"{value:.6g}" for value in found.values()}) > 1 else {"": found["rank 0"]}


def frame(cause, below, height, body):
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}">',
            f"<title>{cause}: {below}</title>",
            '<rect width="100%" height="100%" fill="#fff"/>',
            f'<text x="16" y="18" {TEXT} font-weight="bold">{cause}</text>',
            f'<text x="16" y="34" {TEXT}>{below}</text>',
            *body,
            "</svg>\n",
        ]
    )


def legend(y):
    """Which colour is which."""
    parts = []
    for x, colour, word in ((16, WRONG, "with the fault"), (126, RIGHT, "without")):
        parts.append(f'<rect x="{x}" y="{y}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 14}" y="{y + 9}" {TEXT}>{word}</text>')
    return parts


def bars(cause, below, rows):
    """Rows of a label and the numbers of both runs; None where a run has none."""
    left, room, line, y = 150, 200, 30, 46
    all_values = [abs(value) for _, pair in rows for value in pair if value is not None]
    largest, least = max(all_values, default=1.0) or 1.0, min(0.0, *(v for _, p in rows for v in p if v is not None))
    zero = left + room * (-least / (largest - least))
    body = []
    for label, pair in rows:
        body.append(f'<text x="{left - 8}" y="{y + 16}" {TEXT} text-anchor="end">{label}</text>')
        for value, colour, down in zip(pair, (WRONG, RIGHT), (2, 14)):
            if value is None:
                continue
            width = room * abs(value) / (largest - least)
            x = zero if value >= 0 else zero - width
            box = f'x="{x:.1f}" y="{y + down}" width="{max(width, 1):.1f}" height="10"'
            body.append(f'<rect {box} fill="{colour}"/>')
            at = f'x="{max(x + width, zero) + 5:.1f}" y="{y + down + 9}"'
            word = f"{value:.4g}" if abs(value) > NOTHING * largest else "0"
            body.append(f"<text {at} {TEXT}>{word}</text>")
        y += line
    return frame(cause, below, y + 24, [*body, *legend(y + 6)])


def points(cause, below, right, captured, plot=190):
    """Each element of the captured tensor over what it is without the fault."""
    right, captured = right.ravel(), captured.ravel()
    keep = np.unique(np.linspace(0, len(right) - 1, min(len(right), MOST_POINTS)).astype(int))
    x, y = right[keep], captured[keep]
    gap, largest = np.abs(captured - right).max(), np.abs(right).max()
    is_near = 0 < gap < NEAR * largest
    wide = np.abs(x).max() if is_near else max(np.abs(x).max(), np.abs(y).max())
    tall = np.abs(captured - right).max() if is_near else wide
    y = y - x if is_near else y
    left, top, half = 96, 48, plot / 2
    at = lambda value, scale, sign: half + sign * half * value / (scale or 1.0)
    spots = "".join(
        f"M{left + at(a, wide, 1):.0f} {top + at(b, tall, -1):.0f}h0" for a, b in zip(x, y)
    )
    line = f"M{left} {top + half}h{plot}" if is_near else f"M{left} {top + plot}l{plot} -{plot}"
    vertical = "captured - right" if is_near else "captured"
    body = [
        f'<rect x="{left}" y="{top}" width="{plot}" height="{plot}" fill="#f7f7f7" stroke="{GREY}"/>',
        f'<path d="M{left} {top + half}h{plot}M{left + half} {top}v{plot}" stroke="#ddd"/>',
        f'<path d="{line}" stroke="{RIGHT}" fill="none"/>',
        f'<path d="{spots}" stroke="{WRONG}" stroke-width="3.4" stroke-linecap="round"/>',
        f'<text x="{left - 6}" y="{top + 10}" {TEXT} text-anchor="end">{tall:.2g}</text>',
        f'<text x="{left - 6}" y="{top + half + 4}" {TEXT} text-anchor="end">{vertical}</text>',
        f'<text x="{left + plot}" y="{top + plot + 14}" {TEXT} text-anchor="end">{wide:.2g}</text>',
        f'<text x="{left + half}" y="{top + plot + 14}" {TEXT} text-anchor="middle">right</text>',
        f'<text x="{left + plot + 14}" y="{top + 14}" {TEXT}>a point: an element</text>',
        f'<text x="{left + plot + 14}" y="{top + 30}" {TEXT}>blue line: a right job</text>',
    ]
    return frame(cause, below, top + plot + 26, body)


def of_sum(plant, told, dumps):
    """A sum by its addends, or by its elements where no coefficient is wrong."""
    parameter, rank = told["parameter"], told["rank"]
    pair = [coefficients(dump, parameter, plant.ranks, rank) for dump in dumps]
    differ = any(abs(pair[0][label] - pair[1].get(label, 0.0)) > 0.02 for label in pair[0])
    where = f"{parameter} on rank {rank}" if plant.ranks > 1 else parameter
    if not differ:
        both = [dump.tensor(f"step.reduced:{parameter}", rank) for dump in dumps]
        return points(plant.cause, f"the reduced gradient of {where}", both[1], both[0])
    rows = [(label, (value, pair[1].get(label))) for label, value in pair[0].items()]
    return bars(plant.cause, f"what gradients are multiplied by in the sum: {where}", rows)


def of_norm(plant, told, dumps):
    """The norm that was reported, and the squares of all parameters."""
    pair = [reported(dump, plant.ranks) for dump in dumps]
    (right,) = pair[1].values()
    rows = [
        (f"norm² {label}".strip(), (value**2, right**2)) for label, value in pair[0].items()
    ]
    squares = []
    for name in dumps[1].names("step.reduced:"):
        whole = np.asarray(dumps[1].whole.tensor(name)).astype(np.float64)
        squares.append((name.partition(":")[2], float((whole**2).sum())))
    squares.sort(key=lambda pair: -pair[1])
    rows += [(f"of {name}", (None, value)) for name, value in squares[:6]]
    return bars(plant.cause, "the square of the norm, and of the largest gradients in it", rows)


def ends(dump, parameter, rank, stage):
    """What a stage makes, by its name: the first that is another is drawn."""
    part = lambda name: dump.held.get((f"step.{name}:{parameter}", rank, None))
    gradient = part("clipped") if part("clipped") is not None else part("reduced")
    # A rank that took no step has recorded none.
    stepped = part("after") is not None
    change = part("after") - part("before") if stepped else np.zeros_like(part("reduced"))
    states = {
        name: dump.tensor(name, rank)
        for name in dump.names("step.state_after.")
        if name.partition(":")[2] == parameter and (name, rank, None) in dump.held
    }
    state_words = lambda name: name.removeprefix("step.state_after.").partition(":")[0]
    return {
        "unscale": {"the unscaled gradient": part("unscaled")},
        "clip": {"the gradient that the optimizer takes": gradient},
        "state": {f"{state_words(name)} after the step": value for name, value in states.items()}
        | {"the change of the parameter": change},
        "update": {"the change of the parameter": change},
        "param": {"the parameter after the step": part("after")},
    }[stage]


def of_elements(plant, told, dumps):
    """What the stage makes, element by element."""
    where = told["parameter"], told["rank"], told["stage"]
    wrong, right = (ends(dump, *where) for dump in dumps)
    for what, value in wrong.items():
        if np.abs(value - right[what]).max() > 1e-6 * np.abs(right[what]).max():
            return points(plant.cause, f"{what}: {told['parameter']}", right[what], value)
    raise ValueError(f"{plant.cause}: nothing of {told['parameter']} differs")


def picture(plant, told, dumps):
    """The picture of a plant. told: stage, parameter and rank of its first divergence. dumps: with
    the fault and without."""
    kind = {"accumulate": of_sum, "reduce": of_sum, "norm": of_norm}.get(told["stage"], of_elements)
    return kind(plant, told, dumps)
