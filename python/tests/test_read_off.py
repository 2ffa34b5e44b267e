"""Faults that are read off the data: which tokens a sum holds, which q, lse or labels a gradient was made with.

Goal: what a kernel really used is solved for and named, in dk that was recorded in sums alone, too; the right job
agrees and noise has no name. Method: a head in numpy over ranks and microbatches with smoothing and a bias, sizes and
places from a seed; each test spoils what one kernel would. BACKTAPE_SEED draws another job.
"""

import numpy as np
import pytest

import backtape
from named import close, named
from numpy_head import IGNORED, SEED, Job


@pytest.mark.parametrize("dk", [None, "pre_reduce", "post_reduce"])
def test_the_right_job_agrees(tmp_path, dk):
    names = ("lse", "loss", "dq", "dbias", "dk") if dk is None else ("lse", "loss", "dq")
    report = Job(epsilon=0.1).recorded(tmp_path, names, dk=dk)
    assert report.verdict == "agreed", report


@pytest.mark.parametrize("dk", ["pre_reduce", "post_reduce"])
@pytest.mark.parametrize("times", [0, 2])
def test_a_chunk_that_one_rank_counts_otherwise_in_the_loss_and_a_sum_of_dk_is_named(tmp_path, dk, times):
    job = Job(ranks=3)
    mb, rank = place = job.drawn()
    last = slice(job.labels[place].size - int(job.rng.integers(5, 12)), None)

    def spoilt(given):
        own, q = given[place], job.q[place].astype(np.float64).reshape(-1, job.depth)
        own["dk"] = own["dk"] + (times - 1) * own["entries"][last].T @ q[last]
        rows, nll = own["nll"]
        own["loss"] = own["loss"] + (times - 1) * nll[rows >= last.start].sum()

    told = named(job.recorded(tmp_path, ("lse", "loss", "dq"), spoilt, dk), "block-miscounted")
    often = "left out" if times == 0 else "twice"
    assert told["of"] == "the sums of dk" and told["which"].endswith(f"{often} in microbatch {mb} of rank {rank}"), told


def test_a_sum_of_dk_that_is_noisy_has_no_name(tmp_path):
    job = Job()

    def spoilt(given):
        given[0, 1]["dk"] = given[0, 1]["dk"] * (1 + 0.1 * job.rng.standard_normal(job.k.shape))

    assert named(job.recorded(tmp_path, ("lse", "loss", "dq"), spoilt, "post_reduce"), "unknown") == {}


def test_labels_that_are_rolled_inside_parts_of_sequences_are_a_shift_though_the_first_ids_stand_nowhere(tmp_path):
    job = Job()

    def spoilt(given):
        for at in given:
            labels = job.labels[at].copy()
            labels[:, job.half - 1] = job.classes // 2 + job.rng.integers(0, job.classes // 2, job.sequences)
            given[at] = job.of(at, labels=labels)

    told = named(job.recorded(tmp_path, ("lse", "loss", "dq"), spoilt, "post_reduce"), "label-shift")
    assert told["over"] == f"runs of {job.half} tokens"


def test_microbatches_that_a_rank_lost_of_a_sum_are_no_chunks_of_tokens(tmp_path):
    job = Job(ranks=2, microbatches=3)
    _, rank = job.drawn()

    def spoilt(given):
        for mb in (0, 1):
            given[mb, rank]["dk"] = 0 * given[mb, rank]["dk"]

    report = job.recorded(tmp_path, ("lse", "loss", "dq"), spoilt, "post_reduce")
    told = {found.id for found in report.causes}
    assert told and told <= {"accumulation-window", "sync-wrong-microbatch"}, report.json["causes"]


def test_the_labels_part_that_a_sum_lacks_of_one_ranks_microbatch_is_named_with_both(tmp_path):
    job = Job(ranks=3)
    mb, rank = place = job.drawn()

    def spoilt(given):
        labels, q = job.labels[place].reshape(-1), job.q[place].astype(np.float64).reshape(-1, job.depth)
        for t in np.flatnonzero(labels != IGNORED):
            given[place]["dk"][labels[t]] += q[t] / job.valid

    told = named(job.recorded(tmp_path, ("lse", "loss", "dq"), spoilt, "post_reduce"), "part-missing")
    assert told["the label's part"] == f"left out in microbatch {mb} of rank {rank}"


def test_tokens_that_stand_in_the_same_places_of_every_sequence_and_count_twice_are_told_by_their_places(tmp_path):
    job = Job(ranks=1, microbatches=1)

    def spoilt(given):
        q = job.q[0, 0].astype(np.float64).reshape(-1, job.depth)
        twice = np.arange(len(q)) % (2 * job.half) == job.half
        given[0, 0]["dk"] = given[0, 0]["dk"] + given[0, 0]["entries"][twice].T @ q[twice]

    told = named(job.recorded(tmp_path, ("lse", "dq", "dk"), spoilt), "block-miscounted")
    assert told["which"] == f"{job.half} twice of every sequence"


