r"""Error bars of anything computed from many predictions, without their covariance matrix.

For quantities $z = \mathrm{fn}(y)$ of all predictions $y$ together, $J = \partial z/\partial y$,

$$ \mathrm{Cov}(z) = J\, \mathrm{Cov}(y)\, J^\top = (J T)(J T)^\top, \qquad
   E[z_q] = \mathrm{fn}(y)_q + \tfrac12 \mathrm{tr}(H_q\, \mathrm{Cov}(y)) $$

to first order (exact where fn is linear) and, if asked for, second order in the mean (exact where
fn is quadratic). $T$ are the derivatives of the predictions with respect to the weights' standard
coordinates (see `outputs`), so correlations between predictions and between targets are kept: a
difference of two similar predictions has a small error bar.

The data are read once into `JointOutputs`. `Differential` evaluates fn there and gives its
derivatives. Both together give J T, whose rows or sums of squares become a `Derived`.

Only the **epistemic** part propagates: noise does not correlate between predictions. Where the
target is a mean of n noisy observations, add noise / n yourself. Where a calibration has a joint
scale (`Full`), what predictions share has that scale, and each distinct row adds a
deviation of its own up to the scale of single predictions (see `joint`). `Paper` has one
scale for both. With `noise="none"` it is set by residuals that contain the noise too, which does
not average out here: for means of 500 predictions, against 120 retrained networks on each of three
data sets (the experiment `propagation`), the error bar was 9 to 101 times the actual error. With a
floor, `noise="constant"`, it was 6 to 24 times, with
`Paper(criterion="evidence", noise="bayes")` 0.9 to 1.0 times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

import torch
from torch import Tensor

from ...models.modes import outside_inference_mode
from ...notices import notify
from ...posterior.joint import JointPosterior
from ...prediction.derived import Derived
from ...readout.readout import AnyReadout
from .differential import REMEDY, Differential, Function
from .outputs import MEMORY_BYTES, Batches, JointOutputs

DerivativeBlock = tuple[slice, slice, Tensor, Tensor]
"""Which quantities and which coordinates a block of J T has, its entries, and derivatives of the
same quantities by which to tell whether they are flat."""


@outside_inference_mode
def propagated(
    fn: Function,
    readout: AnyReadout,
    joint: JointPosterior,
    batches: Batches,
    *,
    second_order: bool = False,
    again: bool = True,
) -> Derived:
    """Mean and covariance of a differentiable function of all predictions together.

    Memory grows with the number of predictions, never with its square. A warning says where
    derivatives are exactly zero, as after rounding. See `LastLayerRigidity.propagate`.

    Args:
        fn: The function of the joined outputs.
        readout: The readout.
        joint: The posterior of all targets' weights.
        batches: Begins to read the data.
        second_order: Whether the mean includes what curvature adds to it.
        again: Whether `batches` may be called a second time, for features beyond 1 GiB.
    """
    outputs = JointOutputs.read(readout, joint, batches, again=again)
    with torch.enable_grad():
        differential = Differential(fn, outputs.output)
        spread = _spread(differential, outputs)
        shift = _shift(differential, outputs) if second_order else None
    if bool(spread.flat.any()):
        notify(
            f"fn has a derivative of exactly zero for {int(spread.flat.sum())} of "
            f"{differential.quantities} quantities (does it round, clamp or return a constant?), "
            f"so to first order their error bar is zero. {REMEDY}"
        )
    return Derived.of(
        differential.value,
        spread.rows,
        variance=spread.variance,
        shift=shift,
        precision=differential.precision,
    )


@outside_inference_mode
def covariance_between(
    readout: AnyReadout, joint: JointPosterior, batches: Batches, others: Batches | None = None
) -> Tensor:
    """Joint epistemic covariance of N predictions and M others, by default the same.

    Args:
        readout: The readout.
        joint: The posterior of all targets' weights.
        batches: Begins to read the data of the N predictions.
        others: Begins to read the data of the M others.

    Returns:
        One dense matrix in the model's precision: (N, M) for one output per sample, else
        (N, *output, M, *output) with the shape of one sample's output.
    """
    left = JointOutputs.read(readout, joint, batches, again=False)
    right = left
    if others is not None:
        right = JointOutputs.read(readout, joint, others, again=False)
    matrix = left.output.new_empty(left.output.numel(), right.output.numel())
    for i, (rows, left_features, left_hashes) in enumerate(left.located_features()):
        for j, (columns, right_features, right_hashes) in enumerate(right.located_features()):
            if right is left and j < i:
                continue  # the transpose of another block
            same = None
            if left_hashes is not None and right_hashes is not None:
                same = left_hashes[:, None] == right_hashes
            covariance = joint.covariance(left_features, right_features, same)  # (M, K, M', K)
            block = covariance.flatten(2).flatten(0, 1).to(matrix.dtype)
            matrix[rows.reshape(-1, 1), columns.reshape(-1)] = block
            if right is left:
                matrix[columns.reshape(-1, 1), rows.reshape(-1)] = block.mT
    left_shape = left.output.shape
    right_shape = right.output.shape
    if left_shape.numel() == left_shape[0] and right_shape.numel() == right_shape[0]:
        return matrix
    return matrix.reshape(*left_shape, *right_shape)


class _Spread(NamedTuple):
    """The derivatives J T of Q quantities by the R coordinates of all outputs.

    Attributes:
        variance: Sums of squares of the derivatives, (Q,).
        rows: The derivatives, (Q, R); None where they would take too much memory.
        flat: Whether all derivatives of a quantity with respect to the outputs are zero, (Q,).
    """

    variance: Tensor
    rows: Tensor | None
    flat: Tensor


def _spread(differential: Differential, outputs: JointOutputs) -> _Spread:
    """J T by one pass of reverse mode per quantity, or one of forward mode per coordinate.

    The mode with fewer passes is taken; a function without forward mode has reverse mode only.
    """
    if differential.quantities > outputs.coordinates:
        with suppress(NotImplementedError):
            return _collected(_forward_blocks(differential, outputs), differential, outputs)
    return _collected(_reverse_blocks(differential, outputs), differential, outputs)


def _collected(
    blocks: Iterable[DerivativeBlock], differential: Differential, outputs: JointOutputs
) -> _Spread:
    """The derivatives J T of all blocks."""
    quantities, coordinates = differential.quantities, outputs.coordinates
    device = outputs.output.device
    variance = torch.zeros(quantities, dtype=torch.float64, device=device)
    flat = torch.ones(quantities, dtype=torch.bool, device=device)
    all_rows: Tensor | None = None
    if 8 * quantities * coordinates <= MEMORY_BYTES:
        all_rows = variance.new_empty(quantities, coordinates)
    for block_quantities, block_coordinates, rows, slopes in blocks:
        flat[block_quantities] &= ~slopes.any(1)
        variance[block_quantities] += rows.square().sum(1)
        if all_rows is not None:
            all_rows[block_quantities, block_coordinates] = rows
    return _Spread(variance, all_rows, flat)


def _reverse_blocks(differential: Differential, outputs: JointOutputs) -> Iterator[DerivativeBlock]:
    """J T from rows of J."""
    for quantities, cotangents in differential.jacobian_rows():
        yield quantities, slice(None), outputs.pull(cotangents), cotangents.flatten(1)


def _forward_blocks(differential: Differential, outputs: JointOutputs) -> Iterator[DerivativeBlock]:
    """J T from columns of T."""
    for coordinates, tangents in _output_tangents(differential, outputs):
        rows = differential.jacobian_products(tangents).mT
        yield slice(None), coordinates, rows, rows


def _shift(differential: Differential, outputs: JointOutputs) -> Tensor:
    """What curvature adds to the mean, half the trace of H Cov(y), (Q,).

    It is half the sum of the second derivatives along the columns of T.
    """
    total = torch.zeros(differential.quantities, dtype=torch.float64, device=outputs.output.device)
    for _, tangents in _output_tangents(differential, outputs):
        total += differential.second_derivatives(tangents).sum(0) / 2
    return total


def _output_tangents(
    differential: Differential, outputs: JointOutputs
) -> Iterator[tuple[slice, Tensor]]:
    """Columns of T, chunk by chunk.

    Yields:
        The numbers of n coordinates, and the changes (n, *output) of the outputs by a unit of each.
    """
    coordinates = outputs.coordinates
    for start in range(0, coordinates, differential.chunk):
        chunk = slice(start, min(start + differential.chunk, coordinates))
        shape = (chunk.stop - start, coordinates)
        unit = torch.zeros(shape, dtype=torch.float64, device=outputs.output.device)
        unit[:, chunk].fill_diagonal_(1.0)
        yield chunk, outputs.push(unit)
