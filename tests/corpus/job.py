"""Jobs drawn at random: sizes, data and what their head is believed to compute.

A job knows nothing of faults. Tokens of a microbatch lie over the ranks in equal parts, as under
shard_map; what differs between ranks and microbatches is how many of them count.
"""

from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np

DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "f32": np.float32, "f64": np.float64}

# Sizes that are no multiples of a tile, drawn once for a seed: XLA compiles for every shape anew.
POOL = 6


@dataclass(frozen=True)
class Options:
    """What the head computes: the loss that the job's author wants. Hashable, for jit."""

    softcap: float | None = None
    temperature: float = 1.0
    z_loss: float = 0.0
    label_smoothing: float = 0.0
    smoothing_formula: str = "uniform"
    valid_vocab: int | None = None
    mask_value: float | None = None
    ignore_label: int | None = None
    cotangent: float = 1.0
    reduction: str = "mean"
    denominator: str = "weights"
    scope: str = "global"
    microbatch_reduction: str = "sum"

    def smoothing(self, classes):
        """The share of the target that is spread over all classes."""
        most = classes / (classes - 1) if self.smoothing_formula == "megatron" else 1.0
        return self.label_smoothing * most


@dataclass
class Job:
    """One optimizer step of one job. q [T, D], labels and weights [T] of each microbatch."""

    dtype: str
    ranks: int
    options: Options
    k: np.ndarray  # [V, D]
    microbatches: list[dict[str, np.ndarray]]
    bias: np.ndarray | None = None
    declared: dict = field(default_factory=dict)  # beside the options: dtypes, path, tiles
    sequence: int | None = None  # tokens of a row, where tokens are recorded as [B, S]
    tensor: int = 1  # ranks that share the tokens and have the vocabulary cut between them
    extra: list[dict[str, np.ndarray]] = field(default_factory=list)  # other tensors, each microbatch

    @property
    def vocab(self):
        return self.k.shape[0]

    @property
    def classes(self):
        return self.options.valid_vocab or self.vocab

    @property
    def count(self):
        return len(self.microbatches)

    def rows(self, rank):
        """The tokens of a microbatch that a rank holds."""
        own = self.microbatches[0]["q"].shape[0] // self.ranks
        return slice(rank * own, (rank + 1) * own)

    def counted(self, mb):
        """[T] f64: the weight of each token, 0 where it is ignored."""
        data = self.microbatches[mb]
        weights = data.get("weights", np.ones(data["labels"].shape, np.float32)).astype(np.float64)
        if self.options.ignore_label is not None:
            weights = weights * (data["labels"] != self.options.ignore_label)
        return weights

    def number(self, mb, rows=slice(None)):
        """What some tokens of a microbatch add to the denominator."""
        labels = self.microbatches[mb]["labels"][rows]
        if self.options.denominator == "weights":
            return float(self.counted(mb)[rows].sum())
        if self.options.denominator == "all":
            return float(labels.size)
        ignored = self.options.ignore_label
        return float((labels != ignored).sum() if ignored is not None else labels.size)

    def denominator(self, mb):
        """What the loss of a microbatch is divided by, as declared."""
        if self.options.reduction == "sum":
            return 1.0
        if self.options.scope == "microbatch":
            return self.number(mb)
        return sum(self.number(i) for i in range(self.count))

    def head(self):
        """The declaration for `tape.head`: what is believed."""
        held = {name: value for name, value in vars(self.options).items() if value is not None}
        return {"loss": "softmax_xent", "microbatches": self.count} | held | self.declared


def pick(rng, values):
    return values[int(rng.integers(len(values)))]


def sizes(seed, large=False):
    """The pool's (tokens of a rank, V, D) for a seed."""
    rng = np.random.default_rng([seed, 77, large])
    low, high = (900, 1400) if large else (210, 460)
    odd = lambda a, b: int(rng.integers(a, b)) | 1
    return [(odd(low, high), odd(240, 1100), int(rng.integers(17, 80))) for _ in range(POOL)]


def zipf_labels(rng, tokens, classes, exponent=1.2):
    """Labels of which few make up most, as words do."""
    shares = 1.0 / np.arange(1, classes + 1) ** exponent
    return rng.permutation(classes)[rng.choice(classes, tokens, p=shares / shares.sum())].astype(np.int32)


