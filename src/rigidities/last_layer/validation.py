"""Calibration of a fit: one pass over validation (or training) data, and the report."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..calibration.calibration import Wanted
from ..calibration.choosing import chosen
from ..calibration.evidence import evidence
from ..calibration.gathering import Gathering
from ..calibration.report import CalibrationReport
from ..data.batches import TARGET_KEYS, Batch
from ..posterior.posterior import Posterior
from ..prediction.noise import Noise
from .accumulation import Statistics, Weighing
from .readout.reading import Reading, read
from .readout.tap import AnyTap


def calibrated(
    tap: AnyTap,
    batches: Iterable[Batch],
    statistics: Statistics,
    posterior: Posterior,
    weighing: Weighing,
    wanted: Wanted,
) -> CalibrationReport:
    """Choose ridge, scale and noise; see `LastLayerRigidity.calibrate`."""
    score = None
    if wanted.ridge is not None:
        posterior.with_ridge(wanted.ridge)
    elif wanted.criterion == "evidence":
        if tap.weights is None:
            raise ValueError("criterion='evidence' needs the readout's weights, not features=.")
        score = evidence(statistics.gram, posterior, tap.weights, tap.biases)
    gathered = Gathering()
    for number, batch in enumerate(batches):
        try:
            reading = read(tap, batch)
            _add(gathered, batch, reading, posterior, weighing, wanted.noise)
        except ValueError as problem:
            raise ValueError(f"Batch {number}: {problem}") from problem
        if not wanted.left_out:  # rows that stand in the training data too
            hashes, _ = reading.hashes(batch, statistics.sketch, exact=statistics.exact)
            gathered.count(hashes.numel(), statistics.sketch.shared(hashes))
    return chosen(
        gathered.residuals(),
        posterior.eigenvalues,
        posterior.with_ridge,
        wanted,
        evidence=score,
        zero_curvature=int(statistics.gram.zeros.sum()),
    )


def _add(
    gathered: Gathering,
    batch: Batch,
    reading: Reading,
    posterior: Posterior,
    weighing: Weighing,
    noise: type[Noise],
) -> None:
    """Errors, squared components in the posterior's eigenbasis and weights of a batch."""
    target = reading.target_rows(batch.target)
    if target is None:
        raise ValueError(
            "there is no target; calibration needs (x, y), a mapping with one of "
            f"{', '.join(map(repr, TARGET_KEYS))}, or target=lambda b: ...."
        )
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
