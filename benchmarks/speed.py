"""Fits and predictions against the bare forward pass over the same batches (plain linear head).

Fits from each kind of source, beside the loop that one writes by hand, and what a fit does for
each batch in counts. Predictions are the paper's form (``criterion="nll"``). One row of a small net
beside them, where the host's own work is all there is.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rigidities as rg
from benchmarks.frame.counts import count_rows
from benchmarks.frame.fits import PASSES, SOURCES, TENSORS, fit_rows, fit_tasks, ratio_row
from benchmarks.frame.limits import least_predict, read, reading, whole_product
from benchmarks.frame.results import Row, at_most, for_information, not_run
from benchmarks.frame.timing import Task, Timings, interleaved
from benchmarks.frame.workload import Workload, train, workload

FITS = {256: {"double": 2.4, "mixed": 1.9}, 1024: {"double": 2.4, "mixed": 2.0}}
"""Bare passes of a fit by width and precision, whatever the source."""
PREDICTIONS = {
    "predict": 1.65,
    "uq(x) batch by batch": 1.6,
    "freeze() batch by batch": 1.6,
}
ONE_ROW = {
    "uq(x), paper's form": 6.0,
    "uq(x), default": 9.0,
    "freeze()": 2.5,
    "freeze() by AOTInductor": 2.0,
}
CALLS = 200
"""Of one row, in a round."""


def run(*, quick: bool = False) -> list[Row]:
    """Width 256 with 50,000 rows, width 1024 with 20,000, and the work of one batch and one row."""
    if quick:
        small = rows_at(2_000, width=32, rounds=2, musts=FITS[256])
        return small + count_rows() + one_row(tiny(), rounds=2, compiled=False)
    narrow = rows_at(50_000, width=256, rounds=15, musts=FITS[256])
    wide = rows_at(20_000, width=1024, rounds=11, musts=FITS[1024])
    return narrow + wide + count_rows() + one_row(tiny(), rounds=15)


def rows_at(rows: int, *, width: int, rounds: int, musts: Mapping[str, float]) -> list[Row]:
    """Fits by source and precision and three ways to predict, in bare passes, with their limits."""
    work = workload(rows, width=width)
    tasks = fit_tasks(work, SOURCES, musts) | prediction_tasks(work)
    timings = interleaved(tasks | whole_product(work) | reading(work), rounds=rounds)
    net = f"{rows:,} rows, width {width}"
    bare = f"bare, {TENSORS}"
    found = [bare_row(net, timings, kind) for kind in SOURCES]
    found += fit_rows(net, timings, SOURCES, musts)
    for name, must in PREDICTIONS.items():
        row = ratio_row(name, net, timings, bare, must)
        found.append(row.beside(flops=least_predict(timings, bare), bytes=read(timings, bare)))
    return found


def bare_row(net: str, timings: Timings, kind: str) -> Row:
    """Milliseconds of the bare pass over a source: the unit of the fits from it."""
    name = f"bare, {kind}"
    fastest = 1e3 * timings.minimum(name)
    return for_information(
        f"{name}, {net}", 1e3 * timings.median(name), "milliseconds", fastest=fastest
    )


def prediction_tasks(work: Workload) -> dict[str, Task]:
    """Three ways to predict all rows."""
    uq = calibrated(work)
    frozen = uq.freeze()
    return {
        "predict": lambda: uq.predict(work.x),
        "uq(x) batch by batch": lambda: [uq(x) for x, _ in work.batches()],
        "freeze() batch by batch": lambda: called(frozen, work),
    }


def called(module: nn.Module, work: Workload) -> None:
    """A module over all batches, as the bare pass goes over them."""
    with torch.inference_mode():
        for x, _ in work.batches():
            module(x)


def calibrated(work: Workload, criterion: str = "nll", **options: Any) -> rg.LastLayerRigidity:
    """Fitted to all but the last tenth of the rows and calibrated on those; the paper's form."""
    valid = len(work.x) // 10
    uq = rg.LastLayerRigidity(work.model).fit((work.x[:-valid], work.y[:-valid]), **options)
    size = options.get("batch_size")
    uq.calibrate((work.x[-valid:], work.y[-valid:]), criterion=criterion, batch_size=size)
    return uq


def tiny() -> Workload:
    """An 8-50-1 net, whose pass costs next to nothing."""
    wide = workload(2_000, width=8, inputs=8, epochs=0)
    model = nn.Sequential(nn.Linear(8, 50), nn.SiLU(), nn.Linear(50, 1))
    work = Workload(model, wide.x, wide.y, wide.batch_size)
    train(work, epochs=20)
    return work


def one_row(work: Workload, *, rounds: int, compiled: bool = True) -> list[Row]:
    """A single row of a small net, in bare passes of it and in microseconds."""
    calls = calls_of(work, work.x[:1], compiled=compiled)
    timings, net = interleaved({k: _many(calls[k]) for k in calls}, rounds=rounds), "8-50-1"
    found = [for_information(f"bare, one row, {net}", _micro(timings, "bare"), "microseconds")]
    for name, limit in ONE_ROW.items():
        work_done = f"{name}, one row, {net}"
        if name in calls:
            found.append(at_most(work_done, timings.ratio(name, "bare"), limit, PASSES))
            time = for_information(work_done, _micro(timings, name), "microseconds")
            found.append(time)
        else:
            found.append(not_run(work_done, "it takes a C++ compiler and time: not in quick runs"))
    return found


def calls_of(work: Workload, x: Tensor, *, compiled: bool) -> dict[str, Task]:
    """The row as the bare model, the eager wrappers and the frozen modules take it."""
    paper, default = calibrated(work), calibrated(work, "auto")
    frozen = paper.freeze()
    calls = {
        "bare": _inferring(work.model, x),
        "uq(x), paper's form": lambda: paper(x),
        "uq(x), default": lambda: default(x),
        "freeze()": _inferring(frozen, x),
    }
    return calls | ({"freeze() by AOTInductor": aot(frozen, x)} if compiled else {})


def _inferring(module: nn.Module, x: Tensor) -> Task:
    def call() -> None:
        with torch.inference_mode():
            module(x)

    return call


def aot(module: nn.Module, x: Tensor) -> Task:
    """A call of the module compiled ahead of time, for this batch size alone."""
    with tempfile.TemporaryDirectory() as folder:
        exported = torch.export.export(module, (x,))
        path = str(Path(folder) / "frozen.pt2")
        package = torch._inductor.aoti_compile_and_package(exported, package_path=path)
        loaded = torch._inductor.aoti_load_package(package)
    return lambda: loaded(x)


def _many(call: Task) -> Task:
    def task() -> None:
        for _ in range(CALLS):
            call()

    return task


def _micro(timings: Timings, task: str) -> float:
    return 1e6 / CALLS * timings.median(task)
