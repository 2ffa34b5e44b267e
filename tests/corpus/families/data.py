"""Faults of distribution and data: parts that were not summed, rows in the wrong place."""

from dataclasses import replace

import numpy as np

from corpus import tensor, train
from corpus.case import Case, draw_kept, plant, switched
from corpus.families.scale import code_for, kept_for
from corpus.heads import Code
from corpus.job import draw_job, pick
from corpus.record import names_of


def relabelled(job, change):
    """The job with other labels: what the code computes with, not what the tape is given."""
    swapped = [data | {"labels": change(data["labels"])} for data in job.microbatches]
    return replace(job, microbatches=swapped)


def on_other_data(cause, job, kept, code, used, parameters, also=(), **more):
    """A program that computes on `used` what it records as `job`."""
    names = frozenset(names_of(kept) | {"loss", "dk", "dq"})
    run = lambda used: lambda: (job, train.train(used, code, names=names))
    parameters = {"dtype": job.dtype, "ranks": job.ranks, "microbatches": job.count, "head": code.head} | parameters
    return Case(cause, [{cause}, *also], kept, run(used), run(job), parameters, **more)


@plant("label-shift")
def label_shift(rng, seed):
    """Labels that are the next token already are shifted once more, within rows or across them."""
    amount, across = pick(rng, [-2, -1, 1, 2]), bool(rng.random() < 0.5)
    job = draw_job(rng, seed, uneven=bool(rng.random() < 0.5))
    tokens = job.microbatches[0]["labels"].size // job.ranks
    length = next((n for n in (37, 29, 23, 19, 17, 13, 11, 7, 5, 3) if tokens % n == 0), tokens)
    code = code_for(rng, job)

    def shifted(labels):
        rows = labels.reshape(-1, tokens if across else length)
        return np.roll(rows, -amount, axis=-1).reshape(-1)

    parameters = {"shift": amount, "across rows": across, "row": length}
    kept = kept_for(rng, code)
    return on_other_data("label-shift", job, kept, code, relabelled(job, shifted), parameters)


@plant("partial-not-reduced")
def partial_not_reduced(rng, seed):
    """Tensor parallelism: dq is one shard's part, or the sum of exponentials counts every shard
    once more for each rank."""
    wrong, ranks = pick(rng, ["dq", "dq", "lse"]), pick(rng, [2, 4])
    size = (int(rng.integers(200, 420)) | 1, ranks * int(rng.integers(70, 200)), int(rng.integers(17, 60)))
    job = draw_job(
        rng, seed, size=size, ranks=1, dtype=pick(rng, ["bf16", "f32"]), padded=False, bias=False,
        options={"softcap": None, "z_loss": 0.0, "temperature": 1.0},
    )  # fmt: skip
    job.tensor = ranks
    kept = draw_kept(rng, parts=False, accumulated=False, grad_norm=False)
    parameters = {"dtype": job.dtype, "tensor ranks": ranks, "microbatches": job.count, "what": wrong}
    run = lambda wrong: lambda: (job, tensor.train(job, wrong))
    return Case("partial-not-reduced", [{"partial-not-reduced"}], kept, run(wrong), run(None), parameters)


def after(cause, rng, job, change, parameters, also=(), kept=None, code=None, **more):
    """A fault of what happens to a right step's gradients: `change(job, captured)`."""
    code = code or code_for(rng, job)
    kept = kept or kept_for(rng, code)
    names = frozenset(names_of(kept) | {"loss", "dk", "dq"})

    def run(change):
        def both():
            captured = train.train(job, code, names=names)
            return job, change(job, captured) if change else captured

        return both

    about = {"dtype": job.dtype, "ranks": job.ranks, "microbatches": job.count, "head": code.head}
    return Case(cause, [{cause}, *also], kept, run(change), run(None), about | parameters, **more)


@plant("sync-wrong-microbatch")
def sync_wrong_microbatch(rng, seed):
    """The reduction runs in the first microbatch of the window; what comes after stays local."""
    which = pick(rng, ["first", "not the last"])
    job = draw_job(rng, seed, ranks=pick(rng, [2, 4]), microbatches=pick(rng, [2, 3]))

    def change(job, captured):
        own = [[mb["dk"][rank].astype(np.float32) for mb in captured.addends] for rank in range(job.ranks)]
        cut = 1 if which == "first" else job.count - 1
        synced = sum(sum(each[:cut]) for each in own)
        captured.replicas = [synced + sum(each[cut:], np.zeros_like(synced)) for each in own]
        return captured

    also = [{"replica-divergence"}, {"sync-wrong-microbatch", "replica-divergence"}]
    # Copies that disagree are no stage of the head: the dump itself is refused.
    return after("sync-wrong-microbatch", rng, job, change, {"synced": which}, also, stages=set())


