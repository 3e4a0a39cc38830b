"""Predictions with error bars and true values, in one pass over labelled data."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ..calibration.report import CalibrationReport
from ..data.batches import Batch
from ..data.feed import Feed

MOST_INPUTS = 12
"""Numbers per input row up to which they are shown beside a point."""


class Bars(Protocol):
    """What a report asks of an object with error bars; `LastLayerRigidity` has it."""

    @property
    def report(self) -> CalibrationReport | None:
        """How it was calibrated."""

    def __call__(self, *inputs: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation."""

    @property
    def feed(self) -> Feed:
        """How data reach the model."""


def labelled(
    bars: Bars, data: Any, progress: bool | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Mean, std and target of labelled data, and the inputs where they are few numbers a row.

    One pass, so that a loader may shuffle and an iterator may end.

    Raises:
        ValueError: there are no data, or they have no target.
    """
    parts: list[tuple[Tensor, Tensor, Tensor]] = []
    inputs: list[Tensor | None] = []
    for batch in bars.feed(data, "report", progress=progress):
        if batch.target is None:
            raise ValueError(
                "Expected labelled data, got batches without a target. Pass (x, y), or give the "
                "model's wrapper target=lambda batch: ...."
            )
        mean, std = (part.detach().cpu() for part in bars(*batch.args, **batch.kwargs))
        parts.append((mean, std, batch.target.cpu().reshape(_shape_for(batch.target, mean))))
        inputs.append(_few_numbers(batch))
    if not parts:
        raise ValueError("Expected labelled data, got none.")
    mean, std, target = (torch.cat(column) for column in zip(*parts, strict=True))
    known = [part for part in inputs if part is not None]
    return mean, std, target, torch.cat(known) if len(known) == len(inputs) else None


def bars_on(bars: Bars, data: Any, progress: bool | None = None) -> Tensor:
    """The error bars alone, of labelled or unlabelled data, flat for one target, else (N, K)."""
    parts = [
        bars(*batch.args, **batch.kwargs)[1].detach().cpu()
        for batch in bars.feed.unlabelled()(data, "reference", progress=progress)
    ]
    return torch.cat(parts)


def _shape_for(target: Tensor, mean: Tensor) -> tuple[int, ...]:
    """The shape of the prediction, where the target differs by dimensions of size one alone."""
    if target.squeeze().shape != mean.squeeze().shape:
        raise ValueError(
            f"Expected targets shaped like the predictions, {tuple(mean.shape)}, "
            f"got {tuple(target.shape)}."
        )
    return tuple(mean.shape)


def _few_numbers(batch: Batch) -> Tensor | None:
    """The inputs as (N, D), if that is what they are and D is small."""
    if len(batch.args) != 1 or batch.kwargs:
        return None
    (x,) = batch.args
    if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[1] > MOST_INPUTS:
        return None
    return x.detach().cpu()
