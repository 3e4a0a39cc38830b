r"""The exact Hessian of the loss with respect to the parameters, summed over batches.

$$ H = \frac{\partial^2}{\partial w\, \partial w^\top}
   \Bigl[ \sum_i c_i\, \ell(\tilde y(x_i, w), y_i) + r(w) \Bigr] $$

`exact_hessian` differentiates the weighted loss of one piece of the data after the other, so that
what autograd saves of a piece's loss stays within `SAVED` bytes. The regulariser r does not depend
on the data: it is a `Penalty`, whose derivatives the Gauss-Newton forms need too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from ...data.samples import SampleBatch, Samples
from ...losses import NOT_DIFFERENTIABLE, Loss, ValuedLoss, require_valued, summed_loss
from ...models.derivatives import Differentiated, recorded
from ..derivatives.regressor import Regressor

ROWS = 1024
"""Samples that are differentiated at once, at most."""

SAVED = 1 << 26
"""Bytes that the graph of these samples' loss may save; that of its gradient saves a few times as
many."""

Regulariser = Callable[[Any], Tensor]


def exact_hessian(
    regressor: Regressor, shape: torch.Size, samples: Samples, loss: Loss
) -> tuple[Tensor, float]:
    """The Hessian of the summed loss without the regulariser, and its machine epsilon.

    It is computed in float64, whatever the model's precision, since second derivatives cancel. A
    function that does not run in float64 is differentiated as it is.

    Args:
        regressor: The model as a function of its flat parameters.
        shape: Shape of one sample's output.
        samples: Training data with targets.
        loss: A loss with a value.

    Returns:
        (P, P), symmetric, and the machine epsilon of the precision it was computed in.
    """
    valued_loss = require_valued(loss)
    first = next(samples.pieces(1))
    double = _runs_in_double(regressor, first)
    if double:
        regressor = regressor.double()
        first = first.double()
    flat = regressor.flat
    total = torch.zeros(len(flat), len(flat), dtype=torch.float64, device=flat.device)
    rows = _rows_at_once(_batch_loss(regressor, shape, first, valued_loss), flat)
    for batch in samples.pieces(rows):
        if double:
            batch = batch.double()
        batch_loss = _batch_loss(regressor, shape, batch, valued_loss)
        total += Differentiated.of(batch_loss, flat).hessian()
    return total, torch.finfo(flat.dtype).eps


def _runs_in_double(regressor: Regressor, first: SampleBatch) -> bool:
    """Whether the regressor can be called in float64."""
    double = regressor.double()
    first = first.double()
    try:
        with torch.no_grad():
            double.outputs(double.flat, *first.args, **first.kwargs)
    except RuntimeError:
        return False
    return True


def _rows_at_once(loss_of_one: Callable[[Tensor], Tensor], flat: Tensor) -> int:
    """How many samples to differentiate at once, so that their graph saves `SAVED` bytes at most.

    Args:
        loss_of_one: The loss of the first sample as a function of the parameters.
        flat: The parameters, (P,).

    Raises:
        ValueError: The loss cannot be differentiated.
    """
    saved = 0

    def count(tensor: Tensor) -> Tensor:
        nonlocal saved
        saved += tensor.numel() * tensor.element_size()
        return tensor

    with saved_tensors_hooks(count, lambda tensor: tensor):
        _, value = recorded(loss_of_one, flat)
    if not value.requires_grad:
        raise ValueError(NOT_DIFFERENTIABLE)
    return max(1, min(ROWS, SAVED // max(1, saved)))


def _batch_loss(
    regressor: Regressor, shape: torch.Size, batch: SampleBatch, loss: ValuedLoss
) -> Callable[[Tensor], Tensor]:
    """The weighted loss of a batch as a function of the flat parameters."""

    def loss_at(flat: Tensor) -> Tensor:
        prediction = regressor.outputs(flat, *batch.args, **batch.kwargs)
        target = batch.target_rows(prediction, shape)
        if target is None:
            raise ValueError("hessian='exact' needs targets: fit(x, y).")
        return summed_loss(loss, prediction, target, batch.weight, batch.raw)

    return loss_at


class Penalty:
    """A regulariser r(params) as a function of the flat parameters, in float64.

    Args:
        regressor: The model whose parameters are penalised.
        regulariser: A function of the parameters in their container.

    Raises:
        ValueError: The regulariser does not return one number as a tensor.
    """

    def __init__(self, regressor: Regressor, regulariser: Regulariser) -> None:
        self._regressor = regressor.double()
        self._regulariser = regulariser
        value = self._value(self._regressor.flat)
        expected = "regulariser(params) must return one number (a tensor)"
        if not isinstance(value, Tensor):
            raise ValueError(f"{expected}, got {type(value).__name__}.")
        if value.ndim:
            raise ValueError(f"{expected}, got {tuple(value.shape)}.")

    @property
    def local(self) -> Differentiated:
        """Its value and derivatives at the fitted parameters, in float64."""
        return Differentiated.of(self._value, self._regressor.flat)

    def product(self, vectors: Tensor) -> Tensor:
        """Its Hessian times vectors: (m, P) -> (m, P)."""
        return self.local.products(vectors)

    def _value(self, flat: Tensor) -> Any:
        """What the regulariser returns at some parameters, (P,)."""
        return self._regulariser(self._regressor.parameters.restore(flat))
