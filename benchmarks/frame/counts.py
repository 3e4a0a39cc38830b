"""What a fit does for each batch, in counts that no noisy machine can blur.

The network is a small one, 8-50-1. Each count is the difference between a fit of many batches and
one of few, over the difference of their numbers, so that what a fit does once is left out.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import rigidities as rg
from benchmarks.frame.fits import LIST, LOADER, SOURCES, TENSORS, Source, fitted, source
from benchmarks.frame.results import Row, at_most
from benchmarks.frame.timing import Task

__all__ = [
    "ForwardCalls",
    "PythonPath",
    "count_rows",
    "forward_calls",
    "operations",
    "operations_per_batch",
    "path_rows",
    "python_calls_per_batch",
    "python_path",
    "small_network",
    "small_source",
]

INPUTS = 8
ADDED, WAITING = 1_024, 8
"""Rows of a batch that is added soon, and of one that waits until others fill a block."""
BATCHES = {ADDED: (8, 40), WAITING: (100, 400)}
"""A few batches and many, by their rows: many small ones still complete next to no block."""
OPERATIONS = {ADDED: 45, WAITING: 20}
PYTHON_CALLS = 40
FORWARD_CALLS, FORWARD_ROWS = 2, 16
LIBRARY = str(Path(rg.__file__).parent)
FIRST_BATCH, ONE_ROW, CALIBRATION = (300, 12, 12), (22, 6, 8), (None, 12, 18)
"""Calls, levels and files to reach in a fit of one batch, in `uq(x)` of one row with the paper's
calibration, and in a default calibration."""


class OperationCounter(TorchDispatchMode):
    """Counts the operations that reach torch's dispatcher while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class PythonPath:
    """What a reader goes through who follows a call: functions of the library alone.

    Attributes:
        calls: How often a function was entered, or a generator went on.
        depth: How many functions were entered within one another.
        files: The modules that they stand in.
    """

    calls: int
    depth: int
    files: frozenset[str]


@dataclass(frozen=True)
class ForwardCalls:
    """Calls of the model in a fit beyond one per batch, and the rows that they have together."""

    calls: int
    rows: int


def small_network() -> nn.Sequential:
    """An 8-50-1 network; its pass takes five operations, and three in inference mode."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(INPUTS, 50), nn.Tanh(), nn.Linear(50, 1))


def small_source(kind: str, rows: int, batches: int) -> Source:
    """So many batches of so many rows each for the small network."""
    torch.manual_seed(1)
    return source(kind, torch.randn(rows * batches, INPUTS), torch.randn(rows * batches, 1), rows)


def operations(task: Task) -> int:
    """Torch operations of a call."""
    with OperationCounter() as counter:
        task()
    return counter.count


def operations_per_batch(kind: str, rows: int) -> float:
    """Torch operations of a fit for each batch of so many rows; those of the source left out."""
    few, many = BATCHES[rows]
    _fit_operations(kind, rows, few)  # constants that the first fit computes and keeps
    more = _fit_operations(kind, rows, many) - _fit_operations(kind, rows, few)
    return more / (many - few)


def _fit_operations(kind: str, rows: int, batches: int) -> int:
    """Torch operations of one fit without those that read the source."""
    data = small_source(kind, rows, batches)
    read_source = data
    if kind == LOADER:
        # A fit reads the tensors of a plain loader itself, where a loop would collate them row by
        # row: cutting the tensors by hand is all that the source has to do.
        read_source = small_source(TENSORS, rows, batches)
    reading = operations(lambda: list(read_source.batches()))
    return operations(lambda: fitted(small_network(), data)) - reading


def python_calls_per_batch(kind: str, rows: int) -> float:
    """Calls of the library's functions in a fit for each further batch."""
    few, many = BATCHES[rows]
    _python_calls(kind, rows, few)  # imports of the first fit
    more = _python_calls(kind, rows, many) - _python_calls(kind, rows, few)
    return more / (many - few)


