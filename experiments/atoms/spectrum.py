r"""The power spectrum: what of an expanded density does not change when the structure is turned.

$$ p^{l}_{kk'} = \frac{s_{kk'}}{\sqrt{2l+1}} \sum_m c_{klm}\, c_{k'lm}, \qquad k \le k', $$

for channels k (species and radial function), with $s = \sqrt 2$ for two different channels, so that
products of spectra are those of the full, symmetric table.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def power_spectrum(expansion: Tensor) -> Tensor:
    """Spectra of atoms.

    Args:
        expansion: (A, C, M) with M = (largest l + 1)^2.

    Returns:
        (A, D): l after l, of each the pairs of channels (k, k') with k <= k'.
    """
    channels, degrees = expansion.shape[-2], math.isqrt(expansion.shape[-1])
    first, second = torch.triu_indices(channels, channels, device=expansion.device)
    root = expansion.new_tensor(math.sqrt(2))
    factor = torch.where(first == second, torch.ones_like(root), root)
    parts = []
    for degree in range(degrees):
        part = expansion[..., degree**2 : (degree + 1) ** 2]
        products = (part @ part.mT).flatten(-2)[..., first * channels + second]
        parts.append(products * (factor / math.sqrt(2 * degree + 1)))
    return torch.cat(parts, dim=-1)


def width(channels: int, angular: int) -> int:
    """Numbers of a spectrum.

    >>> width(30, 4)
    2325
    """
    return (angular + 1) * channels * (channels + 1) // 2
