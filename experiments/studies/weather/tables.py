"""The tables: scores, paired differences, choices and stations."""

from __future__ import annotations

from typing import Any

from experiments.frame.outcome import Table
from experiments.frame.wording import measured

Found = dict[str, Any]

LABELS = {
    "paper": "paper (bins)",
    "nll": "likelihood",
    "best": "best",
    "best_bins": "best by bins",
}
TARGETS = {"raw": "degrees", "standardised": "standardised"}
COLUMNS = {
    "rmse": "RMSE",
    "nll": "NLL",
    "gain": "gain",
    "crps": "CRPS",
    "binned_log_ratio": "log ratio",
    "floor": "floor",
    "ence": "ENCE",
    "coverage": "coverage",
    "slope": "slope",
    "decades": "decades",
    "spearman": "rank corr.",
}
EXTREME = 3
"""Stations shown at either end."""


def score_table(found: Found, caption: str) -> Table:
    """All calibrations of both kinds of nets, and the constant bar."""
    rows: list[list[str | float | None]] = []
    for target, one in found.items():
        calibrations = one["calibrations"]
        for name, way in calibrations.items():
            rows.append([TARGETS[target], LABELS[name], *_cells(way["scores"], COLUMNS)])
        constant = calibrations["paper"]["constant"]["scores"]
        rows.append([TARGETS[target], "constant", *_cells(constant, COLUMNS)])
    return Table(["target", "bars", *COLUMNS.values()], rows, caption)


def difference_table(found: Found, between: Found, caption: str) -> Table:
    """Calibrations minus the paper's on the same nets, and one kind of nets minus the other."""
    names = ("rmse", "nll", "crps", "binned_log_ratio", "ence", "coverage", "spearman")
    rows: list[list[str | float | None]] = [
        [TARGETS[target], f"{LABELS[name]} - paper", *_cells(one, names)]
        for target, kind in found.items()
        for name, one in kind["differences"].items()
    ]
    rows += [
        ["standardised - degrees", LABELS[name], *_cells(one, names)]
        for name, one in between.items()
    ]
    return Table(["target", "bars", *(COLUMNS[name] for name in names)], rows, caption)


def choice_table(found: Found, caption: str) -> Table:
    """What each calibration chose."""
    rows: list[list[str | float | None]] = []
    for target, kind in found.items():
        for name, one in kind["calibrations"].items():
            chosen = one["chosen"]
            ways = "; ".join(f"{way} ({count})" for way, count in chosen["ways"].items())
            numbers = [chosen[key] for key in ("ridge", "scale", "noise_variance")]
            rows.append([TARGETS[target], LABELS[name], ways, *numbers])
    columns = ["target", "bars", "criterion, noise (nets)", "ridge", "scale", "noise variance"]
    return Table(columns, rows, caption)


def station_table(stations: Found, caption: str) -> Table:
    """The stations of the smallest and of the largest errors."""
    names = list(stations)
    shown = names if len(names) <= 2 * EXTREME else names[:EXTREME] + names[-EXTREME:]
    rows: list[list[str | float | None]] = [
        [name, stations[name]["rows"], *(measured(stations[name][k], 2) for k in ("bar", "rmse"))]
        for name in shown
    ]
    return Table(["station", "test rows", "bar", "RMSE"], rows, caption)


def _cells(scores: Found, names: Any) -> list[str | float | None]:
    return [measured(scores[name]) if name in scores else None for name in names]
