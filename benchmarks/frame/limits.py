"""What a fit and a prediction cost at least: the bare pass and one product that none can avoid.

The float64 Gram is symmetric, so half of the product F^T F must be computed; the quadratic form is
|R f|^2 with a triangular R, half of the product F R^T in the model's float32.
"""

from __future__ import annotations

import torch

from benchmarks.frame import dense
from benchmarks.frame.timing import Ratio, Task, Timings
from benchmarks.frame.workload import Workload


def products(work: Workload) -> dict[str, Task]:
    """The two whole products over as many batches as the workload has."""
    batches = -(-len(work.x) // work.batch_size)
    wide = dense.features(work, work.x[: work.batch_size])  # (B, D) float64
    narrow = wide.float()
    gram = torch.zeros(wide.shape[1], wide.shape[1], dtype=wide.dtype)
    factor = torch.randn(narrow.shape[1], narrow.shape[1])

    def float64_product() -> None:
        for _ in range(batches):
            gram.addmm_(wide.mT, wide)

    def float32_product() -> None:
        for _ in range(batches):
            torch.mm(narrow, factor)

    return {"float64 product": float64_product, "float32 product": float32_product}


def reading(work: Workload) -> dict[str, Task]:
    """All features read once from memory: where bytes, not arithmetic, would be the limit."""
    kept = torch.randn(len(work.x), work.model[-1].in_features)
    return {"features read": kept.sum}


def least_read(timings: Timings) -> Ratio:
    """Bare passes that anything takes which reads the features from memory."""
    return _least(timings, "features read", factor=1.0)


def least_fit(timings: Timings) -> Ratio:
    """Bare passes that a fit takes at least."""
    return _least(timings, "float64 product")


def least_predict(timings: Timings) -> Ratio:
    """Bare passes that a prediction takes at least."""
    return _least(timings, "float32 product")


def _least(timings: Timings, task: str, *, factor: float = 0.5) -> Ratio:
    more = timings.ratio(task, "bare", factor=factor)
    return Ratio(1 + more.median, 1 + more.lower, 1 + more.upper, more.rounds)
