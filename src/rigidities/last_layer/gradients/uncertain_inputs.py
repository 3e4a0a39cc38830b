r"""What uncertain inputs add to the variance of a prediction.

To first order, with $S$ the covariance of the input of one sample (paper, Sec. 3.7),

$$ \sigma^2_{\text{inputs}} = \nabla_x y^\top\, S\; \nabla_x y, $$

independent of the model's own variance, to which it is added. By sampling, the variance of the
prediction over draws of the input.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...data.batches import Batch
from ...data.slots import InputName, RowShare, Slot
from ...posterior.draws import standard_normal
from ..readout.tap import AnyTap
from .feature_derivatives import output_derivatives, output_derivatives_apart
from .feature_map import FeatureMap, row_owners

NAME = "input_covariance"


class InputVariances:
    """The variance that one uncertain input brings to each prediction, batch after batch.

    The options are those of `LastLayerRigidity.predict`, the covariance for the L rows of the input
    `wrt`, of which one may also have its own shape in place of d; 0 samples are first order.
    """

    def __init__(
        self,
        covariance: Any,
        wrt: InputName = None,
        samples: int = 0,
        generator: torch.Generator | None = None,
    ) -> None:
        if samples == 1 or samples < 0 or samples != int(samples):
            raise ValueError(f"input_samples must be 0 (first order) or at least 2, got {samples}.")
        self._covariance, self._wrt = covariance, wrt
        self._samples, self._generator = samples, generator
        self._share: RowShare | None = None

    def next(self, tap: AnyTap, batch: Batch, output: Tensor) -> Tensor:
        """Of the next batch, shaped like its output."""
        slot = Slot.find(batch, self._wrt, tap)
        point = slot.get(batch)
        if self._share is None:
            self._share = _shared(self._covariance, point)
        covariance = self._share.next(len(point))
        if self._samples:
            variance = self._sampled(tap, batch, slot, covariance)
        else:
            variance = first_order(FeatureMap.of(tap, batch, slot), covariance)
        return variance.reshape(output.shape)

    def check_used_up(self) -> None:
        """After the last batch: no rows of the covariance may be left."""
        if self._share is not None:
            self._share.check_used_up()

    def _sampled(self, tap: AnyTap, batch: Batch, slot: Slot, covariance: Tensor) -> Tensor:
        point, n = slot.get(batch), self._samples
        base = tap(*batch.args, **batch.kwargs).output.detach().to(torch.float64)
        total, square = torch.zeros_like(base), torch.zeros_like(base)
        for _ in range(n):
            z = standard_normal(tuple(point.shape), point.device, self._generator)
            args, kwargs = slot.put(batch, point + _correlated(z, covariance).to(point))
            change = tap(*args, **kwargs).output.detach().to(torch.float64) - base
            total += change
            square += change.square()
        return (square - total.square() / n) / (n - 1)


def first_order(point: FeatureMap, covariance: Tensor) -> Tensor:
    """$g^T S g$ of every output of a batch, (N, O)."""
    if point.aligned:
        return _form(output_derivatives(point), covariance)
    owners = row_owners(point)
    if owners is None:
        return output_derivatives_apart(point, lambda g: _form(g.movedim(0, 1), covariance).sum(0))
    each = _form(output_derivatives(point), covariance)
    return each.new_zeros(point.samples, each.shape[1]).index_add(0, owners, each)


def _form(gradients: Tensor, covariance: Tensor) -> Tensor:
    """(L, O, d) and a checked covariance -> (L, O)."""
    gradients = gradients.to(torch.float64)
    if covariance.ndim <= 1:
        return (gradients.square() * covariance).sum(-1)
    if covariance.ndim == 2:
        return torch.einsum("lod,ld->lo", gradients.square(), covariance)
    return torch.einsum("lod,lde,loe->lo", gradients, covariance, gradients)


def _correlated(z: Tensor, covariance: Tensor) -> Tensor:
    """Draws with a checked covariance from standard normal ones, shaped like the input."""
    flat = z.reshape(len(z), -1)
    if covariance.ndim <= 2:
        return (flat * covariance.sqrt()).reshape(z.shape)
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)
    drawn: Tensor = root.expand(len(z), -1, -1) @ flat[..., None]
    return drawn.reshape(z.shape)


def _shared(covariance: Any, point: Tensor) -> RowShare:
    """The covariance as (), (d,), (L, d), (1, d, d) or (L, d, d), checked, to be handed out."""
    try:
        given = torch.as_tensor(covariance, dtype=torch.float64).detach().to(point.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"input_covariance must be a number or a tensor of numbers, got {covariance!r}."
        ) from error
    inner, numbers = point.shape[1:], point.shape[1:].numel()
    if given.ndim > max(1, len(inner)) and len(given) == 1:
        given = given[0]
    if not bool(torch.isfinite(given).all()):
        raise ValueError("input_covariance holds NaN or infinity.")
    rows, matrices = {(numbers,), tuple(inner)}, {(numbers, numbers), (*inner, *inner)}
    split = given.ndim > 0 and tuple(given.shape) not in rows | matrices
    one = tuple(given.shape[1:] if split else given.shape)
    if given.ndim and one not in rows | matrices:
        raise ValueError(
            f"input_covariance has the shape {tuple(given.shape)}; for inputs with {numbers} "
            f"numbers per row expected a variance, ({numbers},), (rows, {numbers}), "
            f"({numbers}, {numbers}) or (rows, {numbers}, {numbers})."
        )
    if given.ndim and one not in rows:
        matrix = _checked_matrix(given.reshape(-1, numbers, numbers))
        return RowShare(matrix, split=split, name=NAME)
    if bool((given < 0).any()):
        raise ValueError(
            f"input_covariance holds a negative variance, {float(given.min()):.3g}. Give "
            "variances (squares of standard deviations), or a matrix."
        )
    shape = (len(given), numbers) if split else (numbers,) if given.ndim else ()
    return RowShare(given.reshape(shape), split=split, name=NAME)


def _checked_matrix(matrix: Tensor) -> Tensor:
    size = matrix.abs().amax((-2, -1)).clamp(min=1e-300)
    if bool(((matrix - matrix.mT).abs().amax((-2, -1)) > 1e-6 * size).any()):
        raise ValueError(
            "input_covariance is not symmetric. Pass (S + S.T) / 2, or, for one row of variances "
            "per sample of as many samples as inputs, torch.diag_embed of them."
        )
    smallest = torch.linalg.eigvalsh(matrix)[..., 0]
    if bool((smallest < -1e-6 * size).any()):
        raise ValueError(
            "input_covariance is not positive semi-definite: its smallest eigenvalue is "
            f"{float(smallest.min()):.3g}."
        )
    return (matrix + matrix.mT) / 2
