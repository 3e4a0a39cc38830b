r"""How close to the line a binned plot can come: the log ratio of bars that nothing is wrong with.

The mean of $n$ squared errors scatters by $\sqrt{(\kappa - 1) / n}$ of itself, where $\kappa$ is
their kurtosis (3 for Gaussian ones): right bars have a log ratio above zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

import rigidities as rg
from rigidities import metrics

DRAWS = 20
RIDGES = 57
"""Tried by `hindsight`, ..."""
DECADES = (-10.0, 4.0)
"""... over these decades of the largest eigenvalue, which is where a calibration looks too."""


def kurtosis(error: Tensor) -> float:
    """Fourth central moment over the squared variance.

    >>> kurtosis(torch.tensor([-1.0, 1.0])), kurtosis(torch.tensor([0.0, 0.0, 0.0, 1.0]))
    (1.0, 2.3333333333333335)
    """
    centred = error.double() - error.double().mean()
    return float(centred.pow(4).mean() / centred.square().mean().square())


def floors(error: Tensor, std: Tensor, bin_size: int, seed: int) -> dict[str, float]:
    """Mean log ratio over draws of errors that have these very bars.

    Args:
        error: of the predictions, (N,).
        std: their bars, (N,).
        bin_size: rows of a bin.
        seed: of the draws.

    Returns:
        "gaussian": with e = σ times a normal number; "shuffled": with e = σ z, where z are the
        observed e / σ in another order, their mean square scaled to one: errors of the observed
        shape that know nothing of their bars.
    """
    generator = torch.Generator().manual_seed(seed)
    observed = error / std
    observed = observed / observed.square().mean().sqrt()
    totals = {"gaussian": 0.0, "shuffled": 0.0}
    zero = torch.zeros_like(std)
    for _ in range(DRAWS):
        normal = torch.randn(len(std), generator=generator, dtype=std.dtype)
        order = torch.randperm(len(std), generator=generator)
        for name, z in (("gaussian", normal), ("shuffled", observed[order])):
            totals[name] += metrics.binned_log_ratio(zero, std, std * z, bin_size)
    return {name: total / DRAWS for name, total in totals.items()}


def hindsight(
    uq: rg.LastLayerRigidity, x: Tensor, error: Tensor, bin_size: int
) -> dict[str, float]:
    """The best log ratio of any ridge and scale, chosen on the very rows it is measured on.

    No calibration, since it has seen the answers: a bound on what α² q can reach. For one ridge the
    bins do not depend on the scale, and the mean of |log10(MSE / q) - 2 log10 α| is smallest where
    2 log10 α is the median of the bins.
    """
    posterior, features = uq.posterior, uq.features(x)
    largest = float(posterior.eigenvalues.max())
    zero = torch.zeros_like(error)
    found = {"binned_log_ratio": float("inf"), "log_relative_ridge": float("nan")}
    for decade in torch.linspace(*DECADES, RIDGES, dtype=torch.float64).tolist():
        std = posterior.with_ridge(10**decade * largest).quadratic(features).double().sqrt()
        variance, mse = metrics.binned(zero, std.flatten(), error, bin_size)
        logs = (mse / variance).log10()
        ratio = float((logs - logs.median()).abs().mean())
        if ratio < found["binned_log_ratio"]:
            found = {"binned_log_ratio": ratio, "log_relative_ridge": decade}
    return found
