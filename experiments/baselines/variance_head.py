r"""A variance head fitted post hoc on frozen features, with hold-out rows alone.

$\log \sigma^2 = a + w \cdot \varphi$, linear in the last hidden features $\varphi$ (standardised on
the rows that fit it), by the Gaussian negative log-likelihood of residuals of rows that the net was
not trained on; the net and its mean stay. Four fifths of the hold-out rows fit a and w by Adam on
all of them at once, from the constant variance on; every fifth row stops it: the numbers of its
smallest loss are kept, over the steps and over a few penalties $\lambda |w|^2 / 2$ of the mean
loss. One factor on all variances makes the mean of $r^2 / \sigma^2$ one over all hold-out rows.
Elsewhere a log variance is kept within the range that it has on the hold-out rows, without which a
few dozen of them let it explode on others (our addition, in the head's favour).

The reference fits such heads on several intermediate layers and averages them; the nets here have
one hidden layer, hence one head.

References:
    "Practical deep heteroskedastic regression", arXiv 2603.01750, 2026.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STEPS, RATE, PATIENCE = 1000, 1e-2, 100
PENALTIES = (0.0, 0.01, 0.1, 1.0)
EVERY = 5
"""One row in so many stops the fit."""


@dataclass(frozen=True)
class VarianceHead:
    """Fitted.

    Attributes:
        centre, spread: of the features, (D,).
        weight: (D,).
        bias: log variance at the centre, the factor included.
        ends: the smallest and the largest log variance of hold-out rows.
        steps: after which the loss was smallest.
        penalty: with which it was.
    """

    centre: Tensor
    spread: Tensor
    weight: Tensor
    bias: float
    ends: tuple[float, float]
    steps: int
    penalty: float

    def std(self, features: Tensor) -> Tensor:
        """Of rows, (N,)."""
        log_variance = self.bias + self._standardised(features) @ self.weight
        return (0.5 * log_variance.clamp(*self.ends)).exp()

    def _standardised(self, features: Tensor) -> Tensor:
        return (features.double() - self.centre) / self.spread


def fitted(features: Tensor, residual: Tensor) -> VarianceHead:
    """To hold-out rows.

    Args:
        features: that enter the last layer, (N, D).
        residual: of the rows, (N,).
    """
    features, residual = features.double(), residual.double().flatten()
    stops = torch.arange(len(residual)) % EVERY == EVERY - 1
    own = features[~stops]
    spread = own.std(0)
    spread = torch.where(spread > 0, spread, torch.ones_like(spread))
    phi = (features - own.mean(0)) / spread
    found = [(*_descended(phi, residual.square(), stops, one), one) for one in PENALTIES]
    _, weight, bias, steps, penalty = min(found, key=lambda one: one[0])
    log_variance = bias + phi @ weight
    factor = (residual.square() / log_variance.exp()).mean().log()
    ends = tuple(float(end + factor) for end in (log_variance.min(), log_variance.max()))
    return VarianceHead(own.mean(0), spread, weight, float(bias + factor), ends, steps, penalty)


def _descended(
    phi: Tensor, squares: Tensor, stops: Tensor, penalty: float
) -> tuple[float, Tensor, Tensor, int]:
    """The smallest loss on the rows that stop, its weights, bias and step."""
    bias = squares[~stops].mean().log().requires_grad_()
    weight = torch.zeros(phi.shape[1], dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.Adam([weight, bias], RATE)
    best, kept = float("inf"), (weight.detach().clone(), bias.detach().clone(), 0)
    for step in range(STEPS):
        with torch.enable_grad():
            loss = _loss(bias + phi @ weight, squares)
            (loss[~stops].mean() + penalty / 2 * weight.square().sum()).backward()
        stopping = float(loss[stops].detach().mean())
        if stopping < best:
            best, kept = stopping, (weight.detach().clone(), bias.detach().clone(), step)
        if step - kept[2] > PATIENCE:
            break
        optimiser.step()
        optimiser.zero_grad()
    return best, *kept


def _loss(log_variance: Tensor, squares: Tensor) -> Tensor:
    """The Gaussian negative log-likelihood but for a constant, row by row."""
    return 0.5 * (log_variance + squares * (-log_variance).exp())
