"""Stopping after a time t against a ridge: the filter exp(-2 eta c lambda t) (paper, Sec. 3.5)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from experiments.studies.theory.nets import generator, last_features, rank_correlation, sphere
from rigidities.kernels import last_layer_process_at

FULL = {"rows": 512, "times": 29}
QUICK = {"rows": 128, "times": 7}

WIDTH, DIMENSION, TEST, REACH = 64, 6, 200, 3.0
GROUPS = ("inside", "outside")


def measured(rows: int, times: int, *, seed: int) -> dict[str, Any]:
    """Filter and ridge form of the same features, times in units of 1 / (eta c lambda_max)."""
    source = generator(seed, 7)
    x = sphere(rows + TEST, DIMENSION, source)
    x[-TEST // 2 :] *= REACH  # the second half of the test points lies outside
    f = last_features(x, [512, WIDTH], "silu", source)
    train, test = f[:rows], f[rows:]
    eigenvalues, vectors = torch.linalg.eigh(train.mT @ train)
    power = (test @ vectors).square()  # (points, directions)
    largest = float(eigenvalues[-1])
    reach = math.log10(largest / float(eigenvalues[0]))
    grid = torch.logspace(-1, reach + 0.5, times, dtype=torch.float64)
    process = last_layer_process_at((grid / largest).tolist(), train, test, torch.zeros(rows))
    matches = [match(variance, eigenvalues, power) for variance in process.variance]
    relative = torch.tensor([m["ridge"] for m in matches], dtype=torch.float64) / largest
    formed = torch.stack([m["scale"] * (power @ (1 / (eigenvalues + m["ridge"]))) for m in matches])
    return {
        "setting": {"rows": rows, "features": WIDTH, "test": TEST, "reach": REACH},
        "eigenvalues": eigenvalues,
        "time": grid,
        "matches": {
            **{key: [m[key] for m in matches] for key in matches[0]},
            "relative_ridge": relative.tolist(),
            "ridge_times_twice_the_time": (2 * grid * relative).tolist(),
        },
        "filter": grouped(process.variance),
        "ridge_form": grouped(formed),
        "prior": grouped(test.square().sum(1)[None]),
    }


def grouped(variance: Tensor) -> dict[str, Tensor]:
    """Geometric means over the two halves of the test points."""
    halves = variance.log().split(TEST // 2, dim=1)
    return {name: half.mean(1).exp() for name, half in zip(GROUPS, halves, strict=True)}


def match(variance: Tensor, eigenvalues: Tensor, power: Tensor) -> dict[str, float]:
    """The ridge and scale alpha^2 that come closest in log variance; then with alpha^2 = ridge."""
    ridges = torch.logspace(-12, 3, 1201, dtype=torch.float64) * eigenvalues[-1]
    ridges[0] = 0.0
    forms = power @ (1 / (eigenvalues[:, None] + ridges))  # (points, ridges)
    ratio = variance.log()[:, None] - forms.log()
    spread = ratio.std(0)
    absolute = (ratio[:, 1:] - ridges[1:].log()).square().mean(0).sqrt()
    best = int(spread.argmin())
    return {
        "ridge": float(ridges[best]),
        "scale": float(ratio[:, best].mean().exp()),
        "spread": float(spread[best]),
        "ridge_alone": float(ridges[1 + int(absolute.argmin())]),
        "rms_alone": float(absolute.min()),
        "decades": float(variance.log10().max() - variance.log10().min()),
        "spearman": rank_correlation(variance, forms[:, best]),
    }
