"""Inputs on the sphere, random nets in NTK parametrisation, and an order compared."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rigidities.kernels import activation


def generator(*seeds: int) -> torch.Generator:
    """A source of random numbers for one combination of seeds."""
    mixed = 0
    for seed in seeds:
        mixed = (mixed * 1_000_003 + seed + 1) % (1 << 31)
    return torch.Generator().manual_seed(mixed)


def sphere(points: int, dimension: int, source: torch.Generator) -> Tensor:
    """Uniform on the unit sphere, (points, dimension): x . x' is a correlation."""
    x = torch.randn(points, dimension, generator=source, dtype=torch.float64)
    return torch.nn.functional.normalize(x, dim=1)


def last_features(x: Tensor, widths: Sequence[int], name: str, source: torch.Generator) -> Tensor:
    r"""f / sqrt(N_L) of a random net of the given hidden widths, normalised as in the paper.

    F F^T then estimates the NNGP at $\sigma_w = 1$.
    """
    phi = activation(name).normalised()
    root = phi.factor**0.5
    a = x
    for layer, width in enumerate(widths):
        weights = torch.randn(a.shape[1], width, generator=source, dtype=torch.float64)
        a = root * phi.function(a @ weights if layer == 0 else a @ weights / a.shape[1] ** 0.5)
    return a / a.shape[1] ** 0.5


def rank_correlation(left: Tensor, right: Tensor) -> float:
    """Spearman's."""
    from scipy.stats import spearmanr

    return float(spearmanr(left.numpy(), right.numpy()).statistic)
