"""How a fit's time grows with the number of targets: they share one Gram."""

from __future__ import annotations

import rigidities as rg
from benchmarks.frame.results import Row, at_most, for_information
from benchmarks.frame.timing import interleaved
from benchmarks.frame.workload import Workload, workload

MANY = 32


def run(*, quick: bool = False) -> list[Row]:
    """32 targets against one."""
    rows, width, rounds = (2_000, 32, 2) if quick else (50_000, 256, 15)
    single = workload(rows, width=width)
    many = workload(rows, width=width, targets=MANY)
    tasks = {
        "one": lambda: fit(single),
        "many": lambda: fit(many),
        "bare one": single.bare_pass,
        "bare many": many.bare_pass,
    }
    timings = interleaved(tasks, rounds=rounds)
    return [
        at_most(
            f"fit, {MANY} targets, {many.size}",
            timings.ratio("many", "one"),
            1.15,
            "one-target fits",
            seconds=timings.median("many"),
            one_target_seconds=timings.median("one"),
        ),
        for_information(
            f"the model alone, {MANY} targets, {many.size}",
            timings.ratio("bare many", "bare one"),
            "one-target passes",
        ),
    ]


def fit(work: Workload) -> object:
    """A fit from scratch."""
    return rg.LastLayerRigidity(work.model).fit((work.x, work.y))
