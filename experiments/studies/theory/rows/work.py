"""What is left at t = infinity when rows outnumber features (paper, Sec. 3.5).

For growing numbers of training rows, `measured` averages the variance and the squared error of two
predictions over draws of the data: that of the limit, and that of ridge regression.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from experiments.frame.progress import steps
from experiments.studies.theory.nets import generator, last_features, sphere
from rigidities import Gram, Posterior
from rigidities.theory.kernels import last_layer_process_at

FULL = {"counts": (8, 16, 24, 32, 40, 48, 56, 60, 64, 68, 72, 80, 96, 128, 192, 256), "seeds": 40}
QUICK = {"counts": (16, 48, 64, 96), "seeds": 3}

WIDTH = 64
"""Features."""

DIMENSION = 6
NOISE = 0.1
"""Standard deviation of the noise; the prior variance of a weight is one."""

TEST = 200
"""Test points."""

RIDGES = (NOISE**2 / 100, NOISE**2, 100 * NOISE**2)
"""Too small, right and too large."""


def measured(counts: tuple[int, ...], seeds: int, *, seed: int) -> dict[str, Any]:
    """Means over test points and draws of inputs, prior weights and noise.

    Args:
        counts: Numbers of training rows.
        seeds: Draws of the data.
        seed: The seed of the draws.
    """
    limit_variance = torch.zeros(len(counts), dtype=torch.float64)
    limit_error = torch.zeros(len(counts), dtype=torch.float64)
    ridge_variance = torch.zeros(len(RIDGES), len(counts), dtype=torch.float64)
    ridge_error = torch.zeros(len(RIDGES), len(counts), dtype=torch.float64)
    for j in steps(range(seeds), "draws of the data"):
        source = generator(seed, j)
        x = sphere(max(counts) + TEST, DIMENSION, source)
        f = last_features(x, [256, WIDTH], "silu", source)
        weights = torch.randn(WIDTH, generator=source, dtype=torch.float64)
        noise = NOISE * torch.randn(len(f), generator=source, dtype=torch.float64)
        truth = f @ weights
        y = truth + noise
        test = f[-TEST:]
        target = truth[-TEST:]
        for i, n in enumerate(counts):
            process = last_layer_process_at(math.inf, f[:n], test, y[:n])
            limit_variance[i] += process.variance.mean() / seeds
            limit_error[i] += (process.mean - target).square().mean() / seeds
            for k, ridge in enumerate(RIDGES):
                mean, variance = ridge_form(f[:n], test, y[:n], ridge)
                ridge_variance[k, i] += variance.mean() / seeds
                ridge_error[k, i] += (mean - target).square().mean() / seeds
    return {
        "setting": {
            "features": WIDTH,
            "noise": NOISE,
            "test": TEST,
            "draws": seeds,
            "rows": counts,
        },
        "prior": 1.0,
        "limit": {"variance": limit_variance, "squared_error": limit_error},
        "ridges": {
            f"{ridge:g}": {"variance": ridge_variance[k], "squared_error": ridge_error[k]}
            for k, ridge in enumerate(RIDGES)
        },
    }


def ridge_form(f: Tensor, test: Tensor, y: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Ridge regression and the paper's variance, ridge times f^T (F^T F + ridge)^-1 f.

    Args:
        f: Features of the training rows, (N, D).
        test: Features of the test points, (T, D).
        y: Targets of the training rows, (N,).
        ridge: The ridge.

    Returns:
        Means and variances of the test points, (T,) each.
    """
    gram = Gram(f.shape[1])
    gram.update(f, residuals=y)
    posterior = Posterior.from_gram(gram, ridge=ridge)
    assert gram.cross is not None
    mean = posterior.covariance(test, gram.cross.mT)[:, 0]
    return mean, ridge * posterior.quadratic(test)
