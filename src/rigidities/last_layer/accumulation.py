"""One pass over the training data: features, curvatures and residuals into the Gram."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..data.batches import Batch
from ..data.sketch import RowSketch
from ..losses import Loss
from ..posterior.gram import Gram
from .gradients.loss import GradientLoss
from .readout.reading import Reading, SampleWeight
from .readout.tap import AnyTap

_CHECK_EVERY = 32


@dataclass
class Statistics:
    """Everything that a fit learns from the data.

    Attributes:
        gram: the accumulated rows.
        sketch: hashes of the rows, to recognise them in validation data.
        targets: number of targets K.
        inputs: number of positional inputs of the model.
    """

    gram: Gram
    sketch: RowSketch
    targets: int
    inputs: int

    def clone(self) -> Statistics:
        """An independent copy."""
        return Statistics(self.gram.clone(), self.sketch.clone(), self.targets, self.inputs)


@dataclass(frozen=True)
class Weighing:
    """The weight of a row: the loss's curvature times the user's sample weight.

    Attributes:
        loss: of the values.
        sample_weight: callable(batch) -> weights, where the training loss was weighted.
        gradients: the part of the training loss that derivatives by an input had.
    """

    loss: Loss
    sample_weight: SampleWeight | None = None
    gradients: GradientLoss | None = None

    def __call__(self, batch: Batch, reading: Reading, target: Tensor | None) -> Tensor | None:
        """(M, 1) or (M, K); None for all ones."""
        if target is None and self.loss.needs_target:
            raise ValueError("This loss needs targets: give (x, y) batches or target=.")
        rows = reading.rows(reading.output.detach())
        given = reading.sample_weights(self.sample_weight, batch)
        own = reading.sample_weights(getattr(self.loss, "weight", None), batch)
        if own is not None:
            given = own if given is None else own * given
        curvature = self.loss.curvature(rows, target, batch.raw)
        if curvature is None:
            return given
        if given is not None:  # what the user masks need not have a curvature
            curvature = torch.where(given > 0, curvature, 0.0)
        _check_curvature(curvature)
        return curvature if given is None else curvature * given


@torch.enable_grad()  # for models that differentiate inside forward
def accumulate(
    statistics: Statistics | None,
    find: Callable[[Batch], AnyTap],
    batches: Iterable[Batch],
    weighing: Weighing,
    *,
    remove: bool = False,
) -> Statistics:
    """Add the batches' rows to the statistics (or take them out) and return them.

    Args:
        statistics: so far; None for none.
        find: the readout, for the first batch.
        batches: of data.
        weighing: of their rows.
        remove: take them out.

    Raises:
        ValueError: nothing to add, NaN or infinity, shapes that do not fit, negative curvature;
            with the number of the batch, counted from 0.
    """
    sums: list[Tensor] = []
    number, tap = -1, None
    for number, batch in enumerate(batches):
        tap = find(batch) if tap is None else tap
        try:
            statistics = _add(statistics, tap, batch, weighing, remove, sums)
        except ValueError as error:
            raise ValueError(f"Batch {number}: {error}") from error
        if len(sums) == _CHECK_EVERY:
            _check_finite(sums, number)
    _check_finite(sums, number)
    if statistics is None or number < 0:
        raise ValueError("There are no data: no batch came. Pass at least one row.")
    if not remove and not bool((statistics.gram.diagonal > 0).any()):
        raise ValueError(
            "The Gram is zero: all features are zero, or the loss has no curvature (an absolute "
            "error has none; use 'huber', 'log-cosh' or 'mse')."
        )
    statistics.sketch.settle()  # before threads share it; the diagonal has settled the Gram
    return statistics


def _add(
    statistics: Statistics | None,
    tap: AnyTap,
    batch: Batch,
    weighing: Weighing,
    remove: bool,
    sums: list[Tensor],
) -> Statistics:
    reading = tap(*batch.args, **batch.kwargs)
    if not reading.features.shape[0]:
        raise ValueError("the batch is empty; drop it.")
    target = reading.target_rows(batch.target)
    weights = _shared_weights(weighing(batch, reading, target))
    residuals = None
    if target is not None:
        residuals = target.to(torch.float64) - reading.rows(reading.output.detach())
        if weights is not None:
            residuals = torch.where(weights > 0, residuals, 0.0)
    if statistics is None:
        statistics = _empty(tap, batch, reading)
    features, weights, residuals = _flat(tap.layout, reading.features, weights, residuals)
    gram = statistics.gram
    _check_width(gram, features)
    if weights is not None and weights.shape[1] > 1 and gram.targets is None:
        gram = statistics.gram = gram.expand(weights.shape[1])
    sums.append(_sums(features, residuals))
    (gram.downdate if remove else gram.update)(features, weights, residuals)
    if weighing.gradients is not None:
        _add_derivatives(gram, tap, batch, weighing.gradients, remove, sums)
    hashes = reading.hashes(batch)
    (statistics.sketch.remove if remove else statistics.sketch.add)(hashes)
    return statistics


def _add_derivatives(
    gram: Gram, tap: AnyTap, batch: Batch, loss: GradientLoss, remove: bool, sums: list[Tensor]
) -> None:
    change = gram.downdate if remove else gram.update
    for rows in loss.rows(tap, batch):
        features, weights, residuals = _flat(tap.layout, *rows)
        sums[-1] += _sums(features, residuals)  # one entry per batch
        change(features, weights, residuals, moments=residuals is not None)


def _empty(tap: AnyTap, batch: Batch, reading: Reading) -> Statistics:
    targets = reading.inner[reading.axis]
    own = targets if tap.layout == "separate" else None
    gram = Gram(reading.features.shape[-1], targets=own, device=reading.features.device)
    return Statistics(gram, RowSketch(), targets, len(batch.args))


def _flat(
    layout: str, features: Tensor, weights: Tensor | None, residuals: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Joint features: each target's row is a row of the one Gram."""
    if layout != "joint":
        return features, weights, residuals
    rows, targets = features.shape[:2]
    if weights is not None:
        weights = weights.expand(rows, targets).reshape(-1, 1)
    residuals = None if residuals is None else residuals.reshape(-1, 1)
    return features.flatten(0, 1), weights, residuals


