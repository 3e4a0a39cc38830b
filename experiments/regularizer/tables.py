"""The tables: ridges, effects, scores, and the bias."""

from __future__ import annotations

from typing import Any

from experiments.outcome import Table, with_error
from experiments.quartiles import with_quartiles
from experiments.regularizer.work import CALIBRATIONS

Found = dict[str, Any]

LABELS = {
    "nll": "likelihood",
    "nll, floor": "likelihood, noise floor",
    "bins": "bins",
    "bins, floor": "bins, noise floor",
}


def ridge_table(found: Found, caption: str) -> Table:
    """Medians and quartiles of the relative ridge, and the absolute median by the likelihood."""
    rows: list[list[str | float | None]] = []
    for name, one in found["conditions"].items():
        ridges = [with_quartiles(one[way]["log_relative_ridge"]) for way in CALIBRATIONS]
        rows.append(
            [name, *ridges, with_quartiles(one["nll"]["log_ridge"]), pair(one["weights"], 1)]
        )
    columns = ["training", *LABELS.values(), "likelihood, absolute", "norm of the weights"]
    return Table(columns, rows, caption)


def effect_table(found: Found, caption: str) -> Table:
    """Differences of log10 ridges, absolute and relative, and of the NLL."""
    rows: list[list[str | float | None]] = []
    for label, one in found["effects"].items():
        cells = [pair(one[way]["log_relative_ridge"]) for way in CALIBRATIONS]
        rows.append([label, *cells, pair(one["nll"]["log_ridge"]), pair(one["nll"]["nll"], 3)])
    columns = ["effect of", *LABELS.values(), "likelihood, absolute", "likelihood: NLL"]
    return Table(columns, rows, caption)


def nll_table(found: Found, caption: str) -> Table:
    """RMSE, NLL and the noise floor on the test rows."""
    rows: list[list[str | float | None]] = []
    for name, one in found["conditions"].items():
        nlls = [pair(one[way]["scores"]["nll"], 3) for way in CALIBRATIONS]
        noise = with_quartiles(one["nll, floor"]["noise"])
        rows.append([name, pair(one["test_rmse"], 3), *nlls, noise])
    columns = ["training", "RMSE", *LABELS.values(), "floor by the likelihood"]
    return Table(columns, rows, caption)


def ratio_table(found: Found, caption: str) -> Table:
    """Binned log ratios on the test rows."""
    rows: list[list[str | float | None]] = [
        [name, *(pair(one[way]["scores"]["binned_log_ratio"], 3) for way in CALIBRATIONS)]
        for name, one in found["conditions"].items()
    ]
    return Table(["training", *LABELS.values()], rows, caption)


def bias_table(found: Found, caption: str) -> Table:
    """Without the bias minus with it."""
    rows: list[list[str | float | None]] = []
    for name, one in found["conditions"].items():
        bias = one["bias"]
        nll = with_quartiles(bias["median"]["nll"], 3)
        scores = [pair(bias[score], 3) for score in ("binned_log_ratio", "spearman")]
        bars = [pair(bias[score], 3) for score in ("log_ratio_of_bars", "rank_correlation_of_bars")]
        rows.append([name, nll, bias["ruined"], *scores, *bars])
    columns = ["training", "NLL, median", "ruined nets", "log ratio", "rank corr."]
    columns += ["bars: ratio", "bars: rank corr."]
    return Table(columns, rows, caption)


def pair(values: list[float], digits: int = 2) -> str | float:
    """Mean and standard error; a dash where the score is not defined."""
    mean, error = values
    return mean if mean != mean else with_error(mean, error, digits)