def hidden_states(rng, k, labels, confident, spread, most=12):
    """q [T, D] f64: logits of this spread; a share of the tokens is sure of its label."""
    tokens, depth = labels.size, k.shape[1]
    q = rng.standard_normal((tokens, depth)) * spread / np.sqrt(depth)
    rows = k[labels % k.shape[0]]
    # q k_y grows by `gain` above the others' log-sum-exp: 1 - p_y from 0.3 down to 1e-6.
    gain = np.log(k.shape[0]) + rng.uniform(-1, most, tokens)
    lean = (rng.random(tokens) < confident) * gain / (rows**2).sum(-1)
    return q + lean[:, None] * rows


def draw_job(
    rng, seed, *, dtype=None, ranks=None, microbatches=None, large=False, options=None,
    confident=None, spread=None, bias=None, weights=True, padded=None, uneven=True, path="plain",
    tile=None, chunk=None, dtypes=None, size=None, gain=12,
):  # fmt: skip
    """A job; what is not given is drawn."""
    tokens, vocab, depth = size or pick(rng, sizes(seed, large))
    dtype = dtype or pick(rng, ["bf16", "bf16", "bf16", "f32", "f16"])
    ranks = ranks or pick(rng, [1, 1, 2, 4])
    count = microbatches or pick(rng, [1, 2, 3])
    padded = rng.random() < 0.3 if padded is None else padded
    valid = vocab - int(rng.integers(5, 60)) if padded else None
    o = {"cotangent": pick(rng, [1.0, 1.75, -0.5, 3.0]), "valid_vocab": valid}
    if padded:
        o["mask_value"] = pick(rng, [None, -0.7 * float(np.finfo(np.float32).max), -1e9])
    # What else a head may have, in any job.
    for name, value in (("softcap", 30.0), ("z_loss", 1e-3), ("temperature", 1.5)):
        if rng.random() < 0.12:
            o[name] = value
    options = Options(**(o | (options or {})))
    classes = options.valid_vocab or vocab
    k = rng.standard_normal((vocab, depth))
    narrow = DTYPES[dtype]
    k = k.astype(narrow)
    job = Job(dtype, ranks, options, k, [])
    if bias or (bias is None and rng.random() < 0.15):
        job.bias = rng.standard_normal(vocab).astype(np.float32)
    confident = pick(rng, [0.2, 0.5]) if confident is None else confident
    spread = pick(rng, [1.0, 2.0]) if spread is None else spread
    for mb in range(count):
        labels = zipf_labels(np.random.default_rng([seed, 5]), tokens * ranks, classes)
        labels = rng.permutation(labels) if mb == 0 else zipf_labels(rng, tokens * ranks, classes)
        q = hidden_states(rng, k.astype(np.float64), labels, confident, spread, gain).astype(narrow)
        data = {"q": q, "labels": labels}
        # Packed documents: every rank and microbatch has another share of padding.
        kept = rng.uniform(0.35, 0.98, ranks) if uneven else np.full(ranks, 0.9)
        counts = np.concatenate([np.arange(tokens) < share * tokens for share in kept])
        if options.ignore_label is not None:
            labels[~counts] = options.ignore_label
        if weights:
            mixed = weights == "mixed" or rng.random() < 0.5
            values = rng.uniform(0.2, 1.8, labels.size) if mixed else np.ones(labels.size)
            data["weights"] = (values * counts).astype(np.float32)
        job.microbatches.append(data)
    job.declared = {"path": path, "dtypes": draw_dtypes(rng) if dtypes is None else dtypes}
    if tile and rng.random() < 0.5:
        job.declared["tiles"] = {"vocab": tile}
    if chunk and rng.random() < 0.5:
        job.declared["tiles"] = {"tokens": chunk}
    return job


def draw_dtypes(rng):
    """What an author says of the precision: f32 wherever he thinks of it."""
    chances = {"logits": 0.8, "lse": 0.5, "p": 0.5, "accumulate": 0.5, "reduce": 0.5}
    return {name: "f32" for name, chance in chances.items() if rng.random() < chance}


def with_options(job, **changed):
    """The same data under another head."""
    return replace(job, options=replace(job.options, **changed))
