"""Whether a score grows or falls with the width of the networks.

`with_distances` adds what slope and coverage miss; `trend` follows one score over the widths.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from experiments.frame.outcome import mean_and_error
from experiments.frame.wording import direction
from experiments.judging.scores import SCORES
from rigidities import metrics
from rigidities.metrics.ranking import ranks

BETTER = {
    "rmse": SCORES["rmse"].better,
    "nll": SCORES["nll"].better,
    "gain": SCORES["gain"].better,
    "binned_log_ratio": SCORES["binned_log_ratio"].better,
    "spearman": SCORES["spearman"].better,
    "decades": SCORES["decades"].better,
    "slope": SCORES["slope"].better,
    "slope_error": -1,
    "coverage": SCORES["coverage"].better,
    "coverage_error": -1,
}
"""Scores that are followed: 1 where larger is better, -1 where smaller is, 0 where neither.

The distances of slope and coverage from what they should be are no scores of every experiment.
"""

Scores = Mapping[int, Sequence[Mapping[str, float]]]
"""By width, one entry a network; the k-th networks of all widths share their split."""


def with_distances(scores: Mapping[str, float], level: float) -> dict[str, float]:
    """Scores with the distances of slope and coverage from what they should be.

    Args:
        scores: the scores of a network.
        level: the coverage that is meant.
    """
    return {
        **scores,
        "slope_error": abs(scores["slope"] - 1),
        "coverage_error": abs(scores["coverage"] - level),
    }


def trend(scores: Scores, name: str) -> dict[str, Any]:
    """A score's change with the width, which no single network decides.

    Each split gives a rank correlation of its own over the widths; their mean and standard error
    are those of repetitions with the same rows, and the verdict is theirs. How fast: the median of
    the slopes between any two widths, of the medians over the networks on log2 of the width (Theil
    and Sen's), which networks ruined at one width do not decide either.

    Args:
        scores: the scores by width.
        name: the name of the score.

    Returns:
        "per_doubling", "rank_correlation" [mean, standard error] and the verdict "says".
    """
    widths = sorted(scores)
    log_widths = torch.tensor([math.log2(width) for width in widths], dtype=torch.float64)
    values = torch.tensor(
        [[network[name] for network in scores[width]] for width in widths], dtype=torch.float64
    )  # (widths, networks)
    medians = values.quantile(0.5, dim=1)
    first, second = torch.combinations(torch.arange(len(widths))).unbind(1)
    slopes = (medians[second] - medians[first]) / (log_widths[second] - log_widths[first])
    per_doubling = math.nan
    if len(slopes):
        per_doubling = float(slopes.quantile(0.5))
    correlations = [rank_correlation(log_widths, of_split) for of_split in values.unbind(1)]
    correlation = list(mean_and_error(correlations))
    return {
        "per_doubling": per_doubling,
        "rank_correlation": correlation,
        "says": verdict(correlation, BETTER[name]),
    }


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's rank correlation, ties at their average rank; nan where one is constant."""
    x = ranks(a.flatten())
    y = ranks(b.flatten())
    # Ranks are positive: the library's correlation of |target - mean| and std is theirs.
    return metrics.spearman(torch.zeros_like(x), y, x)


def verdict(change: Sequence[float], better: int) -> str:
    """A change in a word, if it is beyond two standard errors.

    Args:
        change: its mean and standard error.
        better: 1 where a rise is better, -1 where a fall is, 0 where neither.

    >>> verdict([-0.1, 0.01], -1), verdict([-0.1, 0.01], 1), verdict([-0.1, 0.2], 1)
    ('improves', 'gets worse', 'no clear trend')
    """
    sign = direction(change)
    if sign == 0:
        return "no clear trend"
    if better == 0:
        return "grows" if sign > 0 else "falls"
    return "improves" if sign == better else "gets worse"
