"""Fit and predict against the bare forward pass over the same batches (plain linear head)."""

from __future__ import annotations

import rigidities as rg
from benchmarks.frame.limits import least_fit, least_predict, products
from benchmarks.frame.results import Row, at_most, for_information
from benchmarks.frame.timing import Task, Timings, interleaved
from benchmarks.frame.workload import Workload, workload

PASSES = "bare passes"


def run(*, quick: bool = False) -> list[Row]:
    """Width 256 with 50,000 rows and width 1024 with 20,000."""
    if quick:
        return rows_at(2_000, width=32, rounds=2, limits=(2.2, 1.65))
    narrow = rows_at(50_000, width=256, rounds=15, limits=(2.2, 1.65))
    return narrow + rows_at(20_000, width=1024, rounds=9, limits=(2.3, 1.65))


def rows_at(rows: int, *, width: int, rounds: int, limits: tuple[float, float]) -> list[Row]:
    """Fit, predict and a loop over ``uq(x)``, in bare passes."""
    work = workload(rows, width=width)
    timings = timed(work, rounds=rounds)
    net = f"{rows:,} rows, width {width}"
    names = {"fit": limits[0], "predict": limits[1], "uq(x) batch by batch": limits[1]}
    measured = [
        at_most(
            f"{name}, {net}",
            timings.ratio(name, "bare"),
            limit,
            PASSES,
            seconds=timings.median(name),
            bare_seconds=timings.median("bare"),
        )
        for name, limit in names.items()
    ]
    least = {
        "bare pass and half of a float64 product (limit of a fit)": least_fit(timings),
        "bare pass and half of a float32 product (limit of predict)": least_predict(timings),
    }
    return measured + [for_information(f"{k}, {net}", v, PASSES) for k, v in least.items()]


def timed(work: Workload, *, rounds: int) -> Timings:
    """Seconds of the bare pass, a fresh fit, two ways to predict and the limits' products."""
    uq = calibrated(work)

    def call() -> None:
        for x, _ in work.batches():
            uq(x)

    tasks: dict[str, Task] = {
        "bare": work.bare_pass,
        "fit": lambda: rg.LastLayerRigidity(work.model).fit((work.x, work.y)),
        "predict": lambda: uq.predict(work.x),
        "uq(x) batch by batch": call,
    }
    return interleaved(tasks | products(work), rounds=rounds)


def calibrated(work: Workload, criterion: str = "nll") -> rg.LastLayerRigidity:
    """Fitted to all but the last tenth of the rows and calibrated on those; the paper's form."""
    valid = len(work.x) // 10
    uq = rg.LastLayerRigidity(work.model).fit((work.x[:-valid], work.y[:-valid]))
    uq.calibrate((work.x[-valid:], work.y[-valid:]), criterion=criterion)
    return uq
