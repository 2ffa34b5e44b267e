"""How much a fault changed what the tape holds, beside what rounding alone did.

The gradient of the same inputs in f64, by numpy and by the textbook's formulas: it shares nothing
with the programs nor with the replay.
"""

from dataclasses import dataclass, replace

import numpy as np

from corpus.record import STAGES, names_of

# Deviations of a statistic that nobody takes for chance.
SEEN = 5.0


def gradients(job, mb, rank):
    """Every value of the head of one rank's tokens, f64."""
    o, rows, data = job.options, job.rows(rank), job.microbatches[mb]
    q, k = data["q"][rows].astype(np.float64), job.k.astype(np.float64)
    labels, weights = data["labels"][rows].astype(np.int64), job.counted(mb)[rows]
    counts = labels != o.ignore_label if o.ignore_label is not None else np.full(labels.shape, True)
    labels, classes = np.where(counts, labels, 0), job.classes
    z1 = (q @ k.T + (0 if job.bias is None else job.bias.astype(np.float64))) / o.temperature
    slope = np.full_like(z1, 1 / o.temperature)
    z = z1
    if o.softcap:
        z = o.softcap * np.tanh(z1 / o.softcap)
        slope = slope * (1 - (z / o.softcap) ** 2)
    if o.valid_vocab is not None:
        padding = np.arange(job.vocab) >= classes
        z = np.where(padding, -np.inf if o.mask_value is None else o.mask_value, z)
        slope = np.where(padding, 0, slope)
    top = z.max(-1, keepdims=True)
    lse = (top + np.log(np.exp(z - top).sum(-1, keepdims=True)))[:, 0]
    at = np.arange(labels.size)
    own, s = z[at, labels], o.smoothing(classes)
    losses = lse - (1 - s) * own + o.z_loss * lse**2
    if s:
        losses = losses - s * z[:, :classes].mean(-1)
    n = job.denominator(mb) or 1.0  # without a token that counts the loss is 0
    g = o.cotangent * weights / n
    dense = (g * (1 + 2 * o.z_loss * lse))[:, None] * np.exp(z - lse[:, None])
    if s:
        dense[:, :classes] -= (g * s / classes)[:, None]
    label = np.zeros_like(z)
    label[at, labels] = -g * (1 - s)
    dense, label = dense * slope, label * slope
    found = {"lse": lse, "label_logits": own, "loss": float((weights * losses).sum() / n), "logits": z}
    for name, d in (("_lse", dense), ("_label", label)):
        found |= {f"dq{name}": d @ k, f"dk{name}": d.T @ q}
    found |= {"dq": found["dq_lse"] + found["dq_label"], "dk": found["dk_lse"] + found["dk_label"]}
    return found | {"dlogits": dense + label, "dbias": (dense + label).sum(0)}


@dataclass
class Effect:
    """Of one stage, the tensor in which it shows most."""

    stage: str
    change: float  # ‖faulty - fixed‖ / ‖fixed‖
    rounding: float  # ‖fixed - f64‖ / ‖f64‖
    ratio: float  # ‖faulty - f64‖ / ‖fixed - f64‖
    seen: float  # in how many deviations its energy or its slope leaves the twin's

    @property
    def standing(self):
        if self.change == 0:
            return "identical"
        if not self.seen < SEEN or not self.ratio < 2:
            return "clear" if not self.ratio < 1.5 else "weak"
        return "below"


def tensors(job, captured, kept, reference=False):
    """{(stage, mb, rank): array} of all that is recorded, in the order of the stages."""
    wanted, found = names_of(kept), {}
    for mb, held in enumerate(captured.forward):
        ideal = [gradients(job, mb, rank) for rank in range(job.ranks)] if reference else None
        for name in wanted & held.keys():
            value = np.asarray(held[name])
            if ideal is not None:
                parts = [one[name] for one in ideal]
                value = np.asarray(sum(parts)) if value.ndim == 0 else np.concatenate(parts)
            found[name, mb, None] = value
        for name in wanted & captured.addends[mb].keys():
            for rank, value in enumerate(captured.addends[mb][name]):
                found[name, mb, rank] = ideal[rank][name] if ideal is not None else value
    if kept.accumulated:
        for rank, value in enumerate(captured.accumulated):
            own = [mb["dk"][rank].astype(np.float64) for mb in captured.addends]
            found["accumulate", None, rank] = total(job, own) if reference else value
    if kept.reduced and captured.reduced is not None:
        sums = [mb["dk"] for mb in captured.addends]
        ideal = lambda: total(job, [sum(x.astype(np.float64) for x in own) for own in sums])
        for rank, value in enumerate(captured.replicas or [captured.reduced]):
            found["reduce", None, rank] = ideal() if reference else value
    order = {stage: index for index, stage in enumerate(STAGES)}
    return dict(sorted(found.items(), key=lambda item: order[item[0][0]]))


