"""How fast the Gram of the last features tends to the NNGP with the width (paper, Sec. 3.5)."""

from __future__ import annotations

from typing import Any

import torch

from experiments.frame.outcome import mean_and_error
from experiments.frame.progress import steps
from experiments.studies.theory.nets import generator, last_features, sphere
from rigidities.kernels import FullyConnected

FULL = {"widths": (32, 64, 128, 256, 512, 1024, 2048), "seeds": 10}
QUICK = {"widths": (32, 64, 128), "seeds": 4}

ACTIVATIONS = ("erf", "silu", "relu")
POINTS, DIMENSION, DEPTH, NARROW = 32, 6, 3, 64
GROWN = ("all layers", "last layer alone")


def measured(widths: tuple[int, ...], seeds: int, *, seed: int) -> dict[str, Any]:
    """Relative errors of F F^T for every activation, width and seed, and fitted slopes."""
    x = sphere(POINTS, DIMENSION, generator(seed))
    found: dict[str, Any] = {
        "setting": {
            "points": POINTS,
            "dimension": DIMENSION,
            "depth": DEPTH,
            "narrow": NARROW,
            "seeds": seeds,
            "widths": widths,
        }
    }
    for name in steps(ACTIVATIONS, "nets of growing width"):
        exact = FullyConnected(DEPTH, name, input_scale=1.0, normalised=True).nngp(x)
        found[name] = {}
        for grown in GROWN:
            errors = torch.empty(len(widths), seeds, dtype=torch.float64)
            for i, width in enumerate(widths):
                before = width if grown == "all layers" else NARROW
                layers = [*[before] * (DEPTH - 1), width]
                for j in range(seeds):
                    f = last_features(x, layers, name, generator(seed, width, j))
                    errors[i, j] = (f @ f.mT - exact).norm() / exact.norm()
            found[name][grown] = summary(torch.tensor(widths), errors)
    return found


def summary(widths: torch.Tensor, errors: torch.Tensor) -> dict[str, Any]:
    """Root mean square over the seeds, and the slope with its standard error between seeds."""
    slopes = [slope(widths, errors[:, j]) for j in range(errors.shape[1])]
    mean, error = mean_and_error(slopes)
    return {
        "error": errors.square().mean(1).sqrt(),
        "spread": errors.std(1),
        "slope": (mean, error),
        "slope_of_rms": slope(widths, errors.square().mean(1).sqrt()),
    }


def slope(widths: torch.Tensor, errors: torch.Tensor) -> float:
    """Least squares of log error on log width."""
    x, y = widths.to(torch.float64).log(), errors.log()
    x = x - x.mean()
    return float((x * y).sum() / x.square().sum())