@plant("replica-divergence")
def replica_divergence(rng, seed):
    """One rank's copy of the reduced gradient has other bits."""
    size, job = pick(rng, [1e-6, 1e-3, 1e-1]), draw_job(rng, seed, ranks=pick(rng, [2, 4]))
    odd, own = int(rng.integers(job.ranks)), int(rng.integers(2**31))

    def change(job, captured):
        noise = np.random.default_rng(own).standard_normal(captured.reduced.shape)
        drifted = (captured.reduced * (1 + size * noise)).astype(captured.reduced.dtype)
        captured.replicas = [drifted if r == odd else captured.reduced for r in range(job.ranks)]
        return captured

    return after("replica-divergence", rng, job, change, {"rank": odd, "size": size}, [{"silent-corruption"}], stages=set())


@plant("silent-corruption")
def silent_corruption(rng, seed):
    """A flipped bit, or a few rows of garbage, in one rank's gradient."""
    what, bit = pick(rng, ["bit", "rows"]), int(rng.integers(4, 15))
    job = draw_job(rng, seed, dtype=pick(rng, ["bf16", "f16"]))
    rank, own = int(rng.integers(job.ranks)), int(rng.integers(2**31))

    def change(job, captured):
        own_rng = np.random.default_rng(own)
        dk = captured.addends[-1]["dk"][rank].copy()
        if what == "bit":
            heavy = np.argsort(-np.abs(dk.astype(np.float32)).reshape(-1))[own_rng.integers(20)]
            dk.view(np.uint16).reshape(-1)[heavy] ^= np.uint16(1 << bit)
        else:
            rows = own_rng.choice(dk.shape[0], 3, replace=False)
            dk[rows] = own_rng.standard_normal((3, dk.shape[1])).astype(dk.dtype) * np.abs(dk).max()
        captured.addends[-1]["dk"][rank] = dk
        return train.together(job, train.Step(), captured.forward, captured.addends)

    return after("silent-corruption", rng, job, change, {"what": what, "bit": bit, "rank": rank})


@plant("token-order")
def token_order(rng, seed):
    """Context parallelism cuts a sequence in a zigzag: rows of dq, or labels, stay in its order."""
    job = draw_job(rng, seed)
    which, parts = pick(rng, ["dq", "dq", "labels"]), pick(rng, [4, 8])
    order = zigzag(job.microbatches[0]["labels"].size, parts)
    parameters = {"what": which, "parts": parts}
    if which == "labels":
        code = code_for(rng, job)
        used = relabelled(job, lambda labels: labels[order])
        return on_other_data("token-order", job, kept_for(rng, code), code, used, parameters)

    def change(job, captured):
        for found in captured.forward:
            found["dq"] = found["dq"][order]
        return captured

    return after("token-order", rng, job, change, parameters)