def _python_calls(kind: str, rows: int, batches: int) -> int:
    """Calls of the library's functions in one fit."""
    model = small_network()
    data = small_source(kind, rows, batches)
    return python_path(lambda: fitted(model, data)).calls


def python_path(task: Task) -> PythonPath:
    """The functions of the library that a call goes through, comprehensions left out."""
    calls = 0
    depth = 0
    deepest = 0
    files: set[str] = set()

    def counting(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls, depth, deepest
        code = frame.f_code
        if not code.co_filename.startswith(LIBRARY) or code.co_name.startswith("<"):
            return
        if event == "call":
            calls += 1
            depth += 1
            deepest = max(deepest, depth)
            files.add(code.co_filename.removeprefix(LIBRARY))
        elif event == "return":
            depth -= 1

    before = sys.getprofile()
    sys.setprofile(counting)
    try:
        task()
    finally:
        sys.setprofile(before)
    return PythonPath(calls, deepest, frozenset(files))


def path_rows() -> list[Row]:
    """Calls, levels and files of a fit of one batch, of one row, and of a default calibration."""
    first = small_source(LIST, ADDED, 1)
    held_out = [(x + 0.01, y) for x, y in small_source(LIST, ADDED, 1).batches()]
    fitted(small_network(), first)  # imports of the first fit
    table = _path_rows(
        "a fit of one batch, 8-50-1",
        python_path(lambda: fitted(small_network(), first)),
        FIRST_BATCH,
    )
    uq = fitted(small_network(), first).calibrate(held_out, method="paper")
    row = torch.randn(1, INPUTS)
    uq(row)
    table += _path_rows(
        "uq(x) of one row, paper's calibration, 8-50-1", python_path(lambda: uq(row)), ONE_ROW
    )
    with torch.no_grad():
        table.append(at_most("torch operations of the same", operations(lambda: uq(row)), 11))
    default = fitted(small_network(), first)
    table += _path_rows(
        "a default calibration, 8-50-1",
        python_path(lambda: default.calibrate(held_out)),
        CALIBRATION,
    )
    return table


def _path_rows(
    work: str, path: PythonPath, limits: tuple[int | None, int | None, int | None]
) -> list[Row]:
    """Calls, levels and files beside the figures to reach."""
    calls, depth, files = limits
    return [
        at_most(f"Python calls of {work}", path.calls, calls),
        at_most(f"levels of {work}", path.depth, depth),
        at_most(f"files of {work}", len(path.files), files),
    ]


def forward_calls(kind: str = LIST, rows: int = ADDED, batches: int = 4) -> ForwardCalls:
    """How often a fit calls the model beyond one call per batch."""
    model = small_network()
    rows_of_calls: list[int] = []
    model.register_forward_hook(lambda module, inputs, output: rows_of_calls.append(len(output)))
    fitted(model, small_source(kind, rows, batches))
    return ForwardCalls(
        calls=len(rows_of_calls) - batches,
        rows=sum(rows_of_calls) - rows * batches,
    )


def count_rows() -> list[Row]:
    """All counts beside the figures to reach."""
    table = []
    for rows, limit in OPERATIONS.items():
        for kind in SOURCES:
            work = f"torch operations of a fit per batch of {rows:,} rows, {kind}, 8-50-1"
            table.append(at_most(work, operations_per_batch(kind, rows), limit))
    for rows in BATCHES:
        work = f"Python calls of a fit per further batch of {rows:,} rows, {LIST}, 8-50-1"
        table.append(at_most(work, python_calls_per_batch(LIST, rows), PYTHON_CALLS))
    extra = forward_calls()
    beyond = f"of a fit beyond one call per batch, {LIST}, 8-50-1"
    table.append(at_most(f"forward calls {beyond}", extra.calls, FORWARD_CALLS))
    table.append(at_most(f"rows of forward calls {beyond}", extra.rows, FORWARD_ROWS))
    return table
