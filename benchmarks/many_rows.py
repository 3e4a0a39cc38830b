"""Time and memory of calibrating on a million rows, whatever the criterion and the noise.

Run as a module of its own (``python -m benchmarks.many_rows rows width threads``) it calibrates by
each and prints seconds and the growth of the peak memory.
"""

from __future__ import annotations

import json
import sys
from itertools import product

import torch

import rigidities as rg
from benchmarks.frame.apart import measured_apart, peak_bytes
from benchmarks.frame.results import Row, at_most
from benchmarks.frame.timing import clocked
from benchmarks.frame.workload import workload

CRITERIA, NOISES = ("nll", "crps", "bins", "absolute", "evidence"), ("none", "constant", "bayes")


def run(*, quick: bool = False) -> list[Row]:
    """The slowest of all, and the peak of all."""
    rows, width = (5_000, 8) if quick else (1_000_000, 64)
    found = measured_apart("benchmarks.many_rows", rows, width)
    slowest = max(found["seconds"], key=lambda name: found["seconds"][name])
    size = f"{rows:,} rows, width {width}"
    return [
        at_most(
            f"calibration, {size}, the slowest of {len(found['seconds'])}: {slowest}",
            found["seconds"][slowest],
            10,
            "s",
            **found["seconds"],
        ),
        at_most(f"growth of the peak memory, calibration, {size}", found["growth"], 1, "GiB"),
    ]


def main(rows: int, width: int, threads: int) -> None:
    """Calibrate by each criterion with each noise."""
    torch.set_num_threads(threads)
    work = workload(rows, width=width)
    few = 5 * rows // 100
    uq = rg.LastLayerRigidity(work.model).fit((work.x[:few], work.y[:few]))
    held = (work.x + 0.1, work.y)
    before, seconds = peak_bytes(), {}
    for criterion, noise in product(CRITERIA, NOISES):
        task = lambda c=criterion, n=noise: uq.calibrate(held, criterion=c, noise=n)  # noqa: E731
        seconds[f"{criterion}, {noise} noise"] = clocked(task)
    print(json.dumps({"seconds": seconds, "growth": (peak_bytes() - before) / 2**30}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
