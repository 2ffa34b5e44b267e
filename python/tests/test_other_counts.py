"""Counts, parts and places that one rank, one microbatch or one piece has otherwise, solved for and named.

Goal: a count, a share of the loss or a place that a kernel takes of elsewhere is told from the data, and the right job
agrees. Method: the head of numpy_head.py, spoilt as one kernel would. BACKTAPE_SEED draws another job.
"""

import numpy as np
import pytest

import backtape
from named import named
from numpy_head import IGNORED, SEED, Job

GRADIENTS = ("loss", "dq", "dk", "dbias")
IN_SUMS = ("lse", "loss", "dq")


def times(factor):
    """What all places give, so many times."""

    def spoilt(given):
        for own in given.values():
            own.update({name: own[name] * factor for name in GRADIENTS})

    return spoilt


def test_the_largest_of_the_ranks_counts_that_divides_all_is_named(tmp_path):
    job = Job(ranks=3, microbatches=1)
    job.labels[0, 0][:, : job.half] = IGNORED
    job.labels[0, 1][:, : int(job.rng.integers(2, job.half))] = IGNORED
    job.valid = sum(job.counts().values())
    told = named(job.recorded(tmp_path, spoilt=times(job.valid / max(job.counts().values()))), "valid-count")
    assert told["of which"] == "the largest of these counts, for all", told


def test_a_count_from_before_the_shift_is_named_though_some_first_labels_did_not_count(tmp_path):
    job = Job()
    more = int(job.rng.integers(2, job.sequences * len(job.q)))
    told = named(job.recorded(tmp_path, spoilt=times(job.valid / (job.valid + more))), "valid-count")
    assert told["counted as well"].startswith(f"the first labels of {more} of "), told


def test_q_of_other_microbatches_in_a_dk_that_is_a_sum_alone_is_named(tmp_path):
    job = Job(microbatches=3)

    def spoilt(given):
        for (mb, rank), own in given.items():
            q = job.q[{0: 2, 2: 0}.get(mb, mb), rank].astype(np.float64).reshape(-1, job.depth)
            own["dk"] = own["entries"].T @ q

    told = named(job.recorded(tmp_path, IN_SUMS, spoilt, "pre_reduce"), "buffer-overwritten")
    assert "dk multiplies dlogits of microbatch 0 with q of microbatch 2" in told["tensor"], told


def test_tokens_that_a_sum_of_the_only_rank_lacks_are_named(tmp_path):
    job = Job(ranks=1)
    last = slice(job.labels[0, 0].size - int(job.rng.integers(4, 8)), None)

    def spoilt(given):
        for at, own in given.items():
            q = job.q[at].astype(np.float64).reshape(-1, job.depth)
            own["dk"] = own["dk"] - own["entries"][last].T @ q[last]

    told = named(job.recorded(tmp_path, IN_SUMS, spoilt, "pre_reduce"), "block-miscounted")
    assert told["of"] == "the sums of dk", told


def test_labels_that_are_off_in_one_part_of_the_vocabulary_are_told_by_the_part(tmp_path):
    job = Job()
    cut = job.classes // 4

    def spoilt(given):
        for at in given:
            labels = job.labels[at]
            given[at] = job.of(at, labels=np.where(labels >= cut, labels + 1, labels))

    told = named(job.recorded(tmp_path, spoilt=spoilt), "other-labels")["labels"]
    low, high = told.removeprefix("+1 for labels ").split(" to ")
    assert cut <= int(low) < int(high), told


