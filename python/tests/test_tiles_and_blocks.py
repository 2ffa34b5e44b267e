"""Kernels in tiles and blocks whose sizes no list holds, and a backward that puts a constant in a cotangent's place.

Goal: an online softmax that forgets to rescale its sum is named with the width of its tiles, a dk whose blocks of q are
looked up at i b b with the size of the block, dlogits without their cotangent with the number that stands there. Method:
a head in numpy with sizes from a seed. BACKTAPE_SEED draws another job.
"""

import os

import numpy as np
import pytest
from named import named

import backtape

SEED = int(os.environ.get("BACKTAPE_SEED", 31))
F32 = dict.fromkeys(("input", "logits", "lse", "p", "dlogits", "accumulate", "output"), "f32")


class Head:
    """A head in f64 of f32 tensors; `tiles`: how wide those of its forward are that are not rescaled."""

    def __init__(self, tokens=(100, 180), classes=(190, 300)):
        self.rng = np.random.default_rng(SEED)
        self.tokens, self.classes, depth = (int(self.rng.integers(*of)) for of in (tokens, classes, (14, 30)))
        self.q = self.rng.standard_normal((self.tokens, depth)).astype(np.float32)
        self.k = (self.rng.standard_normal((self.classes, depth)) * 0.6).astype(np.float32)
        self.labels = self.rng.integers(0, self.classes, self.tokens).astype(np.int32)
        self.logits = self.q.astype(np.float64) @ self.k.T

    def lse(self, tiles=None):
        if tiles is None:
            return np.log(np.exp(self.logits).sum(-1))
        most, total = np.full(self.tokens, -np.inf), np.zeros(self.tokens)
        for at in range(0, self.classes, tiles):
            tile = self.logits[:, at : at + tiles]
            most = np.maximum(most, tile.max(-1))
            total += np.exp(tile - most[:, None]).sum(-1)
        return most + np.log(total)

    def entries(self, lse, g):
        found = np.exp(self.logits - lse[:, None])
        found[np.arange(self.tokens), self.labels] -= 1
        return found * (np.ones(self.tokens) * g)[:, None]


def replayed(directory, given, **declared):
    recorder = backtape.Recorder(directory, rank=0, world_size=1, mesh={"data": 1})
    with recorder.step(0) as tape:
        tape.head(**{"loss": "softmax_xent", "path": "plain", "dtypes": F32} | declared)
        for name, x in given.items():
            tape.record(name, x if name == "labels" else np.asarray(x, np.float32))
    recorder.close()
    return backtape.replay(directory, step=0)


@pytest.mark.parametrize("recorded", [True, False], ids=["lse", "no lse"])
def test_an_online_softmax_that_does_not_rescale_is_named_with_the_width_of_its_tiles(tmp_path, recorded):
    job = Head()
    tiles = int(job.rng.integers(17, 60))
    for name, lse in (("right", job.lse()), ("wrong", job.lse(tiles))):
        entries = job.entries(lse, 1 / job.tokens)
        loss = (lse - job.logits[np.arange(job.tokens), job.labels]).mean()
        given = {"q": job.q, "k": job.k, "labels": job.labels, "loss": loss}
        given |= {"dq": entries @ job.k, "dk": entries.T @ job.q} | ({"lse": lse} if recorded else {})
        report = replayed(tmp_path / name, given)
        assert (report.verdict == "agreed") == (name == "right"), report
    told = named(report, "other-lse")["lse"]
    assert f"tiles of {tiles} classes, whose sum is not rescaled" in told, told


@pytest.mark.parametrize("whole", [False, True], ids=["product", "softmax too"])
@pytest.mark.parametrize("sizes", [((100, 180), (190, 300)), ((300, 340), (100, 140))], ids=["more classes", "more tokens"])
def test_a_dk_whose_blocks_of_q_are_looked_up_at_their_offset_is_named_with_their_size(tmp_path, sizes, whole):
    job = Head(*sizes)
    size = int(job.rng.integers(13, 23))
    start = np.minimum(np.arange(job.tokens) // size * size * size, job.tokens - size)
    rows = np.minimum(start + np.arange(job.tokens) % size, job.tokens - 1)
    entries = job.entries(job.lse(), 1 / job.tokens)
    given = {"q": job.q, "k": job.k, "labels": job.labels, "dq": entries @ job.k}
    if whole:
        lse, job.logits = job.lse(), job.logits[rows]
        entries = job.entries(lse, 1 / job.tokens)
    given["dk"] = entries.T @ job.q[rows]
    told = named(replayed(tmp_path, given), "block-index-times-block")
    of = "dk, its softmax included" if whole else "the product of dk"
    assert (told["operand"], told["block"], told["only in"]) == ("q", str(size), of), told


def test_dlogits_that_take_a_constant_for_their_cotangent_are_named_with_it(tmp_path):
    job = Head()
    cotangent = job.rng.uniform(0.3, 1.4, job.tokens) / job.tokens
    given = {"logits": job.logits, "labels": job.labels, "cotangent": cotangent}
    declared = {"loss": "xent_logits", "reduction": "none", "dtypes": dict.fromkeys(("logits", "lse", "p"), "f32")}
    right = replayed(tmp_path / "right", given | {"dlogits": job.entries(job.lse(), cotangent)}, **declared)
    assert right.verdict == "agreed", right
    wrong = replayed(tmp_path / "wrong", given | {"dlogits": job.entries(job.lse(), 1 / job.tokens)}, **declared)
    told = named(wrong, "token-weights")["each token counts"]
    number = float(told.removeprefix("with ").removesuffix(" in the place of its cotangent"))
    assert number == pytest.approx(1 / job.tokens, rel=1e-3), told
