"""Time and memory of calibrating on a million rows, whatever the criterion and the noise.

Run as a module (``python -m benchmarks.many_rows rows width threads``) it calibrates by every
criterion with every noise and prints the seconds and the growth of the peak memory.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from itertools import product

import torch

import rigidities as rg
from benchmarks.frame.apart import measured_apart, peak_bytes
from benchmarks.frame.results import Row, at_most
from benchmarks.frame.timing import clocked
from benchmarks.frame.workload import workload

CRITERIA = ("nll", "bins", "evidence")
NOISES = ("none", "constant", "bayes")


def run(*, quick: bool = False) -> list[Row]:
    """The slowest calibration, and the peak of memory over all of them."""
    rows, width = (5_000, 8) if quick else (1_000_000, 64)
    figures = measured_apart("benchmarks.many_rows", rows, width)
    seconds = figures["seconds"]
    slowest = max(seconds, key=seconds.__getitem__)
    size = f"{rows:,} rows, width {width}"
    return [
        at_most(
            f"calibration, {size}, the slowest of {len(seconds)}: {slowest}",
            seconds[slowest],
            10,
            "s",
            **seconds,
        ),
        at_most(f"growth of the peak memory, calibration, {size}", figures["growth"], 1, "GiB"),
    ]


def main(rows: int, width: int, threads: int) -> None:
    """Calibrate by each criterion with each noise."""
    torch.set_num_threads(threads)
    work = workload(rows, width=width)
    few = 5 * rows // 100
    uq = rg.LastLayerRigidity(work.model).fit((work.x[:few], work.y[:few]))
    validation_rows = (work.x + 0.1, work.y)
    before = peak_bytes()
    seconds = {}
    for criterion, noise in product(CRITERIA, NOISES):
        method = rg.Paper(criterion=criterion, noise=noise)
        calibrate = partial(uq.calibrate, validation_rows, method=method)
        seconds[f"{criterion}, {noise} noise"] = clocked(calibrate)
    print(json.dumps({"seconds": seconds, "growth": (peak_bytes() - before) / 2**30}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
