"""The page: tables, and figures and texts that follow the numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from experiments.frame.outcome import Cell, Entry, Found, Picture, Table, with_error
from experiments.judging.scores import SCORES
from experiments.studies.uci import pictures, texts
from experiments.studies.uci.entries import (
    AGAINST_LLPR,
    BASELINES,
    BEST_AGAINST,
    FIVE_AGAINST,
    METHODS,
    METRICS,
    OURS,
    likelihood,
)
from experiments.studies.uci.texts import LABELS, SMALL, lower

COMPARABLE = METHODS[:-1]
"""Judged on the same rows."""

IN_FIFTHS = ("llpr", "best", "best_of_five", "deep_ensemble_400")


def entries(found: Found) -> list[Entry]:
    """The page."""
    trained = [pair for pair in AGAINST_LLPR if pair[0] in (*BASELINES, *OURS[1:])]
    return [
        *texts.opening(found),
        score_table(found, "nll"),
        *([score_table(gridded(found), "cell")] if gridded(found) else []),
        Picture("nll", pictures.likelihoods(found, LABELS), texts.NLL_CAPTION),
        texts.compared(found),
        difference_table(found, AGAINST_LLPR),
        difference_table(found, BEST_AGAINST),
        difference_table(found, FIVE_AGAINST),
        *new_rows(found),
        ratio_table(found, "crps"),
        Picture("crps", pictures.ratios(found, "crps", LABELS, "CRPS"), texts.CRPS_CAPTION),
        coverage_table(found),
        ratio_table(found, "interval_score"),
        fifths_table(found),
        texts.failing(found),
        score_table(found, "rmse"),
        Picture("rmse", pictures.ratios(found, "rmse", LABELS, "RMSE"), texts.RMSE_CAPTION),
        difference_table(found, trained, metric="rmse"),
        reproduced(found),
        reproduction_table(found),
        quoted_table(found),
        seconds_table(found),
        texts.CLOSING,
    ]


def score_table(found: Found, metric: str) -> Table:
    """One metric of all methods."""
    methods = present(found, metric)
    rows: list[list[Cell]] = []
    for name, one in found.items():
        digits = decimals(one["llpr"][metric])
        ours = [one.get(method, {}).get(metric) for method in methods]
        lowest = min(
            value[0]
            for method, value in zip(methods, ours, strict=True)
            if value is not None and method in COMPARABLE
        )
        cells = [
            _cell(value, digits, method in COMPARABLE and value is not None and value[0] == lowest)
            for method, value in zip(methods, ours, strict=True)
        ]
        rows.append([name, one["splits"], *cells])
    columns = ["set", "splits", *(LABELS[method] for method in methods)]
    caption = (
        f"Test {SCORES[metric].head}, mean over the splits and its standard error; the lowest mean "
        f"of the columns on the official splits is bold.{texts.REMARKS.get(metric, '')}"
    )
    return Table(columns, rows, caption)


def difference_table(
    found: Found,
    pairs: Sequence[tuple[str, str]],
    metric: str | None = None,
    rows: str = "paired",
) -> Table:
    """Differences between methods, split by split; of the NLL, by cells on a grid, by default."""
    names = [f"{one} - {other}" for one, other in pairs]
    shown = [
        name
        for name in names
        if any((metric or likelihood(one)) in one[rows].get(name, {}) for one in found.values())
    ]
    table: list[list[Cell]] = []
    for name, one in found.items():
        own = metric or likelihood(one)
        digits = decimals(one["llpr"][own])
        values = [one[rows].get(pair, {}).get(own) for pair in shown]
        table.append([name, *(_cell(value, digits, lower(value)) for value in values)])
    columns = ["set", *(" - ".join(LABELS[part] for part in pair.split(" - ")) for pair in shown)]
    which = " without the test rows that equal a row of the training list" * (rows != "paired")
    caption = (
        f"Differences of the test {SCORES[metric or 'nll'].head}{which}, split by split: mean and "
        "corrected standard error. Negative means that the first is better; bold where it is so by "
        "more than two of these errors."
    )
    return Table(columns, table, caption)


def new_rows(found: Found) -> list[Entry]:
    """The differences without copies, where there are some."""
    sets = {name: one for name, one in found.items() if one["copies"]["test"]}
    pairs = [pair for pair in AGAINST_LLPR if pair[0] in (*OURS, "deep_ensemble_400")]
    return [difference_table(sets, [*pairs, *FIVE_AGAINST], rows="paired_new")] if sets else []


def ratio_table(found: Found, metric: str) -> Table:
    """A score over LLPR's, split by split."""
    named = [f"{method} / llpr" for method in COMPARABLE[1:]]
    shown = [name for name in named if any(metric in _ratio(one, name) for one in found.values())]
    rows: list[list[Cell]] = [
        [name, *(_cell(_ratio(one, method).get(metric), 3) for method in shown)]
        for name, one in found.items()
    ]
    caption = (
        f"Test {SCORES[metric].head} over that of LLPR, split by split: mean and standard error. "
        f"Below one is better.{texts.REMARKS.get(metric, '')}"
    )
    return Table(["set", *(LABELS[name.split(" / ")[0]] for name in shown)], rows, caption)


