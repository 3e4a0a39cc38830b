"""What a fit and a prediction cost at least: the bare pass and one product that none can avoid.

The Gram is symmetric, so the block rows of F^T F from the diagonal on suffice, in float64 or, for
a fit in mixed precision, in the model's own precision. The quadratic form is |R f|^2 with a
triangular R, half of the product F R^T in the model's precision.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from benchmarks.frame import dense
from benchmarks.frame.timing import Task, Timings
from benchmarks.frame.workload import Workload

GATHERED = 16_384
"""Rows of a product on an accelerator, where batches can be gathered before they are multiplied."""


def upper_blocks(work: Workload, precisions: Iterable[str]) -> dict[str, Task]:
    """The upper block rows of F^T F, by precision of the fit, over as many rows as there are."""
    return {f"upper blocks, {name}": _upper_blocks(work, name) for name in precisions}


def _upper_blocks(work: Workload, precision: str) -> Task:
    features = _features(work, double=precision == "double")  # (n, D)
    products = -(-len(work.x) // len(features))
    width = features.shape[1]
    height = max(256, width // 4) if features.is_cuda else max(64, width // 8)
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
    """F times a square matrix in the model's precision: twice what a quadratic form needs."""
    features = _features(work, double=False)
    products = -(-len(work.x) // len(features))
    factor = torch.randn(features.shape[1], features.shape[1]).to(features)

    def task() -> None:
        for _ in range(products):
            torch.mm(features, factor)

    return {"whole product": task}


def reading(work: Workload) -> dict[str, Task]:
    """All features read once from memory: where bytes, not arithmetic, would be the limit."""
    weight = work.model[-1].weight
    kept = torch.randn(len(work.x), weight.shape[1], device=weight.device).to(weight.dtype)
    return {"features read": kept.sum}


def least(timings: Timings, product: str, bare: str) -> float:
    """Bare passes of a pass and a product that were timed alone."""
    return 1 + timings.ratio(product, bare).median


def least_predict(timings: Timings, bare: str) -> float:
    """Bare passes that a prediction takes at least: the pass and half of the whole product."""
    return 1 + timings.ratio("whole product", bare, factor=0.5).median


def read(timings: Timings, bare: str) -> float:
    """Bare passes that anything takes which reads the features from memory."""
    return least(timings, "features read", bare)


def _features(work: Workload, *, double: bool) -> Tensor:
    """Features of so many rows as one product takes, (n, D), in float64 or as the model's."""
    gathered = max(work.batch_size, GATHERED if work.x.is_cuda else 0)
    features = dense.features(work, work.x[:gathered])[:, :-1].contiguous()
    return features if double else features.to(work.model[-1].weight.dtype)
