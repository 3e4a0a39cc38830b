"""Ensembles of readouts against the bare forward pass: one pass and one product for all members."""

from __future__ import annotations

import math

import torch

from benchmarks.frame.dense import features
from benchmarks.frame.fits import PASSES
from benchmarks.frame.results import Row, at_most, for_information
from benchmarks.frame.timing import Ratio, Task, Timings, interleaved
from benchmarks.frame.workload import Workload, workload
from benchmarks.speed import calibrated, called
from rigidities.last_layer.ensemble.ensemble import Ensemble

FEW, MANY = 64, 256
"""Members; a figure is asked of the few."""
LIMIT = 1.5


def run(*, quick: bool = False) -> list[Row]:
    """Width 256 with 50,000 rows, 64 members and, for information, more of them."""
    rows, width, rounds = (2_000, 32, 2) if quick else (50_000, 256, 15)
    work = workload(rows, width=width)
    timings = timed(work, rounds=rounds)
    informing = {
        f"ens(x), {MANY} members": timings.ratio("many", "bare"),
        f"ens(x), {FEW} members of two scales": timings.ratio("two scales", "bare"),
        f"ens.propagate(mean, x), {FEW} members": timings.ratio("propagate", "bare"),
        f"bare pass and one product with {FEW} members": least(timings),
    }
    table = [
        at_most(
            f"ens(x), {FEW} members, {work.size}",
            timings.ratio("few", "bare"),
            LIMIT,
            PASSES,
            seconds=timings.median("few"),
            bare_seconds=timings.median("bare"),
        )
    ]
    for name, ratio in informing.items():
        table.append(for_information(f"{name}, {work.size}", ratio, PASSES))
    return table


def timed(work: Workload, *, rounds: int) -> Timings:
    """Seconds of the bare pass, of several ensembles, and of the product alone."""
    few = ensemble(work, FEW)
    many = ensemble(work, MANY)
    two_scales = ensemble(work, FEW, method="full")
    tasks: dict[str, Task] = {
        "bare": work.bare_pass,
        "few": lambda: called(few, work),
        "many": lambda: called(many, work),
        "two scales": lambda: called(two_scales, work),
        "propagate": lambda: few.propagate(torch.mean, work.x),
        "product": product(work, few),
    }
    return interleaved(tasks, rounds=rounds)


def product(work: Workload, ens: Ensemble) -> Task:
    """The product that no ensemble can do without, as often as there are batches."""
    rows = features(work, work.x[: work.batch_size]).float()  # (B, D + 1)
    weights = ens.deviations[:, 0].float()  # (members, D + 1)
    batches = math.ceil(len(work.x) / work.batch_size)

    def task() -> None:
        for _ in range(batches):
            torch.mm(weights, rows.mT)

    return task


def least(timings: Timings) -> Ratio:
    """Bare passes that 64 members take at least: one pass and the product."""
    product_passes = timings.ratio("product", "bare")
    return Ratio(
        median=1 + product_passes.median,
        lower=1 + product_passes.lower,
        upper=1 + product_passes.upper,
        rounds=product_passes.rounds,
    )


def ensemble(work: Workload, members: int, *, method: str = "paper") -> Ensemble:
    """Independent members of a calibrated fit: of one scale, or of the default's two."""
    generator = torch.Generator().manual_seed(0)
    return calibrated(work, method).ensemble(members, generator=generator)
