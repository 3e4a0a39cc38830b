r"""Whether given parameters are the least-squares fit of given data.

The normal equations say that $d = X^\top W r - \Sigma w$ vanishes at the minimum. A new fit would
lower the sum of squares by $d^\top (X^\top W X + \Sigma)^{-1} d$.
"""

from __future__ import annotations

from torch import Tensor

from .arrays import Values
from .fit_rigidity import FitRigidity
from .sources import weight_roots

__all__ = ["misfit"]


def misfit(
    fit: FitRigidity,
    rows: Tensor,
    target: Tensor,
    weights: Values | None = None,
    penalties: Tensor | None = None,
) -> str | None:
    """What is wrong with parameters that do not fit the data, in words; None where they do.

    Rounding and the tolerance of an iterative solver are allowed for.

    Args:
        fit: The fit, with its parameters (P,).
        rows: The design matrix (N, P).
        target: (N,).
        weights: Weights of the rows, (N,).
        penalties: The diagonal of the penalty, (P,).
    """
    assert fit.parameters is not None
    weight = weight_roots(weights, len(rows)).square()
    residuals = target - rows @ fit.parameters
    normal_equations = rows.mT @ (weight * residuals)
    if penalties is not None:
        normal_equations = normal_equations - penalties * fit.parameters
    lowered = float((normal_equations @ fit.root).square().sum())
    squares = float((weight * residuals.square()).sum())
    # For exact data the squares are zero: rounding, even of float32, is compared with the signal.
    signal = float((weight * (rows.abs() @ fit.parameters.abs()).square()).sum())
    if lowered <= 1e-4 * squares + 1e-12 * signal:
        return None
    return (
        "The parameters do not fit these data: a new fit would lower the sum of squares "
        f"{squares:.3g} by {lowered:.3g}."
    )
