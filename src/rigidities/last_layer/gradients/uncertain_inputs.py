r"""What uncertain inputs add to the variance of a prediction.

To first order, with $S$ the covariance of the input of one sample (paper, Sec. 3.7),

$$ \sigma^2_{\text{inputs}} = \nabla_x y^\top\, S\; \nabla_x y. $$

It is independent of the model's own variance, to which it is added. With input samples, it is the
variance of the prediction over draws of the input instead.

`InputVariances` takes the covariance of all inputs together. It hands each batch its rows of the
covariance and gives the variance of that batch's predictions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...data.batches import Batch
from ...data.slots import InputName, RowShare, Slot
from ...posterior.draws import standard_normal
from ...readout.readout import AnyReadout
from .feature_derivatives import gradient_chunks, output_derivatives
from .feature_map import UNCONNECTED, FeatureMap

NAME = "input_covariance"

_TOLERANCE = 1e-6
"""How far a covariance matrix may be from symmetric and positive, relative to its size."""


class InputVariances:
    """The variance that one uncertain input brings to each prediction, batch after batch.

    Args:
        covariance: The option `input_covariance` of `LastLayerRigidity.predict`, for the L rows of
            d numbers of the input: a number, (d,), (L, d), (d, d) or (L, d, d). The shape of one
            input row may stand in place of d.
        wrt: The uncertain input; None for the only one.
        samples: How many inputs to draw; 0 for first order.
        generator: The random generator of these draws.

    Raises:
        ValueError: `samples` is negative, one, or not a whole number.
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
        self._covariance = covariance
        self._wrt = wrt
        self._samples = samples
        self._generator = generator
        self._share: RowShare | None = None  # made when the first batch shows the input's shape

    def next(self, readout: AnyReadout, batch: Batch, output: Tensor) -> Tensor:
        """The variance of the next batch's predictions, shaped like its output."""
        slot = Slot.find(batch, self._wrt, readout)
        x = slot.get(batch)
        if self._share is None:
            self._share = _checked_covariance(self._covariance, x)
        covariance = self._share.next(len(x))
        if self._samples:
            variance = self._sampled(readout, batch, slot, covariance)
        else:
            variance = first_order(FeatureMap.of(readout, batch, slot), covariance)
        return variance.reshape(output.shape)

    def check_used_up(self) -> None:
        """Check after the last batch that no rows of the covariance are left."""
        if self._share is not None:
            self._share.check_used_up()

    def _sampled(self, readout: AnyReadout, batch: Batch, slot: Slot, covariance: Tensor) -> Tensor:
        """The variance of the output over draws of the input."""
        x = slot.get(batch)
        n = self._samples
        base = readout(batch).output.detach().to(torch.float64)
        # Changes from the base are summed: sums of squares of large outputs would cancel.
        total = torch.zeros_like(base)
        square = torch.zeros_like(base)
        for _ in range(n):
            z = standard_normal(tuple(x.shape), x.device, self._generator)
            args, kwargs = slot.put(batch, x + _correlated(z, covariance).to(x))
            change = readout.read(args, kwargs).output.detach().to(torch.float64) - base
            total += change
            square += change.square()
        return (square - total.square() / n) / (n - 1)


def first_order(feature_map: FeatureMap, covariance: Tensor) -> Tensor:
    """$g^T S g$ of every output of a batch, (N, O).

    Args:
        feature_map: Output and features of the batch as functions of the uncertain input.
        covariance: S, as `_checked_covariance` gives it for the rows of the batch.
    """
    if feature_map.aligned:
        return _quadratic_form(output_derivatives(feature_map), covariance)
    owners = feature_map.row_owners()
    if owners is None:
        # A row of the input acts on several samples: each output has a backward pass of its own.
        with torch.enable_grad():
            values = feature_map.reading.output.flatten()
        forms = []
        for gradients in gradient_chunks(values, feature_map.x, UNCONNECTED):  # (c, L, d)
            forms.append(_quadratic_form(gradients.movedim(0, 1), covariance).sum(0))
        return torch.cat(forms).reshape(feature_map.samples, -1)
    per_input_row = _quadratic_form(output_derivatives(feature_map), covariance)  # (L, O)
    zeros = per_input_row.new_zeros(feature_map.samples, per_input_row.shape[1])
    return zeros.index_add(0, owners, per_input_row)


