"""Statistics that a few outliers do not move: units, means and the reach of residuals."""

from __future__ import annotations

import math

from torch import Tensor

FAR = 1e3
"""Robust units at which single far residuals are cut off."""
OUTLIERS = 0.02
"""Share of the rows that may be outliers: more of them are data."""


def mean_q(q: Tensor) -> Tensor:
    """The mean q, single ones clipped at a thousand times the median; one where there are none."""
    if not len(q):
        return q.new_ones(())
    return q.clamp(max=float(FAR * q.median())).mean()


def robust_unit(squares: Tensor) -> Tensor:
    """The variance of a Gaussian whose squares have this median; few outliers do not move it.

    That is the median over 0.455, the median of a squared standard normal number. Where most
    squares are practically zero, the median is that of the others.
    """
    if not len(squares):
        return squares.new_zeros(())
    # "Practically zero" is relative to a mean that the largest squares do not dominate.
    outliers = max(1, int(OUTLIERS * len(squares)))
    largest = squares.kthvalue(max(1, len(squares) - outliers)).values
    negligible = 1e-6 * squares.clamp(max=float(largest)).mean()
    median = squares.median()
    others = squares[squares > negligible]
    if bool(median <= 0.455 * negligible) and len(others):
        median = others.median()
    return median / 0.455


def reach(residual: Tensor, far: float = FAR) -> float:
    """The size up to which residuals count in full: `far` robust units.

    It is infinite where no row lies beyond, or more than the share `OUTLIERS` of them: these are
    data then, not outliers.
    """
    size = residual.abs()
    if not bool(size.any()):
        return math.inf
    unit = size[size > 0].median()  # in its units only the squares of outliers may overflow
    limit = far * float(unit * robust_unit((size / unit).square()).sqrt())
    beyond = int((size > limit).sum())
    return limit if 0 < beyond <= max(1, OUTLIERS * len(size)) else math.inf


def clipped_mean(squares: Tensor) -> Tensor:
    """The mean of squares, those beyond 25 robust units clipped, so that no outlier dominates."""
    unit = robust_unit(squares)
    return squares.clamp(max=float(25 * unit)).mean().clamp(min=1e-300)
