"""Reproducible random numbers on any device."""

from __future__ import annotations

import torch
from torch import Tensor


def standard_normal(
    shape: tuple[int, ...], device: torch.device, generator: torch.Generator | None
) -> Tensor:
    """Independent N(0, 1) in float64, drawn where the generator lives and moved to the device."""
    source = generator.device if generator is not None else device
    return torch.randn(shape, dtype=torch.float64, device=source, generator=generator).to(device)


MEMBERS = 64
"""How many are drawn where no number is given."""
