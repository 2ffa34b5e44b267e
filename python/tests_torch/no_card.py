"""`python -m gpu` with this process in the place of the card: every line runs, small, on a CPU.

What torch is asked of CUDA is answered here: tensors for it lie in this process' memory, events take
the host's clock. So everything is run but the card, the peers that need one, and torch's profiler.
"""

import contextlib
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode

sys.path.append(str(Path(__file__).resolve().parents[1] / "benches"))

from gpu import capture, card, crossentropy, loading, losses, training  # noqa: E402
from gpu.__main__ import main  # noqa: E402
from gpu.activity import Activity  # noqa: E402
from gpu.head import Shape  # noqa: E402


def here(value):
    """A device of CUDA is this process."""
    named = isinstance(value, str | torch.device) and str(value).startswith("cuda")
    return "cpu" if named else value


class Here(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = {key: here(value) for key, value in (kwargs or {}).items() if key != "pin_memory"}
        return function(*map(here, args), **kwargs)


class Event:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = time.perf_counter()

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


class Stream:
    def wait_stream(self, other):
        pass


class Generators:
    """torch.Generator, whose device is this process; modules that torch loads later name it in their types."""

    def __init__(self, of):
        self.of = of

    def __call__(self, device):
        return self.of(here(device))

    def __or__(self, other):
        return self.of | other


def stand_in():
    """torch.cuda, as far as it is asked."""
    about = SimpleNamespace(name="no card", major=9, minor=0, total_memory=1 << 30)
    nothing = lambda *_: None
    answers = {
        "Event": Event, "Stream": Stream, "current_stream": Stream, "is_available": lambda: True,
        "stream": lambda _: contextlib.nullcontext(), "synchronize": nothing, "empty_cache": nothing,
        "reset_peak_memory_stats": nothing, "memory_allocated": lambda: 0, "max_memory_allocated": lambda: 1 << 30,
        "get_device_properties": lambda _: about,
    }  # fmt: skip
    for name, answer in answers.items():
        assert hasattr(torch.cuda, name), name
        setattr(torch.cuda, name, answer)
    torch.Generator = Generators(torch.Generator)
    torch.accelerator.current_stream = lambda: SimpleNamespace(is_capturing=lambda: False)
    autocast = torch.autocast
    torch.autocast = lambda device, dtype: autocast(here(device), dtype)


def shrink():
    """Everything small, and programs beside this one on a CPU."""
    card.ceilings.__defaults__ = (1 << 20, 64)
    losses.SMALL = Shape(96, 512, 64)
    capture.WORK, capture.TENSOR_BYTES = 32, 1 << 20
    training.LAYERS, training.WIDTH, training.HEADS, training.VOCAB = 1, 32, 2, 64
    training.SEQUENCES, training.LENGTH = 2, 8
    capture.profiled = lambda sides: Activity(copies=2.0, span=4.0, kernels=0.5, names=("fingerprint",))
    for module, name in ((crossentropy, "start_xla"), (capture, "in_jax")):
        function = getattr(module, name)
        count = {"start_xla": 2, "in_jax": 3}[name]
        setattr(module, name, lambda *given, of=function, n=count: of(*given[:n], "cpu"))
    load = loading.by_safetensors
    loading.by_safetensors = lambda files, device: load(files, here(device.partition(":")[0]))


if __name__ == "__main__":
    stand_in()
    shrink()
    with Here():
        sys.exit(main(sys.argv[1:]))
