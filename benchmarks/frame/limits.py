"""What a fit and a prediction cost at least: the bare pass and one product that none can avoid.

`upper_blocks`, `whole_product` and `reading` give tasks to time beside the others;
`least_passes`, `least_predict_passes` and `reading_passes` say what follows from their times.

The Gram is symmetric, so the block rows of F^T F from the diagonal on suffice, in float64 or, for
a fit in mixed precision, in the model's own precision. The quadratic form is |R f|^2 with a
triangular R, half of the product F R^T in the model's precision.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from benchmarks.frame import dense
from benchmarks.frame.timing import Task, Timings
from benchmarks.frame.workload import Workload

__all__ = [
    "least_passes",
    "least_predict_passes",
    "reading",
    "reading_passes",
    "upper_blocks",
    "whole_product",
]

GATHERED = 16_384
"""Rows of a product on an accelerator, where batches can be gathered before they are multiplied."""


def upper_blocks(work: Workload, precisions: Iterable[str]) -> dict[str, Task]:
    """Tasks that compute the upper block rows of F^T F over all rows, by precision of the fit."""
    tasks = {}
    for precision in precisions:
        tasks[f"upper blocks, {precision}"] = _upper_blocks(work, double=precision == "double")
    return tasks


def _upper_blocks(work: Workload, *, double: bool) -> Task:
    features = _features(work, double=double)  # (n, D)
    products = math.ceil(len(work.x) / len(features))
    width = features.shape[1]
    if features.is_cuda:
        height = max(256, width // 4)
    else:
        height = max(64, width // 8)
    gram = torch.zeros(width, width, dtype=features.dtype, device=features.device)

    def task() -> Tensor:
        gram.zero_()
        for _ in range(products):
            for start in range(0, width, height):
                rows = features[:, start : start + height]
                gram[start : start + height, start:].addmm_(rows.mT, features[:, start:])
        return gram

    return task


def whole_product(work: Workload) -> dict[str, Task]:
    """A task: F times a square matrix in the model's precision, twice what |R f|^2 needs."""
    features = _features(work, double=False)
    products = math.ceil(len(work.x) / len(features))
    factor = torch.randn(features.shape[1], features.shape[1]).to(features)

    def task() -> None:
        for _ in range(products):
            torch.mm(features, factor)

    return {"whole product": task}


def reading(work: Workload) -> dict[str, Task]:
    """A task that reads all features once from memory, where bytes would be the limit."""
    weight = work.model[-1].weight
    features = torch.randn(len(work.x), weight.shape[1], device=weight.device).to(weight.dtype)
    return {"features read": features.sum}


def least_passes(timings: Timings, product: str, bare: str) -> float:
    """Bare passes of one pass and a product that was timed alone."""
    return 1 + timings.ratio(product, bare).median


def least_predict_passes(timings: Timings, bare: str) -> float:
    """Bare passes that a prediction takes at least: the pass and half of the whole product."""
    return 1 + timings.ratio("whole product", bare, factor=0.5).median


def reading_passes(timings: Timings, bare: str) -> float:
    """Bare passes of one pass and of reading the features from memory."""
    return least_passes(timings, "features read", bare)


def _features(work: Workload, *, double: bool) -> Tensor:
    """Features of as many rows as one product takes, (n, D), in float64 or as the model's."""
    gathered = work.batch_size
    if work.x.is_cuda:
        gathered = max(gathered, GATHERED)
    features = dense.features(work, work.x[:gathered])[:, :-1].contiguous()
    if double:
        return features
    return features.to(work.model[-1].weight.dtype)
