"""Whether a score grows or falls with the width of the nets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from experiments.frame.outcome import mean_and_error
from experiments.frame.wording import direction
from experiments.judging.scores import SCORES
from rigidities import metrics
from rigidities.metrics.ranking import ranks

FOLLOWED = (
    *("rmse", "nll", "gain", "binned_log_ratio", "spearman", "decades"),
    *("slope", "slope_error", "coverage", "coverage_error"),
)
BETTER = {name: SCORES[name].better if name in SCORES else -1 for name in FOLLOWED}
"""Scores that are followed: 1 where larger is better, -1 where smaller is, 0 where neither.
The distances of slope and coverage from what they should be are no scores of every experiment."""

Scores = Mapping[int, Sequence[Mapping[str, float]]]
"""By width, one entry a net; the k-th nets of all widths share their split."""


def completed(scores: Mapping[str, float], level: float) -> dict[str, float]:
    """The same with the distances of slope and coverage from what they should be."""
    return {
        **scores,
        "slope_error": abs(scores["slope"] - 1),
        "coverage_error": abs(scores["coverage"] - level),
    }


def trend(scores: Scores, name: str) -> dict[str, Any]:
    """A score's change with the width, which no single net decides.

    Each split gives a rank correlation of its own over the widths; their mean and standard error
    are those of repetitions with the same rows, and the verdict is theirs. How fast: the median of
    the slopes between any two widths, of the medians over the nets on log2 of the width (Theil and
    Sen's), which nets ruined at one width do not decide either.

    Args:
        scores: by width.
        name: of the score.

    Returns:
        "per_doubling", "rank_correlation" [mean, standard error] and the verdict "says".
    """
    widths = sorted(scores)
    logs = torch.tensor([math.log2(width) for width in widths], dtype=torch.float64)
    values = torch.tensor(
        [[one[name] for one in scores[width]] for width in widths], dtype=torch.float64
    )  # (widths, nets)
    medians = values.quantile(0.5, dim=1)
    first, second = torch.combinations(torch.arange(len(widths))).unbind(1)
    slopes = (medians[second] - medians[first]) / (logs[second] - logs[first])
    change = list(mean_and_error([rank_correlation(logs, net) for net in values.unbind(1)]))
    return {
        "per_doubling": float(slopes.quantile(0.5)) if len(slopes) else math.nan,
        "rank_correlation": change,
        "says": verdict(change, BETTER[name]),
    }


def rank_correlation(a: torch.Tensor, b: torch.Tensor) -> float:
    """Spearman's, ties at their average rank; nan where one is constant."""
    x, y = ranks(a.flatten()), ranks(b.flatten())
    # Ranks are positive: the library's correlation of |target - mean| and std is theirs.
    return metrics.spearman(torch.zeros_like(x), y, x)


def verdict(change: Sequence[float], better: int) -> str:
    """In a word, beyond two standard errors.

    >>> verdict([-0.1, 0.01], -1), verdict([-0.1, 0.01], 1), verdict([-0.1, 0.2], 1)
    ('improves', 'gets worse', 'no clear trend')
    """
    sign = direction(change)
    if not sign:
        return "no clear trend"
    if not better:
        return "grows" if sign > 0 else "falls"
    return "improves" if sign == better else "gets worse"
