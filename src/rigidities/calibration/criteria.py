r"""How good a spread is, once its scale is the best one: profile criteria of calibration.

Each criterion takes residuals r (n, J) and unscaled variances u = q + floor (n, J) for J candidates
at once. It finds the best $\alpha^2$ of each candidate, in closed form or by bisection, and returns
($\alpha^2$, value), both (J,); smaller values are better. The criterion of the likelihood is the
distribution's own (`Distribution.profile`).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..prediction.distribution import Distribution, Gaussian
from ..prediction.quadrature import increasing_root

__all__ = ["AUTO", "BIN_SIZE", "CRITERIA", "Criterion", "absolute", "bins", "criterion_for", "crps"]

Criterion = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Residuals and unscaled variances, both (n, J), to the best squared scales and values, (J,)."""

BIN_SIZE = 100
"""Rows of a bin, where there are enough of them."""

AUTO = "auto"
"""The full model; see `full_model`."""

BY_LIKELIHOOD = ("nll", "evidence", "loo")
"""Criteria that set the scale by the distribution's likelihood."""

_DISTRIBUTIONS_OF_AUTO = ("tilted", "student-t", "gaussian")


def absolute(residual: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    r"""$\alpha = \sqrt{\pi/2}\; \overline{|r|/\sqrt u}$, less moved by outliers than the NLL.

    The value is the negative log-likelihood per row of a Laplace distribution with mean absolute
    deviation $\sqrt{2/\pi}\,\alpha \sqrt u$, which that scale minimises.
    """
    deviation = (residual.abs() / spread.sqrt()).mean(0)
    value = 1 + math.log(2) + deviation.log() + 0.5 * spread.log().mean(0)
    return math.pi / 2 * deviation.square(), value


def crps(residual: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    r"""Mean continuous ranked probability score of a Gaussian.

    The best $\alpha$ solves $\sum \sqrt u\,[2\phi(r / \alpha\sqrt u) - 1/\sqrt\pi] = 0$, whose
    left side grows with $\alpha$, by Newton steps, and bisection where they leave the bracket.
    """
    root = spread.sqrt()
    z = residual.abs() / root
    # The bracket of log alpha: beyond its upper end no residual is as large as its bar.
    high = z.amax(0).clamp(min=1e-300).log() + 1
    low = high - 31
    start = ((root * z).sum(0) / root.sum(0)).log().clamp(low, high)

    def value_and_slope(log_scale: Tensor) -> tuple[Tensor, Tensor]:
        x = z / log_scale.exp()
        terms = 2 * root * _normal_density(x)
        value = (terms - math.pi**-0.5 * root).sum(0)
        slope = (terms * x.square()).sum(0)
        return value, slope

    scale = increasing_root(value_and_slope, start, low, high, steps=60, near=1e-12).exp()
    sigma = scale * root
    z = z / scale
    # the closed form of Gneiting and Raftery (2007), section 4.2
    value = sigma * (z * torch.erf(z / 2**0.5) + 2 * _normal_density(z) - math.pi**-0.5)
    return scale.square(), value.mean(0)


def bins(residual: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    r"""The paper's: $\sum_b \log^2 (\mathrm{MSE}_b / \alpha^2 \bar u_b)$ over bins by variance.

    Rows are sorted by u and cut into bins of 100 (a quarter of the rows when there are fewer than
    400); an incomplete last bin is left out. The best $\log \alpha^2$ is the mean log-ratio.
    """
    size = bin_size(len(spread))
    count = len(spread) // size
    order = spread.argsort(dim=0)[: count * size]
    square = residual.expand_as(spread).gather(0, order).square()
    # (bins, rows of a bin, J) -> (bins, J)
    mse = square.reshape(count, size, -1).mean(1)
    variance = spread.gather(0, order).reshape(count, size, -1).mean(1)
    log_ratio = (mse / variance).log()
    log_scale2 = log_ratio.mean(0)
    value = (log_ratio - log_scale2).square().sum(0)
    return log_scale2.exp(), value.nan_to_num(nan=math.inf)


def bin_size(rows: int) -> int:
    """100, or a quarter of the rows where there are fewer than 400."""
    return max(1, min(BIN_SIZE, rows // 4))


def pooled(criterion: Criterion, values: Tensor) -> Tensor:
    """One value for several targets (last dimension), whatever the units of each.

    A mean; for the CRPS, which has the target's unit, a geometric mean.
    """
    if criterion is crps:
        return values.log().mean(-1).exp()
    return values.mean(-1)


CRITERIA: dict[str, Criterion] = {"bins": bins, "crps": crps, "absolute": absolute}
"""Criteria by name, except those of the likelihood."""

_PRICES = {Gaussian.profile: 1, absolute: 1, crps: 24, bins: 48}
_PRICE_OF_OTHERS = 128


def price(criterion: Criterion) -> int:
    """The cost of a criterion relative to the cheapest: a sort or an iteration costs more."""
    function = getattr(criterion, "__func__", criterion)  # of a bound method
    return _PRICES.get(function, _PRICE_OF_OTHERS)


def criterion_for(name: str, distribution: Distribution, noise: str = "none") -> Criterion:
    """The profile criterion of that name under a distribution; for `auto` the likelihood.

    Args:
        name: The criterion's name.
        distribution: The distribution around the mean.
        noise: The noise's name.

    Raises:
        ValueError: There is no such criterion, or it is not for that distribution or noise.
    """
    if name == AUTO:
        if noise in ("none", "bayes") or distribution.name not in _DISTRIBUTIONS_OF_AUTO:
            raise ValueError(
                "criterion='auto' fits noise='features', 'constant' or a function, and "
                f"distribution='tilted', 'student-t' or 'gaussian', got noise={noise!r} and "
                f"distribution={distribution.name!r}. For the paper's form use criterion='nll'."
            )
        return Gaussian().profile
    if noise == "features" or distribution.name == "tilted":
        raise ValueError(
            f"noise='features' and distribution='tilted' need criterion='auto', got {name!r}."
        )
    if name in BY_LIKELIHOOD:
        return distribution.profile
    if name not in CRITERIA:
        names = ", ".join([AUTO, "nll", *CRITERIA, *BY_LIKELIHOOD[1:]])
        raise ValueError(f"Unknown criterion {name!r}. Known: {names}.")
    if name != "bins" and not isinstance(distribution, Gaussian):
        raise ValueError(
            f"criterion={name!r} is a formula for the Gaussian distribution, but the distribution "
            f"here is {distribution.name!r}. Use 'nll', or 'bins', which only needs variances."
        )
    return CRITERIA[name]


def _normal_density(z: Tensor) -> Tensor:
    """The standard normal density."""
    return (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)
