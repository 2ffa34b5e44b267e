"""Random loss heads: options that hold together, and the arrays of each microbatch.

Shapes come from a small pool, drawn once for each seed: XLA compiles every operation again for
every shape. One case is one draw of everything else.
"""

from dataclasses import dataclass, field

import numpy as np
from heads import Options, shape_of

# What jobs mask padded columns with.
F32_MIN = float(np.finfo(np.float32).min)
MASKS = [None, -np.inf, F32_MIN, 0.7 * F32_MIN, -20.0, -3.5]


@dataclass
class Case:
    """An option set, as `tape.head` takes it, and its inputs."""

    options: dict
    dtype: type
    # Of all microbatches: k, bias.
    shared: dict = field(default_factory=dict)
    microbatches: list = field(default_factory=list)

    def __str__(self):
        arrays = lambda held: {name: f"{a.dtype}{list(a.shape)}" for name, a in held.items()}
        return f"{self.options} {arrays(self.shared)} {[arrays(mb) for mb in self.microbatches]}"


class Pool:
    """Shapes of tokens and of the unembedding."""

    def __init__(self, rng):
        self.leads = [(int(rng.integers(3, 41)),), tuple(map(int, rng.integers(2, 9, 2)))]
        vocab = map(int, rng.integers(4, 91, 2))
        self.sizes = [(int(rng.integers(1, 13)), v, int(rng.integers(2, v))) for v in vocab]


def maybe(rng, chance, value, default=None):
    return value if rng.random() < chance else default


def pick(rng, values):
    return values[rng.integers(len(values))]


def draw_options(rng, valid, loss=None):
    """A head that `HeadOptions::new` takes: at most one of what excludes each other."""
    loss = loss or pick(rng, ["softmax_xent"] * 4 + ["xent_logits", "grpo", "grpo"])
    o = {"loss": loss, "path": pick(rng, ["plain", "fused", "chunked"])}
    o["cotangent"] = pick(rng, [1.0, 1.0, 0.37, -2.5, 4096.0])
    o["ignore_label"] = pick(rng, [None, -100, -1, 1])
    if rng.random() < 0.5:
        o["valid_vocab"] = valid
        o["mask_value"] = pick(rng, MASKS)
    o["softcap"] = maybe(rng, 0.35, pick(rng, [2.5, 15.0, 30.0]))
    if rng.random() < 0.5:
        o |= [{"temperature": 0.7}, {"temperature": 3.0}, {"logit_scale": 0.25},
              {"logit_scale": -1.3}][rng.integers(4)]  # fmt: skip
    if rng.random() < 0.3:
        o["tiles"] = {"tokens": int(rng.integers(1, 20)), "vocab": int(rng.integers(1, 40))}
    if o["path"] != "plain" and rng.random() < 0.1:
        o["gradient_filter"] = 2.0**-12
    if rng.random() < 0.4:
        o["labels_shifted"] = False
    if loss != "xent_logits":
        o["k_layout"] = pick(rng, ["vd", "dv"])
    o["reduction"] = pick(rng, ["mean", "mean", "mean", "sum"] + ["none"] * (loss != "grpo"))
    if o["reduction"] == "mean":
        o["denominator"] = pick(rng, ["valid", "all", "weights", float(rng.integers(1, 99)) / 2])
        o["scope"] = pick(rng, ["global", "microbatch", "rank"])
    if loss == "grpo":
        o["grpo"] = draw_policy_options(rng)
    else:
        o["label_smoothing"] = maybe(rng, 0.5, pick(rng, [0.01, 0.1, 0.45]), 0.0)
        o["smoothing_formula"] = pick(rng, ["uniform", "megatron"])
        o["z_loss"] = maybe(rng, 0.5, pick(rng, [1e-4, 0.01, 0.2]), 0.0)
        if o["z_loss"]:
            o["z_loss_in_loss"] = bool(rng.random() < 0.6)
    if rng.random() < 0.35:
        o["microbatches"] = int(rng.integers(2, 4))
        o["microbatch_reduction"] = pick(rng, ["mean", "sum"])
    return {name: value for name, value in o.items() if value is not None}


