"""Error bars of trained nets by the library, as an experiment needs them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import rigidities as rg
from rigidities import metrics

Rows = tuple[Tensor, Tensor]
"""x (N, d) and y (N, 1)."""


@dataclass(frozen=True)
class Calibration:
    """How ridge, scale and noise are chosen: the arguments of `LastLayerRigidity.calibrate`."""

    criterion: str = "nll"
    noise: str = "none"


PAPER = Calibration()
"""The paper's for its benchmark: two numbers by the likelihood of the validation rows."""

BINS = Calibration("bins")
"""The paper's elsewhere: two numbers by bins of the validation rows."""

CANDIDATES = (PAPER, Calibration(noise="constant"), Calibration("evidence", "bayes"))
"""From which `best` chooses."""

FOLDS = 5


@dataclass(frozen=True)
class Bars:
    """Predictions with error bars, in the target's unit.

    Attributes:
        mean: (N,).
        std: (N,).
        chosen: ridge, scale, noise variance and the calibration that chose them.
    """

    mean: Tensor
    std: Tensor
    chosen: dict[str, float | str]


def fitted(net: nn.Module, train: Rows) -> rg.LastLayerRigidity:
    """One pass over the training rows."""
    return rg.LastLayerRigidity(net).fit(train, progress=False)


def bars(uq: rg.LastLayerRigidity, valid: Rows, x: Tensor, how: Calibration) -> Bars:
    """Calibrate on the validation rows, predict others."""
    calibrated(uq, valid, how)
    p = uq.predict(x)
    chosen: dict[str, float | str] = {
        "criterion": how.criterion,
        "noise": how.noise,
        "ridge": uq.ridge,
        "scale": float(uq.scale),
        "noise_variance": float(p.noise.flatten()[0]),
    }
    return Bars(p.mean.double().flatten(), p.std.double().flatten(), chosen)


def calibrated(uq: rg.LastLayerRigidity, valid: Rows, how: Calibration) -> rg.CalibrationReport:
    """Choose ridge, scale and noise."""
    return uq.calibrate(valid, criterion=how.criterion, noise=how.noise, progress=False)


def best(
    uq: rg.LastLayerRigidity, valid: Rows, candidates: Sequence[Calibration] = CANDIDATES
) -> Calibration:
    """The calibration with the best likelihood on validation rows that did not choose its numbers.

    A candidate with more numbers to choose always fits the rows that choose them better; five-fold
    cross-validation within the validation rows is fair to all.
    """
    scores = [sum(_held_out(uq, valid, how)) for how in candidates]
    return candidates[min(range(len(candidates)), key=scores.__getitem__)]


def constant(uq_mean: Tensor, target: Tensor) -> float:
    """The constant error bar: the root mean square of the validation residuals."""
    return metrics.rmse(uq_mean, target)


def _held_out(uq: rg.LastLayerRigidity, valid: Rows, how: Calibration) -> Iterator[float]:
    """The summed NLL of each fold, by the numbers that the others choose."""
    fold = torch.arange(len(valid[0])) % FOLDS
    for k in range(FOLDS):
        inside, outside = fold == k, fold != k
        calibrated(uq, (valid[0][outside], valid[1][outside]), how)
        p = uq.predict(valid[0][inside])
        yield metrics.nll(p.mean, p.std, valid[1][inside]) * int(inside.sum())
