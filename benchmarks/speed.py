"""Fits and predictions against the bare forward pass over the same batches (plain linear head).

Fits from each kind of source, beside the loop that one writes by hand, and what a fit does for
each batch in counts. Predictions are the paper's form (``criterion="nll"``); ``default`` has those
of the default calibration beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import rigidities as rg
from benchmarks.frame.counts import count_rows
from benchmarks.frame.fits import SOURCES, TENSORS, fit_rows, fit_tasks, ratio_row
from benchmarks.frame.limits import least_predict, read, reading, whole_product
from benchmarks.frame.results import Row, for_information
from benchmarks.frame.timing import Task, Timings, interleaved
from benchmarks.frame.workload import Workload, workload

FITS = {256: {"double": 2.4, "mixed": 1.9}, 1024: {"double": 2.4, "mixed": 2.0}}
"""Bare passes of a fit by width and precision, whatever the source."""
PREDICTIONS = {
    "predict": 1.65,
    "uq(x) batch by batch": 1.6,
    "freeze() batch by batch": 1.6,
}


def run(*, quick: bool = False) -> list[Row]:
    """Width 256 with 50,000 rows, width 1024 with 20,000, and the work of one batch."""
    if quick:
        return rows_at(2_000, width=32, rounds=2, musts=FITS[256]) + count_rows()
    narrow = rows_at(50_000, width=256, rounds=15, musts=FITS[256])
    wide = rows_at(20_000, width=1024, rounds=11, musts=FITS[1024])
    return narrow + wide + count_rows()


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
