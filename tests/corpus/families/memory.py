"""Faults of index and memory: tails, block maps, buffers, strides."""

from dataclasses import replace

from corpus.case import draw_kept, plant, switched
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
