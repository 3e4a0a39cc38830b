r"""The evidence of a ridge: how probable the training data are under it.

Bayesian linear regression on the features has a closed form in the sums that a fit keeps: the Gram
$G = F^\top F$, the features' sums with the residuals $b = F^\top r$ and the residuals' sum of
squares. `evidence` turns these into a function of the ridge, which `paper.most_evident_ridge`
minimises; `ridge_solution` gives the weights that are best at a ridge. In both,
biases have no prior, so their columns are projected out first (`bias_projection`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..posterior.gram import Gram
from ..posterior.memory import require_memory
from ..posterior.posterior import Posterior

__all__ = ["evidence", "ridge_solution"]

_ROUNDING = 1e-14
"""Share of the residuals' sum of squares below which what remains of it is rounding."""


def evidence(
    gram: Gram, posterior: Posterior, weights: Tensor, biases: Tensor | None = None
) -> Callable[[Tensor], Tensor]:
    r"""Negative log marginal likelihood per row of Bayesian linear regression on the features.

    With $w \sim N(0, \sigma^2/s\, I)$ and $\sigma^2$ at its best,
    $-\log ev = \frac N2 [\log(2\pi S/N) + 1] - \frac D2 \log s + \frac12 \sum \log(\lambda + s)$,
    where $S = \min_w |y - F w|^2 + s |w|^2$ follows from the Gram's sums of residuals. Biases have
    no prior, or the target's offset would move the ridge: their columns are projected out of F and
    y, and each takes a row of N (the restricted likelihood). N counts rows whatever their weights,
    which divide the noise variance of an observation and do not make several of it.

    Args:
        gram: The Gram of the training data, with residual sums.
        posterior: The posterior that has its eigenbasis.
        weights: The trained readout weights (D, K), about which the residuals were taken.
        biases: The columns of the features that belong to biases.

    Returns:
        A function from ridges (J,) to values (J,), the mean over targets.

    Raises:
        ValueError: The fit has no residuals, not those of all rows, or fewer rows than biases.
    """
    if gram.square is None:
        raise ValueError(
            "The evidence needs the residuals of the fit. Call fit with (x, y). If forgotten rows "
            "had much larger residuals, rounding has erased the others: fit again."
        )
    if gram.cross is None:
        raise ValueError(
            "The evidence needs the residuals of all rows, but the fit included derivatives "
            "without targets. Fit with GradientLoss(..., target=...), or use another criterion."
        )
    eigenvalues = posterior.eigenvalues  # (D,) or (K, D)
    basis = posterior.eigenvectors  # (D, D) or (K, D, D)
    cross = gram.cross.mT[..., None]  # (K, D, 1)
    weight = weights.to(basis).mT[..., None]  # (K, D, 1)
    total = gram.square.diagonal() if gram.square.ndim == 2 else gram.square  # (K,)
    square = total
    rows = gram.informative.to(torch.float64)
    if biases is not None and len(biases):
        projection = bias_projection(gram, cross, biases.to(gram.device))
        eigenvalues, basis = torch.linalg.eigh(projection.matrix)
        eigenvalues = eigenvalues.clamp(min=0)
        cross = projection.cross
        weight = weight[:, projection.columns]
        square = square - projection.explained
        rows = rows - projection.rank
    if not bool((rows > 0).all()):
        raise ValueError(
            "The evidence needs more rows than the readout has biases, got "
            f"{int(gram.informative.min())}. Fit on more data, or use another criterion."
        )
    if eigenvalues.ndim == 1:
        eigenvalues = eigenvalues[None]
    if basis.ndim == 2:
        basis = basis[None]
    # weights and sums with the residuals in the eigenbasis, (K, D)
    u = (basis.mT @ weight)[..., 0]
    c = (basis.mT @ cross)[..., 0]

    def value(ridges: Tensor) -> Tensor:
        """The negative log evidence per row of ridges (J,), the mean over targets, (J,)."""
        ridges = ridges.to(eigenvalues.device)
        s = ridges[:, None, None]  # (J, 1, 1)
        # S, (J, K): what the best weights at this ridge leave of the sum of squares
        gained = ((c - s * u).square() / (eigenvalues + s)).sum(-1)
        least = square + ridges[:, None] * u.square().sum(-1) - gained
        least = torch.where(least > _ROUNDING * total, least, torch.nan)
        log_volume = (eigenvalues + s).log().sum(-1)
        log_volume = log_volume - eigenvalues.shape[-1] * ridges[:, None].log()
        minus_log = 0.5 * rows * ((2 * math.pi * least / rows).log() + 1) + 0.5 * log_volume
        return (minus_log / rows).mean(-1).cpu()

    return value


