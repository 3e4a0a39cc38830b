r"""First and second derivatives of the loss with respect to the predictions of a batch.

The paper's pseudo-Hessian (Sec. 3.4) is $\sum_i J_i^\top \Lambda_i J_i$ with
$\Lambda_i = \partial^2 \ell_i / \partial \tilde y_i^2$, a K x K matrix for several outputs. A root
$\Lambda = L L^\top$ turns it into a plain sum over the rows of $L^\top J$.

`loss_terms` takes predictions, targets and weights of a batch and returns its `LossTerms`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...losses import NOT_DIFFERENTIABLE, Loss, PerSampleLoss, ValuedLoss, own_weights
from ...models.derivatives import pulled, recorded


@dataclass(frozen=True)
class LossTerms:
    r"""Derivatives of the weighted loss of each sample.

    Attributes:
        curvature: $\Lambda$, (N, K) where it is diagonal, else (N, K, K).
        slope: d loss / d prediction, (N, K); None where the loss has no value or there are no
            targets.
        unit_curvature: Whether the curvature is 1 everywhere.
    """

    curvature: Tensor
    slope: Tensor | None
    unit_curvature: bool = False

    @property
    def root(self) -> Tensor | None:
        r"""L with $L L^\top = \Lambda$, shaped like $\Lambda$; None where $\Lambda$ is 1.

        Raises:
            ValueError: The loss is concave at some predictions.
        """
        if self.unit_curvature:
            return None
        if self.curvature.ndim == 2:
            lowest = float(self.curvature.min())
            if lowest >= 0:
                return self.curvature.sqrt()
        else:
            values, vectors = torch.linalg.eigh(self.curvature)
            lowest = float(values.min())
            # Rounding may leave a zero eigenvalue slightly negative.
            if lowest >= -1e-12 * float(values.max()):
                return torch.mul(vectors, values.clamp(min=0).sqrt()[:, None])
        raise ValueError(
            f"The loss is concave at some predictions (lowest curvature {lowest:.3g}), where the "
            "Gauss-Newton form is not valid. Use a convex loss, or hessian='exact'."
        )

    @property
    def diagonal(self) -> Tensor:
        """Second derivative with respect to each output alone, (N, K)."""
        if self.curvature.ndim == 2:
            return self.curvature
        return self.curvature.diagonal(dim1=-2, dim2=-1)

    @property
    def rows(self) -> int:
        """Number of predictions with a curvature."""
        return int((self.diagonal != 0).sum())

    @cached_property
    def dispersion(self) -> float:
        r"""$\sum \ell'^\top \Lambda^{-1} \ell'$: for a squared loss, weighted squared residuals.

        NaN where the slope is not known.
        """
        if self.slope is None:
            return float("nan")
        if self.curvature.ndim == 3:
            inverse = torch.linalg.pinv(self.curvature, hermitian=True)
            return float(torch.einsum("nk,nkl,nl->", self.slope, inverse, self.slope))
        terms = self.slope.square() / self.curvature
        return float(torch.where(self.curvature == 0, 0.0, terms).sum())


def loss_terms(
    loss: Loss, prediction: Tensor, target: Tensor | None, weight: Tensor | None, batch: Any
) -> LossTerms:
    """Curvature and slope of a batch.

    Args:
        loss: The loss of one sample.
        prediction: (N, K).
        target: (N, K), or None for a loss that needs none.
        weight: Weights of the samples, (N, 1); also (N, K) where the loss is a sum over outputs.
        batch: The batch as the user gave it, which some losses read.

    Raises:
        ValueError: Targets are missing, weights have the wrong shape, or a derivative is not
            finite.
    """
    if target is None and loss.needs_target:
        raise ValueError("This loss needs targets: fit(x, y).")
    prediction = prediction.detach().to(torch.float64)
    weight = _total_weight(weight, own_weights(loss, batch))
    curvature = _curvature(loss, prediction, target, batch)  # None for 1 everywhere
    slope, loss_per_output = _slope(loss, prediction, target, batch)
    diagonal = curvature is None or curvature.ndim == 2
    _check_weights(weight, prediction, per_output=loss_per_output and diagonal)
    unit_curvature = curvature is None and weight is None
    if curvature is None:
        curvature = torch.ones_like(prediction)
    if weight is not None:
        # A sample of weight zero need not have a derivative: a product would keep its NaN.
        curvature_weight = weight if curvature.ndim == 2 else weight[..., None]
        curvature = torch.where(curvature_weight > 0, curvature * curvature_weight, 0.0)
        if slope is not None:
            slope = torch.where(weight > 0, slope * weight, 0.0)
    if slope is not None and not bool(torch.isfinite(slope).all()):
        row = int((~torch.isfinite(slope)).any(1).nonzero()[0])
        raise ValueError(
            f"Row {row} of a batch has a prediction or target that is not finite. Give such rows "
            "a sample_weight of 0, or leave them out."
        )
    if not bool(torch.isfinite(curvature).all()):
        raise ValueError(
            "The curvature of the loss is not finite. Check the predictions and targets for NaN."
        )
    return LossTerms(curvature, slope, unit_curvature)


def _total_weight(sample_weight: Tensor | None, loss_weight: Tensor | None) -> Tensor | None:
    """The product of the user's weights and those of the loss; None where there are neither."""
    if loss_weight is None:
        return sample_weight
    if sample_weight is None:
        return loss_weight
    return loss_weight * sample_weight


def _curvature(loss: Loss, prediction: Tensor, target: Tensor | None, batch: Any) -> Tensor | None:
    """Second derivatives: (N, K) where they are diagonal, else (N, K, K); None for all ones."""
    if isinstance(loss, PerSampleLoss) and prediction.shape[1] > 1:
        assert target is not None
        full = loss.coupled_curvature(prediction, target)
        diagonal = full.diagonal(dim1=-2, dim2=-1)
        if torch.equal(full, diagonal.diag_embed()):
            return diagonal
        return full
    return loss.curvature(prediction, target, batch)


def _slope(
    loss: Loss, prediction: Tensor, target: Tensor | None, batch: Any
) -> tuple[Tensor | None, bool]:
    """First derivatives (N, K), and whether the loss has one value per output.

    Where the loss has no values, or there are no targets, these are None and True.
    """
    if target is None or not isinstance(loss, ValuedLoss):
        return None, True
    leaf, values = recorded(lambda y: loss.value(y, target, batch), prediction)
    ones = torch.ones_like(values)[None]
    (slope,) = pulled(values, leaf, ones, unconnected=NOT_DIFFERENTIABLE)
    return slope, values.numel() == leaf.numel()


def _check_weights(weight: Tensor | None, prediction: Tensor, *, per_output: bool) -> None:
    """Refuse weights that are not one per sample or, where that makes sense, per output."""
    if weight is None:
        return
    samples, outputs = prediction.shape
    columns = weight.shape[1]
    if columns == 1 or (per_output and columns == outputs):
        return
    expected = f"({samples},)"
    if per_output:
        expected += f" or, one for each output, ({samples}, {outputs})"
    raise ValueError(
        f"Sample weights (or a loss's variances) must be {expected}, got {tuple(weight.shape)}."
    )
