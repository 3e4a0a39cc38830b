r"""First and second derivatives of the loss by the predictions of a batch.

The paper's pseudo-Hessian (Sec. 3.4) is $\sum_i J_i^\top \Lambda_i J_i$ with
$\Lambda_i = \partial^2 \ell_i / \partial \tilde y_i^2$, for several outputs a K x K matrix. A root
$\Lambda = L L^\top$ turns it into a plain sum over the rows of $L^\top J$.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...losses import Loss, PerSampleLoss, ValuedLoss, own_weights


@dataclass(frozen=True)
class LossTerms:
    r"""Derivatives of the weighted loss of each sample.

    Attributes:
        curvature: $\Lambda$, (N, K) where it is diagonal, else (N, K, K).
        slope: d loss / d prediction, (N, K); None where the loss has no value or there are no
            targets.
        ones: whether the curvature is 1 everywhere.
    """

    curvature: Tensor
    slope: Tensor | None
    ones: bool = False

    @property
    def root(self) -> Tensor | None:
        r"""L with $L L^\top = \Lambda$, like it; None for all ones. Refuses a concave loss."""
        if self.ones:
            return None
        if self.curvature.ndim == 2:
            lowest = float(self.curvature.min())
            if lowest >= 0:
                return self.curvature.sqrt()
        else:
            values, vectors = torch.linalg.eigh(self.curvature)
            lowest = float(values.min())
            if lowest >= -1e-12 * float(values.max()):
                return torch.mul(vectors, values.clamp(min=0).sqrt()[:, None])
        raise ValueError(
            f"The loss is concave at some predictions (lowest curvature {lowest:.3g}), where the "
            "Gauss-Newton form does not hold. Use a convex loss, or hessian='exact'."
        )

    @property
    def diagonal(self) -> Tensor:
        """Curvature by each output alone, (N, K)."""
        own = self.curvature
        return own if own.ndim == 2 else own.diagonal(dim1=-2, dim2=-1)

    @property
    def rows(self) -> int:
        """Predictions with a curvature."""
        return int((self.diagonal != 0).sum())

    @cached_property
    def dispersion(self) -> float:
        r"""$\sum \ell'^\top \Lambda^{-1} \ell'$: weighted squared residuals, for a squared loss."""
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
    """Curvature and slope of a batch as the user gave it, from predictions and targets (N, K).

    Weights are (N, 1), for a loss of each output alone also (N, K).
    """
    if target is None and loss.needs_target:
        raise ValueError("This loss needs targets: fit(x, y).")
    prediction = prediction.detach().to(torch.float64)
    given, own = weight, own_weights(loss, batch)
    if own is not None:
        given = own if weight is None else own * weight
    curvature = _curvature(loss, prediction, target, batch)
    slope, apart = _slope(loss, prediction, target, batch)
    _check_weights(given, prediction, apart=apart and (curvature is None or curvature.ndim == 2))
    ones = curvature is None and given is None
    if curvature is None:
        curvature = torch.ones_like(prediction)
    if given is not None:  # what weighs nothing need not have a derivative
        shaped = given if curvature.ndim == 2 else given[..., None]
        curvature = torch.where(shaped > 0, curvature * shaped, 0.0)
        slope = None if slope is None else torch.where(given > 0, slope * given, 0.0)
    if slope is not None and not bool(torch.isfinite(slope).all()):
        row = int((~torch.isfinite(slope)).any(1).nonzero()[0])
        raise ValueError(
            f"Row {row} of a batch has a prediction or target that is not finite. Give such rows "
            "sample_weight 0 or leave them out."
        )
    if not bool(torch.isfinite(curvature).all()):
        raise ValueError("The loss has no finite curvature. NaN in the predictions or targets?")
    return LossTerms(curvature, slope, ones)


def _curvature(loss: Loss, prediction: Tensor, target: Tensor | None, batch: Any) -> Tensor | None:
    if isinstance(loss, PerSampleLoss) and prediction.shape[1] > 1:
        assert target is not None
        full = loss.coupled_curvature(prediction, target)
        diagonal = full.diagonal(dim1=-2, dim2=-1)
        return diagonal if torch.equal(full, diagonal.diag_embed()) else full
    return loss.curvature(prediction, target, batch)


def _slope(
    loss: Loss, prediction: Tensor, target: Tensor | None, batch: Any
) -> tuple[Tensor | None, bool]:
    """First derivative (N, K), and whether the loss has a value for each output."""
    if target is None or not isinstance(loss, ValuedLoss):
        return None, True
    with torch.enable_grad():
        y = prediction.clone().requires_grad_()
        values = loss.value(y, target, batch)
        (slope,) = torch.autograd.grad(values.sum(), y)
    return slope, values.numel() == y.numel()


def _check_weights(weights: Tensor | None, prediction: Tensor, *, apart: bool) -> None:
    outputs = prediction.shape[1]
    if weights is None or weights.shape[1] in ({1, outputs} if apart else {1}):
        return
    each = f" or, one for each output, ({len(prediction)}, {outputs})" if apart else ""
    raise ValueError(
        f"Sample weights (or a loss's variances) must be ({len(prediction)},){each}, got "
        f"{tuple(weights.shape)}."
    )
