"""A fault that holds in one microbatch, on one rank, or in one rank's classes alone, where dk was recorded summed.

Goal: the cause and the place are named though the sum of dk holds what is right as well; a fault that no entry of the
catalogue describes gets no name there either. Method: a head in numpy on data-parallel ranks, dq of each microbatch and
dk as one sum, with sizes, place and options from a seed. BACKTAPE_SEED draws another job.
"""

import os

import numpy as np
import pytest

import backtape
from named import close, named

SEED = int(os.environ.get("BACKTAPE_SEED", 71))


class Job:
    """Ranks x microbatches of tokens; `options` are those of `tape.head`, which `other` changes in some places."""

    def __init__(self, **options):
        print(f"BACKTAPE_SEED={SEED}")
        rng = self.rng = np.random.default_rng(SEED)
        self.ranks, self.microbatches = (int(n) for n in rng.integers(2, 4, 2))
        self.tokens, self.depth, self.classes = (int(rng.integers(*of)) for of in ((30, 60), (12, 30), (150, 250)))
        self.options = options
        self.k = (rng.standard_normal((self.classes, self.depth)) * 0.8).astype(np.float32)
        shape = (self.microbatches, self.ranks, self.tokens)
        self.q = rng.standard_normal((*shape, self.depth)).astype(np.float32)
        self.labels = rng.integers(0, self.classes, shape).astype(np.int32)

    def of(self, at, softcap=None, z_loss=0.0, label_smoothing=0.0):
        """lse, dlogits and so dq and dk of a rank's microbatch, in f64."""
        q, labels, k = self.q[at].astype(np.float64), self.labels[at], self.k.astype(np.float64)
        rows = np.arange(self.tokens)
        products = q @ k.T
        logits = softcap * np.tanh(products / softcap) if softcap else products
        lse = np.log(np.exp(logits).sum(-1))
        entries = np.exp(logits - lse[:, None]) * (1 + 2 * z_loss * lse[:, None])
        entries -= label_smoothing / self.classes
        entries[rows, labels] -= 1 - label_smoothing
        if softcap:
            entries *= 1 - (logits / softcap) ** 2
        entries /= self.labels.size
        return {"lse": lse, "entries": entries, "dq": entries @ k, "dk": entries.T @ q}

    def recorded(self, directory, other=lambda mb, rank: {}, when="pre_reduce", spoilt=lambda mb, rank, of: None):
        """`other` gives the options that a place really has; `spoilt` changes what it gives. dk is recorded as the sum
        of each rank (`pre_reduce`), or of all of them (`post_reduce`)."""
        mesh = {"data": self.ranks}
        recorders = [
            backtape.Recorder(directory, rank=rank, world_size=self.ranks, mesh=mesh) for rank in range(self.ranks)
        ]
        sums, given = [0.0] * self.ranks, {}
        for rank in range(self.ranks):
            for mb in range(self.microbatches):
                given[mb, rank] = self.of((mb, rank), **{**self.options, **other(mb, rank)})
                spoilt(mb, rank, given[mb, rank])
                sums[rank] = sums[rank] + given[mb, rank]["dk"]
        for rank, recorder in enumerate(recorders):
            with recorder.step(0) as tape:
                tape.head(
                    loss="softmax_xent",
                    path="fused",
                    microbatches=self.microbatches,
                    microbatch_reduction="sum",
                    **self.options,
                )
                tape.record("k", self.k)
                for mb in range(self.microbatches):
                    own = given[mb, rank]
                    tape.record("q", self.q[mb, rank], microbatch=mb, placement={"data": 0})
                    tape.record("labels", self.labels[mb, rank], microbatch=mb, placement={"data": 0})
                    for name in ("lse", "dq"):
                        tape.record(name, own[name].astype(np.float32), microbatch=mb, placement={"data": 0})
                if when == "pre_reduce":
                    tape.record("dk", sums[rank].astype(np.float32), partial="sum", when=when)
                else:
                    tape.record("dk", sum(sums).astype(np.float32), when=when)
        close(recorders)
        return backtape.replay(directory, step=0)

    def drawn(self):
        """A microbatch and a rank."""
        return int(self.rng.integers(self.microbatches)), int(self.rng.integers(self.ranks))


