"""Gauss's quadrature rule, and roots of increasing functions such as distribution functions."""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=16)
@torch.inference_mode(False)
def gauss(points: int) -> tuple[Tensor, Tensor]:
    r"""Nodes and weights of the Gauss-Legendre rule on [0, 1], in float64.

    The nodes are the eigenvalues of the Jacobi matrix, which has $k / \sqrt{4 k^2 - 1}$ next to its
    diagonal (Golub and Welsch).

    Args:
        points: Number of nodes.

    Returns:
        Nodes and weights, (points,) each.

    Examples:
        >>> x, w = gauss(3)
        >>> round(float(w @ x**5), 12)  # 1/6
        0.166666666667
    """
    k = torch.arange(1, points, dtype=torch.float64)
    off_diagonal = k / (4 * k.square() - 1).sqrt()
    jacobi = torch.diag(off_diagonal, 1) + torch.diag(off_diagonal, -1)
    nodes, vectors = torch.linalg.eigh(jacobi)
    return (1 + nodes) / 2, vectors[0].square()


def increasing_root(
    value_and_slope: Callable[[Tensor], tuple[Tensor, Tensor]],
    start: Tensor,
    low: float | Tensor,
    high: float | Tensor,
    steps: int = 100,
    near: float = 1e-10,
) -> Tensor:
    """The roots of increasing functions, one for each entry of `start`.

    Each step is a Newton step, or halves the bracket where a Newton step would leave it. Where the
    function is NaN the root is NaN.

    Args:
        value_and_slope: Gives the functions' values and derivatives at its argument.
        start: Where to start, within the bracket.
        low: Lower end of the bracket.
        high: Upper end of the bracket.
        steps: Most steps to take. A graph takes all of them, since it cannot stop early.
        near: The search stops once no entry moves by more than this.

    Returns:
        The roots, shaped like `start`.

    Examples:
        >>> round(increasing_root(lambda x: (x**2 - 2, 2 * x), torch.ones(1), 0.0, 9.0).item(), 6)
        1.414214
    """
    x = start
    for _ in range(steps):
        value, slope = value_and_slope(x)
        is_below_root = value < 0
        low = torch.where(is_below_root, x, low)
        high = torch.where(is_below_root, high, x)
        newton = x - value / slope
        following = torch.where((newton >= low) & (newton <= high), newton, (low + high) / 2)
        moved = following - x
        x = following
        # Dynamo cannot branch on a tensor's value.
        if not torch.compiler.is_compiling() and not bool((moved.abs() > near).any()):
            break
    return x
