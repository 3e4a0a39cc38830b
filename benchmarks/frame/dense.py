"""Dense float64 references that share no code with the library: variances and scores."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from benchmarks.frame.workload import Workload

__all__ = ["features", "gaussian_nll", "quadratic", "rank_correlation"]


def features(work: Workload, x: Tensor) -> Tensor:
    """Input of the head and a column of ones for its bias, (N, D + 1), float64."""
    with torch.inference_mode():
        hidden = nn.Sequential(*list(work.model)[:-1])(x).double()
    return torch.cat([hidden, torch.ones_like(hidden[:, :1])], dim=1)


def quadratic(train: Tensor, rows: Tensor, *, ridge: float = 0.0) -> Tensor:
    """q = f^T (F^T F + ridge I)^-1 f as |R^-T f|^2 with F = QR: cond(F) is never squared."""
    width = train.shape[1]
    damping = math.sqrt(ridge) * torch.eye(width, dtype=torch.float64)
    factor = torch.linalg.qr(torch.cat([train.double(), damping]), mode="r").R
    solved = torch.linalg.solve_triangular(factor.mT, rows.double().mT, upper=False)
    return solved.square().sum(0)


def gaussian_nll(residuals: Tensor, variance: Tensor) -> float:
    """Mean of log(2 pi v) / 2 + r^2 / (2 v)."""
    terms = torch.log(2 * math.pi * variance) + residuals.square() / variance
    return float(terms.mean() / 2)


def rank_correlation(first: Tensor, second: Tensor) -> float:
    """Spearman's correlation of two vectors without ties."""
    ranks = torch.stack([values.argsort().argsort().double() for values in (first, second)])
    return float(torch.corrcoef(ranks)[0, 1])
