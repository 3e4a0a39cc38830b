r"""How good a spread is, once its scale is the best one: profile criteria of calibration.

Each takes residuals r (n, J) and unscaled variances u = q + floor (n, J) for J candidates at
once, finds the best $\alpha^2$ of each candidate in closed form (or by bisection) and returns
($\alpha^2$, value), both (J,); smaller values are better.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Criterion = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

LOG_TWO_PI = math.log(2 * math.pi)
BIN_SIZE = 100


def nll(residual: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    r"""$\alpha^2 = \overline{r^2/u}$; Gaussian negative log-likelihood per row.

    Examples:
        >>> scale, value = nll(torch.tensor([[2.0], [-2.0]]), torch.ones(2, 1))
        >>> scale.item(), round(value.item(), 4)
        (4.0, 2.1121)
    """
    scale = (residual.square() / spread).mean(0)
    return scale, 0.5 * (1 + LOG_TWO_PI + scale.log() + spread.log().mean(0))


def absolute(residual: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    r"""$\alpha = \sqrt{\pi/2}\; \overline{|r|/\sqrt u}$, less moved by outliers than the NLL.

    The value is the negative log-likelihood per row of a Laplace law with mean absolute
    deviation $\sqrt{2/\pi}\,\alpha \sqrt u$, which that scale minimises.
    """
    deviation = (residual.abs() / spread.sqrt()).mean(0)
    value = 1 + math.log(2) + deviation.log() + 0.5 * spread.log().mean(0)
    return math.pi / 2 * deviation.square(), value


def crps(residual: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    r"""Mean continuous ranked probability score of a Gaussian.

    The best $\alpha$ solves $\sum \sqrt u\,[2\phi(r / \alpha\sqrt u) - 1/\sqrt\pi] = 0$, whose
    left side grows with $\alpha$: bisection.
    """
    root = spread.sqrt()
    z = residual.abs() / root
    low = z.amax(0).clamp(min=1e-300).log() - 30
    high = low + 60
    for _ in range(50):
        middle = (low + high) / 2
        slope = (root * (_density(z / middle.exp()) * 2 - math.pi**-0.5)).sum(0)
        low, high = torch.where(slope < 0, middle, low), torch.where(slope < 0, high, middle)
    scale = ((low + high) / 2).exp()
    sigma, z = scale * root, z / scale
    value = sigma * (z * torch.erf(z / 2**0.5) + 2 * _density(z) - math.pi**-0.5)
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
    mse = square.reshape(count, size, -1).mean(1)
    variance = spread.gather(0, order).reshape(count, size, -1).mean(1)
    ratio = (mse / variance).log()
    scale = ratio.mean(0)
    value = (ratio - scale).square().sum(0)
    return scale.exp(), value.nan_to_num(nan=math.inf)


def bin_size(rows: int) -> int:
    """100, or a quarter of the rows where there are fewer than 400."""
    return max(1, min(BIN_SIZE, rows // 4))


def pooled(criterion: Criterion, values: Tensor) -> Tensor:
    """One value for several targets (last dimension), whatever the units of each.

    A mean; for the CRPS, which has the target's unit, a geometric mean.
    """
    return values.log().mean(-1).exp() if criterion is crps else values.mean(-1)


CRITERIA: dict[str, Criterion] = {"nll": nll, "bins": bins, "crps": crps, "absolute": absolute}


def _density(z: Tensor) -> Tensor:
    return (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)
