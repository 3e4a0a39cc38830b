"""How good error bars are, beside a constant one: the numbers that every experiment gives.

`SCORES` is the one place that defines a score: what it computes, the head of its column, and which
way is better. `beside_constant` scores one network's bars, `beside_constant_over_seeds` takes means
over repetitions, and `pictured` gives the numbers of the two plots.
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
    """Predictions that are judged, (N,) each.

    Attributes:
        mean: Predicted values.
        std: Error bars.
        target: Observed values.
    """

    mean: Tensor
    std: Tensor
    target: Tensor

    @property
    def error(self) -> Tensor:
        """The error of each prediction, with its sign."""
        return self.mean - self.target


@dataclass(frozen=True)
class Score:
    """One number about error bars.

    Attributes:
        head: The head of its column.
        better: 1 where larger is better, -1 where smaller is, 0 where neither.
        of: A function of the rows and of the number of rows a bin, which returns the score. None
            where a study adds the score by itself.
    """

    head: str
    better: int
    of: Callable[[Rows, int], float] | None = None


def _offset(rows: Rows, bin_size: int) -> float:
    """The mean over bins of log10(MSE / variance), with its sign."""
    variance, mse = metrics.binned(*rows, bin_size)
    return float((mse / variance).log10().mean())


def _ence(rows: Rows, bin_size: int) -> float:
    """The expected normalised calibration error over as many bins as the other scores use."""
    variance, _ = metrics.binned(*rows, bin_size)
    return metrics.ence(*rows, bins=len(variance))


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
    """All scores that predictions, bars and targets alone give."""
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
    """The scores of error bars and of a constant bar, with the gain in NLL over it.

    Args:
        mean: Predicted values, (N,).
        std: Error bars, (N,).
        target: Observed values, (N,).
        constant: The constant bar.
        bin_size: Rows of a bin.
        more: A function of bars, (N,), which returns further scores of theirs.

    Returns:
        {"scores": ..., "constant": {"scores": ...}}.
    """
    constant_std = torch.full_like(std, constant)
    bar_scores = scores(mean, std, target, bin_size)
    constant_scores = scores(mean, constant_std, target, bin_size)
    gain = constant_scores["nll"] - bar_scores["nll"]
    return {
        "scores": {**bar_scores, "gain": gain, **more(std)},
        "constant": {"scores": constant_scores | more(constant_std)},
    }


def by_distribution(block: Mapping[str, Any], rows: RowScores) -> dict[str, Any]:
    """A block of `beside_constant` with scores by the predictive distribution.

    NLL, CRPS, coverage and gain are replaced; the other scores do not depend on the distribution.

    Args:
        block: What `beside_constant` returned.
        rows: The same rows, judged by their distribution.
    """
    columns = {"crps": rows.crps, "nll": rows.nll, "coverage": rows.covered.double()}
    means = {name: float(column.mean()) for name, column in columns.items() if column is not None}
    gain = block["constant"]["scores"]["nll"] - means["nll"]
    return {**block, "scores": {**block["scores"], **means, "gain": gain}}


def pictured(mean: Tensor, std: Tensor, target: Tensor, bin_size: int) -> dict[str, Any]:
    """The numbers of both plots: "bins" and "points"."""
    return {"bins": bins(mean, std, target, bin_size), "points": points(mean, std, target)}


def bins(mean: Tensor, std: Tensor, target: Tensor, bin_size: int) -> dict[str, Any]:
    """The numbers of the binned plot."""
    variance, mse = metrics.binned(mean, std, target, bin_size)
    return {"bin_size": bin_size, "variance": variance, "mse": mse}


def points(mean: Tensor, std: Tensor, target: Tensor, seed: int = 0) -> dict[str, Any]:
    """The numbers of the scatter plot, for at most `POINTS` rows drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(len(std), generator=generator)[:POINTS].sort().values
    return {"std": std[rows], "error": (target - mean).abs()[rows], "rows": len(std)}


def over_seeds(repetitions: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """[mean, standard error] of every score over repetitions."""
    return {
        name: list(mean_and_error([scores[name] for scores in repetitions]))
        for name in repetitions[0]
    }


def beside_constant_over_seeds(repetitions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """[mean, standard error] of every score in blocks of `beside_constant`, over repetitions."""
    bar_scores = [block["scores"] for block in repetitions]
    constant_scores = [block["constant"]["scores"] for block in repetitions]
    return {
        "scores": over_seeds(bar_scores),
        "constant": {"scores": over_seeds(constant_scores)},
    }


def paired(
    repetitions: Sequence[Mapping[str, float]], reference: Sequence[Mapping[str, float]]
) -> dict[str, list[float]]:
    """[mean, standard error] of the differences to a reference, repetition by repetition."""
    differences = [
        {name: scores[name] - reference_scores[name] for name in scores}
        for scores, reference_scores in zip(repetitions, reference, strict=True)
    ]
    return over_seeds(differences)


def from_paper(calibrations: Mapping[str, Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """`paired` differences between each calibration and the paper's.

    Args:
        calibrations: Scores of every repetition, by the name of the calibration.
    """
    return {
        name: paired(repetitions, calibrations["paper"])
        for name, repetitions in calibrations.items()
        if name != "paper"
    }


def quartiles(values: Sequence[float]) -> list[float]:
    """[median, lower quartile, upper quartile], for scores whose mean one repetition can ruin.

    >>> quartiles([3.0, 1.0, 2.0, 5.0, 4.0])
    [3.0, 2.0, 4.0]
    """
    if len(values) == 1:
        return [values[0]] * 3
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return [middle, low, high]


def quartiles_of_each(repetitions: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """`quartiles` of every score over repetitions."""
    return {name: quartiles([scores[name] for scores in repetitions]) for name in repetitions[0]}
