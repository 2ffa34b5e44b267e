"""Records the steps of a jax job that was not written for it, with one line.

    train_step = backtape.jax.attach(train_step)

    session.py    which calls are steps
    doors.py      where a recorded step is seen in jax
    marks.py, shadow.py   a program traced once more, with marks where a gradient is taken
    graph.py      the program of a loss, laid open
    facts.py, rules.py    what its values are, in terms of logits and labels: arithmetic.py, softmax.py, labels.py,
                  shapes.py, constants.py
    finding.py    the heads in it
    copies.py, sites.py   a copy of it, in which the heads are heard; devices.py: inside shard_map
    heads.py      what is recorded of them
    declared.py   what is declared of them
    losses.py     losses that register their own head
"""

import os
from collections.abc import Callable
from typing import Any

from backtape.attach_jax.heads import DEFAULT_BYTES
from backtape.attach_jax.session import Attached
from backtape.recorder import Recorder

ASKED = ("STEPS", "WATCH", "RING")


def attach(
    function: Callable[..., Any],
    *,
    recorder: Recorder | None = None,
    first_step: int = 0,
    head_bytes: int = DEFAULT_BYTES,
) -> Attached:
    """Records the steps that BACKTAPE_STEPS asks for, of a job that calls nothing else of backtape.

        train_step = backtape.jax.attach(train_step)

    Of each such step it records the loss head: hidden states, unembedding, labels, the loss of each token, what
    arrives at it in the backward pass, and the gradients of hidden states and unembedding. The head is found in
    the program of each function of which a gradient is taken. Where nothing is asked for, it does nothing.

    function: what makes a step, jitted or not; each call of it from outside of jit is one. Or the loss, wherever it
        is called: then put `with attached.step():` around each step.
    recorder: by default `Recorder.from_env`, made when the first step begins.
    first_step: the number of the next step, for a job that goes on from a checkpoint.
    head_bytes: how many bytes of unembeddings and their gradients each process records of a step at most: a
        large head is recorded for the first runs of the loss alone.

    In a step that is recorded, the program of the job has a copy of the loss beside it, in which the head is heard:
    the job's own values keep their bits. It takes the time of one more forward pass, and the memory of the head's
    logits once more. Other steps run the job's own program.

    Returns what is called as the function is. Its `close` is called when the process ends.
    """
    if recorder is not None:
        is_asked = recorder.active
    else:
        is_asked = any(os.environ.get(f"BACKTAPE_{name}") for name in ASKED)
    return Attached(function, recorder, first_step, head_bytes, is_active=is_asked)
