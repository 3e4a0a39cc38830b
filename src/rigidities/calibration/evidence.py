r"""The evidence of a ridge: how probable the training data are under it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..posterior.gram import Gram
from ..posterior.memory import require_memory
from ..posterior.posterior import Posterior

_ROUNDING = 1e-14
"""Share of the residuals' sum of squares below which what is left of it is not known."""


def evidence(
    gram: Gram, posterior: Posterior, weights: Tensor, biases: Tensor | None = None
) -> Callable[[Tensor], Tensor]:
    r"""Negative log marginal likelihood per row of Bayesian linear regression on the features.

    With $w \sim N(0, \sigma^2/s\, I)$ and $\sigma^2$ at its best,
    $-\log ev = \frac N2 [\log(2\pi S/N) + 1] - \frac D2 \log s + \frac12 \sum \log(\lambda + s)$,
    where $S = \min_w |y - F w|^2 + s |w|^2$ follows from the Gram's sums of residuals. Biases have
    no prior, or the target's offset would move the ridge: their columns are projected out of F and
    y, and each takes a row of N (the restricted likelihood). N counts rows whatever their weights,
    which divide the noise of one observation and do not make it several.

    Args:
        gram: with residual sums.
        posterior: its eigenbasis.
        weights: the trained readout weights (D, K), about which the residuals were taken.
        biases: columns of the features that belong to biases.

    Returns:
        ridges (J,) -> values (J,), the mean over targets.
    """
    if gram.square is None:
        raise ValueError(
            "The evidence needs the residuals of the fit: call fit with (x, y), anew after "
            "rows were forgotten beside whose residuals those left are lost to rounding."
        )
    if gram.cross is None:
        raise ValueError(
            "The evidence needs the residuals of all rows, and the fit counted derivatives "
            "without targets: pass gradient_target= to fit, or take another criterion."
        )
    lam, basis = posterior.eigenvalues, posterior.eigenvectors
    cross, w = gram.cross.mT[..., None], weights.to(basis).mT[..., None]
    rr = total = gram.square.diagonal() if gram.square.ndim == 2 else gram.square
    rows = gram.informative.to(torch.float64)
    if biases is not None and len(biases):
        matrix, free, cross, explained, rank = projected(gram, cross, biases.to(gram.device))
        (lam, basis), w = torch.linalg.eigh(matrix), w[:, free]
        lam, rr, rows = lam.clamp(min=0), rr - explained, rows - rank
    if not bool((rows > 0).all()):
        raise ValueError(
            "The evidence needs more rows than the readout has biases, got "
            f"{int(gram.informative.min())}. Fit on more data, or take another criterion."
        )
    lam, basis = (part if part.ndim > n else part[None] for n, part in ((1, lam), (2, basis)))
    u, c = ((basis.mT @ part)[..., 0] for part in (w, cross))

    def value(ridges: Tensor) -> Tensor:
        ridges = ridges.to(lam.device)
        s = ridges[:, None, None]
        gained = ((c - s * u).square() / (lam + s)).sum(-1)
        fit = rr + ridges[:, None] * u.square().sum(-1) - gained
        fit = torch.where(fit > _ROUNDING * total, fit, torch.nan)
        log_volume = (lam + s).log().sum(-1) - lam.shape[-1] * ridges[:, None].log()
        minus_log = 0.5 * rows * ((2 * math.pi * fit / rows).log() + 1) + 0.5 * log_volume
        return (minus_log / rows).mean(-1).cpu()

    return value


def projected(gram: Gram, cross: Tensor, biases: Tensor) -> tuple[Tensor, ...]:
    """The Gram's sums with the bias columns B projected out of features and residuals.

    A Schur complement, $F^T F - F^T B (B^T B)^{-1} B^T F$, and likewise with r.

    Returns:
        The matrix, the columns left, their part of `cross` (K, D, 1), what the biases explain of
        $r^T r$, and how many rows they take: equal ones, of heads that are summed, take one.
    """
    require_memory(5, gram.width, gram.targets, gram.device)  # what is left, and its eigenbasis
    columns = torch.arange(gram.width, device=gram.device)
    free, matrix = columns[~torch.isin(columns, biases)], gram.matrix
    values, vectors = torch.linalg.eigh(matrix[..., biases[:, None], biases])
    held = values > 1e-12 * values[..., -1:]
    root = vectors * torch.where(held, values, torch.inf).rsqrt().unsqueeze(-2)
    left = matrix[..., free[:, None], biases] @ root
    own = root.mT @ cross[:, biases]
    rest = matrix[..., free[:, None], free]
    del matrix  # as wide as what is left, which is factorised next
    rest -= left @ left.mT
    explained = own.square().sum((-2, -1))
    return rest, free, cross[:, free] - left @ own, explained, held.sum(-1)


def ridge_solution(
    gram: Gram, weights: Tensor, biases: Tensor, ridge: float
) -> tuple[Tensor, Tensor]:
    r"""The change (D, K) to the ridge-optimal weights, and how many of them the rows determine.

    $w^* = \arg\min_w |y - F w|^2 + s |P w|^2 = w + (G + s P)^{-1} (b - s P w)$, where P leaves out
    the biases, and the trace of $(G + s P)^{-1} G$, () or (K,). Equal bias columns share the
    change. The arguments are those of `evidence`.
    """
    assert gram.cross is not None
    biases, matrix = biases.to(gram.device), gram.matrix
    cross, w = gram.cross.mT[..., None], weights.to(gram.cross).mT[..., None]
    rest, free, right, _, rank = projected(gram, cross, biases)
    values, basis = torch.linalg.eigh(rest)
    values, change = values.clamp(min=0), torch.zeros_like(cross)
    right = basis.mT @ (right - ridge * w[:, free])
    change[:, free] = basis @ (right / (values + ridge)[..., None])
    right = cross[:, biases] - matrix[..., biases[:, None], free] @ change[:, free]
    own = torch.linalg.pinv(matrix[..., biases[:, None], biases], rtol=1e-12, hermitian=True)
    change[:, biases] = own @ right
    return change[..., 0].mT, (values / (values + ridge)).sum(-1) + rank
