"""Is the NTK a constant times the NNGP, and does the variance depend on it? (paper, Sec. 3.5).

For every activation and depth, `compared` computes both exact kernels of random inputs, fits the
constant, and compares the exact variance with the one that the replacement gives.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from experiments.frame.outcome import mean_and_error
from experiments.frame.progress import steps
from experiments.studies.theory.nets import generator, rank_correlation, sphere
from rigidities.theory.kernels import FullyConnected, Kernels, gaussian_process_at

FULL = {"rows": 200, "draws": 5, "depths": (1, 2, 3, 4)}
QUICK = {"rows": 40, "draws": 2, "depths": (1, 3)}

ACTIVATIONS = ("erf", "tanh", "sin", "silu", "gelu", "relu")
DIMENSION = 6
TEST = 200
"""Test points."""

RIDGE = 1e-2
"""Relative to the mean diagonal of the NNGP."""

SCATTERED = ("erf", "silu", "relu")
"""Activations whose variances are drawn point by point."""

SHOWN_DEPTH = 3
"""The depth of the scatter plot and of the table."""


def measured(rows: int, draws: int, depths: tuple[int, ...], *, seed: int) -> dict[str, Any]:
    """Constant, rank correlation and spread for every activation and depth.

    Args:
        rows: Training points.
        draws: How often inputs are drawn.
        depths: Numbers of hidden layers.
        seed: The seed of the inputs.
    """
    numbers: dict[str, Any] = {
        "setting": {
            "rows": rows,
            "test": TEST,
            "dimension": DIMENSION,
            "draws": draws,
            "ridge": RIDGE,
        }
    }
    for name in steps(ACTIVATIONS, "activations"):
        numbers[name] = {}
        for depth in depths:
            runs = [compared(name, depth, rows, generator(seed, draw)) for draw in range(draws)]
            entry: dict[str, Any] = {}
            for key in runs[0]:
                if key not in VARIANCES:
                    entry[key] = mean_and_error([run[key] for run in runs])
            if depth == SHOWN_DEPTH and name in SCATTERED:
                for key in VARIANCES:
                    entry[key] = runs[0][key]
            numbers[name][depth] = entry
    return numbers


VARIANCES = ("exact", "last_layer")
"""Entries of `compared` that are variances of all test points."""


def compared(name: str, depth: int, rows: int, source: torch.Generator) -> dict[str, Any]:
    """Exact and last-layer variance of one network on one draw of inputs.

    Args:
        name: The activation.
        depth: Hidden layers.
        rows: Training points.
        source: Draws the inputs.

    Returns:
        "constant", the c of K_NTK ~ c K_NNGP, and its "misfit"; what `comparison` gives without a
        ridge, with one in all four terms ("ridge_"), and against the paper's form, which inserts it
        at the end ("inserted_"); the variances of `VARIANCES`.
    """
    network = FullyConnected(depth, name, input_scale=1.0, normalised=True)
    x = sphere(rows + TEST, DIMENSION, source)
    train = network.kernels(x[:rows])  # (rows, rows)
    cross = network.kernels(x[rows:], x[:rows])  # (TEST, rows)
    prior = network.diagonal(x[rows:]).nngp  # (TEST,)

    # Least squares over all pairs of training points.
    constant = float((train.nngp * train.ntk).sum() / train.nngp.square().sum())
    misfit = (train.ntk - constant * train.nngp).norm() / train.ntk.norm()

    # Without a ridge the constant cancels.
    exact = variance(train, cross, prior)
    last_layer = variance(Kernels(train.nngp, train.nngp), Kernels(cross.nngp, cross.nngp), prior)

    # With a ridge in all four terms it does not.
    ridge = RIDGE * float(train.nngp.diagonal().mean())
    exact_with_ridge = with_ridge(train, cross, prior, constant * ridge)
    replaced_with_ridge = with_ridge(
        Kernels(train.nngp, constant * train.nngp),
        Kernels(cross.nngp, constant * cross.nngp),
        prior,
        constant * ridge,
    )

    # The paper inserts the ridge once the terms have been collected.
    inverse = torch.linalg.inv(train.nngp + ridge * torch.eye(rows, dtype=torch.float64))
    ridge_inserted = prior - ((cross.nngp @ inverse) * cross.nngp).sum(1)
    return {
        "constant": constant,
        "misfit": float(misfit),
        **comparison("", exact, last_layer),
        **comparison("ridge_", exact_with_ridge, replaced_with_ridge),
        **comparison("inserted_", exact_with_ridge, ridge_inserted),
        "exact": exact,
        "last_layer": last_layer,
    }


def variance(train: Kernels, cross: Kernels, prior: Tensor) -> Tensor:
    """The variance of the test points at t = infinity; the targets do not matter."""
    return gaussian_process_at(
        math.inf,
        ntk=(train.ntk, cross.ntk),
        nngp=(train.nngp, cross.nngp, prior),
        targets=torch.zeros(len(train.ntk)),
    ).variance


def with_ridge(train: Kernels, cross: Kernels, prior: Tensor, ridge: float) -> Tensor:
    """The four terms of the variance with K_NTK + ridge in place of K_NTK."""
    regularised = train.ntk + ridge * torch.eye(len(train.ntk), dtype=torch.float64)
    a = torch.linalg.solve(regularised, cross.ntk.mT).mT  # k_NTK (K_NTK + ridge)^-1
    return prior + ((a @ train.nngp - 2 * cross.nngp) * a).sum(1)


def comparison(prefix: str, exact: Tensor, approximate: Tensor) -> dict[str, float]:
    """Rank correlation of two variances, and mean and spread of their log ratio."""
    log_ratio = (exact / approximate).log()
    return {
        f"{prefix}spearman": rank_correlation(exact, approximate),
        f"{prefix}spread": float(log_ratio.std()),
        f"{prefix}shift": float(log_ratio.mean()),
    }
