"""Ensembles of readouts against the bare forward pass: one pass and one product for all members."""

from __future__ import annotations

import torch

from benchmarks.frame.dense import features
from benchmarks.frame.fits import PASSES
from benchmarks.frame.results import Row, at_most, for_information
from benchmarks.frame.timing import Ratio, Task, Timings, interleaved
from benchmarks.frame.workload import Workload, workload
from benchmarks.speed import calibrated
from rigidities.last_layer.ensemble.ensemble import Ensemble

LIMIT = 1.5


def run(*, quick: bool = False) -> list[Row]:
    """Width 256 with 50,000 rows, 64 members and, for information, more of them."""
    rows, width, rounds = (2_000, 32, 2) if quick else (50_000, 256, 15)
    work = workload(rows, width=width)
    counts = (64, 256)
    timings = timed(work, counts, rounds=rounds)
    net = f"{rows:,} rows, width {width}"
    first, *more = [f"ens(x), {n} members" for n in counts]
    figures = {"seconds": timings.median(first), "bare_seconds": timings.median("bare")}
    measured = [at_most(f"{first}, {net}", timings.ratio(first, "bare"), LIMIT, PASSES, **figures)]
    informing = {name: timings.ratio(name, "bare") for name in more}
    informing["ens(x), 64 members of two scales"] = timings.ratio("two scales", "bare")
    informing["ens.propagate(mean, x), 64 members"] = timings.ratio("propagate", "bare")
    informing["bare pass and one product with 64 members"] = least(timings)
    return measured + [for_information(f"{k}, {net}", v, PASSES) for k, v in informing.items()]


def timed(work: Workload, counts: tuple[int, ...], *, rounds: int) -> Timings:
    """Seconds of the bare pass, of ensembles of several sizes, and of the product alone."""
    ensembles = [ensemble(work, n) for n in counts]
    tasks: dict[str, Task] = {"bare": work.bare_pass}
    for ens in ensembles:
        tasks[f"ens(x), {len(ens)} members"] = passes(work, ens)
    tasks["two scales"] = passes(work, ensemble(work, counts[0], criterion="auto"))
    tasks["propagate"] = lambda: ensembles[0].propagate(torch.mean, work.x)
    tasks["product"] = product(work, ensembles[0])
    return interleaved(tasks, rounds=rounds)


def passes(work: Workload, ens: Ensemble) -> Task:
    """All members over all batches."""

    def task() -> None:
        with torch.inference_mode():
            for x, _ in work.batches():
                ens(x)

    return task


def product(work: Workload, ens: Ensemble) -> Task:
    """The product that no ensemble can do without, as often as there are batches."""
    rows = features(work, work.x[: work.batch_size]).float()
    weights = ens.deviations[:, 0].float()
    batches = -(-len(work.x) // work.batch_size)

    def task() -> None:
        for _ in range(batches):
            torch.mm(weights, rows.mT)

    return task


def least(timings: Timings) -> Ratio:
    """Bare passes that 64 members take at least."""
    more = timings.ratio("product", "bare")
    return Ratio(1 + more.median, 1 + more.lower, 1 + more.upper, more.rounds)


def ensemble(work: Workload, n: int, *, criterion: str = "nll") -> Ensemble:
    """Independent members of a calibrated fit: of one scale, or of the default's two."""
    return calibrated(work, criterion).ensemble(n, generator=torch.Generator().manual_seed(0))
