"""Stopping after a time t against a ridge: the filter exp(-2 eta c lambda t) (paper, Sec. 3.5).

`measured` computes the variance of test points along the time for the last features of a random
network; `match` finds the ridge whose variance comes closest at each time.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from experiments.studies.theory.nets import generator, last_features, rank_correlation, sphere
from rigidities.theory.kernels import last_layer_process_at

FULL = {"rows": 512, "times": 29}
QUICK = {"rows": 128, "times": 7}

WIDTH = 64
DIMENSION = 6
TEST = 200
"""Test points: the first half inside the data, the second half outside."""

REACH = 3.0
"""How many times longer inputs outside are than those of the training data."""

GROUPS = ("inside", "outside")


def measured(rows: int, times: int, *, seed: int) -> dict[str, Any]:
    """Filter and ridge form of the same features, times in units of 1 / (eta c lambda_max).

    Args:
        rows: Training points.
        times: How many times are looked at.
        seed: The seed of inputs and features.
    """
    source = generator(seed, 7)
    x = sphere(rows + TEST, DIMENSION, source)
    x[-TEST // 2 :] *= REACH
    f = last_features(x, [512, WIDTH], "silu", source)
    train = f[:rows]
    test = f[rows:]
    eigenvalues, vectors = torch.linalg.eigh(train.mT @ train)
    power = (test @ vectors).square()  # (points, directions)

    # From before the first direction is learnt until after the last one.
    largest = float(eigenvalues[-1])
    decades = math.log10(largest / float(eigenvalues[0]))
    grid = torch.logspace(-1, decades + 0.5, times, dtype=torch.float64)
    process = last_layer_process_at((grid / largest).tolist(), train, test, torch.zeros(rows))

    matches = [match(variance, eigenvalues, power) for variance in process.variance]
    relative = torch.tensor([best["ridge"] for best in matches], dtype=torch.float64) / largest
    ridge_forms = torch.stack(
        [best["scale"] * (power @ (1 / (eigenvalues + best["ridge"]))) for best in matches]
    )
    return {
        "setting": {"rows": rows, "features": WIDTH, "test": TEST, "reach": REACH},
        "eigenvalues": eigenvalues,
        "time": grid,
        "matches": {
            **{key: [best[key] for best in matches] for key in matches[0]},
            "relative_ridge": relative.tolist(),
            "ridge_times_twice_the_time": (2 * grid * relative).tolist(),
        },
        "filter": grouped(process.variance),
        "ridge_form": grouped(ridge_forms),
        "prior": grouped(test.square().sum(1)[None]),
    }


def grouped(variance: Tensor) -> dict[str, Tensor]:
    """Geometric means of variances (times, points) over both groups of test points."""
    halves = variance.log().split(TEST // 2, dim=1)
    return {name: half.mean(1).exp() for name, half in zip(GROUPS, halves, strict=True)}


def match(variance: Tensor, eigenvalues: Tensor, power: Tensor) -> dict[str, float]:
    """The ridge and scale alpha^2 that come closest in log variance; then with alpha^2 = ridge.

    Args:
        variance: Variances of the test points at one time, (points,).
        eigenvalues: Of F^T F, ascending, (directions,).
        power: Squares of the test features along the eigenvectors, (points, directions).

    Returns:
        "ridge" and "scale" with the smallest "spread", the standard deviation of the log ratio;
        "ridge_alone" with the smallest root mean square of it, "rms_alone"; the "decades" that the
        variances span; the rank correlation "spearman" of the first.
    """
    ridges = torch.logspace(-12, 3, 1201, dtype=torch.float64) * eigenvalues[-1]
    ridges[0] = 0.0
    forms = power @ (1 / (eigenvalues[:, None] + ridges))  # (points, ridges)
    log_ratio = variance.log()[:, None] - forms.log()

    # A free scale is the mean of the log ratio: what is left is its standard deviation.
    spread = log_ratio.std(0)
    best = int(spread.argmin())

    # With alpha^2 = ridge there is nothing to fit; a ridge of zero has no such form.
    rms = (log_ratio[:, 1:] - ridges[1:].log()).square().mean(0).sqrt()
    return {
        "ridge": float(ridges[best]),
        "scale": float(log_ratio[:, best].mean().exp()),
        "spread": float(spread[best]),
        "ridge_alone": float(ridges[1 + int(rms.argmin())]),
        "rms_alone": float(rms.min()),
        "decades": float(variance.log10().max() - variance.log10().min()),
        "spearman": rank_correlation(variance, forms[:, best]),
    }
