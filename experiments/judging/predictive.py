r"""Scores of predictive distributions, row by row.

`row_scores` judges any object with a density, a cdf, a CRPS and intervals (`Predictive`), `summary`
takes means over the rows, and `differences` compares two methods over the splits of a set.

Where targets lie on a grid, a density can grow without bound at the points of the grid. Such
targets are judged by the mass of their cell, $-\log (F(y + \delta/2) - F(y - \delta/2))$ with the
step $\delta$ of the grid. The score of an interval of level $\ell$ is its width plus
$2/(1 - \ell)$ times the distance of a target that lies outside.

References:
    Gneiting and Raftery, "Strictly proper scoring rules, prediction, and estimation", JASA 2007.
    Nadeau and Bengio, "Inference for the generalization error", Machine Learning 2003.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

LEVEL = 0.9
"""Level of the intervals that are judged."""

FIFTHS = 5
"""Number of equal groups of rows whose coverage is given."""

SMALL = 1e-3
"""Mass of a cell below which the difference of two values of the cdf has too few digits."""

NODES = 65
"""Nodes of the trapezoidal rule that integrates the density over a cell of small mass."""

Scores = dict[str, Any]
"""Numbers by name; the coverages of the fifths are lists."""


class Predictive(Protocol):
    """What can be judged: `rigidities.Prediction` and the like."""

    @property
    def mean(self) -> Tensor: ...

    @property
    def std(self) -> Tensor: ...

    def log_prob(self, target: Tensor) -> Tensor: ...

    def cdf(self, target: Tensor) -> Tensor: ...

    def crps(self, target: Tensor) -> Tensor: ...

    def interval(self, level: float = LEVEL) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True)
class Normal:
    """A Gaussian for every row.

    Attributes:
        mean: Means, of any shape.
        std: Standard deviations, of the same shape.

    >>> standard = Normal(torch.zeros(1), torch.ones(1))
    >>> low, high = standard.interval(0.9)
    >>> round(standard.crps(torch.zeros(1)).item(), 4), round(low.item(), 3), round(high.item(), 3)
    (0.2337, -1.645, 1.645)
    """

    mean: Tensor
    std: Tensor

    @property
    def distribution(self) -> torch.distributions.Normal:
        """The same as a distribution of torch."""
        return torch.distributions.Normal(self.mean, self.std)

    def log_prob(self, target: Tensor) -> Tensor:
        """The logarithm of the density at the target."""
        return self.distribution.log_prob(target)

    def cdf(self, target: Tensor) -> Tensor:
        """The probability of values below the target."""
        return self.distribution.cdf(target)

    def crps(self, target: Tensor) -> Tensor:
        r"""The CRPS, $\sigma (z (2 \Phi(z) - 1) + 2 \phi(z) - 1 / \sqrt\pi)$."""
        z = (target - self.mean) / self.std
        density = (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)
        unit = z * (2 * torch.special.ndtr(z) - 1) + 2 * density - 1 / math.sqrt(math.pi)
        return self.std * unit

    def interval(self, level: float = LEVEL) -> tuple[Tensor, Tensor]:
        """The central interval of a level."""
        half = statistics.NormalDist().inv_cdf((1 + level) / 2) * self.std
        return self.mean - half, self.mean + half


@dataclass(frozen=True)
class RowScores:
    """Predictions and their scores, (N,) each; None where a method does not give a score.

    Attributes:
        mean: Predicted values.
        bar: Predictive standard deviations, or what else orders rows by their uncertainty.
        target: Observed values.
        low: Lower ends of the intervals.
        high: Upper ends of the intervals.
        nll: Negative logarithms of the density at the target.
        crps: Continuous ranked probability scores.
        cell: Negative logarithms of the mass of the target's cell.
    """

    mean: Tensor
    bar: Tensor
    target: Tensor
    low: Tensor
    high: Tensor
    nll: Tensor | None = None
    crps: Tensor | None = None
    cell: Tensor | None = None

    @property
    def covered(self) -> Tensor:
        """Whether the intervals cover the targets, (N,)."""
        return (self.low <= self.target) & (self.target <= self.high)

    def in_unit(self, unit: float) -> RowScores:
        """The same scores where a target of one means `unit`.

        Lengths are multiplied by the unit, and a density is divided by it. The mass of a cell has
        no unit.
        """
        return replace(
            self,
            mean=self.mean * unit,
            bar=self.bar * unit,
            target=self.target * unit,
            low=self.low * unit,
            high=self.high * unit,
            nll=None if self.nll is None else self.nll + math.log(unit),
            crps=None if self.crps is None else self.crps * unit,
        )

    def picked(self, rows: Tensor) -> RowScores:
        """Some of the rows, given by their indices or a mask."""
        columns = {
            name: None if column is None else column[rows] for name, column in vars(self).items()
        }
        return RowScores(**columns)


def row_scores(p: Predictive, target: Tensor, step: float | None = None) -> RowScores:
    """Judge predictions.

    Args:
        p: Predictions of N rows.
        target: Observed values, shaped like the mean of the predictions.
        step: The distance of neighbouring targets that lie on a grid. Without it cells are not
            judged.

    Returns:
        The scores in float64.
    """

    def column(values: Tensor) -> Tensor:
        return values.double().flatten()

    low, high = p.interval(LEVEL)
    return RowScores(
        mean=column(p.mean),
        bar=column(p.std),
        target=column(target),
        low=column(low),
        high=column(high),
        nll=column(-p.log_prob(target)),
        crps=column(p.crps(target)),
        cell=None if step is None else -log_mass(p, target, step),
    )


def log_mass(p: Predictive, target: Tensor, step: float) -> Tensor:
    """The logarithm of the probability of the cell around each target, (N,).

    Args:
        p: Predictions of N rows.
        target: Centres of the cells.
        step: Width of the cells.
    """
    below = target - step / 2
    above = target + step / 2
    mass = (p.cdf(above).double() - p.cdf(below).double()).flatten()
    log_difference = mass.clamp_min(SMALL).log()
    accurate = mass >= SMALL
    if bool(accurate.all()):
        return log_difference

    # Where the mass is small, the trapezoidal rule over the density takes the difference's place.
    nodes = torch.linspace(-0.5, 0.5, NODES).tolist()
    log_densities = torch.stack(
        [p.log_prob(target + node * step).double().flatten() for node in nodes]
    )  # (NODES, N)
    weights = torch.full((NODES, 1), step / (NODES - 1), dtype=torch.float64)
    weights[0] = weights[-1] = weights[0] / 2
    log_integral = (log_densities + weights.log()).logsumexp(0)
    return torch.where(accurate, log_difference, log_integral)


def summary(rows: RowScores) -> Scores:
    """Means over the rows, the coverage of the intervals, and that in fifths of the rows."""
    covered = rows.covered.double()
    scores: Scores = {"rmse": float((rows.mean - rows.target).square().mean().sqrt())}
    for name in ("nll", "cell", "crps"):
        values = getattr(rows, name)
        if values is not None:
            scores[name] = float(values.mean())
    scores["coverage_90"] = float(covered.mean())
    scores["interval_score"] = float(interval_scores(rows).mean())
    scores["fifths_of_prediction"] = fifths(rows.mean, covered)
    scores["fifths_of_bar"] = fifths(rows.bar, covered)
    return scores


def interval_scores(rows: RowScores) -> Tensor:
    """The interval score of every row, (N,)."""
    outside = (rows.low - rows.target).clamp_min(0) + (rows.target - rows.high).clamp_min(0)
    return rows.high - rows.low + 2 / (1 - LEVEL) * outside


def fifths(key: Tensor, values: Tensor) -> list[float]:
    """Means of the values in fifths of the rows, which are ordered by a key.

    >>> key = torch.tensor([5.0, 1, 2, 3, 4])
    >>> fifths(key, torch.tensor([0.5, 1, 0, 1, 0]))
    [1.0, 0.0, 1.0, 0.0, 0.5]
    """
    ordered = values[key.argsort(stable=True)]
    return [float(group.mean()) for group in ordered.tensor_split(FIFTHS)]


def with_and_without(rows: RowScores, copied: Tensor) -> dict[str, Scores]:
    """The summary of "all" rows, and of the "new" ones, which are no copies of training rows.

    Args:
        rows: The judged rows.
        copied: Which of them equal a training row, (N,).
    """
    return {"all": summary(rows), "new": summary(rows.picked(~copied))}


def corrected(differences: Sequence[float], test: int, train: int) -> list[float]:
    r"""[mean, standard error] over splits of one set, whose training rows overlap.

    The error is $\sqrt{1/J + n_\mathrm{test} / n_\mathrm{train}}$ times the standard deviation over
    the J splits (Nadeau and Bengio). It is nan for one split.

    Args:
        differences: One number a split.
        test: Test rows of a split.
        train: Training rows of a split.

    >>> mean, error = corrected([1.0, 3.0], test=1, train=2)
    >>> mean, round(error, 4)
    (2.0, 1.4142)
    """
    splits = len(differences)
    mean = math.fsum(differences) / splits
    if splits == 1:
        return [mean, math.nan]
    share = 1 / splits + test / train
    return [mean, math.sqrt(share) * statistics.stdev(differences)]


def differences(
    method: Sequence[Mapping[str, Any]],
    reference: Sequence[Mapping[str, Any]],
    test: int,
    train: int,
) -> dict[str, list[float]]:
    """`corrected` differences, method less reference, of every number that both have.

    Args:
        method: Scores by name, one mapping a split.
        reference: The same of another method, on the same splits.
        test: Test rows of a split.
        train: Training rows of a split.
    """
    results = {}
    for name, value in method[0].items():
        if name not in reference[0] or isinstance(value, list):
            continue
        by_split = [a[name] - b[name] for a, b in zip(method, reference, strict=True)]
        results[name] = corrected(by_split, test, train)
    return results
