"""What the default calibration costs beside the paper's form: predictions, the fit, itself.

Run as a module of its own (``python -m benchmarks.default rows width threads``) it calibrates once
from a fresh fit and prints seconds, the growth of the peak memory, and the rows that were used.
"""

from __future__ import annotations

import json
import sys

import torch

import rigidities as rg
from benchmarks.frame.apart import measured_apart, peak_bytes
from benchmarks.frame.fits import PASSES
from benchmarks.frame.results import Row, at_most, for_information
from benchmarks.frame.timing import Ratio, Task, Timings, clocked, interleaved
from benchmarks.frame.workload import Workload, workload
from benchmarks.speed import calibrated

PREDICTIONS, SAMPLE = 2.6, 0.2
CALIBRATIONS = {"default": "auto", "paper's form": "nll"}


def run(*, quick: bool = False) -> list[Row]:
    """Predictions and the fit at width 256, and calibrations of few and of many rows."""
    rows, width, rounds = (2_000, 32, 2) if quick else (50_000, 256, 15)
    sizes = [(500, 32), (5_000, 8)] if quick else [(10_000, 256), (1_000_000, 64)]
    work = workload(rows, width=width)
    return [
        *prediction_rows(work, rounds=rounds),
        sample_row(work, rounds=rounds),
        *(row for size in sizes for row in calibration_rows(*size, limited=size == sizes[0])),
    ]


def prediction_rows(work: Workload, *, rounds: int) -> list[Row]:
    """Predict and a loop over ``uq(x)`` by both calibrations, in bare passes."""
    tasks: dict[str, Task] = {"bare": work.bare_pass}
    for name, criterion in CALIBRATIONS.items():
        uq = calibrated(work, criterion)
        tasks[f"predict, {name}"] = lambda uq=uq: uq.predict(work.x)
        tasks[f"uq(x) batch by batch, {name}"] = lambda uq=uq: [uq(x) for x, _ in work.batches()]
    timings = interleaved(tasks, rounds=rounds)
    size = f"{len(work.x):,} rows, width {work.model[-1].in_features}"
    return [_row(f"{name}, {size}", timings, name, PREDICTIONS) for name in list(tasks)[1:]]


def _row(work: str, timings: Timings, task: str, limit: float) -> Row:
    """A ratio to the bare pass; the limit is the default's."""
    ratio, seconds = timings.ratio(task, "bare"), timings.median(task)
    figures = {"seconds": seconds, "bare_seconds": timings.median("bare")}
    if task.endswith("default"):
        return at_most(work, ratio, round(limit, 1), PASSES, **figures)
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


def calibration_rows(rows: int, width: int, *, limited: bool) -> list[Row]:
    """Seconds and memory of the default calibration, and the rows it was fitted to."""
    found = measured_apart("benchmarks.default", rows, width)
    work = f"default calibration, {rows:,} rows, width {width}"
    memory, note = f"growth of the peak memory, {work}", found["said"]
    if limited:
        seconds = at_most(work, found["seconds"], 20, "s", note=note)
        return [seconds, at_most(memory, found["growth"], 1, "GiB")]
    seconds = for_information(work, found["seconds"], "s", note=note)
    return [seconds, for_information(memory, found["growth"], "GiB")]


def main(rows: int, width: int, threads: int) -> None:
    """Fit as many rows, at most 50,000, and calibrate on others."""
    torch.set_num_threads(threads)
    few = min(rows, 50_000)
    work = workload(few + rows, width=width)
    uq = rg.LastLayerRigidity(work.model).fit((work.x[:few], work.y[:few]))
    held, reports = (work.x[few:], work.y[few:]), []
    before = peak_bytes()
    seconds = clocked(lambda: reports.append(uq.calibrate(held)))
    growth = (peak_bytes() - before) / 2**30
    said = str(reports[0]).splitlines()[0]
    print(json.dumps({"seconds": seconds, "growth": growth, "said": said}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
