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
"""What a page calls them."""


def labels(names: Iterable[str]) -> dict[str, str]:
    """The names of some calibrations."""
    return {name: CALIBRATIONS[name] for name in names}


def heads(names: Iterable[str]) -> list[str]:
    """Of columns of scores."""
    return [SCORES[name].head for name in names]


def cells(scores: Found, names: Iterable[str]) -> list[Cell]:
    """[mean, standard error] of each score, nothing where there is none."""
    return [measured(scores[name]) if name in scores else None for name in names]


def score_rows(
    calibrations: Found,
    names: Iterable[str],
    labelled: Mapping[str, str] = CALIBRATIONS,
    first: Iterable[str] = (),
) -> list[list[Cell]]:
    """One row a calibration, and the constant bar's.

    Args:
        calibrations: by name, blocks with "scores" and "constant".
        names: of the scores.
        labelled: what the calibrations are called.
        first: cells before each row.
    """
    names, first = list(names), list(first)
    found = [[*first, labelled[k], *cells(one["scores"], names)] for k, one in calibrations.items()]
    constant = next(iter(calibrations.values()))["constant"]["scores"]
    return [*found, [*first, "constant", *cells(constant, names)]]
