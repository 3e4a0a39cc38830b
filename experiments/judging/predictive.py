r"""Scores of predictive distributions, row by row: any object with a density, a cdf, a CRPS and
intervals.

Where targets lie on a grid a density can grow without bound at the grid's points; such targets are
judged by the mass of their cell, $-\log (F(y + \delta/2) - F(y - \delta/2))$ with the step
$\delta$. An interval's score is its width plus $2/(1 - \ell)$ times what a target lies outside.

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
"""Of the intervals that are judged."""

FIFTHS = 5
NODES = 65
"""Of the trapezoidal rule in a cell, ..."""
SMALL = 1e-3
"""... which takes the place of the cdf's difference where the mass is below this: of nearly equal
numbers the difference keeps too few digits."""

Scores = dict[str, Any]
"""Numbers by name; the coverage of fifths is a list."""


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

    >>> one = Normal(torch.zeros(1), torch.ones(1))
    >>> round(one.crps(torch.zeros(1)).item(), 4), [round(x.item(), 3) for x in one.interval(0.9)]
    (0.2337, [-1.645, 1.645])
    """

    mean: Tensor
    std: Tensor

    @property
    def distribution(self) -> torch.distributions.Normal:
        """As torch has it."""
        return torch.distributions.Normal(self.mean, self.std)

    def log_prob(self, target: Tensor) -> Tensor:
        """Of the density."""
        return self.distribution.log_prob(target)

    def cdf(self, target: Tensor) -> Tensor:
        """The probability below."""
        return self.distribution.cdf(target)

    def crps(self, target: Tensor) -> Tensor:
        r"""$\sigma (z (2 \Phi(z) - 1) + 2 \phi(z) - 1 / \sqrt\pi)$."""
        z = (target - self.mean) / self.std
        density = (-0.5 * z.square()).exp() / math.sqrt(2 * math.pi)
        unit = z * (2 * torch.special.ndtr(z) - 1) + 2 * density - 1 / math.sqrt(math.pi)
        return self.std * unit

    def interval(self, level: float = LEVEL) -> tuple[Tensor, Tensor]:
        """The central one."""
        half = statistics.NormalDist().inv_cdf((1 + level) / 2) * self.std
        return self.mean - half, self.mean + half


@dataclass(frozen=True)
class RowScores:
    """Of every row, (N,) each; None where a method has none.

    Attributes:
        mean: what is predicted.
        bar: the predictive standard deviation, or what orders rows by their uncertainty.
        target: what was observed.
        low, high: ends of the interval.
        nll: less the logarithm of the density.
        crps: the continuous ranked probability score.
        cell: less the logarithm of the mass of the target's cell.
    """

    mean: Tensor
    bar: Tensor
    target: Tensor
    low: Tensor
    high: Tensor
    nll: Tensor | None = None
    crps: Tensor | None = None
    cell: Tensor | None = None

    def in_unit(self, unit: float) -> RowScores:
        """The same where a target of one means `unit`."""
        lengths = ("mean", "bar", "target", "low", "high", "crps")
        values = {name: getattr(self, name) for name in lengths}
        scaled = {name: value * unit for name, value in values.items() if value is not None}
        nll = None if self.nll is None else self.nll + math.log(unit)
        return replace(self, **scaled, nll=nll)

    def picked(self, rows: Tensor) -> RowScores:
        """Some rows."""
        return RowScores(*(None if one is None else one[rows] for one in vars(self).values()))

    @property
    def held(self) -> Tensor:
        """Whether the intervals hold the targets, (N,)."""
        return (self.low <= self.target) & (self.target <= self.high)


def row_scores(p: Predictive, target: Tensor, step: float | None = None) -> RowScores:
    """Judge predictions.

    Args:
        p: N of them.
        target: shaped like their mean.
        step: between neighbouring targets that lie on a grid.
    """
    low, high = p.interval(LEVEL)
    parts = (p.mean, p.std, target, low, high, -p.log_prob(target), p.crps(target))
    cell = None if step is None else -log_mass(p, target, step)
    return RowScores(*(one.double().flatten() for one in parts), cell)


def log_mass(p: Predictive, target: Tensor, step: float) -> Tensor:
    """Of the cell of this width around each target, (N,)."""
    below, above = target - step / 2, target + step / 2
    mass = (p.cdf(above).double() - p.cdf(below).double()).flatten()
    log = mass.clamp_min(SMALL).log()
    if bool((mass >= SMALL).all()):
        return log
    inside = torch.linspace(-0.5, 0.5, NODES).tolist()
    densities = torch.stack([p.log_prob(target + at * step).double().flatten() for at in inside])
    weights = torch.full((NODES, 1), step / (NODES - 1), dtype=torch.float64)
    weights[0] = weights[-1] = weights[0] / 2
    return torch.where(mass >= SMALL, log, (densities + weights.log()).logsumexp(0))


def summary(rows: RowScores) -> Scores:
    """Means over the rows, the coverage of the intervals, and that in fifths of the rows."""
    held = rows.held.double()
    given = {name: getattr(rows, name) for name in ("nll", "cell", "crps")}
    return {
        "rmse": float((rows.mean - rows.target).square().mean().sqrt()),
        **{name: float(one.mean()) for name, one in given.items() if one is not None},
        "coverage_90": float(held.mean()),
        "interval_score": float(interval_scores(rows).mean()),
        "fifths_of_prediction": fifths(rows.mean, held),
        "fifths_of_bar": fifths(rows.bar, held),
    }


def interval_scores(rows: RowScores) -> Tensor:
    """Of every row, (N,)."""
    outside = (rows.low - rows.target).clamp_min(0) + (rows.target - rows.high).clamp_min(0)
    return rows.high - rows.low + 2 / (1 - LEVEL) * outside


def fifths(by: Tensor, held: Tensor) -> list[float]:
    """Means of equal parts of the rows, in the order of a value.

    >>> by = torch.tensor([5.0, 1, 2, 3, 4])
    >>> fifths(by, torch.tensor([0.5, 1, 0, 1, 0]))
    [1.0, 0.0, 1.0, 0.0, 0.5]
    """
    ordered = held[by.argsort(stable=True)]
    return [float(part.mean()) for part in ordered.tensor_split(FIFTHS)]


def with_and_without(rows: RowScores, copied: Tensor) -> dict[str, Scores]:
    """The summary of all rows, and of the new ones where some are copies of training rows.

    Args:
        rows: judged.
        copied: which rows equal a training row, (N,).
    """
    return {"all": summary(rows), "new": summary(rows.picked(~copied))}


def corrected(differences: Sequence[float], test: int, train: int) -> list[float]:
    r"""[mean, standard error] over splits of one set, whose training rows overlap.

    The error is $\sqrt{1/J + n_\mathrm{test} / n_\mathrm{train}}$ times the standard deviation over
    the J splits (Nadeau and Bengio); nan for one split.

    >>> mean, error = corrected([1.0, 3.0], test=1, train=2)
    >>> mean, round(error, 4)
    (2.0, 1.4142)
    """
    mean = math.fsum(differences) / len(differences)
    if len(differences) == 1:
        return [mean, math.nan]
    share = 1 / len(differences) + test / train
    return [mean, math.sqrt(share) * statistics.stdev(differences)]


def differences(
    ones: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]], test: int, train: int
) -> dict[str, list[float]]:
    """`corrected` of every number that both have, split by split."""
    shared = [
        name for name, value in ones[0].items() if name in others[0] and not isinstance(value, list)
    ]
    return {
        name: corrected([a[name] - b[name] for a, b in zip(ones, others, strict=True)], test, train)
        for name in shared
    }
