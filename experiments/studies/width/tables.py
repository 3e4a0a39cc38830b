"""The tables: scores by width, and their trends."""

from __future__ import annotations

from typing import Any

from experiments.frame.outcome import Table
from experiments.frame.quartiles import with_quartiles
from experiments.frame.wording import measured

Found = dict[str, Any]

COLUMNS = {
    "rmse": "RMSE",
    "nll": "NLL",
    "gain": "gain",
    "binned_log_ratio": "log ratio",
    "slope": "slope",
    "decades": "decades",
    "spearman": "rank corr.",
    "coverage": "coverage",
}
NAMES = {
    **COLUMNS,
    "gain": "NLL gain over a constant bar",
    "binned_log_ratio": "log ratio",
    "spearman": "rank correlation of bar and error",
    "slope_error": "distance of the slope from 1",
    "coverage_error": "distance of the coverage from 0.9",
}
MEDIANS = ("nll", "gain", "binned_log_ratio", "slope")
"""Scores that a single net can ruin: medians and quartiles, means and standard errors elsewhere."""

LABELS = {"paper": "paper (bins)", "nll": "likelihood", "floor": "noise floor"}


def width_table(found: Found, calibration: str, caption: str) -> Table:
    """One row a width."""
    rows = []
    for width, one in found["widths"].items():
        block = one[calibration]
        cells = [score(block, name) for name in COLUMNS]
        rows.append([str(width), *cells, score(block["constant"], "binned_log_ratio")])
    return Table(["width", *COLUMNS.values(), "constant: log ratio"], rows, caption)


def narrow_table(found: Found, caption: str) -> Table:
    """Bars close to zero, all calibrations."""
    rows: list[list[str | float | None]] = [
        [
            str(width),
            *(
                cell
                for name in LABELS
                for cell in (one[name]["ruined"], f"{one[name]['least_bar']:.2g}")
            ),
        ]
        for width, one in found["widths"].items()
    ]
    heads = [
        f"{label}: {what}" for label in LABELS.values() for what in ("ruined nets", "least bar")
    ]
    return Table(["width", *heads], rows, caption)


def trend_table(found: Found, caption: str) -> Table:
    """One row a score, all calibrations."""
    trends = found["trends"]
    rows = []
    for name, label in NAMES.items():
        cells: list[str | float | None] = [label]
        for calibration in LABELS:
            one = trends[calibration][name]
            cells += [f"{one['says']}, {measured(one['rank_correlation'], 2)}", one["per_doubling"]]
        rows.append(cells)
    heads = [head for label in LABELS.values() for head in (label, "per doubling")]
    return Table(["score", *heads], rows, caption)


def score(block: dict[str, Any], name: str) -> str:
    """A score of one width in a cell."""
    if name in MEDIANS:
        return with_quartiles(block["median"][name], 3)
    return measured(block["scores"][name])
