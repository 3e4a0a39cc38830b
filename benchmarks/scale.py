"""Time and memory of a fit as rows, features, targets and processes grow.

Rows come from a generator and never exist together. Run as a module (``python -m benchmarks.scale
rows width targets repeats threads``) it fits and prints seconds and peak memory.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import rigidities as rg
from benchmarks.frame.apart import measured_apart, peak_bytes, resident_bytes
from benchmarks.frame.ranks import job
from benchmarks.frame.results import Row, at_least, at_most, for_information
from benchmarks.frame.timing import Task, clocked, interleaved

INPUTS = 32
BATCH = 1024
MIB = 2**20
FEW = 4 * BATCH
"""Rows of the fit that warms a process up."""


def run(*, quick: bool = False) -> list[Row]:
    """Growth in all four; the full sizes take about a quarter of an hour on two cores."""
    if quick:
        table = by_rows({2_000: 1, 4_000: 1}, width=16)
        return table + by_processes(6_000, width=16, rounds=1)
    table = by_rows({10**4: 9, 10**5: 9, 10**6: 3, 10**7: 1}, width=256)
    for width in (64, 128, 256, 512, 1024, 2048):
        rows = 10**6 if width < 512 else 10**5
        table.append(fit_row(fitted_apart(rows, width), rows, width))
    for targets in (4, 16, 64):  # which share one Gram
        figures = fitted_apart(10**5, 256, targets=targets)
        table.append(fit_row(figures, 10**5, 256, targets=targets))
    return table + by_processes(1_200_000, width=256, rounds=5)


def by_rows(repeats: dict[int, int], *, width: int) -> list[Row]:
    """The same network for more and more rows: seconds per row, the cost of every fit, memory.

    Args:
        repeats: How often a fit is timed, by its number of rows.
        width: The width of the network.
    """
    figures = {rows: fitted_apart(rows, width, repeats=count) for rows, count in repeats.items()}
    seconds = {rows: figures[rows]["seconds"] for rows in figures}
    steps = list(pairwise(seconds))
    if len(steps) > 1:
        steps = steps[1:]  # the clock is too coarse for the fewest rows
    further_row = {more: (seconds[more] - seconds[fewer]) / (more - fewer) for fewer, more in steps}
    fewest, most = min(seconds), max(seconds)
    fixed = seconds[fewest] - fewest * statistics.median(further_row.values())
    first = figures[fewest]["first"]
    table = [
        at_most(
            f"what each further row costs, {steps[0][0]:,} to {most:,} rows, width {width}",
            max(further_row.values()) / min(further_row.values()),
            1.1,
            "of the least",
            further_row=further_row,
            seconds=seconds,
        ),
        at_most(
            f"peak memory of a fit above the model's, {most:,} rows, width {width}",
            figures[most]["growth"] / MIB,
            250,
            "MiB",
            bytes={rows: figures[rows]["growth"] for rows in figures},
        ),
        for_information(
            f"what every fit costs beside its rows, width {width}",
            1e3 * fixed,
            "ms",
            note=f"The first fit of a process, to {FEW:,} rows, took {first:.2f} s.",
        ),
    ]
    for rows in figures:
        table.append(fit_row(figures[rows], rows, width))
    return table


def fit_row(figures: dict[str, Any], rows: int, width: int, *, targets: int = 1) -> Row:
    """Time and memory of one fit that `fitted_apart` has measured."""
    noun = "target" if targets == 1 else "targets"
    model_alone = f"{1e6 * figures['bare']:.2f} of the model alone"
    memory = f"{figures['growth'] / MIB:.0f} MiB above the model"
    return for_information(
        f"fit, {rows:,} rows, width {width}, {targets} {noun}",
        1e6 * figures["seconds"] / rows,
        f"microseconds a row ({model_alone}), {memory}",
        **figures,
    )


def by_processes(rows: int, *, width: int, rounds: int) -> list[Row]:
    """One process of one thread against two, with half of the rows each."""
    with tempfile.TemporaryDirectory() as name:
        alone_folder = Path(name, "1")
        pair_folder = Path(name, "2")
        tasks: dict[str, Task] = {
            "1": lambda: together(1, alone_folder, rows, width),
            "2": lambda: together(2, pair_folder, rows, width),
        }
        timings = interleaved(tasks, rounds=rounds, warmups=0)
        alone_gram = torch.load(alone_folder / "gram.pt")
        pair_gram = torch.load(pair_folder / "gram.pt")
        fixed = together(2, pair_folder, 2 * BATCH, width)
    size = f"{rows:,} rows, width {width}"
    difference = float((alone_gram - pair_gram).norm() / alone_gram.norm())
    return [
        at_least(
            f"fit by 2 processes of one thread, {size}",
            timings.ratio("1", "2"),
            1.6,
            "times one's speed",
            seconds_1=timings.median("1"),
            seconds_2=timings.median("2"),
        ),
        at_most(
            f"Gram of 2 processes against that of one, {size}", difference, 1e-12, "of its norm"
        ),
        for_information(
            f"fit by 2 processes to {BATCH:,} rows each, width {width}", 1e3 * fixed, "ms"
        ),
    ]


def together(size: int, folder: Path, rows: int, width: int) -> float:
    """Seconds of a fit by so many processes, the slowest of them; the Gram is left in a file."""
    folder.mkdir(exist_ok=True)
    (folder / "store").unlink(missing_ok=True)
    processes = job(fit_share, size, folder, rows, width)
    for process in processes:
        process.join()
        if process.exitcode:
            raise RuntimeError(f"A process of {size} ended with {process.exitcode}.")
    return max(float((folder / f"{rank}.seconds").read_text()) for rank in range(size))


def fit_share(rank: int, size: int, folder: Path, rows: int, width: int) -> None:
    """The work of one rank: a fit to batches number rank, rank + size, ..."""
    model = network(width)
    rg.LastLayerRigidity(model, process_group=False).fit(stream(FEW))
    uq = rg.LastLayerRigidity(model)
    dist.barrier()
    seconds = clocked(lambda: uq.fit(stream(rows, first=rank, step=size)))
    (folder / f"{rank}.seconds").write_text(str(seconds))
    if rank == 0:
        torch.save(uq.gram.matrix, folder / "gram.pt")
    dist.destroy_process_group()


def network(width: int, targets: int = 1) -> nn.Sequential:
    """Seeded and untrained: what it predicts does not matter here."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(INPUTS, width),
        nn.SiLU(),
        nn.Linear(width, width),
        nn.SiLU(),
        nn.Linear(width, targets),
    )