def coverage_table(found: Found) -> Table:
    """What the intervals hold."""
    methods = [method for method in present(found, "coverage_90") if method in COMPARABLE]
    rows: list[list[Cell]] = [
        [name, *(_cell(one.get(method, {}).get("coverage_90"), 3) for method in methods)]
        for name, one in found.items()
    ]
    caption = (
        "Share of the test targets that the 90 % intervals hold: mean over the splits and its "
        "standard error."
    )
    return Table(["set", *(LABELS[method] for method in methods)], rows, caption)


def fifths_table(found: Found) -> Table:
    """The same in fifths of the rows."""
    rows: list[list[Cell]] = []
    for name, one in found.items():
        for method in IN_FIFTHS:
            if method in one:
                by = [one[method][f"fifths_of_{what}"] for what in ("prediction", "bar")]
                rows.append([name, LABELS[method], *(f"{v:.2f}" for part in by for v in part)])
    places = ("lowest", "2nd", "3rd", "4th", "highest")
    columns = [
        "set",
        "",
        *(f"{place} {what}" for what in ("prediction", "bar") for place in places),
    ]
    caption = (
        "Share of the test targets that the 90 % intervals hold in fifths of each split's test "
        "rows, ordered by the prediction and by the error bar: mean over the splits. A fifth of "
        "the smallest sets has few rows."
    )
    return Table(columns, rows, caption)


def reproduction_table(found: Found) -> Table:
    """Ours against the paper's own column."""
    rows: list[list[Cell]] = []
    for name, one in found.items():
        for metric in METRICS:
            digits = decimals(one["llpr"][metric])
            cells = [name, SCORES[metric].head, _cell(one["published"]["llpr"][metric], 2)]
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


def quoted_table(found: Found) -> Table:
    """The paper's own table."""
    quoted = list(next(iter(found.values()))["published"])
    rows: list[list[Cell]] = [
        [name, *(_cell(one["published"][method][m], 2) for m in METRICS for method in quoted)]
        for name, one in found.items()
    ]
    columns = [f"{SCORES[m].head}, {LABELS[method]}" for m in METRICS for method in quoted]
    return Table(["set", *columns], rows, "The paper's table, quoted with its errors.")


def seconds_table(found: Found) -> Table:
    """How long the parts took."""
    methods = sorted({part for one in found.values() for part in one["seconds"]})
    rows = [
        [name, one["rows"], *(one["seconds"].get(part) for part in methods)]
        for name, one in found.items()
    ]
    caption = (
        "Seconds on one core, or on the GPU where the run used one. *Official*, *five* and "
        "*random* are the error bars of the rigidities' nets, whose training is not counted where "
        "they come with the project."
    )
    return Table(["set", "rows", *(LABELS.get(part, part) for part in methods)], rows, caption)


def present(found: Found, metric: str) -> list[str]:
    """Methods that have it."""
    return [m for m in METHODS if any(metric in one.get(m, {}) for one in found.values())]


def gridded(found: Found) -> Found:
    """The sets whose targets lie on a grid."""
    return {name: one for name, one in found.items() if likelihood(one) == "cell"}


def reproduced(found: Found) -> str:
    """How far the paper's row comes out again."""
    sentences = []
    for method, splits in (("llpr", "the official splits"), ("llpr_random", "random splits")):
        agreeing, comparable = within(found, method)
        strictly, _ = within(found, method, "strict")
        sentences.append(
            f"On {splits}, {agreeing} of the paper's {comparable} comparable numbers come out "
            f"within two combined standard errors, {strictly} if its errors are corrected for the "
            f"number of splits{_outside(found, method)}."
        )
    return " ".join([*sentences, *([texts.NAVAL] if "naval" in found else [])])


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


def _ratio(one: Mapping[str, Mapping[str, Mapping[str, list[float]]]], name: str) -> Mapping:
    return one["ratio"].get(name, {})


def _outside(found: Found, method: str) -> str:
    others = [
        f"{name} {SCORES[metric].head} by {value:+.1f}"
        for name, metric, value in beyond(found, method)
    ]
    return f"; outside: {', '.join(others)}" if others else ""


def _sigmas(against: Mapping[str, float]) -> list[str | None]:
    values = (against["sigmas"], against["strict"])
    return [None if math.isnan(value) else f"{value:.1f}" for value in values]


def _cell(value: Sequence[float | None] | None, digits: int, bold: bool = False) -> str | None:
    if value is None:
        return None
    mean, error = value
    text = with_error(mean, math.nan if error is None else error, digits)
    return f"**{text}**" if bold else text
