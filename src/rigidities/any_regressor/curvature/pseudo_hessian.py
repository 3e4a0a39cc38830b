r"""One pass over the training data: weighted rows of the pseudo-Hessian, and what comes with them.

$$ H = \sum_i J_i^\top \Lambda_i J_i = \sum_i (L_i^\top J_i)^\top (L_i^\top J_i) $$

(the paper's Sec. 3.4; $\Lambda = L L^\top$ is the curvature of the loss by the predictions). The
gradient of the loss and the dispersion of the residuals are summed on the way: they tell whether
the parameters are a minimum, around which rigidities are defined. For each parameter the gradient
is compared with what the gradients of the samples would add up to if they all agreed,

$$ \frac{\bigl| \sum_i \partial_p \ell_i + \partial_p r \bigr|}
        {\sum_i |\partial_p \ell_i| + |\partial_p r|}, $$

which is 0 at a minimum, about $N^{-1/2}$ where samples pull at random, and 1 where they all pull
one way, in whatever units the parameter is. The mean over the parameters decides.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...data.finiteness import require_finite
from ...data.samples import SampleBatch, Samples
from ...losses import Loss
from ..derivatives.differentiation import Differentiation
from ..derivatives.tangents import Tangents
from .loss_terms import LossTerms, loss_terms

PIECE = 1 << 27
"""Bytes that the tangents of the samples in work may take."""

FAR = 0.2
"""Mean share of the samples' gradients beyond which the point is not taken for a minimum."""

NEGLIGIBLE = 1e-6
"""Residuals this small beside the predictions are rounding: the model passes through its data."""


class Totals:
    r"""Running sums over the training data.

    Attributes:
        gradient: of the loss, (P,).
        rows: predictions with a curvature.
        zeros: predictions without one.
        dispersion: $\sum \ell'^2 / \ell''$, for a squared loss the weighted sum of squared
            residuals; NaN where the loss has no slope.
    """

    def __init__(self, flat: Tensor) -> None:
        self.gradient = torch.zeros_like(flat, dtype=torch.float64)
        self.rows = self.zeros = 0
        self.dispersion = 0.0
        self._magnitude = torch.zeros_like(self.gradient)
        self._residuals = self._predictions = 0.0

    def add(self, terms: LossTerms, tangents: Tangents, prediction: Tensor) -> None:
        """Add the samples of a batch: unweighted tangents, predictions (N, K)."""
        self.rows += terms.rows
        self.zeros += prediction.numel() - terms.rows
        self.dispersion += terms.dispersion
        if terms.slope is None:
            return
        self.gradient += tangents.backward(terms.slope[None])[0]
        self._magnitude += tangents.magnitudes(terms.slope)
        self._residuals += terms.dispersion
        self._predictions += float((terms.diagonal.abs() * prediction.square()).sum())

    def check(self, regulariser: Tensor | None, ridge: float, flat: Tensor) -> float:
        """The norm of the gradient, with the regulariser's; warns where it is far from zero.

        The ridge's penalty s w may have been part of the loss or not: either will do.
        """
        penalty = torch.zeros_like(self.gradient) if regulariser is None else regulariser
        decay = ridge * flat.to(self.gradient)
        shares = [self._share(penalty), self._share(penalty + decay)]
        total = self.gradient + (penalty if shares[0] <= shares[1] else penalty + decay)
        norm, share = float(total.norm()), min(shares)
        exact = self._residuals <= NEGLIGIBLE**2 * self._predictions
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
        extent = self._magnitude + penalty.abs()
        share = (self.gradient + penalty).abs() / extent
        return float(share[extent > 0].mean()) if bool((extent > 0).any()) else 0.0


@dataclass(frozen=True)
class TrainingRows:
    """The training data of one regressor and loss, whose curvature weighs the rows if `curved`."""

    differentiation: Differentiation
    samples: Samples
    loss: Loss
    curved: bool = True

    @cached_property
    def totals(self) -> Totals:
        """What is summed on the way."""
        return Totals(self.differentiation.regressor.flat)

    def __call__(self, numbers: int) -> Iterator[tuple[SampleBatch, Tensor | None, Tangents]]:
        """Pieces of the data, the roots of their weights and their weighted tangents.

        The totals are summed on the way; so many numbers of a sample are held.
        """
        for batch in self.samples.pieces(max(1, PIECE // (8 * numbers))):
            prediction, tangents = self.differentiation(*batch.args, **batch.kwargs)
            require_finite(prediction, prediction, [batch].copy)
            target = batch.target_rows(prediction, self.differentiation.shape)
            terms = loss_terms(self.loss, prediction, target, batch.weight, batch.raw)
            self.totals.add(terms, tangents, prediction)
            root = terms.root if self.curved else None
            yield batch, root, tangents if root is None else tangents.mixed(root)
