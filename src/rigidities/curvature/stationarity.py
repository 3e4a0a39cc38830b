r"""Whether the parameters are a minimum of the loss, around which rigidities are defined.

The gradient of the loss is compared with what the gradients of the samples would add up to if they
all agreed,

$$ \frac{\bigl| \sum_i \nabla \ell_i + \nabla r \bigr|}{\sum_i |\nabla \ell_i| + |\nabla r|}, $$

which is 0 at a minimum, about $N^{-1/2}$ where samples pull at random, and 1 where they all pull
one way.
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from ..derivatives.tangents import Tangents
from .loss_terms import LossTerms

FAR = 0.1
"""Share of the samples' gradients beyond which the point is not taken for a minimum."""

NEGLIGIBLE = 1e-6
"""Residuals this small beside the predictions are rounding: the model passes through its data."""


class Gradient:
    """Running sums over the training data."""

    def __init__(self, width: int, device: torch.device) -> None:
        self.total = torch.zeros(width, dtype=torch.float64, device=device)
        self.lengths = self.residuals = self.predictions = 0.0

    def add(self, tangents: Tangents, terms: LossTerms, prediction: Tensor) -> None:
        """Add the samples of a batch: unweighted tangents, predictions (N, K)."""
        if terms.slope is None:
            return
        self.total += tangents.backward(terms.slope[None])[0]
        self.lengths += float((tangents.squares().sqrt() * terms.slope.abs()).sum())
        self.residuals += terms.dispersion
        self.predictions += float((terms.diagonal.abs() * prediction.square()).sum())

    def check(self, regulariser: Tensor | None, ridge: float, flat: Tensor) -> float:
        """The gradient's norm; warns where it is far from zero.

        Args:
            regulariser: its gradient, (P,), or None.
            ridge: the penalty s w may have been part of the loss or not: either will do.
            flat: the parameters w.
        """
        total = self.total if regulariser is None else self.total + regulariser
        extent = self.lengths + (0.0 if regulariser is None else float(regulariser.norm()))
        norm = min(float(total.norm()), float((total + ridge * flat.to(total)).norm()))
        exact = self.residuals <= NEGLIGIBLE**2 * self.predictions
        if not exact and norm > FAR * extent:
            warnings.warn(
                f"The parameters are not a minimum of the loss: its gradient has norm {norm:.3g}, "
                f"{norm / extent:.0%} of the sum of the samples' own. Rigidities describe the loss "
                "around a minimum: fit further, give the regulariser that was used, or read the "
                "error bars as those of the linearised model.",
                stacklevel=4,
            )
        return norm
