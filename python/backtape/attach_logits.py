"""What is made of the product of hidden states and unembedding before the softmax, as options of `Tape.head`."""

from typing import Any


def options(scale: float, cap: float | None, valid: int | None) -> dict[str, Any]:
    """The options for z = softcap tanh(z1 / softcap), with z1 the product times the scale.

    cap: None where no tanh is taken; valid: how many classes from the first on have a part, None for all.
    """
    return {"valid_vocab": valid, "logit_scale": scale, "softcap": cap}
