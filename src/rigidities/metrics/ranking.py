"""Do larger bars go with larger errors? Measures that depend only on the order of rows."""

from __future__ import annotations

import torch
from torch import Tensor

from .alignment import Values, aligned, of_prediction


@of_prediction
def spearman(mean: Values, std: Values, target: Values) -> float:
    """Rank correlation (Spearman) of |e| and sigma. Ties get their average rank.

    Right bars do not reach 1, because |e| scatters about sigma. The result is nan if |e| or sigma
    is constant.

    Examples:
        >>> spearman([0.0, 0.0, 0.0], [1.0, 2.0, 3.0], [0.1, -0.2, 0.3])
        1.0
    """
    mean, std, target = aligned(mean=mean, std=std, target=target)
    mean_rank = (len(std) + 1) / 2
    error_rank = ranks((target - mean).abs()) - mean_rank
    std_rank = ranks(std) - mean_rank
    sizes = (error_rank.square().sum() * std_rank.square().sum()).sqrt()
    return float(error_rank @ std_rank / sizes)


@of_prediction
def ause(mean: Values, std: Values, target: Values) -> float:
    """Area under the sparsification error, as a fraction of the RMSE.

    Let S_k be the RMSE without the k rows of largest sigma, and O_k without those of largest |e|
    (the oracle). The result is the mean over k = 0 ... N - 1 of (S_k - O_k) / S_0. It is zero if
    sigma ranks the errors perfectly, or if every error is zero. Rows with equal sigma each count
    with the mean of their e^2, so that their order does not matter.

    Examples:
        >>> ause([0.0, 0.0], [1.0, 2.0], [3.0, 4.0])
        0.0
        >>> round(ause([0.0, 0.0], [2.0, 1.0], [3.0, 4.0]), 4)  # (4 - 3) / 2 / sqrt(12.5)
        0.1414
    """
    mean, std, target = aligned(mean=mean, std=std, target=target)
    squared = (target - mean).square()
    if not squared.any():
        return 0.0
    gap = retained_rmse(squared, by=std) - retained_rmse(squared, by=squared)
    return float(gap.mean() / squared.mean().sqrt())


def auroc(std_in: Values, std_out: Values) -> float:
    """Probability that a row outside the domain has the larger bar, P(out > in) + P(out = in) / 2.

    Args:
        std_in: Bars inside the domain, of any shape.
        std_out: Bars outside it, of any shape.

    Examples:
        >>> auroc([1.0, 2.0], [2.0, 3.0])
        0.875
    """
    (inside,) = aligned(std=std_in)
    (outside,) = aligned(std=std_out)
    n = len(inside)
    m = len(outside)
    outside_ranks = ranks(torch.cat([inside, outside]))[n:]
    # Mann and Whitney: the sum of ranks, less its least value, counts the pairs in order.
    return float((outside_ranks.sum() - m * (m + 1) / 2) / (n * m))


def ranks(values: Tensor) -> Tensor:
    """Ranks from 1 to N, ties averaged."""
    group, counts = _ties(values)
    return (counts.cumsum(0) - (counts - 1) / 2)[group]


def retained_rmse(squared: Tensor, *, by: Tensor) -> Tensor:
    """RMSE of the n rows with the smallest `by`, for n = 1 ... N.

    Args:
        squared: Squared errors, (N,).
        by: What rows are sorted by, (N,). Tied rows count with the mean of their squared errors.
    """
    group, counts = _ties(by)
    group_means = torch.zeros_like(counts).index_add(0, group, squared) / counts
    sorted_squares = group_means.repeat_interleave(counts.long())
    return (sorted_squares.cumsum(0) / torch.arange(1, len(sorted_squares) + 1)).sqrt()


def _ties(values: Tensor) -> tuple[Tensor, Tensor]:
    """For each row the index of its value among the sorted distinct ones; how often each occurs."""
    _, group, counts = torch.unique(values, return_inverse=True, return_counts=True)
    return group, counts.double()
