r"""One pass over the training data: weighted rows of the pseudo-Hessian, and running sums.

$$ H = \sum_i J_i^\top \Lambda_i J_i = \sum_i (L_i^\top J_i)^\top (L_i^\top J_i) $$

(the paper's Sec. 3.4; $\Lambda = L L^\top$ is the second derivative of the loss with respect to the
predictions). `TrainingRows` yields $L_i^\top J_i$ batch by batch. In the same pass `Totals` sums
the gradient of the loss and the dispersion of the residuals, which show whether the parameters are
a minimum, where rigidities are defined. For each parameter, the gradient is compared with what the
gradients of the samples would add up to if they all had the same sign,

$$ \frac{\bigl| \sum_i \partial_p \ell_i + \partial_p r \bigr|}
        {\sum_i |\partial_p \ell_i| + |\partial_p r|}. $$

This share is 0 at a minimum, about $N^{-1/2}$ where the samples pull at random, and 1 where they
all pull the same way, whatever the units of the parameter. The mean over the parameters decides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ...data.finiteness import require_finite
from ...data.samples import SampleBatch, Samples
from ...losses import Loss
from ...notices import notify
from ..derivatives.differentiation import Differentiation
from ..derivatives.tangents import Tangents
from .loss_terms import LossTerms, loss_terms

PIECE = 1 << 27
"""Bytes that the tangents of the samples processed at once may take."""

FAR = 0.2
"""Mean share (see above) beyond which the parameters are said not to be a minimum."""

NEGLIGIBLE = 1e-6
"""Residuals below this share of the predictions are rounding: the model interpolates its data."""


def samples_at_once(numbers_per_sample: int) -> int:
    """How many samples to process at once if each needs this many float64 numbers."""
    return max(1, PIECE // (8 * numbers_per_sample))


class Totals:
    r"""Running sums over the training data.

    Args:
        flat: The parameters, whose size and device the sums get.

    Attributes:
        gradient: Gradient of the loss, (P,).
        rows: Number of predictions with a curvature.
        flat_rows: Number of predictions where the loss has no curvature.
        dispersion: $\sum \ell'^2 / \ell''$, for a squared loss the weighted sum of squared
            residuals; NaN where the loss has no slope.
        squared_error: Sum of (target - prediction)^2 over the same predictions.
    """

    def __init__(self, flat: Tensor) -> None:
        self.gradient = torch.zeros_like(flat, dtype=torch.float64)
        self.rows = 0
        self.flat_rows = 0
        self.dispersion = 0.0
        self.squared_error = 0.0
        self._magnitude = torch.zeros_like(self.gradient)  # sums of |gradient of a sample|
        self._residuals = 0.0  # the dispersion of batches with a slope, so never NaN
        self._predictions = 0.0  # squared predictions in the same units
        self._squares: Tensor | None = None  # sums of squared slopes, a number per output
        # Relative: of a sum of some terms, and of parameters that were solved for in float64.
        self._rounding = max(64 * torch.finfo(flat.dtype).eps, 1e-12)

    def add(
        self, terms: LossTerms, tangents: Tangents, prediction: Tensor, target: Tensor | None
    ) -> None:
        """Add a batch with its unweighted tangents, its predictions (N, K) and targets (N, K)."""
        self.rows += terms.rows
        self.flat_rows += prediction.numel() - terms.rows
        self.dispersion += terms.dispersion
        if target is not None:
            square = (target - prediction).square()
            self.squared_error += float(torch.where(terms.diagonal == 0, 0.0, square).sum())
        if terms.slope is None:
            return
        self.gradient += tangents.backward(terms.slope[None])[0]
        self._magnitude += tangents.magnitudes(terms.slope)
        self._residuals += terms.dispersion
        self._predictions += float((terms.diagonal.abs() * prediction.square()).sum())
        squares = terms.slope.square().sum(0)  # (K,)
        self._squares = squares if self._squares is None else self._squares + squares

    @property
    def residuals_are_rounding(self) -> bool:
        """Whether residuals are nothing but the rounding of the model's predictions."""
        return self._residuals <= self._rounding**2 * self._predictions

    @property
    def typical_weight(self) -> float:
        r"""The weight c of a usual prediction in the Hessian, which has the noise $\alpha^2 / c$.

        It is the ratio between the dispersion, which is in units of $\alpha^2$, and the squared
        errors. For a squared loss without weights it is 1, and so it is where it is not known.
        """
        if self.squared_error > 0 and self.dispersion > 0:
            return self.dispersion / self.squared_error
        return 1.0

    @property
    def outputs_are_alike(self) -> bool:
        """Whether the residuals of all outputs are of one size, up to a factor of three."""
        if self._squares is None:
            return True
        return float(self._squares.max()) <= 9 * float(self._squares.min())

    def checked_gradient_norm(
        self, penalty_gradient: Tensor | None, ridge: float, flat: Tensor
    ) -> float:
        """The norm of the gradient of loss plus regulariser; warns if it is far from zero.

        The penalty of the ridge, with gradient s w, may or may not have been part of the loss that
        was minimised: the case that is nearer to a minimum is taken.

        Args:
            penalty_gradient: Gradient of the regulariser, (P,), or None.
            ridge: The ridge s.
            flat: The parameters w, (P,).
        """
        if penalty_gradient is None:
            penalty_gradient = torch.zeros_like(self.gradient)
        with_decay = penalty_gradient + ridge * flat.to(self.gradient)
        share = self._share(penalty_gradient)
        share_with_decay = self._share(with_decay)
        if share <= share_with_decay:
            norm = float((self.gradient + penalty_gradient).norm())
        else:
            norm = float((self.gradient + with_decay).norm())
            share = share_with_decay
        # Where the model interpolates its data, all gradients are rounding, and so are the shares.
        interpolates = self._residuals <= NEGLIGIBLE**2 * self._predictions
        if share > FAR and not interpolates:
            notify(
                f"The parameters are not a minimum of the loss: its gradient has norm {norm:.3g}, "
                f"which is {share:.0%} of what it would be if the gradients of all samples "
                "agreed. Rigidities describe the loss around a minimum. Fit further, pass the "
                "regulariser that was used, or read the error bars as those of the linearised "
                "model."
            )
        return norm

    def _share(self, penalty_gradient: Tensor) -> float:
        """|gradient| / sum of |gradients|, averaged over the parameters where the sum is not 0."""
        extent = self._magnitude + penalty_gradient.abs()
        share = (self.gradient + penalty_gradient).abs() / extent
        matters = extent > 0
        if not bool(matters.any()):
            return 0.0
        return float(share[matters].mean())


