r"""How close to the line a binned plot can come: the log ratio of error bars that are right.

The mean of $n$ squared errors scatters by $\sqrt{(\kappa - 1) / n}$ of itself, where $\kappa$ is
the kurtosis of the errors (3 for Gaussian ones). Even right bars therefore have a log ratio above
zero: `floors` draws errors that have these bars, and `hindsight` gives the best ratio that any
ridge and scale could reach on the rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

import rigidities as rg
from rigidities import metrics

DRAWS = 20
"""Draws over which `floors` takes a mean."""

RIDGES = 57
"""Number of ridges that `hindsight` tries."""

DECADES = (-10.0, 4.0)
"""Decades of the largest eigenvalue over which they lie. A calibration looks there too."""


def kurtosis(error: Tensor) -> float:
    """Fourth central moment over the squared variance.

    >>> kurtosis(torch.tensor([-1.0, 1.0])), kurtosis(torch.tensor([0.0, 0.0, 0.0, 1.0]))
    (1.0, 2.3333333333333335)
    """
    centred = error.double() - error.double().mean()
    return float(centred.pow(4).mean() / centred.square().mean().square())


def floors(error: Tensor, std: Tensor, bin_size: int, seed: int) -> dict[str, float]:
    """The mean log ratio over draws of errors that have these very bars.

    Args:
        error: Errors of the predictions, (N,).
        std: Error bars, (N,).
        bin_size: Rows of a bin.
        seed: Seed of the draws.

    Returns:
        "gaussian", with errors σ times a normal number, and "shuffled", with errors σ z. There z
        are the observed errors over their bars in another order, scaled to a mean square of one:
        errors of the observed shape that do not depend on their bars.
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

    This is no calibration, since it has seen the answers, but a bound on what α² q can reach. For
    one ridge the bins do not depend on the scale, and the mean of |log10(MSE / q) - 2 log10 α| is
    smallest where 2 log10 α is the median over the bins.

    Args:
        uq: Error bars that were fitted.
        x: Inputs of the rows.
        error: Errors of the predictions, (N,).
        bin_size: Rows of a bin.

    Returns:
        "binned_log_ratio", the smallest ratio, and "log_relative_ridge", the logarithm of its ridge
        over the largest eigenvalue.
    """
    posterior = uq.posterior
    features = uq.features(x)
    largest = float(posterior.eigenvalues.max())
    zero = torch.zeros_like(error)
    best = {"binned_log_ratio": float("inf"), "log_relative_ridge": float("nan")}
    for decade in torch.linspace(*DECADES, RIDGES, dtype=torch.float64).tolist():
        std = posterior.with_ridge(10**decade * largest).quadratic(features).double().sqrt()
        variance, mse = metrics.binned(zero, std.flatten(), error, bin_size)
        log_ratios = (mse / variance).log10()
        mean_log_ratio = float((log_ratios - log_ratios.median()).abs().mean())
        if mean_log_ratio < best["binned_log_ratio"]:
            best = {"binned_log_ratio": mean_log_ratio, "log_relative_ridge": decade}
    return best
