"""What a batch, a row and a calibration take, in counts that no noisy machine can blur."""

from __future__ import annotations

from benchmarks.frame.counts import count_rows, path_rows
from benchmarks.frame.results import Row


def run(*, quick: bool = False) -> list[Row]:
    """Operations, Python calls, levels, files and forward calls of a small network."""
    return path_rows() if quick else [*count_rows(), *path_rows()]
