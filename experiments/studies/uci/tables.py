"""The tables of the page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.frame.outcome import Table, with_error
from experiments.studies.uci.entries import BASELINES, METHODS, METRICS, RIGIDITIES

Found = Mapping[str, Mapping[str, Any]]

NAMES = {"rmse": "RMSE", "nll": "NLL"}
LABELS = {
    "llpr": "LLPR",
    "best": "best",
    "constant": "constant",
    "laplace": "Laplace",
    "mc_dropout": "MC dropout",
    "deep_ensemble": "ensemble",
    "deep_ensemble_400": "ensemble, 400 epochs",
    "llpr_random": "LLPR, random splits",
    "pbp": "PBP",
}
COMPARABLE = (*RIGIDITIES, *BASELINES)
"""Judged on the same rows."""

SMALL = 2.0
"""Combined standard errors that count as agreement."""


def score_table(found: Found, metric: str) -> Table:
    """One metric of all methods, then the paper's columns."""
    methods = present(found)
    quoted = list(next(iter(found.values()))["published"])
    rows: list[list[str | float | None]] = []
    for name, one in found.items():
        digits = decimals(one["llpr"][metric])
        ours = [one[method][metric] if method in one else None for method in methods]
        lowest = min(one[method][metric][0] for method in COMPARABLE if method in one)
        cells = [
            _cell(value, digits, method in COMPARABLE and value is not None and value[0] == lowest)
            for method, value in zip(methods, ours, strict=True)
        ]
        theirs = [_cell(one["published"][method][metric], 2) for method in quoted]
        rows.append([name, one["splits"], *cells, *theirs])
    columns = ["set", "splits", *(LABELS[method] for method in methods)]
    columns += [f"paper: {LABELS[method]}" for method in quoted]
    caption = (
        f"Test {NAMES[metric]}, mean over the splits and its standard error; the lowest mean of "
        "our columns on the official splits is bold. Columns headed *paper* are quoted from it, "
        "with its errors."
    )
    return Table(columns, rows, caption)


def difference_table(found: Found, metric: str, pairs: Sequence[tuple[str, str]]) -> Table:
    """Differences between methods, split by split."""
    names = [f"{one} - {other}" for one, other in pairs]
    shown = [name for name in names if any(name in one["paired"] for one in found.values())]
    rows: list[list[str | float | None]] = []
    for name, one in found.items():
        digits = decimals(one["llpr"][metric])
        values = [one["paired"].get(pair, {}).get(metric) for pair in shown]
        rows.append([name, *(_cell(value, digits, lower(value)) for value in values)])
    columns = ["set", *(" - ".join(LABELS[part] for part in pair.split(" - ")) for pair in shown)]
    caption = (
        f"Differences of the test {NAMES[metric]}, split by split: mean and standard error. "
        "Negative means that the first is better; bold where it is so by more than two standard "
        "errors."
    )
    return Table(columns, rows, caption)


def reproduction_table(found: Found) -> Table:
    """Ours against the paper's own column."""
    rows: list[list[str | float | None]] = []
    for name, one in found.items():
        for metric in METRICS:
            digits = decimals(one["llpr"][metric])
            cells = [name, NAMES[metric], _cell(one["published"]["llpr"][metric], 2)]
            for method in ("llpr", "llpr_random"):
                against = one["reproduction"][method][metric]
                cells += [_cell(one[method][metric], digits), *_sigmas(against)]
            rows.append(cells)
    columns = ["set", "", "paper", "official splits", "sigmas", "strict"]
    columns += ["random splits", "sigmas", "strict"]
    caption = (
        "Our LLPR against the paper's: *sigmas* is the difference over the combined standard error "
        "(ours, the printed one, the rounding of two printed decimals); *strict* corrects the "
        "printed error, whose script divided by the root of 5 where 20 splits are stated."
    )
    return Table(columns, rows, caption)


def seconds_table(found: Found) -> Table:
    """How long the parts took."""
    methods = sorted({part for one in found.values() for part in one["seconds"]})
    rows = [
        [name, one["rows"], *(one["seconds"].get(part) for part in methods)]
        for name, one in found.items()
    ]
    caption = (
        "Seconds on one core, or on the GPU where the run used one. *Official* and *random* are "
        "the nets of the rigidities with all their error bars, on one drawing of splits each."
    )
    return Table(["set", "rows", *(LABELS.get(part, part) for part in methods)], rows, caption)


def present(found: Found) -> list[str]:
    """Methods that were measured."""
    return [method for method in METHODS if any(method in one for one in found.values())]


def within(found: Found, method: str, key: str = "sigmas") -> tuple[int, int]:
    """How many of the paper's numbers ours agree with, and of how many that can be compared."""
    values = [
        one["reproduction"][method][metric][key] for one in found.values() for metric in METRICS
    ]
    comparable = [value for value in values if not math.isnan(value)]
    return sum(abs(value) <= SMALL for value in comparable), len(comparable)


def beyond(found: Found, method: str, key: str = "sigmas") -> Iterable[tuple[str, str, float]]:
    """The others: set, metric, sigmas."""
    for name, one in found.items():
        for metric in METRICS:
            value = one["reproduction"][method][metric][key]
            if abs(value) > SMALL:
                yield name, metric, value


def decimals(value: Sequence[float]) -> int:
    """So many that the standard error shows two digits, or the mean three; two at least.

    >>> decimals([5.2, 0.11]), decimals([0.0004, 0.00001]), decimals([0.5, float("nan")])
    (2, 6, 3)
    """
    mean, error = value
    size = abs(mean) / 10 if math.isnan(error) or error == 0 else error
    return max(2, 1 - math.floor(math.log10(size))) if size else 2


def lower(value: Sequence[float] | None) -> bool:
    """Whether a difference is below zero by more than two standard errors."""
    return value is not None and value[0] < -SMALL * value[1]


def _sigmas(against: Mapping[str, float]) -> list[str | None]:
    values = (against["sigmas"], against["strict"])
    return [None if math.isnan(value) else f"{value:.1f}" for value in values]


def _cell(value: Sequence[float | None] | None, digits: int, bold: bool = False) -> str | None:
    if value is None:
        return None
    mean, error = value
    text = with_error(mean, math.nan if error is None else error, digits)
    return f"**{text}**" if bold else text
