"""From logits back to the product that they come from: chains of operations drawn at random, held against
what the product that was found gives when it is computed anew. The seeds are printed."""

import random

import pytest
import torch

from backtape.attach_torch.graph import product_of
from backtape.attach_torch.rows import Unfollowed

BATCH, LENGTH, WIDTH, VOCAB = 3, 5, 4, 7


def scaled(logits, classes, draw):
    return (logits * 1.5 if draw.random() < 0.5 else logits / 0.8), classes


def in_f64(logits, classes, draw):
    return logits.double(), classes


def copied(logits, classes, draw):
    return logits.clone().contiguous(), classes


def swapped(logits, classes, draw):
    first, second = draw.sample(range(logits.dim()), 2)
    moved = {first: second, second: first}
    return logits.transpose(first, second - logits.dim()), moved.get(classes, classes)


def permuted(logits, classes, draw):
    order = draw.sample(range(logits.dim()), logits.dim())
    return logits.permute(order), order.index(classes)


def merged(logits, classes, draw):
    """Rows in one dimension, the classes behind them."""
    return logits.movedim(classes, -1).reshape(-1, logits.shape[classes]), 1


def parted(logits, classes, draw):
    logits = logits.movedim(classes, -1)
    rows = logits.shape[:-1].numel()
    parts = draw.choice([n for n in range(1, rows + 1) if rows % n == 0])
    return logits.reshape(parts, rows // parts, -1), 2


def widened(logits, classes, draw):
    at = draw.randint(0, logits.dim())
    return logits.unsqueeze(at), classes + (at <= classes)


def shortened(logits, classes, draw):
    rows = [at for at in range(logits.dim()) if at != classes and logits.shape[at] > 1]
    if not rows:
        return logits, classes
    at = draw.choice(rows)
    where = [slice(None)] * logits.dim()
    where[at] = draw.choice([slice(1, None), slice(None, -1), slice(0, None, 2)])
    return logits[tuple(where)], classes


def chosen(logits, classes, draw):
    """Rows by a mask of the first dimension."""
    logits = logits.movedim(classes, -1)
    mask = torch.tensor([draw.random() < 0.7 for _ in range(logits.shape[0])])
    mask[0] = True
    return logits[mask], logits.dim() - 1


def without_padding(logits, classes, draw):
    return logits.narrow(classes, 0, max(2, logits.shape[classes] - 1)), classes


OPERATIONS = [scaled, in_f64, copied, swapped, permuted, merged, parted, widened, shortened, chosen, without_padding]


@pytest.mark.parametrize("seed", range(60))
def test_the_product_that_is_found_gives_the_logits_row_by_row(seed):
    print("seed", seed)
    draw = random.Random(seed)
    torch.manual_seed(seed)
    hidden = torch.randn(BATCH, LENGTH, WIDTH, requires_grad=True)
    bias = torch.randn(VOCAB, requires_grad=True) if draw.random() < 0.3 else None
    weight = torch.randn(VOCAB, WIDTH, requires_grad=True)
    logits, classes = torch.nn.functional.linear(hidden, weight, bias), 2
    cap_at = draw.choice([None, 0, 1, 2])
    for number in range(draw.randint(1, 5)):
        logits, classes = draw.choice(OPERATIONS)(logits, classes, draw)
        if number == cap_at:
            logits = torch.tanh(logits / 2.5) * 2.5
    found = product_of(logits, classes)
    scale, softcap, valid = (found.head[name] for name in ("logit_scale", "softcap", "valid_vocab"))
    z = hidden.detach().reshape(-1, WIDTH) @ weight.detach().T * scale
    if found.bias is not None:
        z += found.bias.detach() * scale
    if softcap is not None:
        z = torch.tanh(z / softcap) * softcap
    z = z[:, :valid]
    rows = torch.arange(len(z)) if found.rows is None else found.rows
    expected = logits.detach().movedim(classes, -1).reshape(-1, logits.shape[classes])
    torch.testing.assert_close(z[rows].double(), expected.double(), rtol=1e-5, atol=1e-6)
    assert (found.bias is None) == (bias is None)


def test_what_cannot_be_followed_is_named():
    hidden = torch.randn(4, WIDTH, requires_grad=True)
    weight = torch.randn(VOCAB, WIDTH, requires_grad=True)
    logits = hidden @ weight.T
    for given, said in [
        (torch.cat([logits, logits]), "Cat"),
        (logits.softmax(-1), "Softmax"),
        (logits + hidden.sum(), "Add"),
        (logits[:, 1:], "from the first one on"),
        (logits[torch.tensor([0, 0])], "one hidden state gives several rows"),
        (torch.randn(4, VOCAB), "no product"),
    ]:
        with pytest.raises(Unfollowed, match=said):
            product_of(given, 1)
