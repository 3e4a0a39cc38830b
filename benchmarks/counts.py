"""What a batch, a row and a calibration take, in counts that no noisy machine can blur."""

from __future__ import annotations

from benchmarks.frame.counts import count_rows, path_rows
from benchmarks.frame.results import Row


def run(*, quick: bool = False) -> list[Row]:
    """Python calls, levels, files, operations and forward calls of a small network."""
    paths = path_rows()  # first: counting operations loads torch's compiler, which adds a function
    return paths if quick else [*paths, *count_rows()]
