"""Rows for reports, whose errors follow their bars, or miss them in a known way."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rigidities import report
from rigidities.report.rows import TargetRows
from tests.support.pages import Page


def columns(count: int = 400, scale: float = 1.0, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Mean, std and target whose errors are Gaussian with std times scale."""
    generator = torch.Generator().manual_seed(seed)
    mean, log_std, z = torch.randn(3, count, generator=generator, dtype=torch.float64)
    std = (0.7 * log_std).exp()
    return 3 * mean, std, 3 * mean + scale * std * z


def rows(count: int = 400, scale: float = 1.0, seed: int = 0) -> TargetRows:
    return TargetRows(*columns(count, scale, seed))


def changed(**parts: Callable[[Tensor], Tensor]) -> TargetRows:
    """Five hundred rows with something done to a column."""
    part = rows(500)
    return replace(part, **{key: change(getattr(part, key)) for key, change in parts.items()})


def page(mean: Tensor, std: Tensor, target: Tensor, **options: Any) -> Page:
    return Page(report.html(mean, target, std=std, **options))