@pytest.mark.parametrize("placed", ["sum", "mean"])
def test_a_bucket_that_was_reduced_before_one_rank_had_added_its_last_microbatch_is_named(tmp_path, placed):
    # A mean over ranks is that of losses which each rank multiplies by their number.
    often = 3 if placed == "mean" else 1
    job = Job(ranks=3, cotangent=often)
    half = job.classes // 2
    late = {}

    def spoilt(given):
        late["dk"] = given[1, 1]["dk"]
        for own in given.values():
            own.update({name: own[name] * often for name in ("dq", "dk", "dbias")})

    def reduced(total):
        total = total / often
        total[half:] -= late["dk"][half:]
        return total

    report = job.recorded(tmp_path, IN_SUMS, spoilt, "both", reduced, placement={"data": placed})
    told = named(report, "partial-not-reduced")
    assert told["where"] == f"rows {half} to {job.classes - 1}", told
    assert "rank 1 microbatch 1" not in told["holds"] and "rank 1 microbatch 0" in told["holds"], told


def test_a_z_loss_of_the_sum_of_exponentials_without_its_maximum_is_named(tmp_path):
    job = Job(z_loss=0.02)

    def spoilt(given):
        for at, own in given.items():
            rest = job.lse(at) - job.logits(at).max(-1)
            own.update({name: job.of(at, softmax=1 + 2 * job.z_loss * rest)[name] for name in ("dq", "dk", "dbias")})

    told = named(job.recorded(tmp_path, spoilt=spoilt), "zloss-mismatch")
    assert told["the term of the gradient multiplies"] == "lse less the largest logit", told


def test_a_z_loss_that_is_the_mean_of_the_microbatches_means_is_named(tmp_path):
    job = Job(z_loss=0.02, ranks=1)
    job.labels[0, 0][:, : job.half] = IGNORED
    job.valid = sum(job.counts().values())

    def spoilt(given):
        for at, own in given.items():
            often = job.valid / job.microbatches / job.counts()[at]
            counts = job.labels[at].reshape(-1) != IGNORED
            changed = job.of(at, softmax=1 + 2 * job.z_loss * often * job.lse(at))
            own.update({name: changed[name] for name in ("dq", "dk", "dbias")})
            own["loss"] = own["loss"] + (often - 1) * job.z_loss * (job.lse(at)[counts] ** 2).sum() / job.valid

    told = named(job.recorded(tmp_path, spoilt=spoilt), "zloss-mismatch")
    assert told["the z-loss is divided by"].endswith("counted over microbatch") and "and by" in told, told


def test_smoothing_over_a_third_of_the_classes_in_the_spread_is_named_with_their_number(tmp_path):
    job = Job(epsilon=0.1, ranks=3, axis="tensor")

    def spoilt(given):
        for at, own in given.items():
            changed, logits = job.of(at, spread=3.0), job.logits(at)
            own.update({name: changed[name] for name in ("dq", "dk", "dbias")})
            counts = job.labels[at].reshape(-1) != IGNORED
            own["loss"] = own["loss"] - 2 * job.epsilon * logits.mean(-1)[counts].sum() / job.valid

    told = named(job.recorded(tmp_path, spoilt=spoilt), "smoothing-mismatch")
    assert told.get("as if the classes were") == f"{job.classes // 3}, not {job.classes}", told


