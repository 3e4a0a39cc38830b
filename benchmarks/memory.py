"""Peak memory of a fit as its rows grow tenfold, each in a fresh process.

Run as a module (``python -m benchmarks.memory rows width threads``) it fits once over
generated batches and prints its peak memory.
"""

from __future__ import annotations

import json
import sys

import torch

import rigidities as rg
from benchmarks.frame.apart import measured_apart, peak_bytes
from benchmarks.frame.results import Row, at_most, for_information
from benchmarks.frame.workload import batches, workload


def run(*, quick: bool = False) -> list[Row]:
    """N and 10 N rows from a generator of batches."""
    rows, width = (2_000, 32) if quick else (50_000, 256)
    few = measured_apart("benchmarks.memory", rows, width)
    many = measured_apart("benchmarks.memory", 10 * rows, width)
    growth = many["after"] - few["after"]
    return [
        at_most(
            f"peak memory of a fit, {10 * rows:,} rows, width {width}",
            many["after"] / few["after"],
            1.05,
            f"of {rows:,} rows",
            bytes=many["after"],
            bytes_few=few["after"],
        ),
        for_information(f"growth of the peak over {9 * rows:,} more rows", growth / 2**20, "MiB"),
        for_information(
            f"the fit's own share of the peak, {10 * rows:,} rows",
            (many["after"] - many["before"]) / 2**20,
            "MiB above a fit of 4,096 rows",
        ),
    ]


def main(rows: int, width: int, threads: int) -> None:
    """Warm up on few rows, then fit all and report both peaks."""
    torch.set_num_threads(threads)
    model = workload(2_000, width=width).model
    rg.LastLayerRigidity(model).fit(batches(4 * 1024))
    before = peak_bytes()
    rg.LastLayerRigidity(model).fit(batches(rows))
    print(json.dumps({"before": before, "after": peak_bytes()}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
