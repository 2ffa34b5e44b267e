"""Loss heads as training scripts write them, computed on the GPU and recorded: right, or with a planted fault.

`T` tokens, `V` classes, depth `D`: large enough that cuBLAS chooses the kernels that a real head gets.
"""

import contextlib
import math

import backtape
import torch
import torch.nn.functional as F

T, V, D = 1024, 8192, 512
EAGER = {
    "input": "bf16", "logits": "bf16", "lse": "f32", "p": "f32", "dlogits": "bf16", "output": "bf16",
}  # fmt: skip
ALL_F32 = dict.fromkeys(("input", "logits", "lse", "p", "dlogits", "accumulate", "output"), "f32")


def inputs(dtype=torch.bfloat16, seed=0):
    """q, k and labels; half of the labels are the likeliest class of their token."""
    generator = torch.Generator("cuda").manual_seed(seed)
    draw = {"generator": generator, "device": "cuda"}
    q = torch.randn(T, D, **draw)
    k = 2.0 * torch.randn(V, D, **draw) / math.sqrt(D)
    labels = torch.randint(V, (T,), **draw)
    labels[::2] = (q @ k.T).argmax(1)[::2]
    return q.to(dtype).requires_grad_(), k.to(dtype).requires_grad_(), labels


def eager(q, k, labels):
    """The head that most scripts have: logits in the inputs' type, the loss in f32."""
    return F.cross_entropy((q @ k.T).float(), labels)


def chunked(q, k, labels, chunk=256):
    """Chunk after chunk, as a script that saves memory does."""
    parts = zip(q.split(chunk), labels.split(chunk), strict=True)
    return sum(F.cross_entropy((rows @ k.T).float(), of, reduction="sum") for rows, of in parts) / len(q)


class LostLabels(torch.autograd.Function):
    """A planted fault: dlogits of the tokens whose label is the likeliest class lose its -1."""

    @staticmethod
    def forward(context, q, k, labels):
        logits = (q @ k.T).float()
        context.save_for_backward(q, k, labels, logits)
        return F.cross_entropy(logits, labels)

    @staticmethod
    def backward(context, upstream):
        q, k, labels, logits = context.saved_tensors
        p = logits.softmax(1)
        rows = torch.arange(len(q), device=q.device)
        p[rows, labels] -= (p[rows, labels] < p.amax(1)).float()
        entries = (upstream * p / len(q)).to(q.dtype)
        return entries @ k, entries.T @ q, None


def record(folder, q, k, labels, gradients, declared, **head):
    """The dump of one step with one microbatch."""
    recorder = backtape.Recorder(dir=folder, steps="0", strict=True)
    with recorder.step(0) as tape:
        tape.head(**({"loss": "softmax_xent", "path": "plain", "reduction": "mean", "dtypes": declared} | head))
        for name, tensor in {"q": q, "labels": labels, "dq": gradients[0]}.items():
            tape.record(name, tensor.detach(), microbatch=0)
        tape.record("k", k.detach())
        tape.record("dk", gradients[1])
    summary = recorder.close()
    assert summary is not None and not summary.omissions and 0 in summary.steps_committed, summary
    return folder


@contextlib.contextmanager
def tf32():
    """f32 products in TF32, as `torch.backends.cuda.matmul.allow_tf32` has them."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def torch_job(folder, loss, declared, dtype=torch.bfloat16, around=contextlib.nullcontext, scale=1.0, **head):
    """Forward and backward on the GPU; `around` surrounds the forward and the backward, `scale` is a GradScaler's."""
    q, k, labels = inputs(dtype)
    with around():
        value = loss(q, k, labels) * scale
        gradients = torch.autograd.grad(value, (q, k))
    return record(folder, q, k, labels, gradients, declared, cotangent=scale, **head)