def stream(
    rows: int, targets: int = 1, *, first: int = 0, step: int = 1
) -> Iterator[tuple[Tensor, Tensor]]:
    """Batches number first, first + step, ...; a batch is the same in every process."""
    for number in range(first, math.ceil(rows / BATCH), step):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(min(BATCH, rows - number * BATCH), INPUTS, generator=generator)
        yield x, x[:, :1].sin().expand(-1, targets)


def fitted_apart(rows: int, width: int, *, targets: int = 1, repeats: int = 1) -> dict[str, Any]:
    """The figures of a fit in a fresh process."""
    return measured_apart("benchmarks.scale", rows, width, targets, repeats)


def main(rows: int, width: int, targets: int, repeats: int, threads: int) -> None:
    """Seconds and memory of the model alone, of the first fit, and of fits to all rows."""
    torch.set_num_threads(threads)
    model = network(width, targets)

    def bare(rows: int) -> None:
        with torch.inference_mode():
            for x, _ in stream(rows, targets):
                model(x)

    def fit(rows: int) -> None:
        rg.LastLayerRigidity(model).fit(stream(rows, targets))

    bare(BATCH)
    before = resident_bytes()
    first = clocked(lambda: fit(FEW))
    seconds = [clocked(lambda: fit(rows)) for _ in range(repeats)]
    growth = peak_bytes() - before
    bare_rows = min(rows, 10**5)
    figures = {
        "first": first,
        "seconds": statistics.median(seconds),
        "growth": growth,
        "bare": clocked(lambda: bare(bare_rows)) / bare_rows,
        "all": seconds,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
