"""How good error bars are, beside a constant one: the numbers that every experiment gives.

`SCORES` is the one place that knows a score: what it computes, the head of its column, and which
way is better.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.frame.outcome import mean_and_error
from experiments.judging.predictive import RowScores
from rigidities import metrics

POINTS = 1500
"""Rows that a scatter plot shows: more would hide one another."""


class Rows(NamedTuple):
    """What is judged, (N,) each."""

    mean: Tensor
    std: Tensor
    target: Tensor

    @property
    def error(self) -> Tensor:
        """Of each prediction, with its sign."""
        return self.mean - self.target


@dataclass(frozen=True)
class Score:
    """One number about error bars.

    Attributes:
        head: of its column.
        better: 1 where larger is better, -1 where smaller is, 0 where neither.
        of: the value for some rows and so many rows a bin; None where a study adds it by itself.
    """

    head: str
    better: int
    of: Callable[[Rows, int], float] | None = None


def _offset(rows: Rows, size: int) -> float:
    """The mean over bins of log10(MSE / variance), with its sign."""
    variance, mse = metrics.binned(*rows, size)
    return float((mse / variance).log10().mean())


def _ence(rows: Rows, size: int) -> float:
    return metrics.ence(*rows, bins=len(metrics.binned(*rows, size)[0]))


SCORES = {
    "rmse": Score("RMSE", -1, lambda rows, _: metrics.rmse(rows.mean, rows.target)),
    "nll": Score("NLL", -1, lambda rows, _: metrics.nll(*rows)),
    "crps": Score("CRPS", -1, lambda rows, _: metrics.crps(*rows)),
    "binned_log_ratio": Score("log ratio", -1, lambda rows, n: metrics.binned_log_ratio(*rows, n)),
    "offset": Score("offset", 0, _offset),
    "ence": Score("ENCE", -1, _ence),
    "coverage": Score("coverage", 0, lambda rows, _: metrics.coverage(*rows)),
    "slope": Score("slope", 0, lambda rows, size: metrics.slope(*rows, size)),
    "decades": Score("decades", 0, lambda rows, size: metrics.decades(rows.std, size)),
    "spearman": Score("rank corr.", 1, lambda rows, _: metrics.spearman(*rows)),
    "cell": Score("NLL of cells", -1),
    "interval_score": Score("interval score", -1),
    "kurtosis": Score("kurtosis", 0),
    "gain": Score("gain", 1),
    "floor": Score("floor", 0),
    "wide_log_ratio": Score("in wide bins", -1),
    "bar": Score("bar", 0),
    **{f"coverage_{level}": Score(f"in {level} %", 0) for level in (68, 90, 95)},
}
"""Scores by name, in the order of the numbers that are kept."""


def scores(mean: Tensor, std: Tensor, target: Tensor, bin_size: int) -> dict[str, float]:
    """All that rows and bars alone give."""
    rows = Rows(mean, std, target)
    return {name: score.of(rows, bin_size) for name, score in SCORES.items() if score.of}


def beside_constant(
    mean: Tensor,
    std: Tensor,
    target: Tensor,
    constant: float,
    bin_size: int,
    more: Callable[[Tensor], dict[str, float]] = lambda std: {},
) -> dict[str, Any]:
    """The scores of the bars and of a constant one, with the gain in NLL over it.

    Args:
        mean, std, target: of the rows, (N,) each.
        constant: the other bar.
        bin_size: rows of a bin.
        more: further scores of bars, (N,).
    """
    flat = torch.full_like(std, constant)
    own, other = (scores(mean, bar, target, bin_size) for bar in (std, flat))
    return {
        "scores": {**own, "gain": other["nll"] - own["nll"], **more(std)},
        "constant": {"scores": other | more(flat)},
    }


def by_distribution(found: Mapping[str, Any], rows: RowScores) -> dict[str, Any]:
    """What `beside_constant` gives, with likelihood, CRPS and coverage by the predictive
    distribution."""
    own = {"crps": rows.crps, "nll": rows.nll, "coverage": rows.held.double()}
    means = {name: float(one.mean()) for name, one in own.items() if one is not None}
    gain = found["constant"]["scores"]["nll"] - means["nll"]
    return {**found, "scores": {**found["scores"], **means, "gain": gain}}


def pictured(mean: Tensor, std: Tensor, target: Tensor, bin_size: int) -> dict[str, Any]:
    """The numbers of both plots: "bins" and "points"."""
    return {"bins": bins(mean, std, target, bin_size), "points": points(mean, std, target)}


def bins(mean: Tensor, std: Tensor, target: Tensor, bin_size: int) -> dict[str, Any]:
    """The binned plot's numbers."""
    variance, mse = metrics.binned(mean, std, target, bin_size)
    return {"bin_size": bin_size, "variance": variance, "mse": mse}


def points(mean: Tensor, std: Tensor, target: Tensor, seed: int = 0) -> dict[str, Any]:
    """The scatter plot's numbers, for at most `POINTS` rows drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(std), generator=generator)[:POINTS].sort().values
    return {"std": std[rows], "error": (target - mean).abs()[rows], "rows": len(std)}


def over_seeds(repeated: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """[mean, standard error] of every score over repetitions."""
    return {name: list(mean_and_error([one[name] for one in repeated])) for name in repeated[0]}


def beside_constant_over_seeds(repeated: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The same of what `beside_constant` gives."""
    constant = [one["constant"]["scores"] for one in repeated]
    return {
        "scores": over_seeds([one["scores"] for one in repeated]),
        "constant": {"scores": over_seeds(constant)},
    }


def paired(
    repeated: Sequence[Mapping[str, float]], other: Sequence[Mapping[str, float]]
) -> dict[str, list[float]]:
    """[mean, standard error] of the differences, repetition by repetition."""
    differences = [{k: a[k] - b[k] for k in a} for a, b in zip(repeated, other, strict=True)]
    return over_seeds(differences)


def from_paper(own: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """The same between each calibration and the paper's."""
    return {name: paired(of, own["paper"]) for name, of in own.items() if name != "paper"}


def quartiles(values: Sequence[float]) -> list[float]:
    """[median, lower quartile, upper quartile], for scores whose mean one repetition can ruin.

    >>> quartiles([3.0, 1.0, 2.0, 5.0, 4.0])
    [3.0, 2.0, 4.0]
    """
    if len(values) == 1:
        return [values[0]] * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return [middle, low, high]


def quartiles_of_each(repeated: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """The same of every score over repetitions."""
    return {name: quartiles([one[name] for one in repeated]) for name in repeated[0]}
