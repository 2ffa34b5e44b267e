"""What every job has of its rank: meshes, a recorder, batches, and a model to train."""

import contextlib

import torch
import torch.distributed as dist

import backtape
import backtape.torch
from step_corpus import layers, models
from step_corpus.meshes import device_mesh

SEED = 20261130
VOCABULARY, WIDTH = 29, 12


class Rank:
    """One rank of one job. `directory` takes the dump."""

    def __init__(self, index, world, directory):
        self.index, self.world, self.directory = index, world, directory
        torch.manual_seed(SEED)

    def mesh(self, **sizes):
        """A mesh of torch with these axes, the outermost first."""
        return device_mesh(tuple(sizes.values()), tuple(sizes))

    def recorder(self, step=0, **sizes):
        """A recorder of this step, on a mesh with these axes."""
        return backtape.Recorder.from_env(
            steps=str(step),
            dir=self.directory,
            mesh=sizes or None,
            rank=self.index,
            world_size=self.world,
            strict=True,
        )

    @contextlib.contextmanager
    def recorded(self, model, optimizer, *, reduce=None, **sizes):
        """The only step of a job, recorded."""
        with self.recorder(**sizes) as recorder, recorder.step(0) as tape:
            yield backtape.torch.step_algebra(tape, model, optimizer, reduce=reduce)

    def batch(self, microbatch=0, step=0, of=None):
        """Tokens and labels that a rank has; those of all ranks differ."""
        rank = self.index if of is None else of
        draw = torch.Generator().manual_seed(((SEED + rank) * 31 + step) * 17 + microbatch)
        return [torch.randint(VOCABULARY, (3, 5), generator=draw) for _ in range(2)]

    def transformer(self, depth=1):
        """A small language model, the same on every rank."""
        return self.started(models.Transformer(WIDTH, VOCABULARY, depth, tied=False))

    def started(self, model):
        """Gives every parameter its first value."""
        return layers.start(model, SEED)


def sum_over(tensor, group=None):
    """The sum over the ranks of a group, in place."""
    dist.all_reduce(tensor, group=group)
    return tensor


def mean_over(tensor, group=None):
    """The mean over the ranks of a group, in place."""
    return sum_over(tensor, group).div_(dist.get_world_size(group))
