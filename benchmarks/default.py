"""What the default calibration costs beside the paper's form: calls, compiled ones, itself.

Run as a module of its own (``python -m benchmarks.default rows width targets form threads``, the
form 1 for the default and 0 for the paper's) it calibrates once from a fresh fit and prints
seconds, the growth of the peak memory, and the rows that were used.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections import deque
from pathlib import Path

import torch
from torch import Tensor, nn

import rigidities as rg
from benchmarks.frame.apart import measured_apart, peak_bytes
from benchmarks.frame.fits import PASSES, on_device
from benchmarks.frame.results import Row, at_most, for_information, not_run
from benchmarks.frame.timing import Ratio, Task, Timings, clocked, interleaved
from benchmarks.frame.workload import Workload, train, workload
from benchmarks.gpu import Case, built
from benchmarks.speed import calibrated, called

PREDICTIONS = {"predict": 2.6, "uq(x) batch by batch": 1.9, "freeze() batch by batch": 1.9}
"""Bare passes of the default."""
SAMPLE = 0.2
CALIBRATIONS = {"default": "auto", "paper's form": "nll"}
SECONDS = {64: 0.7, 256: 2.0, 1024: 4.0}
"""Of the default calibration on 4,096 rows and 8,192 kept ones, by width."""
TARGETS, TIMES = 32, 6.0
"""So many targets may take so many times as long as one."""
ONE_ROW = {
    "uq(x), paper's form": 6.0,
    "uq(x), default": 9.0,
    "freeze()": 2.5,
    "freeze(), default": 6.0,
    "freeze() by AOTInductor": 2.0,
    "freeze() by AOTInductor, default": 2.0,
}
CALLS = 200
"""Of one row, in a round."""
DEVICE = {"uq(x), default": 3.5, "freeze() compiled, default": 1.3}
"""Passes of the bare model, eager or compiled likewise, over batches of 1,024 on a CUDA device."""


def run(*, quick: bool = False) -> list[Row]:
    """Predictions and the fit at width 256, one row, a CUDA device, and calibrations."""
    rows, width, rounds = (2_000, 32, 2) if quick else (50_000, 256, 15)
    work = workload(rows, width=width)
    found = [*prediction_rows(work, rounds=rounds), sample_row(work, rounds=rounds)]
    found += one_row(tiny(), rounds=rounds, compiled=not quick)
    found += device_rows(rounds=rounds)
    held, widths, many = (500, [32], (5_000, 8)) if quick else (4_096, [*SECONDS], (1_000_000, 64))
    for one in widths:
        found += calibration_rows(held, one)
    found.append(targets_row(held, widths[0]))
    seconds, growth = (name.format(*many) for name in (_CALIBRATION, _MEMORY))
    said = measured_apart("benchmarks.default", *many, 1, 1)
    found.append(for_information(seconds, said["seconds"], "s", note=said["said"]))
    return [*found, for_information(growth, said["growth"], "GiB")]


_CALIBRATION = "default calibration, {:,} rows, width {}"
_MEMORY = "growth of the peak memory, default calibration, {:,} rows, width {}"


def prediction_rows(work: Workload, *, rounds: int) -> list[Row]:
    """Predict, and loops over ``uq(x)`` and ``freeze()``, by both calibrations, in bare passes."""
    tasks: dict[str, Task] = {"bare": work.bare_pass}
    for name, criterion in CALIBRATIONS.items():
        uq = calibrated(work, criterion)
        frozen = uq.freeze()
        tasks[f"predict, {name}"] = lambda uq=uq: uq.predict(work.x)
        tasks[f"uq(x) batch by batch, {name}"] = lambda uq=uq: [uq(x) for x, _ in work.batches()]
        tasks[f"freeze() batch by batch, {name}"] = lambda module=frozen: called(module, work)
    timings = interleaved(tasks, rounds=rounds)
    size = f"{len(work.x):,} rows, width {work.model[-1].in_features}"
    return [_row(f"{name}, {size}", timings, name) for name in list(tasks)[1:]]


def _row(work: str, timings: Timings, task: str) -> Row:
    """A ratio to the bare pass; the limit is the default's."""
    ratio, seconds = timings.ratio(task, "bare"), timings.median(task)
    figures = {"seconds": seconds, "bare_seconds": timings.median("bare")}
    name, _, form = task.rpartition(", ")
    if form == "default":
        return at_most(work, ratio, PREDICTIONS[name], PASSES, **figures)
    return for_information(work, ratio, PASSES, **figures)