def _shared_weights(weights: Tensor | None) -> Tensor | None:
    """One column where all targets have the same weights."""
    if weights is None or weights.shape[1] == 1:
        return weights
    return weights[:, :1] if torch.equal(weights, weights[:, :1].expand_as(weights)) else weights


def _check_curvature(curvature: Tensor) -> None:
    if not bool(torch.isfinite(curvature).all()):
        raise ValueError("the loss's curvature is not finite; check the targets and the loss.")
    smallest = float(curvature.min())
    if smallest < 0:
        raise ValueError(
            f"the loss has negative curvature ({smallest:.3g}) at some predictions. A rigidity "
            "needs a loss that is convex in the prediction: use 'mse', 'huber' or 'log-cosh'."
        )


def _check_width(gram: Gram, features: Tensor) -> None:
    if features.shape[-1] != gram.width:
        raise ValueError(
            f"the readout has {features.shape[-1]} features here and {gram.width} in the data "
            "before. All batches must pass through the same readout."
        )


def _sums(features: Tensor, residuals: Tensor | None) -> Tensor:
    """Sums of features and residuals, which NaN or infinity would spoil.

    They are not read yet, so that an accelerator runs on.
    """
    short = torch.finfo(features.dtype).bits < 32
    total = features.detach().sum(dtype=torch.float32 if short else None).to(torch.float64)
    return torch.stack([total, total if residuals is None else residuals.sum()])


def _check_finite(sums: list[Tensor], last: int) -> None:
    """Read the sums of the latest batches, of which `last` is the number of the last."""
    first = last - len(sums) + 1
    read = [pair.tolist() for pair in sums]
    sums.clear()
    for number, pair in enumerate(read, start=first):
        for total, what in zip(pair, ("features", "targets or predictions"), strict=True):
            if not math.isfinite(total):
                raise ValueError(
                    f"Batch {number}: NaN or infinity in the {what}. Clean the data, or check "
                    "that the model has not diverged."
                )
