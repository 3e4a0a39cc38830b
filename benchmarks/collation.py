"""What handing in tensors, data sets or loaders costs over batches sliced by hand."""

from __future__ import annotations

from functools import partial

from torch.utils.data import DataLoader, TensorDataset

import rigidities as rg
from benchmarks.frame.results import Row, at_most
from benchmarks.frame.timing import Task, interleaved
from benchmarks.frame.workload import Workload, workload
from benchmarks.speed import calibrated


def run(*, quick: bool = False) -> list[Row]:
    """Fits whose data come as tensors, ``TensorDataset`` or ``DataLoader``; predictions too."""
    rows, width, rounds = (2_000, 32, 2) if quick else (50_000, 256, 15)
    work = workload(rows, width=width)
    return fit_rows(work, rounds) + predict_rows(work, rounds)


def fit_rows(work: Workload, rounds: int) -> list[Row]:
    """Each kind of training data against a generator of slices."""
    dataset = TensorDataset(work.x, work.y)
    kinds = {
        "tensors": (work.x, work.y),
        "TensorDataset": dataset,
        "DataLoader over it": DataLoader(dataset, batch_size=work.batch_size),
    }

    def fit(train: object) -> object:
        return rg.LastLayerRigidity(work.model).fit(train)

    tasks: dict[str, Task] = {"slices": lambda: fit(work.batches())}
    for name, train in kinds.items():
        tasks[name] = partial(fit, train)
    timings = interleaved(tasks, rounds=rounds)
    return [
        at_most(f"fit, {name}, {work.size}", timings.ratio(name, "slices"), 1.1, "fits from slices")
        for name in kinds
    ]


def predict_rows(work: Workload, rounds: int) -> list[Row]:
    """One call with the whole tensor against one call with its slices."""
    uq = calibrated(work)
    tasks = {
        "slices": lambda: uq.predict([x for x, _ in work.batches()]),
        "tensor": lambda: uq.predict(work.x),
    }
    timings = interleaved(tasks, rounds=rounds)
    ratio = timings.ratio("tensor", "slices")
    return [at_most(f"predict, tensor, {work.size}", ratio, 1.1, "predictions from slices")]
