"""A loss head in numpy over ranks and microbatches, whose kernels a test spoils."""

import os

import numpy as np

import backtape
from named import close

SEED = int(os.environ.get("BACKTAPE_SEED", 43))
IGNORED = -100


class Job:
    """Ranks x microbatches of sequences; a mean over all valid tokens, in f64 but for what is stored."""

    def __init__(self, ranks=2, microbatches=2, epsilon=0.0, axis="data", z_loss=0.0, **declared):
        print(f"BACKTAPE_SEED={SEED}")
        rng = self.rng = np.random.default_rng(SEED)
        self.ranks, self.microbatches, self.axis = ranks, microbatches, axis
        self.epsilon, self.z_loss, self.declared = epsilon, z_loss, declared
        self.sequences, self.half = int(rng.integers(3, 6)), int(rng.integers(6, 10))
        self.depth, self.classes = int(rng.integers(16, 30)), 6 * int(rng.integers(30, 45))
        self.shape = (self.sequences, 2 * self.half)
        places = [(mb, rank) for mb in range(microbatches) for rank in range(ranks)]
        self.k = (rng.standard_normal((self.classes, self.depth)) * 0.6).astype(np.float32)
        self.bias = rng.standard_normal(self.classes).astype(np.float32)
        # The ids lie in the lower half of the vocabulary, so that those of the other half stand nowhere.
        ids = self.ids = {at: rng.integers(0, self.classes // 2, self.shape) for at in places}
        end = np.full((self.sequences, 1), IGNORED)
        self.labels = {at: np.concatenate([of[:, 1:], end], 1) for at, of in ids.items()}
        self.q = {at: rng.standard_normal((*self.shape, self.depth)).astype(np.float32) for at in places}
        self.valid = sum(self.counts().values())
        self.weights = {at: rng.choice([0.25, 0.5, 2.0], self.shape).astype(np.float32) for at in places}
        self.weighted = declared.get("denominator") == "weights"

    def counts(self):
        return {at: int((of != IGNORED).sum()) for at, of in self.labels.items()}

    def logits(self, at):
        return self.q[at].astype(np.float64).reshape(-1, self.depth) @ self.k.T + self.bias

    def lse(self, at):
        return np.log(np.exp(self.logits(at)).sum(-1))

    def entries(self, at, lse=None, labels=None, spread=1.0, weights=None, softmax=None):
        """dlogits, `[T, V]`; `spread` is how often the smoothed share of each class is there, `softmax`
        how often the softmax part is."""
        labels = (self.labels[at] if labels is None else labels).reshape(-1)
        counts = labels != IGNORED
        g = counts / self.valid
        if self.weighted:
            weights = (self.weights[at] if weights is None else weights).reshape(-1)
            all_of = np.concatenate([self.weights[a][self.labels[a] != IGNORED] for a in self.labels])
            g = counts * weights / all_of.astype(np.float64).sum()
        found = np.exp(self.logits(at) - (self.lse(at) if lse is None else lse)[:, None])
        softmax = 1 + 2 * self.z_loss * self.lse(at) if softmax is None else softmax
        found *= np.broadcast_to(softmax, counts.shape)[:, None]
        found -= spread * self.epsilon / self.classes
        found[np.arange(labels.size)[counts], labels[counts]] -= 1 - self.epsilon
        return found * g[:, None]

    def of(self, at, **changed):
        """What a rank's kernel gives of a microbatch."""
        entries, labels = self.entries(at, **changed), changed.get("labels", self.labels[at]).reshape(-1)
        logits, rows = self.logits(at), np.arange(labels.size)[labels != IGNORED]
        nll = self.lse(at) - (1 - self.epsilon) * logits[np.arange(labels.size), np.maximum(labels, 0)]
        nll = nll + self.z_loss * self.lse(at) ** 2
        nll = (nll - self.epsilon * logits.mean(-1))[rows] / self.valid
        q = self.q[at].astype(np.float64).reshape(-1, self.depth)
        return {"entries": entries, "nll": (rows, nll), "loss": nll.sum(), "lse": self.lse(at), "dq": entries @ self.k,
                "dk": entries.T @ q, "dbias": entries.sum(0)}  # fmt: skip

    def recorded(self, directory, names=("lse", "loss", "dq", "dk", "dbias"), spoilt=lambda given: None, dk=None,
                 reduced=lambda total: total, **placed):  # fmt: skip
        """`spoilt` changes what all places give; `dk`: None for each microbatch's, or when a sum alone is recorded, or
        "both" for each rank's, recorded as `placed` says, and for that over ranks, which `reduced` changes."""
        given = {at: self.of(at) for at in self.q}
        spoilt(given)
        mesh = {self.axis: self.ranks}
        recorders = [backtape.Recorder(directory, rank=r, world_size=self.ranks, mesh=mesh) for r in range(self.ranks)]
        for rank, recorder in enumerate(recorders):
            with recorder.step(0) as tape:
                options = {"denominator": "valid", "ignore_label": IGNORED, **self.declared}
                tape.head(loss="softmax_xent", path="plain", scope="global", microbatches=self.microbatches,
                          microbatch_reduction="sum", label_smoothing=self.epsilon, z_loss=self.z_loss,
                          **options)  # fmt: skip
                tape.record("k", self.k)
                tape.record("bias", self.bias)
                for mb in range(self.microbatches):
                    self.of_tokens(tape, given[mb, rank], (mb, rank), names)
                if dk in ("pre_reduce", "both"):
                    own = sum(given[mb, rank]["dk"] for mb in range(self.microbatches))
                    tape.record("dk", np.float32(own), when="pre_reduce", **(placed or {"partial": "sum"}))
                if dk in ("post_reduce", "both"):
                    total = reduced(sum(of["dk"] for of in given.values()))
                    tape.record("dk", np.float32(total), when="post_reduce")
        close(recorders)
        return backtape.replay(directory, step=0)

    def of_tokens(self, tape, own, at, names):
        # A head that shifts the labels itself is given the ids as they come.
        labels = self.labels if self.declared.get("labels_shifted", True) else self.ids
        tokens = {"q": self.q[at], "labels": labels[at].astype(np.int32)}
        tokens |= {"weights": self.weights[at]} if self.weighted else {}
        for name in ("lse", "dq"):
            if name in names:
                tokens[name] = np.float32(own[name]).reshape(*self.shape, *own[name].shape[1:])
        for name, x in tokens.items():
            tape.record(name, x, microbatch=at[0], placement={self.axis: 0})
        for name in {"loss", "dk", "dbias"} & set(names):
            when = {} if name == "loss" else {"when": "pre_reduce"}
            tape.record(name, np.float32(own[name]), microbatch=at[0], partial="sum", **when)

    def drawn(self):
        """A microbatch and a rank."""
        return int(self.rng.integers(self.microbatches)), int(self.rng.integers(self.ranks))
