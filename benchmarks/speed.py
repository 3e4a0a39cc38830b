"""Fits and predictions against the bare forward pass over the same batches (plain linear head).

Fits come from each kind of source and stand beside a loop written by hand, in processor time on one
thread too, which other work on the machine hardly blurs; what a fit does for each batch stands
there in counts. Predictions are those of the paper's form (``method="paper"``); the
benchmark ``default`` has those of the default calibration beside them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial

import torch
from torch import nn

import rigidities as rg
from benchmarks.frame.counts import count_rows
from benchmarks.frame.fits import (
    LIST,
    SHUFFLED,
    SOURCES,
    TENSORS,
    fit_rows,
    fit_tasks,
    fitted,
    naive_loop,
    ratio_row,
    source,
)
from benchmarks.frame.limits import (
    least_predict_passes,
    reading,
    reading_passes,
    whole_product,
)
from benchmarks.frame.results import Row, at_most, for_information
from benchmarks.frame.timing import Task, Timings, interleaved
from benchmarks.frame.workload import Workload, workload

FIT_LIMITS = {256: {"double": 2.4, "mixed": 1.9}, 1024: {"double": 2.4, "mixed": 2.0}}
"""Bare passes of a fit by width and precision, whatever the source."""
NAIVE_LIMITS = {256: 1.15, 1024: 0.95}
"""Processor time of a fit over that of the loop written by hand, by width."""
PREDICTION_LIMITS = {
    "predict": 1.65,
    "uq(x) batch by batch": 1.6,
    "freeze() batch by batch": 1.6,
}
"""Bare passes of a prediction."""


def run(*, quick: bool = False) -> list[Row]:
    """Width 256 with 50,000 rows, width 1024 with 20,000, and the work of one batch."""
    if quick:
        table = rows_at(2_000, width=32, rounds=2, limits=FIT_LIMITS[256])
        table += naive_rows(2_000, width=32, rounds=2, limit=NAIVE_LIMITS[256])
        return table + count_rows()
    table = rows_at(50_000, width=256, rounds=15, limits=FIT_LIMITS[256])
    table += naive_rows(50_000, width=256, rounds=9, limit=NAIVE_LIMITS[256])
    table += rows_at(20_000, width=1024, rounds=11, limits=FIT_LIMITS[1024])
    table += naive_rows(20_000, width=1024, rounds=9, limit=NAIVE_LIMITS[1024])
    return table + count_rows()


def rows_at(rows: int, *, width: int, rounds: int, limits: Mapping[str, float]) -> list[Row]:
    """Fits by source and precision and three ways to predict, in bare passes, with their least."""
    work = workload(rows, width=width)
    tasks = fit_tasks(work, SOURCES, limits) | prediction_tasks(work)
    timings = interleaved(tasks | whole_product(work) | reading(work), rounds=rounds)
    table = [bare_row(work.size, timings, kind) for kind in SOURCES]
    table += fit_rows(work.size, timings, SOURCES, limits)
    for name, limit in PREDICTION_LIMITS.items():
        table.append(prediction_row(name, work.size, timings, f"bare, {TENSORS}", limit))
    return table


def naive_rows(rows: int, *, width: int, rounds: int, limit: float) -> list[Row]:
    """Processor time of a fit on one thread, over that of the loop over the same source."""
    work = workload(rows, width=width)
    tasks: dict[str, Task] = {}
    for kind in (LIST, SHUFFLED, TENSORS):
        data = source(kind, work.x, work.y, work.batch_size)
        loop = partial(naive_loop, work.model, data, torch.float64)
        tasks[f"loop, {kind}"] = partial(processor_seconds, loop)
        tasks[f"fit, {kind}"] = partial(processor_seconds, partial(fitted, work.model, data))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        timings = interleaved(tasks, rounds=rounds)
    finally:
        torch.set_num_threads(threads)
    return [
        at_most(
            f"fit on one thread, {kind}, {work.size}",
            timings.ratio(f"fit, {kind}", f"loop, {kind}"),
            limit,
            "of the processor time of a loop written by hand",
        )
        for kind in (LIST, SHUFFLED, TENSORS)
    ]


def processor_seconds(task: Task) -> float:
    """Seconds of the processor that one call takes."""
    start = time.process_time()
    task()
    return time.process_time() - start


def bare_row(size: str, timings: Timings, kind: str) -> Row:
    """Milliseconds of the bare pass over a source: the unit of the fits from it."""
    task = f"bare, {kind}"
    return for_information(
        f"{task}, {size}",
        1e3 * timings.median(task),
        "milliseconds",
        fastest=1e3 * timings.minimum(task),
    )


def prediction_row(task: str, size: str, timings: Timings, bare: str, limit: float | None) -> Row:
    """A way to predict in bare passes, beside what it takes at least."""
    row = ratio_row(task, size, timings, bare, limit)
    flops = least_predict_passes(timings, bare)
    return row.with_least(flops=flops, bytes=reading_passes(timings, bare))


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


def calibrated(
    work: Workload,
    method: str = "paper",
    *,
    batch_size: int | None = None,
    precision: str = "auto",
) -> rg.LastLayerRigidity:
    """Fitted to all but the last tenth of the rows and calibrated on those, in the paper's form."""
    valid = len(work.x) // 10
    uq = rg.LastLayerRigidity(work.model, batch_size=batch_size)
    uq.fit((work.x[:-valid], work.y[:-valid]), precision=precision)
    return uq.calibrate((work.x[-valid:], work.y[-valid:]), method=method)
