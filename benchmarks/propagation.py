"""Error bars of functions of 100,000 predictions: time in bare passes, memory as the rows double.

Run as a module (``python -m benchmarks.propagation rows width threads``) it propagates
once over generated batches and prints its peak memory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from benchmarks.frame.apart import measured_apart, peak_bytes
from benchmarks.frame.fits import PASSES
from benchmarks.frame.results import Row, at_most, for_information
from benchmarks.frame.timing import Task, interleaved
from benchmarks.frame.workload import batches, workload
from benchmarks.speed import calibrated


class Generated:
    """Rows that never exist together but can be read again."""

    def __init__(self, rows: int) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return batches(self.rows)


def run(*, quick: bool = False) -> list[Row]:
    """Time first, then peak memory for N and 2 N rows, each in a fresh process."""
    rows, width, rounds = (2_000, 32, 2) if quick else (100_000, 256, 9)
    return time_rows(rows, width, rounds) + memory_rows(rows, width)


def time_rows(rows: int, width: int, rounds: int) -> list[Row]:
    """A mean, five quantities, as many quantities as predictions, and the second order."""
    work = workload(rows, width=width)
    uq = calibrated(work)
    tasks: dict[str, Task] = {
        "bare": work.bare_pass,
        "mean": lambda: uq.propagate(torch.mean, work.x),
        "five": lambda: uq.propagate(five, work.x),
        "exp": lambda: uq.propagate(torch.exp, work.x),
        "second": lambda: uq.propagate(five, work.x, second_order=True),
    }
    timings = interleaved(tasks, rounds=rounds)
    size = f"{rows:,} predictions, width {width}"
    kinds: list[tuple[str, str, float | None]] = [
        ("mean", "propagate a mean", 3),
        ("five", "propagate five quantities", 3),
        ("exp", "propagate an elementwise exponential", None),
        ("second", "propagate five quantities, second-order mean", None),
    ]
    table = []
    for task, name, limit in kinds:
        ratio = timings.ratio(task, "bare")
        seconds = timings.median(task)
        table.append(at_most(f"{name}, {size}", ratio, limit, PASSES, seconds=seconds))
    return table


def memory_rows(rows: int, width: int) -> list[Row]:
    """What further predictions add to the peak, beside the size of their features."""
    few = measured_apart("benchmarks.propagation", rows, width)
    many = measured_apart("benchmarks.propagation", 2 * rows, width)
    growth = many["after"] - few["after"]
    features = 4 * (width + 1) * rows  # bytes in float32
    return [
        at_most(
            f"growth of the peak from {rows:,} to {2 * rows:,} predictions, width {width}",
            growth / features,
            2,
            "times the features of the predictions added",
            bytes_few=few["after"],
            bytes_many=many["after"],
        ),
        for_information(f"peak for {2 * rows:,} predictions", many["after"] / 2**20, "MiB"),
    ]


def five(y: Tensor) -> Tensor:
    """Quantities of a kind that people derive."""
    return torch.stack(
        [
            y.mean(),
            y.std(),
            y[:100].sum() - y[100:200].sum(),
            torch.logsumexp(y, 0).sum(),
            (y[1:] - y[:-1]).square().mean(),
        ]
    )


def main(rows: int, width: int, threads: int) -> None:
    """Warm up on few rows, then propagate over all and report both peaks."""
    torch.set_num_threads(threads)
    uq = calibrated(workload(2_000, width=width))
    uq.propagate(five, Generated(4 * 1024))
    before = peak_bytes()
    uq.propagate(five, Generated(rows))
    print(json.dumps({"before": before, "after": peak_bytes()}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