def test_the_right_job_agrees(tmp_path):
    for name, options in (("softcap", {"softcap": 3.0}), ("z", {"z_loss": 0.02}), ("eps", {"label_smoothing": 0.1})):
        report = Job(**options).recorded(tmp_path / name, when="post_reduce")
        assert report.verdict == "agreed", report


def test_a_softcap_that_one_microbatch_alone_lacks_is_named_with_the_microbatch(tmp_path):
    job = Job(softcap=3.0)
    of, _ = job.drawn()
    told = named(job.recorded(tmp_path, lambda mb, rank: {"softcap": None} if mb == of else {}), "softcap-mismatch")
    assert told["only in"] == f"microbatch {of}"


def test_a_z_loss_that_one_rank_alone_leaves_out_is_named_with_the_rank(tmp_path):
    job = Job(z_loss=0.02)
    _, of = job.drawn()
    report = job.recorded(tmp_path, lambda mb, rank: {"z_loss": 0.0} if rank == of else {}, when="post_reduce")
    assert named(report, "zloss-mismatch")["only in"] == f"rank {of}"


def test_smoothing_that_one_rank_leaves_out_in_one_microbatch_is_named_with_both(tmp_path):
    job = Job(label_smoothing=0.1)
    place = job.drawn()
    report = job.recorded(tmp_path, lambda mb, rank: {"label_smoothing": 0.0} if (mb, rank) == place else {})
    assert named(report, "smoothing-mismatch")["only in"] == f"microbatch {place[0]} of rank {place[1]}"


def test_what_no_entry_describes_has_no_name_in_one_microbatch_either(tmp_path):
    job = Job(z_loss=0.02)
    of, _ = job.drawn()

    def spoilt(mb, rank, own):
        if mb == of:
            own["entries"] *= 1 + 0.2 * job.rng.standard_normal(own["entries"].shape)
            own["dq"], own["dk"] = own["entries"] @ job.k, own["entries"].T @ job.q[mb, rank]

    report = job.recorded(tmp_path, spoilt=spoilt)
    assert [found.id for found in report.causes] == ["unknown"], report.json["causes"]


