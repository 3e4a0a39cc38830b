"""Calibration of a fit: one pass over validation (or training) data, and the report."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..calibration.choosing import chosen
from ..calibration.criteria import criterion_for
from ..calibration.evidence import evidence
from ..calibration.gathering import Gathering, Residuals
from ..calibration.report import CalibrationReport
from ..data.batches import Batch
from ..data.sketch import RowSketch
from ..posterior.posterior import Posterior
from ..prediction.law import Law
from ..prediction.noise import Noise, NoNoise
from .accumulation import Statistics, Weighing
from .readout.reading import Reading
from .readout.tap import AnyTap


def calibrated(
    tap: AnyTap,
    batches: Iterable[Batch],
    statistics: Statistics,
    posterior: Posterior,
    weighing: Weighing,
    *,
    criterion: str,
    ridge: float | None,
    noise: type[Noise],
    law: Law,
) -> CalibrationReport:
    """Choose ridge, scale and noise; see `LastLayerRigidity.calibrate`."""
    criterion_for(criterion, law)
    score = None
    if ridge is not None:
        posterior.with_ridge(ridge)
    elif criterion == "evidence":
        if tap.weights is None:
            raise ValueError("criterion='evidence' needs the readout's weights, not features=.")
        score = evidence(statistics.gram, posterior, tap.weights)
    sketch = None if criterion == "loo" else statistics.sketch
    data = residuals(tap, batches, posterior, weighing, noise, sketch=sketch)
    return chosen(
        data,
        posterior.eigenvalues,
        posterior.with_ridge,
        criterion=criterion,
        noise=noise,
        law=law,
        ridge=ridge,
        evidence=score,
        zero_curvature=int(statistics.gram.zeros.sum()),
    )


def residuals(
    tap: AnyTap,
    batches: Iterable[Batch],
    posterior: Posterior,
    weighing: Weighing,
    noise: type[Noise] = NoNoise,
    *,
    sketch: RowSketch | None = None,
) -> Residuals:
    """Errors, squared components in the posterior's eigenbasis and weights of all rows.

    Args:
        tap: the readout.
        batches: with targets.
        posterior: whose eigenbasis to use.
        weighing: the loss's curvature and sample weights.
        noise: whose shape to note.
        sketch: of the training rows, to count those that stand in both; None not to.
    """
    gathered = Gathering()
    for number, batch in enumerate(batches):
        reading = tap(*batch.args, **batch.kwargs)
        try:
            _add(gathered, batch, reading, posterior, weighing, noise)
        except ValueError as problem:
            raise ValueError(f"Batch {number}: {problem}") from problem
        if sketch is not None:
            hashes = reading.hashes(batch)
            gathered.count(hashes.numel(), sketch.shared(hashes))
    return gathered.residuals()


def _add(
    gathered: Gathering,
    batch: Batch,
    reading: Reading,
    posterior: Posterior,
    weighing: Weighing,
    noise: type[Noise],
) -> None:
    target = reading.target_rows(batch.target)
    if target is None:
        raise ValueError("there is no target; calibration needs (x, y).")
    features, mean = reading.features.detach(), reading.rows(reading.output.detach())
    error = target.to(torch.float64) - mean
    weight = weighing(batch, reading, target)
    importance = reading.sample_weights(weighing.sample_weight, batch)
    power = posterior.projections(features).square()
    gathered.add(error, power, weight, noise.shape(mean, features), importance)


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