def zigzag(tokens, parts):
    """Parts 0, n-1, 1, n-2, ...: each rank has an early one and a late one."""
    pieces = np.array_split(np.arange(tokens), parts)
    pairs = [[pieces[i], pieces[-1 - i]] for i in range(parts // 2)]
    return np.concatenate([piece for pair in pairs for piece in pair])


@plant("tied-embedding")
def tied_embedding(rng, seed):
    """The unembedding is the embedding too: its gradient holds the input part, and nobody said so;
    or it was said, and only the head's part is there."""
    said = bool(rng.random() < 0.3)
    job = draw_job(rng, seed, dtype=pick(rng, ["bf16", "f32"]), path="fused")
    code = Code(head="fused")
    kept = draw_kept(rng, parts=said or bool(rng.random() < 0.3), reduced=True, accumulated=False)
    mixer = np.linalg.qr(rng.standard_normal((job.k.shape[1],) * 2))[0].astype(np.float32)
    if said:
        job.declared["tied_embedding"] = True

    def both_parts(job, captured):
        total = captured.reduced.astype(np.float32).copy()
        for data, found in zip(job.microbatches, captured.forward):
            inputs = np.roll(data["labels"], 1)
            np.add.at(total, inputs, found["dq"].astype(np.float32) @ mixer)
        captured.reduced = total
        captured.grad_norm = float(np.linalg.norm(total))
        return captured

    case = after("tied-embedding", rng, job, both_parts, {"declared": said}, kept=kept, code=code)
    if said:
        case.faulty, case.fixed = case.fixed, case.faulty
    return case


@plant("nan-origin")
def nan_origin(rng, seed):
    """A value that is no number enters at one place: an overflowing exp, or a broken input row."""
    what = pick(rng, ["overflow", "q", "one rank's dk"])
    loud = {"gain": 110, "options": {"softcap": None, "temperature": 1.0}} if what == "overflow" else {}
    job = draw_job(rng, seed, dtype=pick(rng, ["bf16", "f32"]), **loud)
    rank, mb = int(rng.integers(job.ranks)), int(rng.integers(job.count))
    own = int(rng.integers(2**31))
    parameters = {"what": what, "rank": rank, "microbatch": mb}
    if what == "q":
        code = code_for(rng, job)
        kept = kept_for(rng, code)
        used = replace(job, microbatches=[dict(data) for data in job.microbatches])
        row = job.rows(rank).start + own % 50
        used.microbatches[mb]["q"] = used.microbatches[mb]["q"].copy()
        used.microbatches[mb]["q"][row, 3] = np.nan
        case = on_other_data("nan-origin", job, kept, code, used, parameters)
        case.faulty = lambda: (used, train.train(used, code, names=frozenset(names_of(kept) | {"loss", "dk", "dq"})))
        case.stages = {"q"}
        return case

    if what == "overflow":
        code = code_for(rng, job, pick(rng, ["kernel", "fused"]))
        return switched("nan-origin", job, kept_for(rng, code), (code, train.Step()), (replace(code, maximum=False), train.Step()))

    def change(job, captured):
        captured.addends[mb]["dk"][rank] = captured.addends[mb]["dk"][rank].copy()
        captured.addends[mb]["dk"][rank][own % job.vocab] = np.nan
        return train.together(job, train.Step(), captured.forward, captured.addends)

    return after("nan-origin", rng, job, change, parameters)


@plant("dropped-batch")
def dropped_batch(rng, seed):
    """One rank skips a microbatch, as a loader that ran dry does: its addend never comes."""
    job = draw_job(rng, seed, ranks=pick(rng, [1, 2, 4]), microbatches=pick(rng, [2, 3, 4]))
    rank, mb = int(rng.integers(job.ranks)), int(rng.integers(job.count))

    def change(job, captured):
        addends = [dict(each) for each in captured.addends]
        lost = list(addends[mb]["dk"])
        lost[rank] = np.zeros_like(lost[rank])
        addends[mb]["dk"] = lost
        summed = train.together(job, train.Step(), captured.forward, addends)
        summed.addends = captured.addends
        return summed

    return after("dropped-batch", rng, job, change, {"rank": rank, "microbatch": mb}, [{"accumulation-window"}])


@plant("duplicate-batch")
def duplicate_batch(rng, seed):
    """A rank or a microbatch gets the same tokens again: the arithmetic is right, the data is not."""
    job = draw_job(rng, seed, ranks=pick(rng, [2, 4]), microbatches=2)
    across = pick(rng, ["ranks", "microbatches"])
    used = replace(job, microbatches=[dict(data) for data in job.microbatches])
    if across == "microbatches":
        used.microbatches[1] = dict(used.microbatches[0])
    else:
        for data in used.microbatches:
            for name in data:
                data[name] = data[name].copy()
                data[name][job.rows(1)] = data[name][job.rows(0)]
    return of_data("duplicate-batch", rng, job, used, {"across": across})


@plant("copy-task")
def copy_task(rng, seed):
    """Labels that are the inputs themselves, not the next ones: nothing is left to predict."""
    job = draw_job(rng, seed)
    job.extra = [{"tokens": np.roll(data["labels"], 1)} for data in job.microbatches]
    used = replace(job, extra=[{"tokens": data["labels"]} for data in job.microbatches])
    return of_data("copy-task", rng, job, used, {}, ids=[{"label-shift"}])


def of_data(cause, rng, job, used, parameters, ids=None):
    """A fault of the data alone: the head computes what it should of what it is given."""
    code = code_for(rng, job)
    kept = kept_for(rng, code)
    case = on_other_data(cause, job, kept, code, used, parameters, kind="checks")
    names = frozenset(names_of(kept) | {"loss", "dk", "dq"})
    case.faulty = lambda: (used, train.train(used, code, names=names))
    case.accept = ids or case.accept
    return case
