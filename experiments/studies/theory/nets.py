"""What several sections share: seeds, inputs on the sphere, random networks, rank correlation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rigidities.theory.kernels import activation


def generator(*seeds: int) -> torch.Generator:
    """A source of random numbers for one combination of seeds."""
    combined = 0
    for seed in seeds:
        combined = (combined * 1_000_003 + seed + 1) % (1 << 31)
    return torch.Generator().manual_seed(combined)


def sphere(points: int, dimension: int, source: torch.Generator) -> Tensor:
    """Uniform on the unit sphere, (points, dimension): x . x' is a correlation."""
    x = torch.randn(points, dimension, generator=source, dtype=torch.float64)
    return torch.nn.functional.normalize(x, dim=1)


def last_features(x: Tensor, widths: Sequence[int], name: str, source: torch.Generator) -> Tensor:
    r"""Last features of a random network in NTK parametrisation, f / sqrt(N_L).

    They are normalised as in the paper: F F^T estimates the NNGP at $\sigma_w = 1$.

    Args:
        x: Inputs (points, dimension).
        widths: Widths of the hidden layers.
        name: The activation.
        source: Draws the weights.

    Returns:
        Features (points, widths[-1]).
    """
    phi = activation(name).normalised()
    root = phi.factor**0.5
    a = x
    for layer, width in enumerate(widths):
        weights = torch.randn(a.shape[1], width, generator=source, dtype=torch.float64)
        z = a @ weights
        if layer > 0:  # inputs lie on the unit sphere: the first sum has unit variance already
            z = z / a.shape[1] ** 0.5
        a = root * phi.function(z)
    return a / a.shape[1] ** 0.5


def rank_correlation(left: Tensor, right: Tensor) -> float:
    """Spearman's rank correlation."""
    from scipy.stats import spearmanr

    return float(spearmanr(left.numpy(), right.numpy()).statistic)
