r"""A variance head fitted post hoc on frozen features, with hold-out rows alone.

$\log \sigma^2 = a + w \cdot \varphi$ is linear in the last hidden features $\varphi$, which are
standardised on the rows that fit it. It minimises the Gaussian negative log-likelihood of residuals
of rows that the network was not trained on; the network and its mean stay.

Four fifths of the hold-out rows fit a and w, by Adam on all of them at once, from the constant
variance on. Every fifth row stops the fit: the numbers of the smallest loss on these rows are kept,
over the steps and over a few penalties $\lambda |w|^2 / 2$ of the mean loss. One factor on all
variances makes the mean of $r^2 / \sigma^2$ one over all hold-out rows. Elsewhere a log variance is
kept within the range that it has on the hold-out rows; without this a few dozen of them let it
explode on others (our addition, in the head's favour).

The reference fits such heads on several intermediate layers and averages them; the networks here
have one hidden layer, hence one head.

References:
    "Practical deep heteroskedastic regression", arXiv 2603.01750, 2026.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

STEPS = 1000
"""Steps of the fit at most."""

RATE = 1e-2

PATIENCE = 100
"""Steps without a smaller loss after which the fit ends."""

PENALTIES = (0.0, 0.01, 0.1, 1.0)

EVERY = 5
"""One row in so many stops the fit."""


@dataclass(frozen=True)
class VarianceHead:
    """A fitted variance head.

    Attributes:
        centre: Means of the features, (D,).
        spread: Standard deviations of the features, (D,).
        weight: (D,).
        bias: The log variance at the centre, the factor on all variances included.
        ends: The smallest and the largest log variance of hold-out rows.
        steps: The step of the smallest loss.
        penalty: The penalty of the smallest loss.
    """

    centre: Tensor
    spread: Tensor
    weight: Tensor
    bias: float
    ends: tuple[float, float]
    steps: int
    penalty: float

    def std(self, features: Tensor) -> Tensor:
        """The standard deviations of rows, (N,)."""
        phi = (features.double() - self.centre) / self.spread
        log_variance = self.bias + phi @ self.weight
        smallest, largest = self.ends
        return (0.5 * log_variance.clamp(smallest, largest)).exp()


class _Descent(NamedTuple):
    """The weights of the smallest loss on the rows that stop a fit."""

    loss: float
    weight: Tensor
    bias: Tensor
    step: int
    penalty: float


def fitted(features: Tensor, residual: Tensor) -> VarianceHead:
    """Fit a head to hold-out rows.

    Args:
        features: What enters the last layer, (N, D).
        residual: Residuals of the rows, (N,).
    """
    features = features.double()
    squares = residual.double().flatten().square()
    stopping_rows = torch.arange(len(squares)) % EVERY == EVERY - 1
    fitting_features = features[~stopping_rows]
    centre = fitting_features.mean(0)
    spread = fitting_features.std(0)
    spread = torch.where(spread > 0, spread, torch.ones_like(spread))
    phi = (features - centre) / spread

    descents = [_descended(phi, squares, stopping_rows, penalty) for penalty in PENALTIES]
    best = min(descents, key=lambda descent: descent.loss)
    log_variance = best.bias + phi @ best.weight
    log_factor = (squares / log_variance.exp()).mean().log()
    return VarianceHead(
        centre=centre,
        spread=spread,
        weight=best.weight,
        bias=float(best.bias + log_factor),
        ends=(float(log_variance.min() + log_factor), float(log_variance.max() + log_factor)),
        steps=best.step,
        penalty=best.penalty,
    )


def _descended(phi: Tensor, squares: Tensor, stopping_rows: Tensor, penalty: float) -> _Descent:
    """Minimise the loss of the fitting rows; return the weights that suit the stopping rows best.

    Args:
        phi: Standardised features, (N, D).
        squares: Squared residuals, (N,).
        stopping_rows: Which rows stop the fit, (N,).
        penalty: The factor of the squared weights.
    """
    bias = squares[~stopping_rows].mean().log().requires_grad_()
    weight = torch.zeros(phi.shape[1], dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.Adam([weight, bias], RATE)
    best = _Descent(float("inf"), weight.detach().clone(), bias.detach().clone(), 0, penalty)
    for step in range(STEPS):
        with torch.enable_grad():
            loss = _loss(bias + phi @ weight, squares)
            (loss[~stopping_rows].mean() + penalty / 2 * weight.square().sum()).backward()
        stopping_loss = float(loss[stopping_rows].detach().mean())
        if stopping_loss < best.loss:
            best = _Descent(
                stopping_loss, weight.detach().clone(), bias.detach().clone(), step, penalty
            )
        if step - best.step > PATIENCE:
            break
        optimiser.step()
        optimiser.zero_grad()
    return best


def _loss(log_variance: Tensor, squares: Tensor) -> Tensor:
    """The Gaussian negative log-likelihood but for a constant, row by row."""
    return 0.5 * (log_variance + squares * (-log_variance).exp())
