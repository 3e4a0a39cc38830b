"""What ridge a calibration chooses, after trainings with and without regularisation."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

import rigidities as rg
from experiments.data.california import WIDTH, Pair, drawn
from experiments.judging import error_bars, scores, stacks
from experiments.judging.error_bars import Calibration
from experiments.judging.scores import Rows
from experiments.judging.stacks import Judged
from experiments.training.protocol import Protocol
from rigidities import metrics

CALIBRATIONS = {
    "nll": error_bars.PAPER,
    "nll, floor": Calibration(noise="constant"),
    "bins": error_bars.BINS,
    "bins, floor": Calibration("bins", "constant"),
}
JUDGED = ("nll", "binned_log_ratio", "slope", "decades", "spearman", "coverage")
"""Scores of the bars on the test rows."""

STOPPING = ("best", "last")
"""Weights of the smallest validation loss, or of the last epoch."""


def name_of(decay: float, copies: int, stopping: str) -> str:
    """Of a condition.

    >>> name_of(0.01, 2, "best")
    'decay 0.01, 2 copies, best'
    """
    return f"decay {decay:g}, {copies} {'copy' if copies == 1 else 'copies'}, {stopping}"


def nets(
    *,
    copies: int,
    count: int,
    seed: int,
    epochs: int,
    hidden: int,
    decay: float,
    bin_size: int,
    most: int | None,
) -> dict[str, Any]:
    """Train a stack and calibrate its best and its last weights.

    Args:
        copies: of each training row, in the training and in the Gram. The epochs are divided by
            it, so that the number of steps is the same.
        count: of nets, each with a split of its own.
        seed: of splits, first weights and batches.
        epochs: of the training.
        hidden: width of both hidden layers.
        decay: of the weights.
        bin_size: rows of a bin.
        most: rows of each part, or None for all.

    Returns:
        By stopping: one entry a net.
    """
    samples = drawn(count, seed, WIDTH, most=most).copied(copies)
    protocol = Protocol(
        (hidden, hidden),
        "silu",
        epochs=max(1, epochs // copies),
        decay=decay,
        patience=max(1, Protocol.patience // copies),
    )
    what = f"nets of decay {decay:g}, {copies} copies"
    found = stacks.trained(samples, protocol, seed, what)
    each: dict[str, Any] = {
        stopping: [
            _judged(one, bin_size) for one in stacks.judged(getattr(found, stopping), samples)
        ]
        for stopping in STOPPING
    }
    return {**each, "epoch": found.epoch, "rows": samples.counts}


def _judged(one: Judged, bin_size: int) -> dict[str, Any]:
    """One net: by calibration what was chosen and how good it is; and the effect of the bias."""
    found: dict[str, Any] = {
        name: _calibrated(one, how, bin_size) for name, how in CALIBRATIONS.items()
    }
    return {
        **found,
        "bias": without_bias(one, bin_size),
        "weights": math.sqrt(sum(float(p.detach().square().sum()) for p in one.net.parameters())),
        "valid_rmse": _rmse(one.net, one.valid),
        "test_rmse": _rmse(one.net, one.test),
    }


def _calibrated(one: Judged, how: Calibration, bin_size: int) -> dict[str, float]:
    report = error_bars.calibrated(one.uq, one.valid, how)
    largest = float(one.uq.posterior.eigenvalues.max())
    return {
        "log_ridge": math.log10(report.ridge),
        "log_relative_ridge": math.log10(report.ridge / largest),
        "log_largest": math.log10(largest),
        "at_lower_edge": float(report.at_edge == "lower"),
        "at_upper_edge": float(report.at_edge == "upper"),
        "effective_rank": float(report.effective_rank),
        "noise": math.sqrt(float(report.noise_level)),
        **_scores(_rows(one.uq, one.test), bin_size),
    }


def without_bias(one: Judged, bin_size: int) -> dict[str, float]:
    """Bars from features without the column of ones, beside those with it; both by likelihood.

    Returns:
        Scores without minus scores with it; the mean of |log10| of the bars' ratio; and the rank
        correlation of the two.
    """
    bare = rg.LastLayerRigidity(one.net, features=lambda model, x: model[:-1](x))
    bare.fit(one.train, progress=False)
    for uq in (one.uq, bare):
        error_bars.calibrated(uq, one.valid, error_bars.PAPER)
    rows = [_rows(uq, one.test) for uq in (one.uq, bare)]
    with_it, without = (_scores(each, bin_size) for each in rows)
    wide, narrow = (each.std for each in rows)
    zero = torch.zeros_like(wide)
    return {
        **{name: without[name] - with_it[name] for name in without},
        "log_ratio_of_bars": float((narrow / wide).log10().abs().mean()),
        "rank_correlation_of_bars": metrics.spearman(zero, narrow, wide),
        "log_ridge": math.log10(bare.ridge) - math.log10(one.uq.ridge),
    }


def _rows(uq: rg.LastLayerRigidity, test: Pair) -> Rows:
    p = uq.predict(test[0])
    return Rows(*(part.double().flatten() for part in (p.mean, p.std, test[1])))


def _scores(rows: Rows, bin_size: int) -> dict[str, float]:
    """Those of `experiments.judging.scores` that bars without a constant one beside them have."""
    found = scores.scores(*rows, bin_size)
    return {name: found[name] for name in JUDGED}


def _rmse(net: nn.Module, rows: Pair) -> float:
    with torch.no_grad():
        return metrics.rmse(net(rows[0]), rows[1])
