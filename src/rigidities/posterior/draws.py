"""Reproducible random numbers on any device."""

from __future__ import annotations

import torch
from torch import Tensor


def standard_normal(
    shape: tuple[int, ...], device: torch.device, generator: torch.Generator | None
) -> Tensor:
    """Independent draws from N(0, 1) in float64.

    Args:
        shape: Shape of the draws.
        device: Where the draws are needed.
        generator: Draws them where it lives; None for torch's own generator of the device.
    """
    source = generator.device if generator is not None else device
    return torch.randn(shape, dtype=torch.float64, device=source, generator=generator).to(device)


MEMBERS = 64
"""Number of members that are drawn where no number is given."""