def total(job, addends):
    mean = job.options.microbatch_reduction == "mean"
    return sum(addends) / (job.count if mean else 1)


def compared(stage, faulty, fixed, ideal):
    """One tensor's effect."""
    a, b, c = (np.atleast_1d(np.asarray(x)).astype(np.float64) for x in (faulty, fixed, ideal))
    if a.shape != b.shape:
        return Effect(stage, np.inf, 0.0, np.inf, np.inf)
    if ((a == b) | (np.isnan(a) & np.isnan(b))).all():
        return Effect(stage, 0.0, 0.0, 1.0, 0.0)
    masked = ~np.isfinite(b) | (np.abs(b) > 1e30)
    a, b, c = (np.where(masked, 0.0, x) for x in (a, b, c))
    if not np.isfinite(a).all():
        return Effect(stage, np.inf, 0.0, np.inf, np.inf)
    norm = lambda x: float(np.linalg.norm(x)) or 1e-300
    # A tensor of few elements may be right by chance: no less than what a few roundings do.
    own = max(norm(b - c), 2.0**-23 * norm(c))
    energy = ((norm(a - c) / own) ** 2 - 1) * np.sqrt(c.size / 2)
    slope = abs(float(np.vdot(a - b, c))) / norm(c) / (own / np.sqrt(c.size))
    ratio = max(norm(a - c) / own, worst_row(a, b, c) / 4)
    return Effect(stage, norm(a - b) / norm(b), own / norm(c), ratio, max(energy, slope))


def worst_row(a, b, c):
    """The largest of a row's errors over what rounding does to that row: some faults are in few."""
    if a.ndim < 2:
        a, b, c = (x[:, None] for x in (a, b, c))
    error, own = ((x - c).reshape(len(c), -1) ** 2 for x in (a, b))
    usual = own.mean(-1) + (2.0**-24 * c.reshape(len(c), -1)) .__pow__(2).mean(-1) + own.mean() * 1e-3
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.sqrt(error.max(-1) / usual)
    return float(np.nanmax(np.where(usual > 0, found, 0.0))) / (1 + np.sqrt(2 * np.log(c.size)))


def effects(job, faulty, fixed, kept):
    """The effect on every stage that is recorded, in their order."""
    of_faulty, of_fixed = (tensors(job, captured, kept) for captured in (faulty, fixed))
    ideal, found = tensors(job, fixed, kept, reference=True), {}
    of_faulty = forced(of_faulty, ideal, tensors(job, faulty, kept, reference=True))
    for key, value in of_fixed.items():
        other = of_faulty.get(key)
        if other is None:
            continue
        one = compared(key[0], other, value, ideal[key])
        held = found.get(key[0])
        if held is None or (one.standing == "clear", one.seen) > (held.standing == "clear", held.seen):
            found[key[0]] = one
    if faulty.replicas and any(x.tobytes() != faulty.replicas[0].tobytes() for x in faulty.replicas):
        # Copies of one tensor need no rounding to be told apart.
        found["reduce"] = Effect("reduce", np.inf, 0.0, np.inf, np.inf)
    return found


def forced(of_faulty, ideal, own):
    """Sums are judged from the addends that were captured: what the addends changed is not theirs."""
    moved = dict(of_faulty)
    for key in moved:
        if key[0] in ("accumulate", "reduce") and key in ideal:
            moved[key] = moved[key].astype(np.float64) - own[key] + ideal[key]
            still = np.abs(moved[key] - ideal[key]) <= 2.0**-22 * np.abs(ideal[key])
            moved[key] = np.where(still, ideal[key], moved[key])
    return moved


def near(found):
    """True where a coarser clean program might err as much as the fault does."""
    return any(one.standing == "clear" and one.ratio < np.inf for one in found.values())


def under(found, clean):
    """Effects measured by the error of the coarsest clean program under the same declaration."""

    def measured(one):
        coarser = max(clean[one.stage].ratio, 1.0)
        return replace(one, ratio=one.ratio / coarser, seen=one.seen / coarser)

    return {stage: measured(one) for stage, one in found.items()}


def standing(found):
    """How well the whole fault can be seen: clear, weak, below or identical."""
    order = ["identical", "below", "weak", "clear"]
    return max((one.standing for one in found.values()), key=order.index, default="identical")


def first_stages(found):
    """Where the fault may be seen first: from the first stage that it changes at all up to the
    first where it is clear; sums that only round otherwise are not changed by it."""
    stages = []
    for stage, one in found.items():
        sums = stage in ("accumulate", "reduce")
        if one.standing in ("weak", "clear") or (one.change and not sums):
            stages.append(stage)
        if one.standing == "clear":
            break
    return stages
