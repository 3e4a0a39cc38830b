"""The tables: inside the domain, outside it, paired differences, and what was chosen."""

from __future__ import annotations

from typing import Any

from experiments.frame.outcome import Table
from experiments.frame.wording import measured

Found = dict[str, Any]
Pair = list[float]

LABELS = {
    "paper": "paper (bins)",
    "nll": "likelihood",
    "best": "best",
    "bayes": "α² (1 + q)",
}
COLUMNS = {
    "rmse": "RMSE",
    "nll": "NLL",
    "gain": "gain",
    "binned_log_ratio": "log ratio",
    "slope": "slope",
    "decades": "decades",
    "spearman": "rank corr.",
    "ence": "ENCE",
    "coverage": "coverage",
}
"""Scores of a table, with the head of their column."""


def domain_table(found: Found, domain: str, caption: str, *more: str) -> Table:
    """All calibrations and the constant bar on one side of the threshold.

    Args:
        found: the experiment's numbers.
        domain: "inside" or "outside".
        caption: above the table.
        more: scores besides `COLUMNS`.
    """
    calibrations = found["calibrations"]
    names = [*COLUMNS, *more]
    rows = [
        [LABELS[name], *_cells(one[domain]["scores"], names)] for name, one in calibrations.items()
    ]
    constant = next(iter(calibrations.values()))[domain]["constant"]["scores"]
    rows.append(["constant", *_cells(constant, names)])
    return Table(["bars", *(COLUMNS.get(name, name) for name in names)], rows, caption)


def detection_table(found: Found, caption: str) -> Table:
    """How well the bars tell far rows, and what the validation rows knew of it."""
    rows = [
        [
            LABELS[name],
            measured(one["auroc"]),
            measured(one["farthest"]["coverage"]),
            measured(one["outside"]["scores"]["coverage"]),
            ", ".join(f"{way} ({count})" for way, count in one["chosen"]["by"].items()),
            f"{one['chosen']['ridge']:.2g}",
            f"{one['chosen']['scale']:.2g}",
            f"{one['chosen']['noise']:.2g}",
        ]
        for name, one in found["calibrations"].items()
    ]
    columns = ["bars", "AUROC", "coverage of the farthest fifth", "coverage outside"]
    columns += ["criterion, noise (nets)", "ridge", "scale", "noise"]
    return Table(columns, rows, caption)


def difference_table(found: Found, caption: str) -> Table:
    """Each calibration minus the paper's, net by net."""
    names = ["nll", "binned_log_ratio", "slope", "spearman", "ence", "coverage"]
    rows = [
        [LABELS[name], domain, *_cells(one[domain], names), measured(one["auroc"])]
        for name, one in found["differences"].items()
        for domain in ("inside", "outside")
    ]
    columns = ["bars", "rows", *(COLUMNS[name] for name in names), "AUROC"]
    return Table(columns, rows, caption)


def limit_table(found: Found, caption: str) -> Table:
    """The log ratio in the domain beside that of errors which are right for the bars."""
    limits, calibrations = found["limits"], found["calibrations"]
    ratios = {name: one["inside"]["scores"] for name, one in calibrations.items()}
    ratios["constant"] = calibrations["paper"]["inside"]["constant"]["scores"]
    rows: list[list[str | float | None]] = [
        [LABELS.get(name, name), measured(one["binned_log_ratio"])]
        + [measured(limits["floors"][name][kind]) for kind in ("shuffled", "gaussian")]
        for name, one in ratios.items()
    ]
    rows.append(
        ["chosen in hindsight", measured(limits["hindsight"]["binned_log_ratio"]), None, None]
    )
    return Table(["bars", "log ratio", "own errors, shuffled", "Gaussian errors"], rows, caption)


def _cells(scores: dict[str, Pair], names: list[str]) -> list[str | float | None]:
    return [measured(scores[name]) if name in scores else None for name in names]