def test_a_sum_that_is_clipped_after_every_microbatch_is_named(tmp_path):
    job = Job(ranks=1, microbatches=4)
    for beside in (0.0, 0.02):
        total, to = 0.0, 0.6 * np.linalg.norm(job.of((0, 0))["dk"])
        for mb in range(4):
            total = total + job.of((mb, 0))["dk"]
            total = total * min(1.0, to / np.hypot(np.linalg.norm(total), beside * mb))
        report = summed(job, tmp_path / str(beside), total)
        assert named(report, "clipping")["clipped"] == "the sum, after every microbatch"


def summed(job, directory, total):
    """The job of one rank with dk of every microbatch, and this as their sum."""
    recorder = backtape.Recorder(directory, rank=0, world_size=1, mesh={"data": 1})
    with recorder.step(0) as tape:
        tape.head(loss="softmax_xent", path="plain", scope="global", microbatches=job.microbatches, denominator="valid",
                  microbatch_reduction="sum", ignore_label=IGNORED)  # fmt: skip
        for name in ("k", "bias"):
            tape.record(name, getattr(job, name))
        for mb in range(job.microbatches):
            job.of_tokens(tape, job.of((mb, 0)), (mb, 0), ("dk",))
        tape.record("dk", np.float32(total), partial="sum", when="pre_reduce")
    recorder.close()
    return backtape.replay(directory, step=0)


def test_weights_that_are_those_of_the_next_token_in_the_loss_and_all_gradients_are_named(tmp_path):
    job = Job(denominator="weights")

    def spoilt(given):
        right = job.weights
        job.weights = {at: np.roll(of, -1, axis=1) for at, of in right.items()}
        given.update({at: job.of(at) for at in given})
        job.weights = right

    told = named(job.recorded(tmp_path, ("lse", "dq", "dk"), spoilt), "token-weights")
    assert told["each token counts"].startswith("with the weight of the token 1 after it in each sequence")


