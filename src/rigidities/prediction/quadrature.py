"""Gauss's rule, and roots of the increasing functions that integrals are."""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def gauss(points: int) -> tuple[Tensor, Tensor]:
    r"""Nodes and weights on [0, 1], float64.

    By the Jacobi matrix, $k / \sqrt{4 k^2 - 1}$ beside its diagonal (Golub and Welsch).

    Examples:
        >>> x, w = gauss(3)
        >>> round(float(w @ x**5), 12)  # 1/6
        0.166666666667
    """
    k = torch.arange(1, points, dtype=torch.float64)
    beside = k / (4 * k.square() - 1).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(beside, 1) + torch.diag(beside, -1))
    return (1 + nodes) / 2, vectors[0].square()


def increasing_root(
    value_and_slope: Callable[[Tensor], tuple[Tensor, Tensor]],
    start: Tensor,
    low: float | Tensor,
    high: float | Tensor,
    steps: int = 100,
    near: float = 1e-10,
) -> Tensor:
    """By Newton's steps, and bisection where they leave the bracket; NaN where there is one.

    In a graph there are as many steps as may be.

    Examples:
        >>> round(increasing_root(lambda x: (x**2 - 2, 2 * x), torch.ones(1), 0.0, 9.0).item(), 6)
        1.414214
    """
    x = start
    for _ in range(steps):
        value, slope = value_and_slope(x)
        low, high = torch.where(value < 0, x, low), torch.where(value < 0, high, x)
        last, x = x, x - value / slope
        x = torch.where((x >= low) & (x <= high), x, (low + high) / 2)
        if not torch.compiler.is_compiling() and not bool(((x - last).abs() > near).any()):
            break
    return x