@dataclass(frozen=True)
class TrainingRows:
    """The training data as weighted rows of the pseudo-Hessian.

    Attributes:
        differentiation: How to differentiate the regressor.
        samples: The training data.
        loss: The loss of one sample.
        curved: Whether the rows are weighted with the curvature of the loss.
    """

    differentiation: Differentiation
    samples: Samples
    loss: Loss
    curved: bool = True

    @cached_property
    def totals(self) -> Totals:
        """The sums of a pass over the data so far."""
        return Totals(self.differentiation.regressor.flat)

    def pieces(self, samples: int) -> Iterator[tuple[SampleBatch, Tensor | None, Tangents]]:
        """Go through the data once, and add them to the totals.

        Args:
            samples: The most samples of a piece.

        Yields:
            A piece of the data, the root L of its weights (None for ones), and its weighted
            tangents.
        """
        batch = None
        for batch in self.samples.pieces(samples):
            prediction, tangents = self._differentiated(batch)
            target = batch.target_rows(prediction, self.differentiation.shape)
            terms = loss_terms(self.loss, prediction, target, batch.weight, batch.raw)
            self.totals.add(terms, tangents, prediction, target)
            root = terms.root if self.curved else None
            if root is None:
                yield batch, None, tangents
            else:
                yield batch, root, tangents.mixed(root)
        if batch is None:
            raise ValueError(
                "The data gave no batch when they were read again. Pass a list of batches, or data "
                "that can be read more than once."
            )

    def _differentiated(self, batch: SampleBatch) -> tuple[Tensor, Tangents]:
        """Predictions (N, K), refused where they are not finite, and their tangents."""
        prediction, tangents = self.differentiation(*batch.args, **batch.kwargs)
        require_finite(prediction, prediction, lambda: [batch])
        return prediction, tangents
