"""What the models of both parts share: how parameters start, and the loss."""

import torch
import torch.nn.functional as F


def start(module: torch.nn.Module, seed: int) -> torch.nn.Module:
    """Gives every parameter values of its own, biases and norms too: none is 0 as a whole."""
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=draw)
            if "norm" in name and name.endswith("weight"):
                parameter.copy_(1 + 0.1 * noise)
            elif parameter.ndim < 2:
                parameter.copy_(0.1 * noise)
            else:
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
    return module


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over tokens, in f32."""
    return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten())
