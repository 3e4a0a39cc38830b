"""Median and quartiles of repetitions, for scores of which one repetition can ruin the mean."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

LARGE = 1000.0
"""From here on a power of ten is shorter."""


def quartiles(values: Sequence[float]) -> list[float]:
    """[median, lower quartile, upper quartile].

    >>> quartiles([3.0, 1.0, 2.0, 5.0, 4.0])
    [3.0, 2.0, 4.0]
    """
    if len(values) == 1:
        return [values[0]] * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return [middle, low, high]


def quartiles_of_each(repeated: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """The same of every score over repetitions."""
    return {name: quartiles([one[name] for one in repeated]) for name in repeated[0]}


def with_quartiles(values: Sequence[float], digits: int = 2) -> str:
    """Median and quartiles for a cell.

    >>> with_quartiles([-1.0, -1.5, 0.25])
    '-1.00 (-1.50 to 0.25)'
    >>> with_quartiles([1.5, 1.0, 398874.1])
    '1.50 (1.00 to 4.0e+05)'
    """
    middle, low, high = (_short(value, digits) for value in values)
    return f"{middle} ({low} to {high})"


def _short(value: float, digits: int) -> str:
    """Digits after the point, or the power of ten of what would be a long row of them."""
    return f"{value:.1e}" if abs(value) >= LARGE else f"{value:.{digits}f}"