def tf32(x):
    """To 10 bits after the point, the nearest even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~np.uint64(0x1FFF)).astype(np.uint32).view(np.float32)


def test_products_in_tf32_of_one_ranks_classes_alone_are_named_with_the_rank(tmp_path):
    rng = np.random.default_rng(SEED)
    ranks, tokens, depth = 3, int(rng.integers(150, 250)), int(rng.integers(20, 40))
    part, of = int(rng.integers(60, 90)), int(rng.integers(ranks))
    q = rng.standard_normal((tokens, depth)).astype(np.float32)
    k = (rng.standard_normal((ranks * part, depth)) * 0.5).astype(np.float32)
    labels = rng.integers(0, ranks * part, tokens).astype(np.int32)
    logits = q.astype(np.float64) @ k.T
    lse = np.log(np.exp(logits).sum(-1))
    entries = np.exp(logits - lse[:, None])
    entries[np.arange(tokens), labels] -= 1
    entries = (entries / tokens).astype(np.float32)
    recorders = [backtape.Recorder(tmp_path, rank=r, world_size=ranks, mesh={"tensor": ranks}) for r in range(ranks)]
    for rank, recorder in enumerate(recorders):
        own = slice(rank * part, (rank + 1) * part)
        a, b = (tf32(entries[:, own]), tf32(q)) if rank == of else (entries[:, own], q)
        with recorder.step(0) as tape:
            f32 = ("input", "logits", "lse", "p", "dlogits", "accumulate", "output")
            tape.head(loss="softmax_xent", path="plain", dtypes=dict.fromkeys(f32, "f32"))
            for name, x in (("q", q), ("labels", labels), ("lse", lse.astype(np.float32))):
                tape.record(name, x)
            tape.record("k", k[own], placement={"tensor": 0})
            tape.record("dk", (a.astype(np.float64).T @ b).astype(np.float32), placement={"tensor": 0})
    close(recorders)
    told = named(backtape.replay(tmp_path, step=0), "gemm-low-precision")
    assert told["only in"] == f"the classes of rank {of}"


def grpo(directory, lacks_kl=None, lacks_ratio=None, kl_times=()):
    """A policy loss over microbatches of one rank; `lacks_kl`: the microbatch whose backward has no KL term,
    `lacks_ratio`: the one whose backward takes A for r A; `kl_times`: how often each has its KL term, by default once."""
    rng = np.random.default_rng(SEED)
    microbatches, batch, length, depth, classes = 3, 3, int(rng.integers(15, 25)), int(rng.integers(20, 30)), 180
    beta, low, high, tokens = 0.2, 0.2, 0.28, batch * length
    k = (rng.standard_normal((classes, depth)) * 0.3).astype(np.float32)
    recorder = backtape.Recorder(directory, rank=0, world_size=1, mesh={"data": 1})
    with recorder.step(0) as tape:
        options = {"clip_low": low, "clip_high": high, "kl_beta": beta, "kl": "k3", "average": "token"}
        tape.head(loss="grpo", path="plain", microbatches=microbatches, microbatch_reduction="sum", grpo=options)
        tape.record("k", k)
        total = 0.0
        for mb in range(microbatches):
            q = rng.standard_normal((tokens, depth)).astype(np.float32)
            labels, rows = rng.integers(0, classes, tokens).astype(np.int32), np.arange(tokens)
            logits = q.astype(np.float64) @ k.T
            lse = np.log(np.exp(logits).sum(-1))
            logp = logits[rows, labels] - lse
            old, ref = (np.float32(logp + rng.standard_normal(tokens) * of) for of in (0.2, 0.5))
            advantages = np.repeat(rng.standard_normal(batch), length).astype(np.float32)
            ratio = np.exp(logp - old)
            clipped = ((advantages > 0) & (ratio > 1 + high)) | ((advantages < 0) & (ratio < 1 - low))
            kl = 0.0 if mb == lacks_kl else beta * (1 - np.exp(ref - logp))
            kl = kl * dict(kl_times).get(mb, 1)
            slope = np.where(clipped, 0, -advantages * (1 if mb == lacks_ratio else ratio))
            dlogp = (slope + kl) / (tokens * microbatches)
            entries = -np.exp(logits - lse[:, None]) * dlogp[:, None]
            entries[rows, labels] += dlogp
            total = total + entries.T @ q
            given = {"q": q, "labels": labels, "old_logprobs": old, "ref_logprobs": ref, "advantages": advantages}
            for name, x in {**given, "dq": np.float32(entries @ k), "logprobs": np.float32(logp)}.items():
                tape.record(name, x, microbatch=mb)
        tape.record("dk", total.astype(np.float32), when="pre_reduce")
    recorder.close()
    return backtape.replay(directory, step=0), microbatches


def test_a_kl_term_without_a_derivative_in_one_microbatch_is_named_with_the_option_and_the_microbatch(tmp_path):
    report, microbatches = grpo(tmp_path / "right")
    assert report.verdict == "agreed", report
    of = SEED % microbatches
    told = named(grpo(tmp_path / "wrong", lacks_kl=of)[0], "token-weights")
    assert (told["of a loss with"], told["only in"]) == ("grpo.kl_beta=0.0", f"microbatch {of}")


@pytest.mark.parametrize("times", [-1, 2])
def test_a_kl_term_whose_derivative_has_another_sign_or_factor_is_named_with_it(tmp_path, times):
    report, _ = grpo(tmp_path / "all", kl_times=[(mb, times) for mb in range(3)])
    assert named(report, "token-weights")["each token counts"] == f"with the gradient of the KL term {times} times"
    for of in range(3):
        told = named(grpo(tmp_path / str(of), kl_times=[(of, times)])[0], "token-weights")
        assert told["each token counts"] == f"with the gradient of the KL term {times} times", (of, told)


def test_a_ratio_that_one_microbatchs_backward_leaves_out_is_named_with_the_microbatch(tmp_path):
    report, microbatches = grpo(tmp_path, lacks_ratio=(SEED + 1) % 3)
    told = named(report, "token-weights")
    assert told["each token counts"] == "without the ratio of the policies"
    assert told["only in"] == f"microbatch {(SEED + 1) % microbatches}"


def smoothed(directory, over_padding, depth=24):
    """Labels smoothed over a padded vocabulary, or over the padding as well."""
    rng = np.random.default_rng(SEED)
    tokens, valid, columns = (int(rng.integers(*of)) for of in ((80, 140), (200, 260), (270, 320)))
    eps, rows = 0.15, np.arange(tokens)
    q = rng.standard_normal((tokens, depth)).astype(np.float32)
    k = (rng.standard_normal((columns, depth)) * 0.6).astype(np.float32)
    labels = rng.integers(0, valid, tokens).astype(np.int32)
    logits = q.astype(np.float64) @ k.T
    logits[:, valid:] = -np.inf
    lse = np.log(np.exp(logits).sum(-1))
    entries = np.exp(logits - lse[:, None])
    entries[:, : columns if over_padding else valid] -= eps / (columns if over_padding else valid)
    entries[rows, labels] -= 1 - eps
    entries /= tokens
    recorder = backtape.Recorder(directory, rank=0, world_size=1, mesh={"data": 1})
    with recorder.step(0) as tape:
        tape.head(loss="softmax_xent", path="fused", valid_vocab=valid, label_smoothing=eps)
        given = {"q": q, "k": k, "labels": labels, "lse": np.float32(lse)}
        for name, x in {**given, "dq": np.float32(entries @ k), "dk": np.float32(entries.T @ q)}.items():
            tape.record(name, x)
    recorder.close()
    return backtape.replay(directory, step=0)


def test_smoothing_over_the_padding_that_is_in_dq_and_dk_too_is_named(tmp_path):
    assert smoothed(tmp_path / "right", over_padding=False).verdict == "agreed"
    told = named(smoothed(tmp_path / "wrong", over_padding=True), "smoothing-mismatch")
    assert told["the padding's entries"] == "-g ε/V, in dq and dk too"


def test_an_index_of_recorded_logits_that_wraps_at_any_number_of_bits_is_named(tmp_path):
    rng = np.random.default_rng(SEED)
    bits, tokens = int(rng.integers(13, 18)), int(rng.integers(60, 120))
    classes = int(1.6 * 2**bits / tokens)
    rows = np.arange(tokens)
    logits = (rng.standard_normal((tokens, classes)) * 2).astype(np.float32)
    labels = rng.integers(0, classes, tokens).astype(np.int32)
    lse = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    entries = np.exp(logits - lse[:, None])
    np.subtract.at(entries.reshape(-1), (rows * classes + labels) % (1 << bits), 1.0)
    recorder = backtape.Recorder(tmp_path, rank=0, world_size=1, mesh={"data": 1})
    with recorder.step(0) as tape:
        tape.head(loss="xent_logits", path="plain")
        given = {"logits": logits, "labels": labels, "lse": np.float32(lse)}
        for name, x in {**given, "dlogits": np.float32(entries / tokens)}.items():
            tape.record(name, x)
    recorder.close()
    told = named(backtape.replay(tmp_path, step=0), "index-overflow-32")
    assert (told["index"], told["of"]) == (f"uint{bits}", "the label's gradient")
