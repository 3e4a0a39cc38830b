"""The tables: ridges, effects, scores, and the bias."""

from __future__ import annotations

from typing import Any

from experiments.frame.outcome import Table
from experiments.frame.quartiles import with_quartiles
from experiments.frame.wording import measured
from experiments.studies.regularizer.signs import bounded, counted
from experiments.studies.regularizer.work import CALIBRATIONS

Found = dict[str, Any]

LABELS = {
    "nll": "likelihood",
    "nll, floor": "likelihood, noise floor",
    "bins": "bins",
    "bins, floor": "bins, noise floor",
}


def ridge_table(found: Found, caption: str) -> Table:
    """Medians and quartiles of the relative ridge, and of the absolute one by the likelihood."""
    rows: list[list[str | float | None]] = []
    for name, one in found["conditions"].items():
        ridges = [ridge_cell(one[way], "log_relative_ridge") for way in CALIBRATIONS]
        absolute = ridge_cell(one["nll"], "log_ridge")
        rows.append([name, *ridges, absolute, measured(one["weights"], 1)])
    columns = ["training", *LABELS.values(), "likelihood, absolute", "norm of the weights"]
    return Table(columns, rows, caption)


def effect_table(found: Found, caption: str) -> Table:
    """Changes of log10 ridges, relative and absolute, and of the NLL."""
    rows: list[list[str | float | None]] = []
    for label, one in found["effects"].items():
        cells = [sign_cell(one[way]["log_relative_ridge"]) for way in CALIBRATIONS]
        rows.append(
            [label, *cells, sign_cell(one["nll"]["log_ridge"]), measured(one["nll"]["nll"])]
        )
    columns = ["effect of", *LABELS.values(), "likelihood, absolute", "likelihood: NLL"]
    return Table(columns, rows, caption)


def nll_table(found: Found, caption: str) -> Table:
    """RMSE, NLL and the noise floor on the test rows."""
    rows: list[list[str | float | None]] = []
    for name, one in found["conditions"].items():
        nlls = [measured(one[way]["scores"]["nll"]) for way in CALIBRATIONS]
        noise = with_quartiles(one["nll, floor"]["noise"])
        rows.append([name, measured(one["test_rmse"]), *nlls, noise])
    columns = ["training", "RMSE", *LABELS.values(), "floor by the likelihood"]
    return Table(columns, rows, caption)


def ratio_table(found: Found, caption: str) -> Table:
    """Binned log ratios on the test rows."""
    rows: list[list[str | float | None]] = [
        [name, *(measured(one[way]["scores"]["binned_log_ratio"]) for way in CALIBRATIONS)]
        for name, one in found["conditions"].items()
    ]
    return Table(["training", *LABELS.values()], rows, caption)


def bias_table(found: Found, caption: str) -> Table:
    """Without the bias minus with it."""
    rows: list[list[str | float | None]] = []
    for name, one in found["conditions"].items():
        bias = one["bias"]
        nll = with_quartiles(bias["median"]["nll"], 3)
        scores = [measured(bias[score]) for score in ("binned_log_ratio", "spearman")]
        bars = [
            measured(bias[score]) for score in ("log_ratio_of_bars", "rank_correlation_of_bars")
        ]
        rows.append([name, nll, bias["ruined"], *scores, *bars])
    columns = ["training", "NLL, median", "ruined nets", "log ratio", "rank corr."]
    columns += ["bars: ratio", "bars: rank corr."]
    return Table(columns, rows, caption)


def ridge_cell(block: Found, name: str) -> str:
    """Median and quartiles, "≥" where one is only bounded, and how many nets are at the edge."""
    middle, low, high = (bounded(one) for one in block["bounds"][name])
    edge = block["at_upper_edge"]
    return f"{middle} ({low} to {high})" + (f"; {edge} at the edge" if edge else "")


def sign_cell(change: Found) -> str:
    """The median change and the signs, bold where the change is clear."""
    told = f"{bounded(change['median'])}; {counted(change)}"
    return told if change["says"] == "no clear change" else f"**{told}**"
