"""Fits as users call them, from each kind of source, beside a loop written by hand.

`fit_tasks` gives the tasks to time, by name; `fit_rows` makes rows of a table of their timings. The
unit is the bare pass: the model alone over the same source. Where reading the source takes time (a
loader that collates rows), that time is in the bare pass and in the fit alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import rigidities as rg
from benchmarks.frame.limits import least_passes, reading_passes, upper_blocks
from benchmarks.frame.results import Row, at_most
from benchmarks.frame.timing import Task, Timings
from benchmarks.frame.workload import Workload

__all__ = [
    "LIST",
    "LOADER",
    "PASSES",
    "SHUFFLED",
    "SOURCES",
    "TENSORS",
    "Source",
    "fit_rows",
    "fit_tasks",
    "fitted",
    "naive_loop",
    "on_device",
    "ratio_row",
    "source",
]

PASSES = "bare passes"
LIST, TENSORS = "list of batches", "tensors"
LOADER, SHUFFLED = "loader of a TensorDataset", "shuffled loader"
SOURCES = (LIST, TENSORS, LOADER, SHUFFLED)
NAIVE = {torch.float64: "naive loop, float64", torch.float32: "naive loop, float32"}


@dataclass(frozen=True)
class Source:
    """Training data in a form that ``fit`` takes.

    Attributes:
        data: Batches, a loader, or a pair of tensors.
        batch_size: The rows of a batch where ``data`` are tensors, else None.
    """

    data: Any
    batch_size: int | None = None

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The batches that a loop over the source meets; tensors are cut by hand."""
        if self.batch_size is None:
            yield from self.data
            return
        x, y = self.data
        for start in range(0, len(x), self.batch_size):
            stop = start + self.batch_size
            yield x[start:stop], y[start:stop]


class BatchesOfRows(Dataset[tuple[Tensor, Tensor]]):
    """Rows that a loader fetches a batch at a time, so that it need not collate them."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self.x[indices], self.y[indices]


def unchanged(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """A collation that has nothing left to do."""
    return batch


def source(kind: str, x: Tensor, y: Tensor, batch_size: int) -> Source:
    """The rows as a source of that kind.

    A plain loader over a ``TensorDataset`` collates row by row when it is iterated; the shuffled
    loader takes whole batches from its data set, so that its own time hides nothing of the fit's.
    """
    if kind == LIST:
        return Source(list(zip(x.split(batch_size), y.split(batch_size), strict=True)))
    if kind == TENSORS:
        return Source((x, y), batch_size)
    if kind == LOADER:
        return Source(DataLoader(TensorDataset(x, y), batch_size=batch_size))
    rows = BatchesOfRows(x, y)
    return Source(DataLoader(rows, batch_size=batch_size, shuffle=True, collate_fn=unchanged))


def bare_pass(model: nn.Module, data: Source) -> None:
    """The model over all batches of the source and nothing else."""
    with torch.inference_mode():
        for x, _ in data.batches():
            model(x)


def fitted(model: nn.Module, data: Source, precision: str = "auto") -> rg.LastLayerRigidity:
    """A fresh fit with the default settings."""
    uq = rg.LastLayerRigidity(model, batch_size=data.batch_size)
    return uq.fit(data.data, precision=precision)


def naive_loop(model: nn.Sequential, data: Source, dtype: torch.dtype) -> Tensor:
    """The Gram (D + 1, D + 1) by a loop written by hand, which computes the outputs too."""
    *hidden, head = model
    trunk = nn.Sequential(*hidden)
    width = head.in_features + 1
    gram = torch.zeros(width, width, dtype=dtype, device=head.weight.device)
    with torch.inference_mode():
        for x, _ in data.batches():
            features = trunk(x)  # (B, D)
            head(features)
            with_bias = torch.cat([features, torch.ones_like(features[:, :1])], dim=1).to(dtype)
            gram += with_bias.T @ with_bias
    return gram


def fit_tasks(work: Workload, kinds: Iterable[str], precisions: Iterable[str]) -> dict[str, Task]:
    """Bare passes and fits by source, the naive loops over a list, and the least products."""
    tasks: dict[str, Task] = {}
    for kind in kinds:
        data = source(kind, work.x, work.y, work.batch_size)
        tasks[f"bare, {kind}"] = partial(bare_pass, work.model, data)
        for precision in precisions:
            tasks[f"fit, {precision}, {kind}"] = partial(fitted, work.model, data, precision)
    batches = source(LIST, work.x, work.y, work.batch_size)
    for dtype, name in NAIVE.items():
        tasks[name] = partial(naive_loop, work.model, batches, dtype)
    return tasks | upper_blocks(work, precisions)


def fit_rows(
    size: str,
    timings: Timings,
    kinds: Iterable[str],
    limits: Mapping[str, float | None],
) -> list[Row]:
    """Each precision from each source, in bare passes over that source.

    Args:
        size: What the names of the rows end with.
        timings: Of the tasks of ``fit_tasks`` and of ``reading``.
        kinds: The sources.
        limits: The figure to reach by precision, None where nothing is asked.
    """
    rows = []
    for precision, limit in limits.items():
        for kind in kinds:
            bare = f"bare, {kind}"
            task = f"fit, {precision}, {kind}"
            if kind == LOADER:
                # A fit reads the tensors of such a loader and need not wait for its collation, so
                # a pass over the loader is no limit and a figure to reach would mean nothing.
                rows.append(ratio_row(task, size, timings, bare, None))
                continue
            row = ratio_row(task, size, timings, bare, limit)
            flops = least_passes(timings, f"upper blocks, {precision}", bare)
            rows.append(row.with_least(flops=flops, bytes=reading_passes(timings, bare)))
    for name in NAIVE.values():
        rows.append(ratio_row(name, size, timings, f"bare, {LIST}", None))
    return rows


def ratio_row(task: str, size: str, timings: Timings, bare: str, limit: float | None) -> Row:
    """A task in bare passes, with the figure to reach where there is one."""
    return at_most(
        f"{task}, {size}",
        timings.ratio(task, bare),
        limit,
        PASSES,
        seconds=timings.median(task),
        bare_seconds=timings.median(bare),
        fastest_seconds=timings.minimum(task),
        fastest_bare_seconds=timings.minimum(bare),
    )


def on_device(tasks: Mapping[str, Task], device: torch.device) -> dict[str, Task]:
    """All tasks, each until its last kernel on the device has ended."""
    return {name: _until_finished(task, device) for name, task in tasks.items()}


def _until_finished(task: Task, device: torch.device) -> Task:
    if device.type != "cuda":
        return task

    def whole() -> None:
        task()
        torch.cuda.synchronize(device)

    return whole
