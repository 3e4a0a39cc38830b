"""How fast the Gram of the last features tends to the NNGP with the width (paper, Sec. 3.5).

Random networks of growing width are drawn; either all hidden layers grow or the last one alone.
`measured` compares F F^T with the exact NNGP and fits the slope of log error on log width.
"""

from __future__ import annotations

from typing import Any

import torch

from experiments.frame.outcome import mean_and_error
from experiments.frame.progress import steps
from experiments.studies.theory.nets import generator, last_features, sphere
from rigidities.theory.kernels import FullyConnected

FULL = {"widths": (32, 64, 128, 256, 512, 1024, 2048), "seeds": 10}
QUICK = {"widths": (32, 64, 128), "seeds": 4}

ACTIVATIONS = ("erf", "silu", "relu")
POINTS = 32
DIMENSION = 6
DEPTH = 3
NARROW = 64
"""Width of the other hidden layers where the last one alone grows."""

GROWN = ("all layers", "last layer alone")
"""What grows."""


def measured(widths: tuple[int, ...], seeds: int, *, seed: int) -> dict[str, Any]:
    """Relative errors of F F^T for every activation, width and seed, and fitted slopes.

    Args:
        widths: Widths of what grows.
        seeds: Random networks for each width.
        seed: The seed of inputs and networks.
    """
    x = sphere(POINTS, DIMENSION, generator(seed))
    numbers: dict[str, Any] = {
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
        numbers[name] = {}
        for grown in GROWN:
            errors = torch.empty(len(widths), seeds, dtype=torch.float64)
            for i, width in enumerate(widths):
                width_before = width if grown == "all layers" else NARROW
                layers = [width_before] * (DEPTH - 1) + [width]
                for j in range(seeds):
                    f = last_features(x, layers, name, generator(seed, width, j))
                    errors[i, j] = (f @ f.mT - exact).norm() / exact.norm()
            numbers[name][grown] = summary(torch.tensor(widths), errors)
    return numbers


def summary(widths: torch.Tensor, errors: torch.Tensor) -> dict[str, Any]:
    """Errors (widths, seeds) averaged over the seeds, and slopes of log error on log width.

    Returns:
        "error", the root mean square over the seeds, and "spread", their standard deviation, at
        every width; "slope", its mean and standard error between seeds; "slope_of_rms".
    """
    slopes = [slope(widths, errors[:, j]) for j in range(errors.shape[1])]
    rms = errors.square().mean(1).sqrt()
    return {
        "error": rms,
        "spread": errors.std(1),
        "slope": mean_and_error(slopes),
        "slope_of_rms": slope(widths, rms),
    }


def slope(widths: torch.Tensor, errors: torch.Tensor) -> float:
    """Least squares of log error on log width."""
    x = widths.to(torch.float64).log()
    x = x - x.mean()
    y = errors.log()
    return float((x * y).sum() / x.square().sum())
