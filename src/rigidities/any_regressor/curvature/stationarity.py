r"""Whether the parameters are a minimum of the loss, around which rigidities are defined.

For each parameter the gradient of the loss is compared with what the gradients of the samples would
add up to if they all agreed,

$$ \frac{\bigl| \sum_i \partial_p \ell_i + \partial_p r \bigr|}
        {\sum_i |\partial_p \ell_i| + |\partial_p r|}, $$

which is 0 at a minimum, about $N^{-1/2}$ where samples pull at random, and 1 where they all pull
one way, in whatever units the parameter is. The mean over the parameters decides.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from ..derivatives.tangents import Tangents
from .loss_terms import LossTerms

FAR = 0.2
"""Mean share of the samples' gradients beyond which the point is not taken for a minimum."""

NEGLIGIBLE = 1e-6
"""Residuals this small beside the predictions are rounding: the model passes through its data."""


class Gradient:
    """Running sums over the training data."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.total = torch.zeros(width, dtype=torch.float64, device=device)
        self.magnitude = torch.zeros_like(self.total)
        self.residuals = self.predictions = 0.0

    def add(self, tangents: Tangents, terms: LossTerms, prediction: Tensor) -> None:
        """Add the samples of a batch: unweighted tangents, predictions (N, K)."""
        if terms.slope is None:
            return
        self.total += tangents.backward(terms.slope[None])[0]
        self.magnitude += tangents.magnitudes(terms.slope)
        self.residuals += terms.dispersion
        self.predictions += float((terms.diagonal.abs() * prediction.square()).sum())

    def check(self, regulariser: Tensor | None, ridge: float, flat: Tensor) -> float:
        """The gradient's norm; warns where it is far from zero.

        Args:
            regulariser: its gradient, (P,), or None.
            ridge: the penalty s w may have been part of the loss or not: either will do.
            flat: the parameters w.
        """
        penalty = torch.zeros_like(self.total) if regulariser is None else regulariser
        decay = ridge * flat.to(self.total)
        shares = [self._share(penalty), self._share(penalty + decay)]
        total = self.total + (penalty if shares[0] <= shares[1] else penalty + decay)
        norm, share = float(total.norm()), min(shares)
        exact = self.residuals <= NEGLIGIBLE**2 * self.predictions
        if not exact and share > FAR:
            warnings.warn(
                f"The parameters are not a minimum of the loss: its gradient has norm {norm:.3g}, "
                f"and by each parameter it is {share:.0%} of what the samples' own would add up to "
                "if they all agreed. Rigidities describe the loss around a minimum: fit further, "
                "give the regulariser that was used, or read the error bars as those of the "
                "linearised model.",
                stacklevel=4,
            )
        return norm

    def _share(self, penalty: Tensor) -> float:
        """Mean over the parameters that matter of |gradient| / sum of |gradients|."""
        extent = self.magnitude + penalty.abs()
        share = (self.total + penalty).abs() / extent
        return float(share[extent > 0].mean()) if bool((extent > 0).any()) else 0.0
