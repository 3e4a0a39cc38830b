"""What the default calibration costs beside the paper's form: calls, compiled ones, itself.

Run as a module (``python -m benchmarks.default rows width targets default threads``, with 1 for the
default and 0 for the paper's form) it calibrates once from a fresh fit and prints seconds, the
growth of the peak memory, and the rows that were used.
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import rigidities as rg
from benchmarks.frame.apart import measured_apart, peak_bytes
from benchmarks.frame.fits import PASSES, on_device
from benchmarks.frame.results import Row, at_most, for_information, not_run
from benchmarks.frame.timing import Task, Timings, clocked, interleaved
from benchmarks.frame.workload import Workload, train, workload
from benchmarks.gpu import Case, case_workload, consumed
from benchmarks.speed import calibrated, called

METHODS = {"default": "full", "paper's form": "paper"}
"""The method of each calibration."""
PREDICTION_LIMITS = {
    "predict, default": 2.6,
    "uq(x) batch by batch, default": 1.9,
    "freeze() batch by batch, default": 1.9,
}
"""Bare passes of a prediction."""
SAMPLE_LIMIT = 0.1
"""Bare passes that the sample of training rows may add to a fit."""
SECONDS_LIMITS = {64: 2.4, 256: 2.5, 1024: 5.0}
"""Of the default calibration on 4,096 rows and 9,000 kept ones, by width."""
TARGETS = 32
TARGETS_LIMIT = 6.0
"""So many targets may take so many times as long as one."""
ONE_ROW_LIMITS = {
    "uq(x), paper's form": 6.0,
    "uq(x), default": 9.0,
    "freeze()": 2.5,
    "freeze(), default": 6.0,
    "freeze() by AOTInductor": 2.0,
    "freeze() by AOTInductor, default": 2.0,
}
"""Bare passes of one row."""
CALLS = 200
"""Calls of one row in a round."""
DEVICE_LIMITS = {"uq(x), default": 3.5, "freeze() compiled, default": 1.3}
"""Passes of the bare model, eager or compiled likewise, over batches of 1,024 on a CUDA device."""


def run(*, quick: bool = False) -> list[Row]:
    """Predictions and the fit at width 256, one row, a CUDA device, and calibrations."""
    rows, width, rounds = (2_000, 32, 2) if quick else (50_000, 256, 15)
    valid_rows, widths = (500, [32]) if quick else (4_096, list(SECONDS_LIMITS))
    many_rows, many_width = (5_000, 8) if quick else (1_000_000, 64)
    work = workload(rows, width=width)
    table = prediction_rows(work, rounds=rounds)
    table.append(sample_row(work, rounds=rounds))
    table += one_row_rows(tiny_workload(), rounds=rounds, compiled=not quick)
    table += device_rows(rounds=rounds)
    for calibrated_width in widths:
        table += calibration_rows(valid_rows, calibrated_width)
    table.append(targets_row(valid_rows, widths[0]))
    table += many_rows_rows(many_rows, many_width)
    return table


def prediction_rows(work: Workload, *, rounds: int) -> list[Row]:
    """Predict, and loops over ``uq(x)`` and ``freeze()``, by both calibrations, in bare passes."""
    predicting: dict[str, Task] = {}
    for name, method in METHODS.items():
        uq = calibrated(work, method)
        predicting[f"predict, {name}"] = partial(uq.predict, work.x)
        predicting[f"uq(x) batch by batch, {name}"] = partial(answers, uq, work)
        predicting[f"freeze() batch by batch, {name}"] = partial(called, uq.freeze(), work)
    timings = interleaved({"bare": work.bare_pass, **predicting}, rounds=rounds)
    table = []
    for task in predicting:
        row = at_most(
            f"{task}, {work.size}",
            timings.ratio(task, "bare"),
            PREDICTION_LIMITS.get(task),
            PASSES,
            seconds=timings.median(task),
            bare_seconds=timings.median("bare"),
        )
        table.append(row)
    return table


def answers(uq: rg.LastLayerRigidity, work: Workload) -> list[tuple[Tensor, Tensor]]:
    """``uq(x)`` of all batches."""
    return [uq(x) for x, _ in work.batches()]


def sample_row(work: Workload, *, rounds: int) -> Row:
    """What the sample of training rows adds to a fit."""
    uq = rg.LastLayerRigidity(work.model)
    without = rg.LastLayerRigidity(work.model)
    tasks: dict[str, Task] = {
        "bare": work.bare_pass,
        "with": lambda: uq.fit((work.x, work.y)),
        "without": lambda: without.fit((work.x, work.y), keep_rows=0),
    }
    timings = interleaved(tasks, rounds=rounds)
    figures = {name: timings.ratio(name, "bare").median for name in ("with", "without")}
    return at_most(
        f"fit, {work.size}: what the sample of rows adds",
        timings.difference("with", "without", "bare"),
        SAMPLE_LIMIT,
        PASSES,
        **figures,
    )


def tiny_workload() -> Workload:
    """An 8-50-1 network, whose pass costs next to nothing."""
    wide = workload(2_000, width=8, inputs=8, epochs=0)
    model = nn.Sequential(nn.Linear(8, 50), nn.SiLU(), nn.Linear(50, 1))
    work = Workload(model, wide.x, wide.y, wide.batch_size)
    train(work, epochs=20)
    return work


def one_row_rows(work: Workload, *, rounds: int, compiled: bool = True) -> list[Row]:
    """A single row of a small network, in bare passes of it and in microseconds."""
    calls = one_row_calls(work, work.x[:1], compiled=compiled)
    tasks = {name: repeated(call) for name, call in calls.items()}
    timings = interleaved(tasks, rounds=rounds)
    size = "one row, 8-50-1"
    unit = "microseconds"
    table = [for_information(f"bare, {size}", microseconds(timings, "bare"), unit)]
    for name, limit in ONE_ROW_LIMITS.items():
        title = f"{name}, {size}"
        if name not in calls:
            table.append(not_run(title, "it takes a C++ compiler and time: not in quick runs"))
            continue
        table.append(at_most(title, timings.ratio(name, "bare"), limit, PASSES))
        table.append(for_information(title, microseconds(timings, name), unit))
    return table


def one_row_calls(work: Workload, x: Tensor, *, compiled: bool) -> dict[str, Task]:
    """One call each of the bare model, the eager wrappers and the frozen modules."""
    paper = calibrated(work)
    default = calibrated(work, "full")
    frozen_paper = paper.freeze()
    frozen_default = default.freeze()
    calls: dict[str, Task] = {
        "bare": inferring(work.model, x),
        "uq(x), paper's form": lambda: paper(x),
        "uq(x), default": lambda: default(x),
        "freeze()": inferring(frozen_paper, x),
        "freeze(), default": inferring(frozen_default, x),
    }
    if compiled:
        calls["freeze() by AOTInductor"] = compiled_ahead(frozen_paper, x)
        calls["freeze() by AOTInductor, default"] = compiled_ahead(frozen_default, x)
    return calls


def inferring(module: nn.Module, x: Tensor) -> Task:
    """A call of the module in inference mode."""

    def call() -> None:
        with torch.inference_mode():
            module(x)

    return call


def compiled_ahead(module: nn.Module, x: Tensor) -> Task:
    """A call of the module compiled ahead of time, for this batch size alone."""
    with tempfile.TemporaryDirectory() as folder:
        exported = torch.export.export(module, (x,))
        path = str(Path(folder) / "frozen.pt2")
        package = torch._inductor.aoti_compile_and_package(exported, package_path=path)
        loaded = torch._inductor.aoti_load_package(package)
    return lambda: loaded(x)


def repeated(call: Task) -> Task:
    """Many calls, since one would be too short for the clock."""

    def task() -> None:
        for _ in range(CALLS):
            call()

    return task


def microseconds(timings: Timings, task: str) -> float:
    """Of one call in the median round."""
    return 1e6 / CALLS * timings.median(task)


def device_rows(*, rounds: int) -> list[Row]:
    """Calls on a CUDA device, and compiled ones with CUDA graphs beside the compiled model."""
    size = "90-1024x3-1 float32, batches of 1,024, CUDA"
    if not torch.cuda.is_available():
        return [not_run(f"{name}, {size}", "there is no CUDA device") for name in DEVICE_LIMITS]
    case = Case(width=1024, layers=3, dtype=torch.float32, batch=1_024, fits={})
    work = case_workload(case, torch.device("cuda"))
    compiled_model = torch.compile(work.model, mode="reduce-overhead")
    bare: dict[str, Task] = {
        "bare": work.bare_pass,
        "bare compiled": partial(called, compiled_model, work),
    }
    predicting: dict[str, Task] = {}
    for name, method in METHODS.items():
        uq = calibrated(work, method)
        frozen = uq.freeze()
        compiled = torch.compile(frozen, mode="reduce-overhead")
        predicting[f"uq(x), {name}"] = partial(consumed, uq, work)
        predicting[f"freeze(), {name}"] = partial(called, frozen, work)
        predicting[f"freeze() compiled, {name}"] = partial(called, compiled, work)
    timings = interleaved(on_device(bare | predicting, work.x.device), rounds=rounds)
    table = []
    for task in predicting:
        if "compiled" in task:
            base, unit = "bare compiled", "passes of the model alone compiled"
        else:
            base, unit = "bare", "passes of the model alone"
        row = at_most(
            f"{task}, {size}",
            timings.ratio(task, base),
            DEVICE_LIMITS.get(task),
            unit,
            seconds=timings.median(task),
            bare_seconds=timings.median(base),
        )
        table.append(row)
    return table


def calibration_rows(rows: int, width: int) -> list[Row]:
    """Seconds and memory of the default calibration, and seconds of the paper's form."""
    default = calibrated_apart(rows, width)
    paper = calibrated_apart(rows, width, default=False)
    size = f"{rows:,} rows, width {width}"
    limit = SECONDS_LIMITS.get(width, 1.0)
    return [
        at_most(
            f"default calibration, {size}", default["seconds"], limit, "s", note=default["report"]
        ),
        at_most(
            f"growth of the peak memory, default calibration, {size}", default["growth"], 1, "GiB"
        ),
        for_information(f"paper's form: calibration, {size}", paper["seconds"], "s"),
    ]