def _quadratic_form(gradients: Tensor, covariance: Tensor) -> Tensor:
    """Gradients (L, O, d) and a checked covariance of L rows -> (L, O)."""
    gradients = gradients.to(torch.float64)
    if covariance.ndim <= 1:  # one variance, or (d,)
        return (gradients.square() * covariance).sum(-1)
    if covariance.ndim == 2:  # (L, d)
        return torch.einsum("lod,ld->lo", gradients.square(), covariance)
    return torch.einsum("lod,lde,loe->lo", gradients, covariance, gradients)


def _correlated(z: Tensor, covariance: Tensor) -> Tensor:
    """Draws with a checked covariance from standard normal ones, shaped like the input."""
    flat = z.reshape(len(z), -1)
    if covariance.ndim <= 2:
        return (flat * covariance.sqrt()).reshape(z.shape)
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)
    draws: Tensor = root.expand(len(z), -1, -1) @ flat[..., None]
    return draws.reshape(z.shape)


def _checked_covariance(covariance: Any, x: Tensor) -> RowShare:
    """A user's covariance, checked, to be handed out batch by batch.

    Args:
        covariance: The option `input_covariance`.
        x: The input of the first batch.

    Returns:
        (), (d,), (L, d), (1, d, d) or (L, d, d) in float64, split by rows where it has L of them.

    Raises:
        ValueError: It is not a tensor of finite numbers, does not fit the input, or is not a
            covariance.
    """
    values = _finite_numbers(covariance, x)
    row_shape = tuple(x.shape[1:])
    numbers = x.shape[1:].numel()
    if values.ndim == 0:
        _check_variances(values)
        return RowShare(values, split=False, name=NAME)

    # One entry of the covariance is that of a single row, or the one for all rows.
    variance_shapes = {(numbers,), row_shape}
    matrix_shapes = {(numbers, numbers), (*row_shape, *row_shape)}
    has_rows = tuple(values.shape) not in variance_shapes | matrix_shapes
    entry_shape = tuple(values.shape[1:] if has_rows else values.shape)
    if entry_shape in variance_shapes:
        _check_variances(values)
        shape = (len(values), numbers) if has_rows else (numbers,)
        return RowShare(values.reshape(shape), split=has_rows, name=NAME)
    if entry_shape in matrix_shapes:
        matrices = _checked_matrices(values.reshape(-1, numbers, numbers))
        return RowShare(matrices, split=has_rows, name=NAME)
    raise ValueError(
        f"input_covariance has the shape {tuple(values.shape)}; for inputs with {numbers} "
        f"numbers per row expected a variance, ({numbers},), (rows, {numbers}), "
        f"({numbers}, {numbers}) or (rows, {numbers}, {numbers})."
    )


def _finite_numbers(covariance: Any, x: Tensor) -> Tensor:
    """The covariance as a float64 tensor on the input's device, without a first dimension of 1."""
    try:
        values = torch.as_tensor(covariance, dtype=torch.float64).detach().to(x.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"input_covariance must be a number or a tensor of numbers, got {covariance!r}."
        ) from error
    if values.ndim > max(1, x.ndim - 1) and len(values) == 1:
        values = values[0]
    if not bool(torch.isfinite(values).all()):
        raise ValueError("input_covariance contains NaN or infinity.")
    return values


def _check_variances(variances: Tensor) -> None:
    """Refuse negative variances."""
    if bool((variances < 0).any()):
        raise ValueError(
            f"input_covariance contains a negative variance, {float(variances.min()):.3g}. Pass "
            "variances (squares of standard deviations), or a matrix."
        )


def _checked_matrices(matrices: Tensor) -> Tensor:
    """Covariance matrices (..., d, d), made exactly symmetric; others are refused."""
    size = matrices.abs().amax((-2, -1)).clamp(min=1e-300)
    asymmetry = (matrices - matrices.mT).abs().amax((-2, -1))
    if bool((asymmetry > _TOLERANCE * size).any()):
        raise ValueError(
            "input_covariance is not symmetric. Pass (S + S.T) / 2. If it contains one row of "
            "variances per sample, pass torch.diag_embed of it."
        )
    smallest = torch.linalg.eigvalsh(matrices)[..., 0]
    if bool((smallest < -_TOLERANCE * size).any()):
        raise ValueError(
            "input_covariance is not positive semi-definite: its smallest eigenvalue is "
            f"{float(smallest.min()):.3g}."
        )
    return (matrices + matrices.mT) / 2
