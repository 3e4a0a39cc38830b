"""Error bars of trained networks by the library, as the studies need them.

A study fits (`fitted`), calibrates by a method of the library (`calibrated`), and predicts
(`bars`). `best` chooses between methods on validation rows alone.
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


Method = rg.Full | rg.Paper
"""How ridge, scale, noise and distribution are chosen."""

PAPER = rg.Paper()
"""The paper's for its benchmark: two numbers by the likelihood of the validation rows."""

FULL = rg.Full()
"""The library's default."""

FLOOR = rg.Paper(noise="constant")
"""A constant noise floor."""

FLOOR_T = rg.Paper(noise="constant", distribution="student-t")
"""A constant noise floor and a Student-t distribution."""

BINS = rg.Paper(criterion="bins")
"""The paper's elsewhere: two numbers by bins of the validation rows."""

SAFE = rg.Paper(criterion="evidence", noise="constant")
"""A noise floor, and the ridge of the greatest evidence of the training rows. The likelihood of
single predictions hardly determines a ridge, and a large one ruins the error bars of far rows."""

BAYES = rg.Paper(criterion="evidence", noise="bayes")
"""Bayesian linear regression on the last layer's features."""

CANDIDATES = (SAFE, PAPER, FLOOR)
"""Methods from which `best` chooses: the first unless another is clearly better."""

REPEATED = r"\d+ of \d+ calibration rows are also in the training data"
"""A warning that sets with repeated rows give."""

FOLDS = 5
"""Folds of the validation rows in `held_out`."""

CLEARLY = 2.0
"""Standard errors by which a method must be better than the first candidate."""


@dataclass(frozen=True)
class Bars:
    """Predictions with error bars, in the target's unit.

    Attributes:
        mean: Predicted values, (N,).
        std: Error bars, (N,).
        chosen: Ridge, scale, noise variance and the method that chose them.
        prediction: The predictions with their distribution, (N, 1). None where the bars are a
            Gaussian's.
    """

    mean: Tensor
    std: Tensor
    chosen: dict[str, float | str]
    prediction: rg.Prediction | None = None


def fitted(net: nn.Module, train: Rows) -> rg.LastLayerRigidity:
    """Error bars of a network after one pass over the training rows."""
    return rg.LastLayerRigidity(net, progress=False).fit(train)


def bars(
    uq: rg.LastLayerRigidity, valid: Rows, x: Tensor | tuple[Tensor, ...], method: Method
) -> Bars:
    """Calibrate on the validation rows and predict others.

    Args:
        uq: Error bars that were fitted. They are calibrated in place.
        valid: Validation rows.
        x: Inputs of the rows to predict.
        method: The method of the calibration.
    """
    calibrated(uq, valid, method)
    prediction = uq.predict(x)
    return Bars(
        mean=prediction.mean.double().flatten(),
        std=prediction.std.double().flatten(),
        chosen={
            "criterion": method.criterion if isinstance(method, rg.Paper) else "auto",
            "noise": method.noise,
            "ridge": uq.ridge,
            "scale": float(uq.scale),
            "noise_variance": float(uq.noise_model.level),
        },
        prediction=prediction,
    )


def calibrated(uq: rg.LastLayerRigidity, valid: Rows, method: Method) -> CalibrationReport:
    """Calibrate in place on the validation rows; returns the library's report."""
    report = uq.calibrate(valid, method=method).calibration_report
    assert report is not None
    return report


def best(
    uq: rg.LastLayerRigidity, valid: Rows, candidates: Sequence[rg.Paper] = CANDIDATES
) -> rg.Paper:
    """The best of several methods, chosen on validation rows.

    Candidates are judged by the likelihood of validation rows that did not choose their numbers:
    one with more numbers to choose always fits the rows that choose them better. The first is taken
    unless another is better by more than two standard errors of the paired differences: the
    likelihood sees familiar rows only, and small gains there are no reason to give up error bars
    that behave elsewhere. Nor is another taken with a ridge that leaves nothing `determined`.

    Args:
        uq: Error bars that were fitted. Their calibration changes.
        valid: Validation rows.
        candidates: Methods to choose from, the preferred one first.
    """
    preferred, *others = candidates
    nll = {method: held_out_nll(uq, valid, method) for method in candidates}
    clearly_better = [
        method for method in others if float(standing(nll[preferred] - nll[method])) > CLEARLY
    ]
    usable = [method for method in clearly_better if determined(uq, valid, method)]
    return min(usable, key=lambda method: float(nll[method].mean()), default=preferred)


def determined(uq: rg.LastLayerRigidity, valid: Rows, method: Method) -> bool:
    """Whether the chosen ridge leaves the data anything to determine.

    Under a ridge above all eigenvalues of the Gram matrix the bars follow the length of the
    features alone and no longer depend on the training rows. They may fit familiar rows, and fail
    on far ones.
    """
    return calibrated(uq, valid, method).effective_rank >= 1


def standing(differences: Tensor) -> Tensor:
    """The mean of differences in units of its standard error; zero where all are equal."""
    error = differences.std() / len(differences) ** 0.5
    return torch.where(error > 0, differences.mean() / error, torch.zeros_like(error))


def constant(mean: Tensor, target: Tensor) -> float:
    """The constant error bar: the root mean square of the validation residuals."""
    return metrics.rmse(mean, target)


def held_out(uq: rg.LastLayerRigidity, valid: Rows, method: Method) -> tuple[Tensor, Tensor]:
    """Mean and error bar of every validation row, (N,), each calibrated without its fold."""
    fold_of_row = torch.arange(len(valid[-1])) % FOLDS
    mean, std = torch.empty(2, len(fold_of_row), dtype=torch.float64)
    inputs = valid[:-1]
    for fold in range(FOLDS):
        inside = fold_of_row == fold
        calibrated(uq, tuple(column[~inside] for column in valid), method)
        prediction = uq.predict(tuple(column[inside] for column in inputs))
        mean[inside] = prediction.mean.double().flatten()
        std[inside] = prediction.std.double().flatten()
    return mean, std


def held_out_nll(uq: rg.LastLayerRigidity, valid: Rows, method: Method) -> Tensor:
    """The Gaussian negative log-likelihood of every validation row by `held_out`, (N,)."""
    mean, std = held_out(uq, valid, method)
    distribution = torch.distributions.Normal(mean, std)
    return -distribution.log_prob(valid[-1].double().flatten())