def draw_policy_options(rng):
    beta = maybe(rng, 0.6, pick(rng, [0.04, 0.5]), 0.0)
    o = {"clip_low": pick(rng, [0.1, 0.2]), "clip_high": pick(rng, [0.2, 0.28]), "kl_beta": beta}
    o |= {"kl": pick(rng, ["k1", "k2", "k3"]), "ratio": pick(rng, ["token", "sequence"])}
    o |= {"average": pick(rng, ["token", "sequence"])}
    if rng.random() < 0.4:
        o["dual_clip"] = pick(rng, [1.5, 3.0])
    return o


def draw(rng, pool, dtype=np.float64, loss=None):
    """One option set with its arrays, all floats of `dtype` but those that a job keeps in f32."""
    depth, vocab, valid = pick(rng, pool.sizes)
    case = Case(draw_options(rng, valid, loss), dtype)
    o = Options(case.options)
    side = np.float64 if dtype is np.float64 else np.float32
    classes = o.classes(vocab)
    starts = {"softmax_xent": ["q"], "xent_logits": ["logits"], "grpo": ["q", "logits", "logprobs"]}
    start = pick(rng, starts[o.loss])
    k = rng.standard_normal((vocab, depth))
    if start == "q":
        case.shared["k"] = np.ascontiguousarray(k.T if o.k_layout == "dv" else k).astype(dtype)
    if start != "logprobs" and rng.random() < 0.4:
        case.shared["bias"] = (2 * rng.standard_normal(vocab)).astype(side)
    # What one microbatch has all have: an input that some lack was lost.
    weighted, unlabelled = rng.random() < 0.6, rng.random() < 0.5
    for _ in range(o.microbatches):
        lead = pick(rng, pool.leads)
        data = draw_labels(rng, o, lead, classes, side if weighted else None)
        if start == "q":
            data["q"] = draw_q(rng, lead, k, data["labels"], classes).astype(dtype)
        elif start == "logits":
            data["logits"] = (3 * rng.standard_normal((*lead, vocab))).astype(dtype)
        else:
            data["logprobs"] = (-3 * rng.random(lead)).astype(side)
            if o.ignore_label is None and unlabelled:
                del data["labels"]
        if o.reduction == "none":
            data["cotangent"] = rng.standard_normal(lead).astype(side)
        case.microbatches.append(data)
    return case


def draw_labels(rng, o, lead, classes, side):
    """Labels that repeat, some ignored, and weights of which some are 0, in `side`, or none. The first
    two positions count, so that no denominator is 0."""
    labels = rng.integers(0, classes, lead)
    labels = np.where(rng.random(lead) < 0.3, pick(rng, labels.ravel()), labels)
    firm = 2 if o.ignore_label == 0 else 0
    if o.ignore_label is not None:
        labels[rng.random(lead) < 0.2] = o.ignore_label
    labels.reshape(-1)[:2] = min(firm, classes - 1)
    data = {"labels": labels.astype(pick(rng, [np.int32, np.int64]))}
    if side is not None:
        weights = rng.random(lead) * 2 * (rng.random(lead) < 0.85)
        weights.reshape(-1)[:2] = 1, 0.5
        data["weights"] = weights.astype(side)
    return data


def draw_q(rng, lead, k, labels, classes):
    """Hidden states of which every third leans on its label's row of k: a confident token."""
    q = rng.standard_normal((*lead, k.shape[1]))
    leans = (rng.random(lead) < 0.33) & (labels >= 0) & (labels < classes)
    return q + 2 * leans[..., None] * k[np.where(leans, labels, 0)]


def add_policy_inputs(rng, case, logprobs):
    """Advantages and the other policies' log-probabilities, near those of this one."""
    o = Options(case.options)
    side = np.float64 if case.dtype is np.float64 else np.float32
    older = rng.random() < 0.8
    for data, logp in zip(case.microbatches, logprobs):
        lead = shape_of(data)
        near = lambda spread: (logp + spread * rng.standard_normal(lead)).astype(side)
        whole = len(lead) == 2 and rng.random() < 0.5
        data["advantages"] = rng.standard_normal(lead[:1] if whole else lead).astype(side)
        if older:
            data["old_logprobs"] = near(0.3)
        if o.grpo["kl_beta"]:
            data["ref_logprobs"] = near(0.6)
