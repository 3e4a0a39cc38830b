"""What watching the layers costs, a layer: of a fit, and of an answer."""

from __future__ import annotations

import rigidities as rg
from benchmarks.frame.results import Row, for_information
from benchmarks.frame.timing import Ratio, Task, Timings, interleaved
from benchmarks.frame.workload import Workload, workload

LAYERS = 3
"""Places that are watched in the net: the input, and what enters the other two linear maps."""


def run(*, quick: bool = False) -> list[Row]:
    """Nets of three widths, from lists of batches."""
    widths, count, rounds = ((32,), 2_000, 2) if quick else ((64, 256, 1024), 20_000, 9)
    rows = []
    for width in widths:
        work = workload(count, width=width)
        rows += _rows(work, f"{count:,} rows, width {width}", rounds)
    return rows


def _rows(work: Workload, net: str, rounds: int) -> list[Row]:
    batches = list(work.batches())
    fresh = (work.x[:1000] + 0.01, work.y[:1000])  # rows that were not trained on
    uq = rg.LastLayerRigidity(work.model).fit(batches, novelty=True, progress=False)
    uq.calibrate(fresh, criterion="nll", progress=False)
    inputs = [x for x, _ in batches]
    plain = rg.LastLayerRigidity(work.model).fit(batches, progress=False)
    plain.calibrate(fresh, criterion="nll", progress=False)
    tasks: dict[str, Task] = {
        "bare": work.bare_pass,
        "fit": lambda: rg.LastLayerRigidity(work.model).fit(batches, progress=False),
        "watching": lambda: rg.LastLayerRigidity(work.model).fit(
            batches, novelty=True, progress=False
        ),
        "predict": lambda: plain.predict(inputs, progress=False),
        "predict with novelty": lambda: uq.predict(inputs, progress=False),
    }
    timings = interleaved(tasks, rounds=rounds)
    unit = "bare passes a layer"
    return [
        for_information(f"fit(novelty=True), {net}", _a_layer(timings, "watching", "fit"), unit),
        for_information(
            f"predict with novelty, {net}",
            _a_layer(timings, "predict with novelty", "predict"),
            unit,
        ),
    ]


def _a_layer(timings: Timings, more: str, less: str) -> Ratio:
    """The difference of two tasks in bare passes, for one layer."""
    rounds = zip(*(timings.seconds[name] for name in (more, less, "bare")), strict=True)
    return Ratio.of([(long - short) / bare / LAYERS for long, short, bare in rounds])
