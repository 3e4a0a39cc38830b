"""What watching the layers for novelty adds to a fit and to a prediction, per layer."""

from __future__ import annotations

import rigidities as rg
from benchmarks.frame.results import Row, for_information
from benchmarks.frame.timing import Task, interleaved
from benchmarks.frame.workload import Workload, workload

LAYERS = 3
"""Places of the network that are watched: the input, and the inputs of the other two layers."""


def run(*, quick: bool = False) -> list[Row]:
    """Networks of three widths, from lists of batches."""
    widths, rows, rounds = ((32,), 2_000, 2) if quick else ((64, 256, 1024), 20_000, 9)
    table = []
    for width in widths:
        table += novelty_rows(workload(rows, width=width), rounds)
    return table


def novelty_rows(work: Workload, rounds: int) -> list[Row]:
    """A fit and a prediction with novelty less those without, in bare passes per layer."""
    batches = list(work.batches())
    inputs = [x for x, _ in batches]
    fresh = (work.x[:1000] + 0.01, work.y[:1000])  # rows that were not trained on
    watching = rg.LastLayerRigidity(work.model, progress=False).fit(batches, novelty=True)
    watching.calibrate(fresh, method="paper")
    plain = rg.LastLayerRigidity(work.model, progress=False).fit(batches)
    plain.calibrate(fresh, method="paper")
    tasks: dict[str, Task] = {
        "bare": work.bare_pass,
        "fit": lambda: rg.LastLayerRigidity(work.model, progress=False).fit(batches),
        "fit with novelty": lambda: rg.LastLayerRigidity(work.model, progress=False).fit(
            batches, novelty=True
        ),
        "predict": lambda: plain.predict(inputs),
        "predict with novelty": lambda: watching.predict(inputs),
    }
    timings = interleaved(tasks, rounds=rounds)
    unit = "bare passes a layer"
    table = []
    for name, task in (("fit(novelty=True)", "fit"), ("predict with novelty", "predict")):
        added = timings.difference(f"{task} with novelty", task, "bare", factor=1 / LAYERS)
        table.append(for_information(f"{name}, {work.size}", added, unit))
    return table
