"""What is left at t = infinity when rows outnumber features (distribution of the limit; paper, Sec.
3.5)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from experiments.frame.progress import steps
from experiments.studies.theory.nets import generator, last_features, sphere
from rigidities import Gram, Posterior
from rigidities.kernels import last_layer_process_at

FULL = {"counts": (8, 16, 24, 32, 40, 48, 56, 60, 64, 68, 72, 80, 96, 128, 192, 256), "seeds": 40}
QUICK = {"counts": (16, 48, 64, 96), "seeds": 3}

WIDTH, DIMENSION, NOISE, TEST = 64, 6, 0.1, 200
RIDGES = (NOISE**2 / 100, NOISE**2, 100 * NOISE**2)


def measured(counts: tuple[int, ...], seeds: int, *, seed: int) -> dict[str, Any]:
    """Means over test points and draws of inputs, prior weights and noise."""
    limit, error = (torch.zeros(len(counts), dtype=torch.float64) for _ in range(2))
    formed = torch.zeros(len(RIDGES), len(counts), dtype=torch.float64)
    fitted = torch.zeros_like(formed)
    for j in steps(range(seeds), "draws of the data"):
        source = generator(seed, j)
        x = sphere(max(counts) + TEST, DIMENSION, source)
        f = last_features(x, [256, WIDTH], "silu", source)
        weights = torch.randn(WIDTH, generator=source, dtype=torch.float64)
        noise = NOISE * torch.randn(len(f), generator=source, dtype=torch.float64)
        truth = f @ weights
        test, target = f[-TEST:], truth[-TEST:]
        for i, n in enumerate(counts):
            process = last_layer_process_at(math.inf, f[:n], test, (truth + noise)[:n])
            limit[i] += process.variance.mean() / seeds
            error[i] += (process.mean - target).square().mean() / seeds
            for k, ridge in enumerate(RIDGES):
                mean, variance = ridge_form(f[:n], test, (truth + noise)[:n], ridge)
                formed[k, i] += variance.mean() / seeds
                fitted[k, i] += (mean - target).square().mean() / seeds
    return {
        "setting": {
            "features": WIDTH,
            "noise": NOISE,
            "test": TEST,
            "draws": seeds,
            "rows": counts,
        },
        "prior": 1.0,
        "limit": {"variance": limit, "squared_error": error},
        "ridges": {
            f"{ridge:g}": {"variance": formed[k], "squared_error": fitted[k]}
            for k, ridge in enumerate(RIDGES)
        },
    }


def ridge_form(f: Tensor, test: Tensor, y: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Ridge regression and the paper's variance, ridge times f^T (F^T F + ridge)^-1 f."""
    gram = Gram(f.shape[1])
    gram.update(f, residuals=y)
    posterior = Posterior.from_gram(gram, ridge=ridge)
    assert gram.cross is not None
    mean = posterior.covariance(test, gram.cross.mT)[:, 0]
    return mean, ridge * posterior.quadratic(test)
