"""Faults of index and memory: tails, block maps, buffers, strides."""

from dataclasses import replace

from corpus import blocks
from corpus.case import Case, draw_kept, plant, switched
from corpus.heads import Code
from corpus.job import draw_job, pick
from corpus.train import Step


@plant("tail-tile-unmasked")
def tail_tile(rng, seed):
    """The last tile of the vocabulary is filled up with zeros, and their logits count."""
    tile = pick(rng, [96, 128, 200])
    job = draw_job(rng, seed, path="fused", tile=tile, padded=False, spread=1.0, bias=False)
    right = Code(head="fused", tile=tile)
    wrong = replace(right, masks_tail=False)
    return switched("tail-tile-unmasked", job, draw_kept(rng), (right, Step()), (wrong, Step()))


@plant("block-index-times-block")
def block_index(rng, seed):
    """An index map that gives element offsets where block indices are wanted, in a Pallas head.

    `loose` clamps a block that starts beyond the array to its end, as interpret mode does and a
    dynamic slice; `strict` has it read NaN."""
    block = pick(rng, [32, 48, 64])
    size = (int(rng.integers(130, 300)) | 1, int(rng.integers(4 * block, 7 * block)) | 1, 32)
    job = draw_job(rng, seed, size=size, dtype=pick(rng, ["bf16", "f32"]), path="fused", options=NO_OPTIONS, padded=False, bias=False)
    where, reads = pick(rng, ["forward", "backward", "both"]), pick(rng, ["loose", "loose", "strict"])
    kept = draw_kept(rng, parts=False)
    run = lambda where: lambda: (job, blocks.train(job, block, where, reads))
    parameters = {"dtype": job.dtype, "ranks": job.ranks, "microbatches": job.count, "head": "pallas", "block": block, "map": where, "reads": reads}
    also = [{"nan-origin"}, {"nan-origin", "block-index-times-block"}] if reads == "strict" else []
    return Case("block-index-times-block", [{"block-index-times-block"}, *also], kept, run(where), run(None), parameters)


NO_OPTIONS = {"softcap": None, "z_loss": 0.0, "temperature": 1.0}


def launched(cause, rng, seed, twist, also=(), keep=None, unknown_too=False, tile=64, chunk=64, stages=None, **job):
    """A fault of the emulated launches."""
    job = draw_job(rng, seed, path="plain", **job)
    code = Code(head="launches", tile=tile, chunk=chunk)
    kept = draw_kept(rng, parts=False, **(keep or {}))
    wrong = replace(code, twist=twist)
    return switched(
        cause, job, kept, (code, Step()), (wrong, Step()), also, unknown_too=unknown_too, stages=stages,
        loose=None,
    )  # fmt: skip


@plant("buffer-overwritten")
def buffer_overwritten(rng, seed):
    """The kernel writes dlogits over the logits: they are recorded, or read again, afterwards."""
    twist = pick(rng, ["gradients over logits", "second backward"])
    keep = {"logits": True} if twist == "gradients over logits" else {}
    return launched("buffer-overwritten", rng, seed, twist, keep=keep, padded=False)


@plant("index-overflow-32")
def index_overflow(rng, seed):
    """Flat indices t V + y in an integer that is too narrow. At sizes that a test can hold that is
    16 or 18 bits, not 32: a report that knows 32 bits only may say unknown."""
    return launched("index-overflow-32", rng, seed, "narrow index", chunk=pick(rng, [16, 17, 18]), unknown_too=True, padded=False)


@plant("stride-ignored")
def stride_ignored(rng, seed):
    """The kernel takes a strided view of q (every row of a sequence but the last) as contiguous."""
    case = launched("stride-ignored", rng, seed, "stride ignored", also=[{"token-order"}])
    return case


@plant("uninitialised-output")
def uninitialised(rng, seed):
    """Buffers of the allocator's pool, of which the kernel writes a part only."""
    twist = pick(rng, ["rows not written", "dq rows not written", "last tile not written"])
    return launched("uninitialised-output", rng, seed, twist, chunk=int(rng.integers(1, 3)))


@plant("zero-times-inf")
def zero_times_inf(rng, seed):
    """The label's logit as onehot times logits: 0 times the -inf of the padding is NaN."""
    return launched(
        "zero-times-inf", rng, seed, "one-hot product", also=[{"nan-origin"}, {"nan-origin", "zero-times-inf"}],
        padded=True, options={"mask_value": None}, keep={"label_logits": True},
    )  # fmt: skip


@plant("int-target-out-of-range")
def target_out_of_range(rng, seed):
    """Labels that are none (-1, -100): the forward skips them, the backward subtracts all the same."""
    options = {"ignore_label": pick(rng, [-100, -1]), "denominator": "valid"}
    return launched("int-target-out-of-range", rng, seed, "target not checked", options=options, weights=False)


@plant("mlp-cuda-kernel")
def mlp_cuda(rng, seed):
    """A public loss-gradient kernel: threads beyond the row read the next one; a vocabulary above
    the block is not walked; gradients are added to what the buffer held."""
    twist = pick(rng, ["columns not masked", "vocabulary above the block", "added to stale"])
    ids = {
        "columns not masked": [{"tail-tile-unmasked"}],
        "vocabulary above the block": [{"uninitialised-output"}, {"tail-tile-unmasked"}],
        "added to stale": [{"uninitialised-output"}],
    }[twist]
    case = launched("mlp-cuda-kernel", rng, seed, twist, also=ids, tile=pick(rng, [64, 128, 192]), unknown_too=True, spread=1.0, padded=False)
    case.accept = ids
    return case