class PolicyLoss:
    """A policy loss on logits [B, S, V], clipped at 0.8 and 1.2."""

    def __init__(self):
        rng = np.random.default_rng(SEED)
        self.sequences, self.length, classes = int(rng.integers(4, 7)), int(rng.integers(8, 14)), 120
        shape = (self.sequences, self.length)
        self.logits = rng.standard_normal((*shape, classes)).astype(np.float32)
        self.labels = rng.integers(0, classes, shape).astype(np.int32)
        wide = self.logits.astype(np.float64)
        at_label = np.take_along_axis(wide, self.labels[..., None], -1)[..., 0]
        self.logp = at_label - np.log(np.exp(wide).sum(-1))
        self.old, self.other = (np.float32(self.logp + rng.standard_normal(shape) * 0.05) for _ in range(2))
        self.each = rng.standard_normal(self.sequences).astype(np.float32)
        self.advantages = np.repeat(self.each, self.length).reshape(shape)

    def recorded(self, directory, taken=None, old=None):
        """`taken` and `old`: advantages and log-probabilities that the job takes instead of those that it records."""
        own, tokens = self.advantages if taken is None else taken, self.labels.size
        ratio = np.exp(self.logp - (self.old if old is None else old))
        clipped = np.where(np.where(own > 0, ratio > 1.2, ratio < 0.8), 0, ratio)
        loss = -np.minimum(ratio * own, np.clip(ratio, 0.8, 1.2) * own).sum() / tokens
        recorder = backtape.Recorder(directory, rank=0, world_size=1, mesh={"data": 1})
        with recorder.step(0) as tape:
            tape.head(loss="grpo", path="plain", grpo={"clip_low": 0.2, "clip_high": 0.2, "kl_beta": 0.0})
            given = {"labels": self.labels, "logits": self.logits, "old_logprobs": self.old, "ref_logprobs": self.other}
            given |= {"advantages": self.advantages, "loss": np.float32(loss)}
            given |= {"dlogprobs": np.float32(-own * clipped / tokens)}
            for name, x in given.items():
                tape.record(name, x)
        recorder.close()
        return backtape.replay(directory, step=0)


def test_a_right_policy_loss_agrees(tmp_path):
    report = PolicyLoss().recorded(tmp_path)
    assert report.verdict == "agreed", report


def test_advantages_of_sequences_that_are_tiled_over_tokens_are_named(tmp_path):
    job = PolicyLoss()
    report = job.recorded(tmp_path, taken=np.tile(job.each, job.length).reshape(job.advantages.shape))
    told = named(report, "token-weights")["each token counts"]
    assert told.startswith("with the advantages of the sequences in turn, one token each"), told


def test_a_ratio_that_is_taken_to_another_policy_is_named_with_the_policy(tmp_path):
    job = PolicyLoss()
    for old, words in ((job.logp, "policy's own"), (job.other, "reference policy's")):
        told = named(job.recorded(tmp_path / words[:6], old=old), "token-weights")["each token counts"]
        assert told == f"with the {words} log-probabilities in the place of the old policy's log-probabilities", told


def test_tokens_that_count_twice_in_the_loss_and_in_all_sums_over_tokens_are_named(tmp_path):
    """A last chunk that is moved back over its neighbour: dq is written twice, and so is right."""
    job = Job(microbatches=1)
    rank, start = job.drawn()[1], int(job.rng.integers(4, job.half))
    twice = slice(start, start + job.half)

    def spoilt(given):
        own = given[0, rank]
        rows, nll = own["nll"]
        own["loss"] += nll[(rows >= twice.start) & (rows < twice.stop)].sum()
        q = job.q[0, rank].astype(np.float64).reshape(-1, job.depth)
        own["dk"] += own["entries"][twice].T @ q[twice]
        own["dbias"] += own["entries"][twice].sum(0)

    told = named(job.recorded(tmp_path, spoilt=spoilt), "block-miscounted")
    assert told["of"] == "dk, dbias, loss" and " twice" in told["which"], told


@pytest.mark.parametrize("counts", ["of the shifted labels", "as declared"])
def test_labels_that_are_shifted_over_the_ends_of_sequences_are_named(tmp_path, counts):
    job = Job(ranks=1, labels_shifted=False)

    def flat(at):
        moved = np.roll(job.ids[at].reshape(-1), -1)
        moved[-1] = IGNORED
        return moved.reshape(job.shape)

    assert job.recorded(tmp_path / "right").verdict == "agreed"
    if counts == "of the shifted labels":
        job.valid = sum(int((flat(at) != IGNORED).sum()) for at in job.ids)

    def spoilt(given):
        given.update({at: job.of(at, labels=flat(at)) for at in given})

    told = named(job.recorded(tmp_path / "flat", spoilt=spoilt), "label-shift")
    assert told["count"] == counts and "where it should be inside each sequence" in told["over"], told
