"""Peak memory of a fit as its rows grow tenfold, each in a fresh process."""

from __future__ import annotations

from benchmarks.frame.apart import measured_apart
from benchmarks.frame.results import Row, at_most, for_information


def run(*, quick: bool = False) -> list[Row]:
    """N and 10 N rows from a generator of batches."""
    rows, width = (2_000, 32) if quick else (50_000, 256)
    few, many = peaks(rows, width), peaks(10 * rows, width)
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


def peaks(rows: int, width: int) -> dict[str, int]:
    """Peak bytes before and after a fit in a process of its own."""
    return measured_apart("benchmarks.streamed_fit", rows, width)
