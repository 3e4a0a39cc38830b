"""What ridge a calibration chooses, after trainings with and without regularisation.

`networks` trains one stack and takes two weights of every network, those of the best epoch and of
the last. Each is calibrated in all ways of `CALIBRATIONS`; `_judged` notes the ridges and the
scores of the test rows, and `without_bias` what the bias of the last layer contributes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

import rigidities as rg
from experiments.data.california import WIDTH, Pair, drawn
from experiments.judging import error_bars, scores, stacks
from experiments.judging.scores import Rows
from experiments.judging.stacks import Judged
from experiments.training.protocol import Protocol
from rigidities import metrics

CALIBRATIONS = {
    "nll": error_bars.PAPER,
    "nll, floor": error_bars.FLOOR,
    "bins": error_bars.BINS,
    "bins, floor": rg.Paper(criterion="bins", noise="constant"),
}
"""The likelihood and the paper's bins, each without noise and with a constant noise floor."""

JUDGED = ("nll", "binned_log_ratio", "slope", "decades", "spearman", "coverage")
"""Scores of the bars on the test rows."""

STOPPING = ("best", "last")
"""Weights of the smallest validation loss, or of the last epoch."""


def name_of(decay: float, copies: int, stopping: str) -> str:
    """The name of a condition.

    >>> name_of(0.01, 2, "best")
    'decay 0.01, 2 copies, best'
    """
    noun = "copy" if copies == 1 else "copies"
    return f"decay {decay:g}, {copies} {noun}, {stopping}"


def networks(
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
        copies: copies of each training row, in the training and in the Gram. The epochs are divided
            by it, so that the number of steps is the same.
        count: the number of networks, each with a split of its own.
        seed: the seed of splits, first weights and batches.
        epochs: the epochs of the training.
        hidden: the width of both hidden layers.
        decay: the weight decay.
        bin_size: the rows of a bin.
        most: the largest number of rows of each part, or None for all.

    Returns:
        "best" and "last", one entry a network; the best "epoch" of each; the numbers of "rows".
    """
    samples = drawn(count, seed, WIDTH, most=most).copied(copies)
    protocol = Protocol(
        (hidden, hidden),
        "silu",
        epochs=max(1, epochs // copies),
        decay=decay,
        patience=max(1, Protocol.patience // copies),
    )
    label = f"nets of decay {decay:g}, {copies} copies"
    training = stacks.trained(samples, protocol, seed, label)
    return {
        "best": [_judged(network, bin_size) for network in stacks.judged(training.best, samples)],
        "last": [_judged(network, bin_size) for network in stacks.judged(training.last, samples)],
        "epoch": training.epoch,
        "rows": samples.counts,
    }


def _judged(network: Judged, bin_size: int) -> dict[str, Any]:
    """One network: by calibration the choices and their scores; and the effect of the bias."""
    calibrations = {
        name: _calibrated(network, method, bin_size) for name, method in CALIBRATIONS.items()
    }
    squares = [float(weights.detach().square().sum()) for weights in network.net.parameters()]
    return {
        **calibrations,
        "bias": without_bias(network, bin_size),
        "weights": math.sqrt(sum(squares)),
        "valid_rmse": _rmse(network.net, network.valid),
        "test_rmse": _rmse(network.net, network.test),
    }


def _calibrated(network: Judged, method: rg.Paper, bin_size: int) -> dict[str, float]:
    """The ridge that a calibration chooses, and the scores of its bars on the test rows."""
    report = error_bars.calibrated(network.uq, network.valid, method)
    largest_eigenvalue = float(network.uq.posterior.eigenvalues.max())
    return {
        "log_ridge": math.log10(report.ridge),
        "log_relative_ridge": math.log10(report.ridge / largest_eigenvalue),
        "log_largest": math.log10(largest_eigenvalue),
        "at_lower_edge": float(report.at_edge == "lower"),
        "at_upper_edge": float(report.at_edge == "upper"),
        "effective_rank": float(report.effective_rank),
        "noise": math.sqrt(float(report.noise_level)),
        **_scores(_test_rows(network.uq, network.test), bin_size),
    }


def without_bias(network: Judged, bin_size: int) -> dict[str, float]:
    """Compare bars from features without the column of ones with those that have it.

    Both are calibrated by the likelihood.

    Returns:
        Scores without the column minus scores with it; the mean of |log10| of the bars' ratio; the
        rank correlation of the two; and the change of the log ridge.
    """
    with_ones = network.uq
    without_ones = rg.LastLayerRigidity(network.net, features=_hidden_features, progress=False)
    without_ones.fit(network.train)
    error_bars.calibrated(with_ones, network.valid, error_bars.PAPER)
    error_bars.calibrated(without_ones, network.valid, error_bars.PAPER)
    rows_with = _test_rows(with_ones, network.test)
    rows_without = _test_rows(without_ones, network.test)
    scores_with = _scores(rows_with, bin_size)
    scores_without = _scores(rows_without, bin_size)
    log_ratio = (rows_without.std / rows_with.std).log10()
    zero = torch.zeros_like(rows_with.std)
    return {
        **{name: scores_without[name] - scores_with[name] for name in scores_without},
        "log_ratio_of_bars": float(log_ratio.abs().mean()),
        # The library correlates |target - mean| with std; here these are the two bars.
        "rank_correlation_of_bars": metrics.spearman(zero, rows_without.std, rows_with.std),
        "log_ridge": math.log10(without_ones.ridge) - math.log10(with_ones.ridge),
    }


def _hidden_features(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """The input of the last layer, without a column of ones for its bias."""
    features: torch.Tensor = model[:-1](x)
    return features


def _test_rows(uq: rg.LastLayerRigidity, test: Pair) -> Rows:
    """Means, bars and targets of the test rows, (N,) each in float64."""
    x, y = test
    prediction = uq.predict(x)
    return Rows(
        mean=prediction.mean.double().flatten(),
        std=prediction.std.double().flatten(),
        target=y.double().flatten(),
    )


def _scores(rows: Rows, bin_size: int) -> dict[str, float]:
    """The scores `JUDGED`."""
    all_scores = scores.scores(rows.mean, rows.std, rows.target, bin_size)
    return {name: all_scores[name] for name in JUDGED}


def _rmse(network: nn.Module, rows: Pair) -> float:
    """The root mean square error of a network on some rows."""
    x, y = rows
    with torch.no_grad():
        return metrics.rmse(network(x), y)
