"""Fits and predictions against the bare forward pass over the same batches (plain linear head).

The paper's form (``criterion="nll"``), the fit with everything on; one row of a small net beside
it, where the host's own work is all there is.
"""

from __future__ import annotations

import platform
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rigidities as rg
from benchmarks.frame.limits import least_fit, least_predict, least_read, products, reading
from benchmarks.frame.results import Row, at_most, for_information, not_run
from benchmarks.frame.timing import Task, Timings, interleaved
from benchmarks.frame.workload import Workload, train, workload
from rigidities.data.sketch import row_hashes

PASSES = "bare passes"
ARM = platform.machine().lower() in ("arm64", "aarch64")
SAME = {"predict": 1.65, "uq(x) batch by batch": 1.65, "freeze() batch by batch": 1.6}
MUSTS: dict[int, dict[str, float]] = {
    256: {"fit, double": 2.2 if ARM else 2.4, "fit, mixed": 2.0, **SAME},
    1024: {"fit, double": 2.2, "fit, mixed": 1.8, **SAME},
}
HASHES = "hashes of the rows alone"
HASHING = 0.12
ONE_ROW = {
    "uq(x), paper's form": 100 / 18,
    "uq(x), default": 220 / 18,
    "freeze()": 3.0,
    "freeze() by AOTInductor": 3.0,
}
CALLS = 200
"""Of one row, in a round."""


def run(*, quick: bool = False) -> list[Row]:
    """Width 256 with 50,000 rows, width 1024 with 20,000, and one row of an 8-50-1 net."""
    if quick:
        small = rows_at(2_000, width=32, rounds=2, musts=MUSTS[256])
        return small + one_row(tiny(), rounds=2, compiled=False)
    narrow = rows_at(50_000, width=256, rounds=15, musts=MUSTS[256])
    wide = rows_at(20_000, width=1024, rounds=15, musts=MUSTS[1024])
    return narrow + wide + one_row(tiny(), rounds=15)


def rows_at(rows: int, *, width: int, rounds: int, musts: Mapping[str, float]) -> list[Row]:
    """Two fits, three ways to predict and the hashing, in bare passes, with their limits."""
    work = workload(rows, width=width)
    timings = interleaved(tasks_of(work), rounds=rounds)
    net = f"{rows:,} rows, width {width}"
    read = least_read(timings).median
    least = {name: least_predict(timings).median for name in musts}
    least["fit, double"] = least_fit(timings).median
    found = [
        _row(f"{name}, {net}", timings, name, limit).beside(flops=least[name], bytes=read)
        for name, limit in musts.items()
    ]
    return [*found, _row(f"{HASHES}, {net}", timings, HASHES, HASHING)]


def tasks_of(work: Workload) -> dict[str, Task]:
    """The bare pass, fresh fits, ways to predict, the hashing and the limits' own work."""
    uq, data = calibrated(work), (work.x, work.y)
    frozen = uq.freeze()
    blocks = list(zip(*(part.split(8192) for part in data), strict=True))  # as a fit hashes them
    tasks: dict[str, Task] = {
        "bare": work.bare_pass,
        "fit, double": lambda: rg.LastLayerRigidity(work.model).fit(data, precision="double"),
        "fit, mixed": lambda: rg.LastLayerRigidity(work.model).fit(data, precision="mixed"),
        "predict": lambda: uq.predict(work.x),
        "uq(x) batch by batch": lambda: [uq(x) for x, _ in work.batches()],
        "freeze() batch by batch": lambda: called(frozen, work),
        HASHES: lambda: [row_hashes([x, y], len(x)) for x, y in blocks],
    }
    return tasks | products(work) | reading(work)


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
            found.append(_row(work_done, timings, name, round(limit, 1)))
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


def _row(work: str, timings: Timings, task: str, limit: float) -> Row:
    figures = {"seconds": timings.median(task), "bare_seconds": timings.median("bare")}
    return at_most(work, timings.ratio(task, "bare"), limit, PASSES, **figures)
