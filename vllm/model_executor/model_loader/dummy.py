"""Random weights: for profiling, and for tests of everything but the model's quality.

Owns: the fill rule. Must not know: models. Layer L6.
"""

from __future__ import annotations

import torch
from torch import nn

__all__ = ["fill_random"]


def fill_random(model: nn.Module, seed: int = 0) -> None:
    """Fills every parameter, the same way for the same model and seed.

    Matrices get a spread that keeps activations near one; norm weights get ones, other vectors small numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and "norm" in name and name.endswith("weight"):
            parameter.fill_(1.0)
            continue
        spread = 0.02 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
        # In slices: a large matrix would need a second copy in fp32.
        flat = parameter.view(-1)
        for start in range(0, flat.numel(), 1 << 24):
            part = flat[start : start + (1 << 24)]
            part.copy_(torch.randn(part.numel(), generator=generator) * spread)
