r"""The evidence of a ridge: how probable the training data are under it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..posterior.gram import Gram
from ..posterior.posterior import Posterior
from .objective import DECADES, PER_DECADE, about, ridge_exponents


def evidence(gram: Gram, posterior: Posterior, weights: Tensor) -> Callable[[Tensor], Tensor]:
    r"""Negative log marginal likelihood per row of Bayesian linear regression on the features.

    With $w \sim N(0, \sigma^2/s\, I)$ and $\sigma^2$ at its best,
    $-\log ev = \frac N2 [\log(2\pi S/N) + 1] - \frac D2 \log s + \frac12 \sum \log(\lambda + s)$,
    where $S = \min_w |y - F w|^2 + s |w|^2$ follows from the Gram's sums of residuals.

    Args:
        gram: with residual sums.
        posterior: its eigenbasis.
        weights: the trained readout weights (D, K), about which the residuals were taken.

    Returns:
        ridges (J,) -> values (J,), the mean over targets.
    """
    if gram.square is None:
        raise ValueError("criterion='evidence' needs targets in the fit: call fit with (x, y).")
    if gram.cross is None:
        raise ValueError(
            "criterion='evidence' needs the residuals of all rows, and the fit counted derivatives "
            "without targets: pass gradient_target= to fit, or take another criterion."
        )
    lam, basis = posterior.eigenvalues, posterior.eigenvectors
    if lam.ndim == 1:
        lam, basis = lam[None], basis[None]
    u = (basis.mT @ weights.to(basis).mT[..., None])[..., 0]
    c = (basis.mT @ gram.cross.mT[..., None])[..., 0]
    rr = gram.square.diagonal() if gram.square.ndim == 2 else gram.square
    rows = gram.informative.to(torch.float64)

    def value(ridges: Tensor) -> Tensor:
        ridges = ridges.to(lam.device)
        s = ridges[:, None, None]
        gained = ((c - s * u).square() / (lam + s)).sum(-1)
        fit = rr + ridges[:, None] * u.square().sum(-1) - gained
        log_volume = (lam + s).log().sum(-1) - gram.width * ridges[:, None].log()
        minus_log = 0.5 * rows * ((2 * math.pi * fit / rows).log() + 1) + 0.5 * log_volume
        return (minus_log / rows).mean(-1).cpu()

    return value


def most_evident_ridge(
    value: Callable[[Tensor], Tensor], largest: float
) -> tuple[float, float, str | None]:
    """The ridge that minimises the negative log evidence, its value, and the edge it lies at."""
    exponents, width = ridge_exponents(), 1 / PER_DECADE
    for _ in range(3):
        values = value(largest * 10**exponents).nan_to_num(nan=math.inf)
        centre, best = float(exponents[values.argmin()]), float(values.min())
        exponents, width = about(centre, width, 17), width / 8
    edge = {DECADES[0]: "lower", DECADES[1]: "upper"}.get(centre)
    return largest * 10**centre, best, edge
