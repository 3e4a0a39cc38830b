"""Scores in tables: the heads of their columns, their cells, and the names of calibrations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from experiments.frame.outcome import Cell, Found
from experiments.frame.wording import measured
from experiments.judging.scores import SCORES

CALIBRATIONS = {
    "paper": "paper (bins)",
    "nll": "likelihood",
    "auto": "auto",
    "best": "best",
    "best_bins": "best by bins",
    "bayes": "α² (1 + q)",
    "evidence": "evidence",
    "floor": "noise floor",
}
"""What a page calls each calibration."""


def labels(names: Iterable[str]) -> dict[str, str]:
    """What a page calls some calibrations, by their names."""
    return {name: CALIBRATIONS[name] for name in names}


def heads(names: Iterable[str]) -> list[str]:
    """The heads of the columns of some scores."""
    return [SCORES[name].head for name in names]


def cells(scores: Found, names: Iterable[str]) -> list[Cell]:
    """The cells of a row: mean and standard error of each score, None for a missing one."""
    return [measured(scores[name]) if name in scores else None for name in names]


def score_rows(
    calibrations: Found,
    names: Iterable[str],
    labelled: Mapping[str, str] = CALIBRATIONS,
    first: Iterable[str] = (),
) -> list[list[Cell]]:
    """The rows of a table: one for each calibration, and one for the constant bar.

    Args:
        calibrations: Blocks with "scores" and "constant", by the name of the calibration.
        names: Names of the scores.
        labelled: What the calibrations are called.
        first: Cells before each row.
    """
    names = list(names)
    first = list(first)
    rows: list[list[Cell]] = []
    for calibration, block in calibrations.items():
        rows.append([*first, labelled[calibration], *cells(block["scores"], names)])
    # The constant bar is the same beside every calibration.
    any_block = next(iter(calibrations.values()))
    rows.append([*first, "constant", *cells(any_block["constant"]["scores"], names)])
    return rows