def sample_row(work: Workload, *, rounds: int) -> Row:
    """What the sample of training rows adds to a fit."""
    tasks: dict[str, Task] = {"bare": work.bare_pass}
    for name, options in {"with": {}, "without": {"sample": 0}}.items():
        uq = rg.LastLayerRigidity(work.model)
        tasks[name] = lambda uq=uq, options=options: uq.fit((work.x, work.y), **options)
    timings = interleaved(tasks, rounds=rounds)
    rounds_of = zip(*(timings.seconds[name] for name in ("with", "without", "bare")), strict=True)
    more = Ratio.of([(a - b) / bare for a, b, bare in rounds_of])
    size = f"{len(work.x):,} rows, width {work.model[-1].in_features}"
    figures = {name: timings.ratio(name, "bare").median for name in ("with", "without")}
    return at_most(f"fit, {size}: what the sample of rows adds", more, SAMPLE, PASSES, **figures)


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
    frozen, whole = paper.freeze(), default.freeze()
    calls = {
        "bare": _inferring(work.model, x),
        "uq(x), paper's form": lambda: paper(x),
        "uq(x), default": lambda: default(x),
        "freeze()": _inferring(frozen, x),
        "freeze(), default": _inferring(whole, x),
    }
    if compiled:
        calls["freeze() by AOTInductor"] = aot(frozen, x)
        calls["freeze() by AOTInductor, default"] = aot(whole, x)
    return calls


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


def device_rows(*, rounds: int) -> list[Row]:
    """Calls on a CUDA device, and compiled ones with CUDA graphs beside the compiled model."""
    net = "90-1024x3-1 float32, batches of 1,024, CUDA"
    if not torch.cuda.is_available():
        return [not_run(f"{name}, {net}", "there is no CUDA device") for name in DEVICE]
    work = built(Case(1024, 3, torch.float32, 1_024, {}), torch.device("cuda"))
    tasks: dict[str, Task] = {"bare": work.bare_pass}
    compiled = torch.compile(work.model, mode="reduce-overhead")
    tasks["bare compiled"] = lambda: called(compiled, work)
    for name, criterion in CALIBRATIONS.items():
        uq = calibrated(work, criterion)
        frozen = uq.freeze()
        fused = torch.compile(frozen, mode="reduce-overhead")
        tasks[f"uq(x), {name}"] = lambda uq=uq: deque(
            map(uq, (x for x, _ in work.batches())), maxlen=0
        )
        tasks[f"freeze(), {name}"] = lambda module=frozen: called(module, work)
        tasks[f"freeze() compiled, {name}"] = lambda module=fused: called(module, work)
    timings = interleaved(on_device(tasks, work.x.device), rounds=rounds)
    found = []
    for name in list(tasks)[2:]:
        unit = "bare compiled" if "compiled" in name else "bare"
        said = f"passes of the {unit.replace('bare', 'model alone').strip()}"
        ratio, seconds = timings.ratio(name, unit), timings.median(name)
        figures = {"seconds": seconds, "bare_seconds": timings.median(unit)}
        limit = DEVICE.get(name)
        text = f"{name}, {net}"
        if limit is None:
            found.append(for_information(text, ratio, said, **figures))
        else:
            found.append(at_most(text, ratio, limit, said, **figures))
    return found


def calibration_rows(rows: int, width: int) -> list[Row]:
    """Seconds and memory of the default calibration, and seconds of the paper's form."""
    found = measured_apart("benchmarks.default", rows, width, 1, 1)
    paper = measured_apart("benchmarks.default", rows, width, 1, 0)
    work, note = _CALIBRATION.format(rows, width), found["said"]
    return [
        at_most(work, found["seconds"], SECONDS.get(width, 1.0), "s", note=note),
        at_most(_MEMORY.format(rows, width), found["growth"], 1, "GiB"),
        for_information(f"paper's form: {work.partition(' ')[2]}", paper["seconds"], "s"),
    ]


def targets_row(rows: int, width: int) -> Row:
    """How many times as long as one target 32 take."""
    one, many = (
        measured_apart("benchmarks.default", rows, width, targets, 1)["seconds"]
        for targets in (1, TARGETS)
    )
    work = f"default calibration of {TARGETS} targets, {rows:,} rows, width {width}"
    return at_most(work, many / one, TIMES, "times that of one", seconds=many)


def main(rows: int, width: int, targets: int, form: int, threads: int) -> None:
    """Fit as many rows, between 9,000 and 50,000, and calibrate on others."""
    torch.set_num_threads(threads)
    few = min(max(rows, 9_000), 50_000)
    work = workload(few + rows, width=width, targets=targets)
    uq = rg.LastLayerRigidity(work.model).fit((work.x[:few], work.y[:few]))
    held, reports = (work.x[few:], work.y[few:]), []
    criterion = "auto" if form else "nll"
    before = peak_bytes()
    seconds = clocked(lambda: reports.append(uq.calibrate(held, criterion=criterion)))
    growth = (peak_bytes() - before) / 2**30
    said = str(reports[0]).splitlines()[0]
    print(json.dumps({"seconds": seconds, "growth": growth, "said": said}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
