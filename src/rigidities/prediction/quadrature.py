"""Gauss's nodes and weights on the unit interval."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=16)
def gauss(points: int) -> tuple[Tensor, Tensor]:
    r"""Nodes and weights of Gauss and Legendre on [0, 1], float64.

    The eigenvalues of the Jacobi matrix, with $k / \sqrt{4 k^2 - 1}$ beside its diagonal, and the
    squared first entries of its eigenvectors (Golub and Welsch).

    Examples:
        >>> x, w = gauss(3)
        >>> round(float(w @ x**5), 12)  # 1/6
        0.166666666667
    """
    k = torch.arange(1, points, dtype=torch.float64)
    beside = k / (4 * k.square() - 1).sqrt()
    nodes, vectors = torch.linalg.eigh(torch.diag(beside, 1) + torch.diag(beside, -1))
    return (1 + nodes) / 2, vectors[0].square()
