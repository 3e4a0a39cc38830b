"""Roots of increasing functions, many at once."""

from collections.abc import Callable

import torch
from torch import Tensor


def increasing_root(
    value_and_slope: Callable[[Tensor], tuple[Tensor, Tensor]],
    start: Tensor,
    low: float | Tensor,
    high: float | Tensor,
) -> Tensor:
    """By Newton's steps, and bisection where they leave the bracket; NaN where there is one.

    Examples:
        >>> round(increasing_root(lambda x: (x**2 - 2, 2 * x), torch.ones(1), 0.0, 9.0).item(), 6)
        1.414214
    """
    x = start
    for _ in range(100):
        value, slope = value_and_slope(x)
        low, high = torch.where(value < 0, x, low), torch.where(value < 0, high, x)
        last, x = x, x - value / slope
        x = torch.where((x >= low) & (x <= high), x, (low + high) / 2)
        if not bool(((x - last).abs() > 1e-10).any()):
            break
    return x
