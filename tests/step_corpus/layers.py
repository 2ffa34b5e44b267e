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


def replace(module: torch.nn.Module, names: set[str]) -> None:
    """Makes other tensors of the same values of some parameters; tied ones stay tied."""
    copies: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    of_names = {parameter for name, parameter in module.named_parameters() if name in names}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter in of_names:
                copy = torch.nn.Parameter(parameter.detach().clone())
                owner._parameters[name] = copies.setdefault(parameter, copy)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean over tokens, in f32."""
    return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten())
