r"""The exact Hessian of the loss by the parameters, summed over batches.

$$ H = \frac{\partial^2}{\partial w\, \partial w^\top}
   \Bigl[ \sum_i c_i\, \ell(\tilde y(x_i, w), y_i) + r(w) \Bigr] $$
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ...data.samples import SampleBatch, Samples
from ...losses import Loss, ValuedLoss, own_weights, require_valued
from ...models.directional import Differentiated
from ..derivatives.regressor import Regressor

ROWS, COLUMNS = 1024, 64
"""Samples and columns of the Hessian that are differentiated at once, at most."""

SAVED = 1 << 28
"""Bytes that may be saved for the backward passes of all of them."""

Regulariser = Callable[[Any], Tensor]


def exact_hessian(
    regressor: Regressor, shape: torch.Size, samples: Samples, loss: Loss
) -> tuple[Tensor, float]:
    """(P, P), symmetric, without the regulariser, and the machine epsilon it was computed in.

    Computed in float64, whatever the model's precision: second derivatives cancel. A function that
    does not run in float64 is differentiated as it is. `shape` is that of one sample's output.
    """
    valued, first = require_valued(loss), next(samples.pieces(1))
    regressor, double = _most_precise(regressor, first)
    flat = regressor.flat
    total = torch.zeros(len(flat), len(flat), dtype=torch.float64, device=flat.device)
    rows, columns = _pace(regressor, first.double() if double else first)
    for batch in samples.pieces(rows):
        batch = batch.double() if double else batch
        total += Differentiated.of(_summed(regressor, shape, batch, valued), flat).hessian(columns)
    return total, torch.finfo(flat.dtype).eps


def _most_precise(regressor: Regressor, first: SampleBatch) -> tuple[Regressor, bool]:
    """The regressor in float64 where it runs so."""
    double, first = regressor.double(), first.double()
    try:
        with torch.no_grad():
            double.outputs(double.flat, *first.args, **first.kwargs)
    except RuntimeError:
        return regressor, False
    return double, True


def _pace(regressor: Regressor, first: SampleBatch) -> tuple[int, int]:
    """Samples and columns at once, so that what a pass saves stays within `SAVED`."""
    saved = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += tensor.numel() * tensor.element_size()
        return tensor

    flat = regressor.flat.clone().requires_grad_()
    with torch.enable_grad(), saved_tensors_hooks(count, lambda tensor: tensor):
        regressor.outputs(flat, *first.args, **first.kwargs)
    columns = max(1, min(COLUMNS, SAVED // max(1, saved)))
    return max(1, min(ROWS, SAVED // max(1, saved * columns))), columns


def _summed(
    regressor: Regressor, shape: torch.Size, batch: SampleBatch, loss: ValuedLoss
) -> Callable[[Tensor], Tensor]:
    """The weighted loss of a batch as a function of the flat parameters."""
    extra = own_weights(loss, batch.raw)

    def summed(flat: Tensor) -> Tensor:
        prediction = regressor.outputs(flat, *batch.args, **batch.kwargs)
        target = batch.target_rows(prediction, shape)
        if target is None:
            raise ValueError("hessian='exact' needs targets: fit(x, y).")
        if batch.weight is not None:  # a NaN that weighs nothing must not spread
            target = torch.where(batch.weight > 0, target, 0.0)
        values = loss.value(prediction, target.to(prediction), batch.raw)
        values = values.reshape(len(prediction), -1)
        for weight in (batch.weight, extra):
            values = values if weight is None else values * weight
        return values.sum()

    return summed


class Penalty:
    """A regulariser r(params), which is given them in float64, as a function of the flat ones."""

    def __init__(self, regressor: Regressor, regulariser: Regulariser) -> None:
        self._regressor, self._regulariser = regressor.double(), regulariser
        value = self._value(self._regressor.flat)
        if not isinstance(value, Tensor) or value.ndim:
            got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"regulariser(params) must return one number (a tensor), got {got}.")

    @property
    def local(self) -> Differentiated:
        """Its value and derivatives at the fitted parameters, in float64."""
        return Differentiated.of(self._value, self._regressor.flat)

    def product(self, vectors: Tensor) -> Tensor:
        """Its Hessian times vectors: (m, P) -> (m, P)."""
        return self.local.products(vectors)

    def _value(self, flat: Tensor) -> Any:
        return self._regulariser(self._regressor.parameters.restore(flat))
