"""Orders with ties: ranks, and what is kept when rows are dropped in some order."""

from __future__ import annotations

import torch
from torch import Tensor


def ranks(values: Tensor) -> Tensor:
    """Ranks from 1 to N, ties averaged."""
    group, counts = _ties(values)
    return (counts.cumsum(0) - (counts - 1) / 2)[group]


def retained_rmse(squared: Tensor, *, by: Tensor) -> Tensor:
    """RMSE of the n rows of smallest `by`, for n = 1 ... N."""
    group, counts = _ties(by)
    shared = torch.zeros_like(counts).index_add(0, group, squared) / counts
    kept = shared.repeat_interleave(counts.long())
    return (kept.cumsum(0) / torch.arange(1, len(kept) + 1)).sqrt()


def _ties(values: Tensor) -> tuple[Tensor, Tensor]:
    """For each row the index of its value among the sorted distinct ones; how often each occurs."""
    _, group, counts = torch.unique(values, return_inverse=True, return_counts=True)
    return group, counts.double()
