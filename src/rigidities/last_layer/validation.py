"""Calibration of a fit: one pass over validation (or training) data, and the report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..calibration.evidence import evidence, most_evident_ridge
from ..calibration.objective import (
    Choice,
    Objective,
    Residuals,
    check_noise,
    constant_nll,
    criterion_for,
    mean_nll,
    search,
)
from ..calibration.report import CalibrationReport
from ..data.batches import Batch
from ..data.sketch import RowSketch
from ..notices import notify
from ..posterior.posterior import Posterior
from .accumulation import Statistics, Weighing
from .readout.reading import Reading
from .readout.tap import AnyTap
from .rows import batch_hashes, sample_weights, target_rows

LARGEST = 1 << 27
"""Numbers to keep at most (1 GiB in float64); beyond it every other row is dropped."""


def residuals(
    tap: AnyTap,
    batches: Iterable[Batch],
    posterior: Posterior,
    weighing: Weighing,
    *,
    sketch: RowSketch | None = None,
) -> Residuals:
    """Errors, squared components in the posterior's eigenbasis and weights of all rows.

    Args:
        tap: the readout.
        batches: with targets.
        posterior: whose eigenbasis to use.
        weighing: the loss's curvature and sample weights.
        sketch: of the training rows, to count those that stand in both; None not to.
    """
    parts: list[tuple[Tensor, ...]] = []
    rows, samples, stride, held, shared = 0, 0, 1, 0, 0.0
    for number, batch in enumerate(batches):
        reading = tap(*batch.args, **batch.kwargs)
        try:
            part = _part(batch, reading, posterior, weighing)
        except ValueError as problem:
            raise ValueError(f"Batch {number}: {problem}") from problem
        if sketch is not None:
            hashes = batch_hashes(batch, reading)
            samples += hashes.numel()
            shared += sketch.shared(hashes)
        start = -rows % stride
        parts.append(part if stride == 1 else tuple(t[start::stride].clone() for t in part))
        rows += len(part[0])
        held += parts[-1][1].numel()
        if held > LARGEST:
            parts = [tuple(torch.cat(column)[::2].clone() for column in zip(*parts, strict=True))]
            held, stride = parts[0][1].numel(), stride * 2
    if rows < 2:
        raise ValueError(
            f"Calibration needs at least two rows, got {rows}. A few dozen give a usable scale."
        )
    error, power, weight, importance = (torch.cat(column) for column in zip(*parts, strict=True))
    _check_errors(error)
    return Residuals(error, power, weight, importance, rows, samples, shared)


def _part(
    batch: Batch, reading: Reading, posterior: Posterior, weighing: Weighing
) -> tuple[Tensor, ...]:
    """(error, power, weight, importance) of one batch; masked targets have a NaN error."""
    target = target_rows(batch.target, reading)
    if target is None:
        raise ValueError("there is no target; calibration needs (x, y).")
    error = target.to(torch.float64) - reading.rows(reading.output.detach())
    weight = weighing(batch, reading, target)
    weight = error.new_ones(len(error), 1) if weight is None else weight.to(torch.float64)
    importance = sample_weights(weighing.sample_weight, batch, reading)
    importance = error.new_ones(len(error), 1) if importance is None else importance
    error = torch.where(importance > 0, error, torch.nan)
    power = posterior.projections(reading.features.detach()).square()
    wrong = (~torch.isfinite(error) & (weight > 0)).any() | ~torch.isfinite(power).all()
    wrong |= torch.isinf(error).any()
    if bool(wrong):
        raise ValueError("NaN or infinity in the features, targets or predictions. Clean the data.")
    return error, power, weight, importance


def _check_errors(error: Tensor) -> None:
    """Every target must have errors that are known and not all zero."""
    for k, column in enumerate(error.unbind(1)):
        which = "" if error.shape[1] == 1 else f" of target {k}"
        known = column[torch.isfinite(column)]
        if len(known) < 2:
            raise ValueError(
                f"Fewer than two values{which} are known in these data: the rest is masked. "
                "Calibrate on rows where every target is known at least twice."
            )
        if not bool(known.any()):
            raise ValueError(
                f"All residuals{which} are zero: the data are predicted exactly, so there is "
                "nothing to calibrate. Are these the model's own predictions, or a memorised "
                "training set?"
            )


def calibrated(
    tap: AnyTap,
    batches: Iterable[Batch],
    statistics: Statistics,
    posterior: Posterior,
    weighing: Weighing,
    *,
    criterion: str,
    ridge: float | None,
    noise: str,
) -> CalibrationReport:
    """Choose ridge, scale and noise; see `LastLayerRigidity.calibrate`."""
    profile = criterion_for(criterion)
    check_noise(noise)
    if ridge is not None:
        posterior.with_ridge(ridge)
    left_out = criterion == "loo"
    sketch = None if left_out else statistics.sketch
    data = residuals(tap, batches, posterior, weighing, sketch=sketch)
    objective = Objective(data, posterior.eigenvalues, profile, noise, left_out)
    if criterion == "evidence" and ridge is None:
        if tap.weights is None:
            raise ValueError("criterion='evidence' needs the readout's weights, not features=.")
        score = evidence(statistics.gram, posterior, tap.weights)
        ridge, value, edge = most_evident_ridge(score, float(posterior.eigenvalues.max()))
        choice = replace(search(objective, ridge)[0], value=value)
    else:
        choice, edge = search(objective, ridge)
    report = _report(choice, edge, criterion, objective, posterior, statistics)
    if report.duplicates:
        notify(report.warnings[0])
    return report


def _report(
    choice: Choice,
    edge: str | None,
    criterion: str,
    objective: Objective,
    posterior: Posterior,
    statistics: Statistics,
) -> CalibrationReport:
    final = posterior.with_ridge(choice.ridge)
    data = objective.as_left_out(choice.ridge) if objective.left_out else objective.residuals
    return CalibrationReport(
        ridge=choice.ridge,
        scale=choice.scale2.sqrt(),
        noise=choice.scale2 * choice.floor,
        criterion=criterion,
        value=choice.value,
        at_edge=edge,
        condition=final.condition,
        effective_rank=final.effective_rank,
        width=final.width,
        nll=mean_nll(data, objective.variance(choice)),
        nll_constant=constant_nll(data),
        rows=data.rows,
        samples=data.samples,
        duplicates=round(data.duplicates),
        zero_curvature=int(statistics.gram.zeros.sum()),
    )


def calibration_data(criterion: str, valid: Any, train: Any) -> Any:
    """Leave-one-out takes the training data, every other criterion validation data."""
    if criterion == "loo":
        if train is None or valid is not None:
            raise ValueError(
                "criterion='loo' takes the training data and no validation data: "
                "calibrate(train=(x, y), criterion='loo')."
            )
        return train
    if train is not None:
        raise ValueError(f"train= is for criterion='loo'; {criterion!r} takes validation data.")
    if valid is None:
        raise ValueError(f"criterion={criterion!r} needs validation data: calibrate((x, y)).")
    return valid