@dataclass(frozen=True)
class BiasProjection:
    r"""A Gram's sums with the bias columns projected out of features and residuals.

    Attributes:
        matrix: $F^\top F - F^\top B (B^\top B)^{-1} B^\top F$ of the other columns F.
        columns: The indices of these other columns.
        cross: $F^\top r - F^\top B (B^\top B)^{-1} B^\top r$, (K, columns, 1).
        explained: What the biases explain of $r^\top r$, (K,).
        rank: How many rows the biases take: equal columns, of heads that are summed, take one.
    """

    matrix: Tensor
    columns: Tensor
    cross: Tensor
    explained: Tensor
    rank: Tensor


def bias_projection(gram: Gram, cross: Tensor, biases: Tensor) -> BiasProjection:
    """Project the bias columns out of a Gram and of its sums with residuals, (K, D, 1)."""
    require_memory(5, gram.width, gram.targets, gram.device)  # the Schur complement and its basis
    every_column = torch.arange(gram.width, device=gram.device)
    columns = every_column[~torch.isin(every_column, biases)]
    matrix = gram.matrix
    # root root^T is the pseudo-inverse of B^T B
    values, vectors = torch.linalg.eigh(matrix[..., biases[:, None], biases])
    positive = values > 1e-12 * values[..., -1:]
    root = vectors * torch.where(positive, values, torch.inf).rsqrt().unsqueeze(-2)
    by_bias = matrix[..., columns[:, None], biases] @ root
    bias_cross = root.mT @ cross[:, biases]
    complement = matrix[..., columns[:, None], columns]
    del matrix  # as large as the complement, which is factorised next
    complement -= by_bias @ by_bias.mT
    return BiasProjection(
        matrix=complement,
        columns=columns,
        cross=cross[:, columns] - by_bias @ bias_cross,
        explained=bias_cross.square().sum((-2, -1)),
        rank=positive.sum(-1),
    )


def ridge_solution(
    gram: Gram, weights: Tensor, biases: Tensor, ridge: float
) -> tuple[Tensor, Tensor]:
    r"""The change to the ridge-optimal weights, and how many weights the rows determine.

    $w^* = \arg\min_w |y - F w|^2 + s |P w|^2 = w + (G + s P)^{-1} (b - s P w)$, where P leaves out
    the biases. Equal bias columns share the change.

    Args:
        gram: As in `evidence`.
        weights: As in `evidence`.
        biases: As in `evidence`.
        ridge: The ridge s.

    Returns:
        The change $w^* - w$ (D, K), and the trace of $(G + s P)^{-1} G$, () or (K,).
    """
    assert gram.cross is not None
    biases = biases.to(gram.device)
    matrix = gram.matrix
    cross = gram.cross.mT[..., None]  # (K, D, 1)
    weight = weights.to(gram.cross).mT[..., None]
    projection = bias_projection(gram, cross, biases)
    columns = projection.columns
    values, basis = torch.linalg.eigh(projection.matrix)
    values = values.clamp(min=0)
    change = torch.zeros_like(cross)
    # the weights without the biases, then the biases that fit to them
    right = basis.mT @ (projection.cross - ridge * weight[:, columns])
    change[:, columns] = basis @ (right / (values + ridge)[..., None])
    right = cross[:, biases] - matrix[..., biases[:, None], columns] @ change[:, columns]
    bias_matrix = matrix[..., biases[:, None], biases]
    inverse = torch.linalg.pinv(bias_matrix, rtol=1e-12, hermitian=True)
    change[:, biases] = inverse @ right
    determined = (values / (values + ridge)).sum(-1) + projection.rank
    return change[..., 0].mT, determined
