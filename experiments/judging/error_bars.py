"""Error bars of trained nets by the library, as an experiment needs them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

import rigidities as rg
from rigidities import metrics
from rigidities.calibration import CalibrationReport

Rows = tuple[Tensor, ...]
"""Inputs, of which the first dimension is the row, and the target (N, 1)."""


@dataclass(frozen=True)
class Calibration:
    """How ridge, scale, noise and distribution are chosen: arguments of
    `LastLayerRigidity.calibrate`."""

    criterion: str = "nll"
    noise: str | None = "none"
    distribution: str | None = "gaussian"
    guard: bool | Literal["q"] = True


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
"""From which `best` chooses: the first unless another is clearly better."""

REPEATED = r"\d+ of \d+ calibration rows stand in the training data"
"""A warning that sets with repeated rows give."""

FOLDS = 5
CLEARLY = 2.0
"""Standard errors by which a calibration must be better than the first candidate."""


@dataclass(frozen=True)
class Bars:
    """Predictions with error bars, in the target's unit.

    Attributes:
        mean: (N,).
        std: (N,).
        chosen: ridge, scale, noise variance and the calibration that chose them.
        prediction: with the distribution, (N, 1); None where the bars are a Gaussian's.
    """

    mean: Tensor
    std: Tensor
    chosen: dict[str, float | str | None]
    prediction: rg.Prediction | None = None


def fitted(net: nn.Module, train: Rows) -> rg.LastLayerRigidity:
    """One pass over the training rows."""
    return rg.LastLayerRigidity(net).fit(train, progress=False)


def bars(
    uq: rg.LastLayerRigidity, valid: Rows, x: Tensor | tuple[Tensor, ...], how: Calibration
) -> Bars:
    """Calibrate on the validation rows, predict others."""
    calibrated(uq, valid, how)
    p = uq.predict(x)
    chosen: dict[str, float | str | None] = {
        "criterion": how.criterion,
        "noise": how.noise,
        "ridge": uq.ridge,
        "scale": float(uq.scale),
        "noise_variance": float(uq.noise_model.level),
    }
    return Bars(p.mean.double().flatten(), p.std.double().flatten(), chosen, p)


def calibrated(uq: rg.LastLayerRigidity, valid: Rows, how: Calibration) -> CalibrationReport:
    """Choose ridge, scale, noise and distribution."""
    asked: dict[str, Any] = {
        "criterion": how.criterion,
        "noise": how.noise,
        "distribution": how.distribution,
    }
    if how.criterion == "auto":
        asked["guard"] = how.guard
    return uq.calibrate(valid, **asked, progress=False)


def best(
    uq: rg.LastLayerRigidity, valid: Rows, candidates: Sequence[Calibration] = CANDIDATES
) -> Calibration:
    """The library's best calibration, chosen on validation rows.

    Candidates are judged by the likelihood of validation rows that did not choose their numbers
    (one with more numbers to choose always fits the rows that choose them better). The first is
    taken unless another is better by more than two standard errors of the paired differences:
    the likelihood sees familiar rows only, and small gains there are no reason to give up error
    bars that behave elsewhere. Nor is it taken with a ridge that leaves nothing `determined`.
    """
    first, *others = candidates
    rows = {how: held_out_nll(uq, valid, how) for how in candidates}
    better = [how for how in others if float(standing(rows[first] - rows[how])) > CLEARLY]
    better = [how for how in better if determined(uq, valid, how)]
    return min(better, key=lambda how: float(rows[how].mean()), default=first)


def determined(uq: rg.LastLayerRigidity, valid: Rows, how: Calibration) -> bool:
    """Whether the chosen ridge leaves the data anything to determine.

    Under a ridge above all eigenvalues of the Gram the bars follow the length of the features alone
    and no longer know the training rows: they may fit familiar rows, and fail on far ones.
    """
    return calibrated(uq, valid, how).effective_rank >= 1


def standing(differences: Tensor) -> Tensor:
    """Their mean in units of its standard error; zero where all are equal."""
    error = differences.std() / len(differences) ** 0.5
    return torch.where(error > 0, differences.mean() / error, torch.zeros_like(error))


def constant(uq_mean: Tensor, target: Tensor) -> float:
    """The constant error bar: the root mean square of the validation residuals."""
    return metrics.rmse(uq_mean, target)


def held_out(uq: rg.LastLayerRigidity, valid: Rows, how: Calibration) -> tuple[Tensor, Tensor]:
    """Mean and error bar of every validation row, (N,), each calibrated without its fold."""
    fold = torch.arange(len(valid[-1])) % FOLDS
    mean, std = torch.empty(2, len(fold), dtype=torch.float64)
    for k in range(FOLDS):
        inside = fold == k
        calibrated(uq, tuple(part[~inside] for part in valid), how)
        p = uq.predict(tuple(part[inside] for part in valid[:-1]))
        mean[inside], std[inside] = p.mean.double().flatten(), p.std.double().flatten()
    return mean, std


def held_out_nll(uq: rg.LastLayerRigidity, valid: Rows, how: Calibration) -> Tensor:
    """The Gaussian negative log-likelihood of every validation row by `held_out`, (N,)."""
    mean, std = held_out(uq, valid, how)
    distribution = torch.distributions.Normal(mean, std)
    return -distribution.log_prob(valid[-1].double().flatten())