@pytest.mark.parametrize("groups", [False, True])
def test_copies_of_a_reduced_dk_that_are_sums_of_other_ranks_are_told_by_what_they_hold(tmp_path, groups):
    job = Job(ranks=4, microbatches=3)
    given = {at: job.of(at)["dk"] for at in job.q}
    parts = {rank: [given[mb, rank] for mb in range(3)] for rank in range(4)}

    def held(rank):
        """Of a group of two ranks alone, or what all have but the last microbatch, of which a rank has its own."""
        if groups:
            return sum(sum(parts[other]) for other in range(4) if other // 2 == rank // 2)
        return sum(sum(part[:2]) for part in parts.values()) + parts[rank][2]

    recorders = [backtape.Recorder(tmp_path, rank=r, world_size=4, mesh={"data": 4}) for r in range(4)]
    for rank, recorder in enumerate(recorders):
        with recorder.step(0) as tape:
            tape.head(loss="softmax_xent", path="plain", scope="global", microbatches=3, microbatch_reduction="sum",
                      denominator="valid", ignore_label=IGNORED)  # fmt: skip
            for name in ("k", "bias"):
                tape.record(name, getattr(job, name))
            for mb in range(3):
                job.of_tokens(tape, job.of((mb, rank)), (mb, rank), ("dq",))
            tape.record("dk", np.float32(held(rank)), when="post_reduce")
    close(recorders)
    told = named(backtape.replay(tmp_path, step=0), "partial-not-reduced" if groups else "sync-wrong-microbatch")
    if groups:
        assert told["holds only"] == "ranks 0 and 1: those of ranks 0 and 1; ranks 2 and 3: those of ranks 2 and 3", told


@pytest.mark.parametrize("data,tensor", [(3, 2), (2, 3)])
def test_a_mean_over_data_ranks_of_a_dk_that_tensor_ranks_cut_is_right(tmp_path, data, tensor):
    rng = np.random.default_rng(SEED)
    tokens, depth, sizes = 30, 16, [int(n) for n in rng.integers(20, 40, tensor)]
    starts, classes = np.cumsum([0, *sizes]), sum(sizes)
    k = (rng.standard_normal((classes, depth)) * 0.5).astype(np.float32)
    q, labels = rng.standard_normal((data, tokens, depth)).astype(np.float32), rng.integers(0, classes, (data, tokens))
    logits = q.astype(np.float64) @ k.T
    entries = np.exp(logits - np.log(np.exp(logits).sum(-1))[..., None])
    np.put_along_axis(entries, labels[..., None], np.take_along_axis(entries, labels[..., None], -1) - 1, -1)
    dk = np.einsum("atv,atd->avd", entries / tokens, q)
    world, mesh = data * tensor, {"data": data, "tensor": tensor}
    recorders = [backtape.Recorder(tmp_path, rank=r, world_size=world, mesh=mesh) for r in range(world)]
    for rank, recorder in enumerate(recorders):
        a, t = divmod(rank, tensor)
        own = slice(int(starts[t]), int(starts[t + 1]))
        with recorder.step(0) as tape:
            tape.head(loss="softmax_xent", path="plain", denominator="all", scope="rank")
            tape.record("k", k[own], placement={"tensor": 0})
            tape.record("q", q[a], placement={"data": 0})
            tape.record("labels", labels[a].astype(np.int32), placement={"data": 0})
            tape.record("dk", np.float32(dk[a, own]), when="pre_reduce", placement={"data": "mean", "tensor": 0})
            tape.record("dk", np.float32(dk.mean(0)[own]), when="post_reduce", placement={"tensor": 0})
    close(recorders)
    report = backtape.replay(tmp_path, step=0)
    assert report.verdict == "agreed", report


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_row_of_garbage_is_corruption_on_one_rank_and_none_where_another_has_it_too(tmp_path, ranks):
    job = Job(ranks=2, microbatches=1)
    row = int(job.rng.integers(job.classes))

    def spoilt(given):
        size = 50 * np.abs(given[0, 0]["dk"]).max()
        for rank in range(ranks):
            given[0, rank]["dk"][row] += size * job.rng.standard_normal(job.depth)

    report = job.recorded(tmp_path, ("lse", "dq", "dk"), spoilt)
    assert [found.id for found in report.causes] == ["silent-corruption" if ranks == 1 else "unknown"]


def test_rows_of_dq_that_are_each_ranks_own_addend_are_named(tmp_path):
    job = Job(ranks=3, axis="tensor")
    mb, _ = job.drawn()
    part = job.classes // 3

    def spoilt(given):
        for rank in range(3):
            own = slice(rank * part, (rank + 1) * part)
            given[mb, rank]["dq"] = given[mb, rank]["entries"][:, own] @ job.k[own]

    assert named(job.recorded(tmp_path, ("lse", "dq", "dk"), spoilt), "partial-not-reduced")["shard"] == "0, 1, 2"


def test_weights_that_one_ranks_backward_multiplies_by_twice_are_named_with_the_rank(tmp_path):
    job = Job(denominator="weights")
    _, rank = job.drawn()

    def spoilt(given):
        for at in given:
            given[at] = job.of(at, weights=job.weights[at] ** 2 if at[1] == rank else None)

    told = named(job.recorded(tmp_path, ("lse", "dq", "dk"), spoilt), "token-weights")
    assert told["each token counts"] == "with the square of its weight" and f"rank {rank}" in told["only in"]


def test_a_q_of_another_microbatch_that_dk_is_made_with_is_named(tmp_path):
    job = Job(ranks=1, microbatches=3)

    def spoilt(given):
        given[0, 0]["dk"] = given[0, 0]["entries"].T @ job.q[2, 0].astype(np.float64).reshape(-1, job.depth)

    told = named(job.recorded(tmp_path, ("lse", "dq", "dk"), spoilt), "buffer-overwritten")
    assert told["tensor"] == "dk of microbatch 0 is made with q of microbatch 2"


def test_an_lse_that_one_microbatch_alone_reads_of_another_is_named(tmp_path):
    job = Job(ranks=1, microbatches=3)

    def spoilt(given):
        given[1, 0] |= {name: job.of((1, 0), lse=job.lse((2, 0)))[name] for name in ("dq", "dk")}

    told = named(job.recorded(tmp_path, ("loss", "dq", "dk"), spoilt), "other-lse")
    assert told["lse"] == "microbatch 1 reads that of microbatch 2"


def test_a_spread_of_smoothing_over_one_ranks_classes_alone_is_named(tmp_path):
    job = Job(epsilon=0.1, axis="tensor")

    def spoilt(given):
        for at in given:
            given[at] |= {name: job.of(at, spread=2.0)[name] for name in ("dq", "dk", "dbias")}

    told = named(job.recorded(tmp_path, spoilt=spoilt), "smoothing-mismatch")
    assert told["instead"] == "2 times the term ε/K of every class", told


def test_a_gradient_of_the_bias_that_holds_the_last_chunk_alone_is_named(tmp_path):
    job = Job()
    chunk = int(job.rng.integers(10, 20))

    def spoilt(given):
        for own in given.values():
            own["dbias"] = own["entries"][-chunk:].sum(0)

    told = named(job.recorded(tmp_path, spoilt=spoilt), "block-miscounted")
    assert told["of"] == "dbias" and "left out" in told["which"]


def test_a_gradient_of_the_bias_that_is_twice_itself_is_named(tmp_path):
    job = Job(ranks=3, microbatches=3)

    def spoilt(given):
        for own in given.values():
            own["dbias"] = 2 * own["dbias"]

    told = named(job.recorded(tmp_path, spoilt=spoilt), "bias-twice")
    assert (told["in"], told["times"]) == ("its gradient", "2")


def test_f16_entries_that_a_late_loss_scale_does_not_save_are_named_though_they_are_declared_f16(tmp_path):
    rng = np.random.default_rng(SEED)
    tokens, depth, classes, scale, over = 150, 32, 600, 32768.0, 65536.0
    q, k = (rng.standard_normal(shape).astype(np.float16) for shape in ((tokens, depth), (classes, depth)))
    k = (0.3 * k).astype(np.float16)
    labels = rng.integers(0, classes, tokens).astype(np.int32)
    wide_q, wide_k = q.astype(np.float64), k.astype(np.float64)
    logits = wide_q @ wide_k.T
    entries = np.exp(logits - np.log(np.exp(logits).sum(-1))[:, None])
    entries[np.arange(tokens), labels] -= 1
    for late in (False, True):
        own = (entries / over * (1 if late else scale)).astype(np.float16).astype(np.float64) * (scale if late else 1)
        directory = tmp_path / ("late" if late else "early")
        recorder = backtape.Recorder(directory, rank=0, world_size=1, mesh={"data": 1})
        with recorder.step(0) as tape:
            f32 = dict.fromkeys(("logits", "lse", "p", "accumulate"), "f32")
            dtypes = {"input": "f16", "dlogits": "f16", "output": "f16", **f32}
            tape.head(loss="softmax_xent", path="plain", denominator=over, cotangent=scale, dtypes=dtypes)
            given = {"dq": (own @ wide_k).astype(np.float16), "dk": (own.T @ wide_q).astype(np.float16)}
            for name, x in {"q": q, "k": k, "labels": labels, **given}.items():
                tape.record(name, x)
        recorder.close()
        report = backtape.replay(directory, step=0)
        if not late:
            assert report.verdict == "agreed", report
    assert "multiplies after the rounding" in named(report, "underflow")["the loss's scale"]


NEVER = "with a ratio that is never clipped"
BOTH = "with a ratio that is clipped at both bounds, whatever the sign of the advantage"
OTHER = "with the ratio to the reference policy"


@pytest.mark.parametrize("words", [NEVER, BOTH, OTHER])
@pytest.mark.parametrize("shown", ["dlogprobs", "dlogits"])
def test_a_policy_loss_whose_backward_clips_by_another_rule_is_named(tmp_path, words, shown):
    rng = np.random.default_rng(SEED)
    tokens, classes, low, high, beta = int(rng.integers(90, 150)), 120, 0.8, 1.28, 0.1
    logits = rng.standard_normal((tokens, classes)).astype(np.float32)
    labels, rows = rng.integers(0, classes, tokens).astype(np.int32), np.arange(tokens)
    lse = np.log(np.exp(logits.astype(np.float64)).sum(-1))
    logp = logits[rows, labels] - lse
    old, ref = (np.float32(logp + rng.standard_normal(tokens) * of) for of in (0.3, 0.4))
    advantages = rng.standard_normal(tokens).astype(np.float32)

    r, other = np.exp(logp - old), np.exp(logp - ref)
    own = {
        NEVER: r,
        BOTH: np.where((r < low) | (r > high), 0, r),
        OTHER: np.where(np.where(advantages > 0, other > high, other < low), 0, other),
    }[words]
    dlogp = (-advantages * own + beta * (1 - np.exp(ref - logp))) / tokens
    dlogits = -np.exp(logits - lse[:, None]) * dlogp[:, None]
    dlogits[rows, labels] += dlogp
    recorder = backtape.Recorder(tmp_path, rank=0, world_size=1, mesh={"data": 1})
    with recorder.step(0) as tape:
        grpo = {"clip_low": 1 - low, "clip_high": high - 1, "kl_beta": beta, "kl": "k3", "average": "token"}
        tape.head(loss="grpo", path="plain", grpo=grpo)
        given = {"labels": labels, "logits": logits, "old_logprobs": old, "ref_logprobs": ref, "advantages": advantages}
        given |= {"logprobs": np.float32(logp), shown: np.float32(dlogp if shown == "dlogprobs" else dlogits)}
        for name, x in given.items():
            tape.record(name, x)
    recorder.close()
    assert named(backtape.replay(tmp_path, step=0), "token-weights")["each token counts"] == words
