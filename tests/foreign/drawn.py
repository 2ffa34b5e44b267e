"""What the heads are given: uneven sizes, frequent labels, tokens that the model is sure of."""

from dataclasses import dataclass

import numpy as np

IGNORED = -100


@dataclass(frozen=True)
class Drawn:
    """One microbatch of a job: `q` [B, S, D] and `k` [V, D] in f32, `labels` [B, S]."""

    q: np.ndarray
    k: np.ndarray
    labels: np.ndarray
    rng: np.random.Generator


def draw(seed, ignored, multiple):
    """A job by its seed. `ignored`: whether some labels are -100; `multiple`: what B and S must be multiples of."""
    rng = np.random.default_rng(seed)
    some = lambda low, high, of: int(rng.integers(low, high)) // of * of or of
    b, s = some(2, 5, multiple[0]), some(40, 120, multiple[1])
    v, d = some(130, 700, multiple[2]), int(rng.integers(16, 72))
    chance = 1.0 / np.arange(1, v + 1)
    labels = rng.choice(v, (b, s), p=chance / chance.sum())
    k = rng.standard_normal((v, d)) / np.sqrt(d)
    q = rng.standard_normal((b, s, d)) * rng.uniform(0.5, 2.0)
    sure = rng.random((b, s, 1)) < 0.4
    q += sure * rng.uniform(2.0, 9.0, (b, s, 1)) * k[labels]
    if ignored:
        # Unlike in each sequence: a mean of means is then no mean.
        for row, ends in zip(labels, rng.integers(s // 3, s, b), strict=True):
            row[ends:] = IGNORED
    return Drawn(q.astype(np.float32), k.astype(np.float32), labels.astype(np.int32), rng)