def targets_row(rows: int, width: int) -> Row:
    """How many times as long as one target 32 take."""
    single_seconds = calibrated_apart(rows, width)["seconds"]
    many_seconds = calibrated_apart(rows, width, targets=TARGETS)["seconds"]
    return at_most(
        f"default calibration of {TARGETS} targets, {rows:,} rows, width {width}",
        many_seconds / single_seconds,
        TARGETS_LIMIT,
        "times that of one",
        seconds=many_seconds,
    )


def many_rows_rows(rows: int, width: int) -> list[Row]:
    """Seconds and memory of the default calibration on very many rows."""
    figures = calibrated_apart(rows, width)
    work = f"default calibration, {rows:,} rows, width {width}"
    return [
        for_information(work, figures["seconds"], "s", note=figures["report"]),
        for_information(f"growth of the peak memory, {work}", figures["growth"], "GiB"),
    ]


def calibrated_apart(
    rows: int, width: int, *, targets: int = 1, default: bool = True
) -> dict[str, Any]:
    """The figures of one calibration in a process of its own."""
    return measured_apart("benchmarks.default", rows, width, targets, int(default))


def main(rows: int, width: int, targets: int, default: int, threads: int) -> None:
    """Fit as many rows, between 9,000 and 50,000, and calibrate on others."""
    torch.set_num_threads(threads)
    train_rows = min(max(rows, 9_000), 50_000)
    work = workload(train_rows + rows, width=width, targets=targets)
    uq = rg.LastLayerRigidity(work.model).fit((work.x[:train_rows], work.y[:train_rows]))
    validation_rows = (work.x[train_rows:], work.y[train_rows:])
    method = "full" if default else "paper"
    before = peak_bytes()
    seconds = clocked(lambda: uq.calibrate(validation_rows, method=method))
    growth = (peak_bytes() - before) / 2**30
    first_line = str(uq.calibration_report).splitlines()[0]
    print(json.dumps({"seconds": seconds, "growth": growth, "report": first_line}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
