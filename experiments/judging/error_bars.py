"""Error bars of trained networks by the library, as the studies need them.

A study fits (`fitted`), calibrates in one of several ways (`Calibration`, `calibrated`), and
predicts (`bars`). `best` chooses between calibrations on validation rows alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import rigidities as rg
from rigidities import metrics
from rigidities.calibration import CalibrationReport

Rows = tuple[Tensor, ...]
"""Inputs, whose first dimension is the row, and last the target (N, 1)."""


@dataclass(frozen=True)
class Calibration:
    """How ridge, scale, noise and distribution are chosen.

    Attributes:
        criterion: The argument of `LastLayerRigidity.calibrate`.
        noise: The argument of the same name.
        distribution: The argument of the same name.
        guard: The argument of the same name. Only the criterion "auto" reads it.
    """

    criterion: str = "nll"
    noise: str | None = "none"
    distribution: str | None = "gaussian"
    guard: bool = True


PAPER = Calibration()
"""The paper's for its benchmark: two numbers by the likelihood of the validation rows."""

AUTO = Calibration("auto", None, None)
"""The library's default."""

FLOOR_T = Calibration(noise="constant", distribution="student-t")
"""A constant noise floor and a Student-t distribution."""

BINS = Calibration("bins")
"""The paper's elsewhere: two numbers by bins of the validation rows."""

SAFE = Calibration("evidence", "constant")
"""A noise floor, and the ridge of the greatest evidence of the training rows. The likelihood of
single predictions hardly determines a ridge, and a large one ruins the error bars of far rows."""

CANDIDATES = (SAFE, PAPER, Calibration(noise="constant"))
"""Calibrations from which `best` chooses: the first unless another is clearly better."""

REPEATED = r"\d+ of \d+ calibration rows are also in the training data"
"""A warning that sets with repeated rows give."""

FOLDS = 5
"""Folds of the validation rows in `held_out`."""

CLEARLY = 2.0
"""Standard errors by which a calibration must be better than the first candidate."""


@dataclass(frozen=True)
class Bars:
    """Predictions with error bars, in the target's unit.

    Attributes:
        mean: Predicted values, (N,).
        std: Error bars, (N,).
        chosen: Ridge, scale, noise variance and the calibration that chose them.
        prediction: The predictions with their distribution, (N, 1). None where the bars are a
            Gaussian's.
    """

    mean: Tensor
    std: Tensor
    chosen: dict[str, float | str | None]
    prediction: rg.Prediction | None = None


def fitted(net: nn.Module, train: Rows) -> rg.LastLayerRigidity:
    """Error bars of a network after one pass over the training rows."""
    return rg.LastLayerRigidity(net).fit(train, progress=False)


def bars(
    uq: rg.LastLayerRigidity, valid: Rows, x: Tensor | tuple[Tensor, ...], how: Calibration
) -> Bars:
    """Calibrate on the validation rows and predict others.

    Args:
        uq: Error bars that were fitted. They are calibrated in place.
        valid: Validation rows.
        x: Inputs of the rows to predict.
        how: The calibration.
    """
    calibrated(uq, valid, how)
    prediction = uq.predict(x)
    return Bars(
        mean=prediction.mean.double().flatten(),
        std=prediction.std.double().flatten(),
        chosen={
            "criterion": how.criterion,
            "noise": how.noise,
            "ridge": uq.ridge,
            "scale": float(uq.scale),
            "noise_variance": float(uq.noise_model.level),
        },
        prediction=prediction,
    )


def calibrated(uq: rg.LastLayerRigidity, valid: Rows, how: Calibration) -> CalibrationReport:
    """Calibrate in place on the validation rows; returns the library's report."""
    # Criteria other than "auto" have no guard and accept the default alone.
    guard = how.guard if how.criterion == "auto" else True
    return uq.calibrate(
        valid,
        criterion=how.criterion,
        noise=how.noise,
        distribution=how.distribution,
        guard=guard,
        progress=False,
    )


def best(
    uq: rg.LastLayerRigidity, valid: Rows, candidates: Sequence[Calibration] = CANDIDATES
) -> Calibration:
    """The best of several calibrations, chosen on validation rows.

    Candidates are judged by the likelihood of validation rows that did not choose their numbers:
    one with more numbers to choose always fits the rows that choose them better. The first is taken
    unless another is better by more than two standard errors of the paired differences: the
    likelihood sees familiar rows only, and small gains there are no reason to give up error bars
    that behave elsewhere. Nor is another taken with a ridge that leaves nothing `determined`.

    Args:
        uq: Error bars that were fitted. Their calibration changes.
        valid: Validation rows.
        candidates: Calibrations to choose from, the preferred one first.
    """
    preferred, *others = candidates
    nll = {how: held_out_nll(uq, valid, how) for how in candidates}
    clearly_better = [how for how in others if float(standing(nll[preferred] - nll[how])) > CLEARLY]
    usable = [how for how in clearly_better if determined(uq, valid, how)]
    return min(usable, key=lambda how: float(nll[how].mean()), default=preferred)


def determined(uq: rg.LastLayerRigidity, valid: Rows, how: Calibration) -> bool:
    """Whether the chosen ridge leaves the data anything to determine.

    Under a ridge above all eigenvalues of the Gram matrix the bars follow the length of the
    features alone and no longer depend on the training rows. They may fit familiar rows, and fail
    on far ones.
    """
    return calibrated(uq, valid, how).effective_rank >= 1


def standing(differences: Tensor) -> Tensor:
    """The mean of differences in units of its standard error; zero where all are equal."""
    error = differences.std() / len(differences) ** 0.5
    return torch.where(error > 0, differences.mean() / error, torch.zeros_like(error))


def constant(mean: Tensor, target: Tensor) -> float:
    """The constant error bar: the root mean square of the validation residuals."""
    return metrics.rmse(mean, target)


def held_out(uq: rg.LastLayerRigidity, valid: Rows, how: Calibration) -> tuple[Tensor, Tensor]:
    """Mean and error bar of every validation row, (N,), each calibrated without its fold."""
    fold_of_row = torch.arange(len(valid[-1])) % FOLDS
    mean, std = torch.empty(2, len(fold_of_row), dtype=torch.float64)
    inputs = valid[:-1]
    for fold in range(FOLDS):
        inside = fold_of_row == fold
        calibrated(uq, tuple(column[~inside] for column in valid), how)
        prediction = uq.predict(tuple(column[inside] for column in inputs))
        mean[inside] = prediction.mean.double().flatten()
        std[inside] = prediction.std.double().flatten()
    return mean, std


def held_out_nll(uq: rg.LastLayerRigidity, valid: Rows, how: Calibration) -> Tensor:
    """The Gaussian negative log-likelihood of every validation row by `held_out`, (N,)."""
    mean, std = held_out(uq, valid, how)
    distribution = torch.distributions.Normal(mean, std)
    return -distribution.log_prob(valid[-1].double().flatten())
