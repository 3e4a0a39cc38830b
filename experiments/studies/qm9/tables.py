"""The tables of the molecules' energies: scores, differences, choices, costs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from experiments.frame.outcome import Table
from experiments.frame.wording import measured

Found = dict[str, Any]

LABELS = {"paper": "paper (bins)", "nll": "likelihood", "evidence": "evidence"}
COLUMNS = {
    "nll": "NLL",
    "gain": "gain",
    "crps": "CRPS",
    "binned_log_ratio": "log ratio",
    "floor": "floor",
    "wide_log_ratio": "in wide bins",
    "coverage": "coverage",
    "slope": "slope",
    "decades": "decades",
    "spearman": "rank corr.",
}
COMPARED = ("nll", "crps", "binned_log_ratio", "coverage", "spearman")


def error_table(scores: Found, caption: str) -> Table:
    """How wrong the predictions are."""
    names = {
        "rmse": "RMSE (kcal/mol)",
        "mae": "MAE (kcal/mol)",
        "rmse_per_atom": "RMSE (meV/atom)",
    }
    return Table(list(names.values()), [_cells(scores, names)], caption)


def score_table(calibrations: Found, caption: str) -> Table:
    """All calibrations, and the constant bar."""
    rows: list[list[str | float | None]] = [
        [LABELS[name], *_cells(one["scores"], COLUMNS)] for name, one in calibrations.items()
    ]
    constant = next(iter(calibrations.values()))["constant"]["scores"]
    return Table(
        ["bars", *COLUMNS.values()], [*rows, ["constant", *_cells(constant, COLUMNS)]], caption
    )


def difference_table(differences: Found, caption: str) -> Table:
    """Calibrations minus the paper's on the same nets."""
    rows: list[list[str | float | None]] = [
        [f"{LABELS[name]} - paper", *_cells(one, COMPARED)] for name, one in differences.items()
    ]
    return Table(["bars", *(COLUMNS[name] for name in COMPARED)], rows, caption)


def choice_table(calibrations: Found, caption: str) -> Table:
    """What each calibration chose."""
    names = ("ridge", "scale", "noise_variance", "effective_rank")
    rows: list[list[str | float | None]] = [
        [LABELS[name], *(one["chosen"][key] for key in names)] for name, one in calibrations.items()
    ]
    columns = ["bars", "ridge", "scale", "noise variance", "effective rank"]
    return Table(columns, rows, caption)


def cost_table(costs: Found, caption: str) -> Table:
    """Seconds, and their ratio to the bare pass."""
    fit, predict = costs["fit"], costs["predict"]
    rows: list[list[str | float | None]] = [
        ["fit", fit["molecules"], fit["bare"], fit["fit"], fit["ratio"]],
        ["predictions", predict["molecules"], predict["bare"], predict["bars"], predict["ratio"]],
    ]
    return Table(
        ["work", "molecules", "bare pass (s)", "with error bars (s)", "ratio"], rows, caption
    )


def _cells(scores: Found, names: Iterable[str]) -> list[str | float | None]:
    return [measured(scores[name]) if name in scores else None for name in names]
