"""Calibration of a fit, from one pass over data to the report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from .accumulation import Statistics, Weighing
from .batches import Batch
from .calibrated import CalibrationReport
from .calibration import (
    Choice,
    Objective,
    check_noise,
    constant_nll,
    criterion_for,
    evidence,
    mean_nll,
    most_evident_ridge,
    search,
)
from .notices import notify
from .posterior import Posterior
from .readout import AnyTap
from .validation import residuals


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
