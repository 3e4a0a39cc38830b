r"""Error bars of anything computed from many predictions, without their covariance matrix.

For quantities $z = \mathrm{fn}(y)$ of all predictions $y$ together, $J = \partial z/\partial y$,

$$ \mathrm{Cov}(z) = J\, \mathrm{Cov}(y)\, J^\top = (J T)(J T)^\top, \qquad
   E[z_q] = \mathrm{fn}(y)_q + \tfrac12 \mathrm{tr}(H_q\, \mathrm{Cov}(y)) $$

to first order (exact where fn is linear) and, if asked for, second order in the mean (exact where
fn is quadratic). $T$ are the derivatives of the predictions by the weights' standard coordinates
(see `joint_outputs`), so correlations between predictions and between targets are kept: a
difference of two similar predictions has a small error bar.

Only the **epistemic** part propagates: noise does not correlate between predictions. Where the
target is a mean of n noisy observations, add noise / n yourself. Where a calibration has a joint
scale (`criterion="auto"`), what predictions share has that one, and each distinct row adds a part
of its own up to the scale of single predictions (see `joint`). Other criteria have one scale for
both. With `noise="none"` it is set by residuals that hold the noise too, which does not average out
here: for means of 500 predictions, against 120 retrained nets on each of three data sets (the
experiment `propagation`), the error bar was 9 to 101 times the actual error, with a floor,
`noise="constant"`, 6 to 24 times, with `criterion="evidence", noise="bayes"` 0.9 to 1.0 times.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import Tensor

from ...models.modes import outside_inference_mode
from ...notices import notify
from ...posterior.joint import JointPosterior
from ...prediction.derived import Derived
from ..readout.tap import AnyTap
from .differential import REMEDY, Differential, Function
from .outputs import KEPT, Batches, JointOutputs


@outside_inference_mode
def propagated(
    fn: Function,
    tap: AnyTap,
    joint: JointPosterior,
    batches: Batches,
    *,
    second_order: bool = False,
    again: bool = True,
) -> Derived:
    """Mean and covariance of a differentiable function of all predictions together.

    Memory grows with the number of predictions, never with its square. See
    `LastLayerRigidity.propagate`; `again` says whether `batches` may be called a second time, for
    features beyond 1 GiB. It warns where derivatives are exactly zero, as after rounding.
    """
    with torch.enable_grad():
        outputs = JointOutputs.read(tap, joint, batches, again=again)
        slope = Differential(fn, outputs.output)
        spread = _spread(slope, outputs)
        shift = _shift(slope, outputs) if second_order else None
    if bool(spread.flat.any()):
        notify(
            f"fn has a derivative of exactly zero for {int(spread.flat.sum())} of "
            f"{slope.quantities} quantities (rounding, clamping, a constant?), so to first order "
            f"their error bar is zero. {REMEDY}"
        )
    return Derived.of(
        slope.value, spread.rows, variance=spread.variance, shift=shift, precision=slope.precision
    )


@outside_inference_mode
def covariance_between(
    tap: AnyTap, joint: JointPosterior, batches: Batches, others: Batches | None = None
) -> Tensor:
    """Joint epistemic covariance of N predictions and M others, by default the same.

    One dense matrix, (N, M) for one output per sample, else (N, *out, M, *out) with the outputs'
    shape per sample; in the model's precision.
    """
    with torch.enable_grad():
        left = JointOutputs.read(tap, joint, batches, again=False)
        right = left if others is None else JointOutputs.read(tap, joint, others, again=False)
    matrix = left.output.new_empty(left.output.numel(), right.output.numel())
    for i, (rows, a, these) in enumerate(left.located()):
        for j, (columns, b, those) in enumerate(right.located()):
            if right is left and j < i:
                continue  # the transpose of another block
            same = None if these is None or those is None else these[:, None] == those
            block = joint.covariance(a, b, same).flatten(2).flatten(0, 1).to(matrix.dtype)
            matrix[rows.reshape(-1, 1), columns.reshape(-1)] = block
            if right is left:
                matrix[columns.reshape(-1, 1), rows.reshape(-1)] = block.mT
    shapes = [side.output.shape for side in (left, right)]
    if all(shape.numel() == shape[0] for shape in shapes):
        return matrix
    return matrix.reshape(*shapes[0], *shapes[1])


def _spread(slope: Differential, outputs: JointOutputs) -> _Spread:
    """One pass of reverse mode per quantity, or one of forward mode per coordinate: the fewer."""
    if slope.quantities > outputs.coordinates:
        with suppress(NotImplementedError):
            return _pushed(slope, outputs)
    return _pulled(slope, outputs)


def _pulled(slope: Differential, outputs: JointOutputs) -> _Spread:
    spread = _Spread(slope.quantities, outputs)
    for part, cotangents in slope.cotangents():
        spread.add(part, slice(None), outputs.pull(cotangents), cotangents.flatten(1))
    return spread


def _pushed(slope: Differential, outputs: JointOutputs) -> _Spread:
    spread = _Spread(slope.quantities, outputs)
    for part, tangents in _directions(slope, outputs):
        rows = slope.pushed(tangents).mT
        spread.add(slice(None), part, rows, rows)
    return spread


def _shift(slope: Differential, outputs: JointOutputs) -> Tensor:
    """Half the trace of H Cov(y), (Q,): the mean bend along the coordinates."""
    total = torch.zeros(slope.quantities, dtype=torch.float64, device=outputs.output.device)
    for _, tangents in _directions(slope, outputs):
        total += slope.bent(tangents).sum(0) / 2
    return total


def _directions(slope: Differential, outputs: JointOutputs) -> Iterator[tuple[slice, Tensor]]:
    number, device = outputs.coordinates, outputs.output.device
    for start in range(0, number, slope.chunk):
        part = slice(start, min(start + slope.chunk, number))
        unit = torch.zeros(part.stop - start, number, dtype=torch.float64, device=device)
        unit[:, part].fill_diagonal_(1.0)
        yield part, outputs.push(unit)


class _Spread:
    """Rows of derivatives by the coordinates (Q, R), or their sums of squares (Q,) alone."""

    def __init__(self, quantities: int, outputs: JointOutputs) -> None:
        coordinates, device = outputs.coordinates, outputs.output.device
        self.variance = torch.zeros(quantities, dtype=torch.float64, device=device)
        self.flat = torch.ones(quantities, dtype=torch.bool, device=device)
        self.rows = None
        if 8 * quantities * coordinates <= KEPT:
            self.rows = self.variance.new_empty(quantities, coordinates)

    def add(self, quantities: slice, coordinates: slice, rows: Tensor, slopes: Tensor) -> None:
        """A block of rows; a quantity whose slopes are all zero is `flat`."""
        self.flat[quantities] &= ~slopes.any(1)
        self.variance[quantities] += rows.square().sum(1)
        if self.rows is not None:
            self.rows[quantities, coordinates] = rows
