"""Runs a training script with one fault planted, in torch and not in the script: `planted.py FAULT SCRIPT ...`, or
`planted.py FAULT -m MODULE ...`.

    head-scaled      the gradient of the logits is multiplied by 0.8 before it reaches the unembedding
    head-bf16        it is rounded to bf16 there
    clip             torch's clipping leaves the largest parameter as it was
    not-cleared      no gradient is cleared between two steps
    decay            AdamW decays parameters by twice the declared weight decay
    no-correction    Adam and AdamW leave the correction of their moments out
    none             nothing; with BACKTAPE_ON_CPU torch is said to have a CPU alone, for scripts that ask for a GPU
"""

import contextlib
import importlib
import os
import runpy
import sys

import torch


def at_logits(changed):
    """Changes the gradient that comes back to the widest Linear of the model, which the unembedding is."""

    def watched(module, given, output):
        is_head = isinstance(module, torch.nn.Linear) and module.out_features >= 3 * module.in_features
        if is_head and isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(changed)

    torch.nn.modules.module.register_module_forward_hook(watched)


def head_bf16():
    at_logits(lambda gradient: gradient.bfloat16().to(gradient.dtype))


def head_scaled():
    at_logits(lambda gradient: gradient * 0.8)


def clip():
    """Puts the largest gradient back after torch's clipping."""

    def left_out(original):
        def clipped(parameters, *args, **options):
            parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            largest = max((one for one in parameters if one.grad is not None), key=torch.Tensor.numel)
            before = largest.grad.clone()
            result = original(parameters, *args, **options)
            largest.grad.copy_(before)
            return result

        return clipped

    for name in ("clip_grad_norm_", "clip_grads_with_norm_"):
        replacement = left_out(getattr(torch.nn.utils, name))
        setattr(torch.nn.utils, name, replacement)
        # transformers and Accelerate reach it by this module.
        setattr(torch.nn.utils.clip_grad, name, replacement)


def not_cleared():
    """Has neither optimizers nor modules clear gradients."""
    torch.optim.Optimizer.zero_grad = lambda self, *_, **__: None
    torch.nn.Module.zero_grad = lambda self, *_, **__: None


def in_adam(changed):
    """Has the steps of Adam and AdamW done otherwise, by their function and its arguments."""
    # By its name torch.optim.adam is the class's module, which torch.optim hides.
    module = importlib.import_module("torch.optim.adam")
    function = module.adam

    module.adam = lambda *args, **options: changed(function, args, options)


def decay():
    """Doubles the weight decay."""

    def changed(function, args, options):
        function(*args, **options | {"weight_decay": 2 * options["weight_decay"]})

    in_adam(changed)


def no_correction():
    """Adds to the count of steps, while one is computed, so many that the corrections are 1."""
    late = 1e6

    def changed(function, args, options):
        *_, steps = args
        for step in steps:
            step += late
        function(*args, **options)
        for step in steps:
            step -= late

    in_adam(changed)


FAULTS = {
    "head-bf16": head_bf16, "head-scaled": head_scaled, "clip": clip, "not-cleared": not_cleared, "decay": decay,
    "no-correction": no_correction, "none": lambda: None,
}  # fmt: skip


def on_cpu():
    """Says what torch says on a machine that has a CPU and no other device."""
    torch._utils._get_available_device_type = lambda: "cpu"
    # It refuses a backward pass on the CPU, as its compiled form has none there.
    importlib.import_module("torch.nn.attention.flex_attention")._validate_device = lambda *_: None
    torch.cpu.get_device_name = lambda *_: "CPU"
    torch.cpu.get_device_properties = lambda *_: type("CPU", (), {"total_memory": 2**34, "name": "CPU"})
    for name in ("reset_peak_memory_stats", "empty_cache", "reset_accumulated_memory_stats"):
        setattr(torch.cpu, name, lambda *_: None)
    torch.cpu.memory_stats = lambda *_: {}
    # torch's own barrier takes numbers of devices, and of a CPU it has a name.
    barrier = torch.distributed.barrier
    torch.distributed.barrier = lambda *args, device_ids=None, **options: barrier(*args, **options)


def main(fault, target, *more):
    FAULTS[fault]()
    if os.environ.get("BACKTAPE_ON_CPU"):
        on_cpu()
    if target == "-m":
        target, *more = more
        sys.argv = [target, *more]
        with contextlib.suppress(SystemExit):
            runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    sys.argv = [target, *more]
    sys.path[0] = os.path.dirname(os.path.abspath(target))
    runpy.run_path(target, run_name="__main__")


if __name__ == "__main__":
    main(*sys.argv[1:])
