"""Has Megatron-LM run on a CPU: import this before it. What computes gradients, sums, norms and steps stays as it is."""

import os

os.environ["TORCHDYNAMO_DISABLE"] = "1"

import contextlib  # noqa: E402
import functools  # noqa: E402

import torch  # noqa: E402

CPU = torch.device("cpu")
FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "arange", "zeros_like", "ones_like", "empty_like")


def here(device):
    """The CPU in place of a GPU."""
    kind = device.type if isinstance(device, torch.device) else str(device)
    return CPU if kind.startswith("cuda") else device


def on_cpu(function):
    """A function that makes its tensors on the CPU."""

    @functools.wraps(function)
    def made(*args, **options):
        if "device" in options:
            options["device"] = here(options["device"])
        return function(*args, **options)

    return made


for name in FACTORIES:
    setattr(torch, name, on_cpu(getattr(torch, name)))

type_of = torch.Tensor.type


def type_on_gpu(tensor, *args, **options):
    """Megatron-LM sorts parameters by the names of types on a GPU."""
    told = type_of(tensor, *args, **options)
    return told.replace("torch.", "torch.cuda.", 1) if isinstance(told, str) else told


torch.Tensor.type = type_on_gpu
torch.Tensor.cuda = lambda tensor, *_, **__: tensor
torch.nn.Module.cuda = lambda module, *_, **__: module
torch.cuda.current_device = lambda: CPU
torch.cuda.synchronize = lambda *_, **__: None
torch.cuda.get_rng_state = lambda *_, **__: torch.get_rng_state()
torch.cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
torch.cuda.manual_seed = torch.manual_seed
torch.cuda.stream = lambda *_, **__: contextlib.nullcontext()

import megatron.core.tensor_parallel.random as random  # noqa: E402

random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
