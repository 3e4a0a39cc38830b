"""What a page can draw or compare in an experiment's numbers, wherever it stands in them.

| recognised, at any depth | as |
| --- | --- |
| `{set: {"splits": n, method: {"rmse": [mean, error], "nll": [mean, error]}}}` | comparison |
| a mapping of exactly `bin_size`, `variance` and `mse` | errors of bins |
| `"points": {"std": [...], "error": [...]}` | errors against bars |
| `"scores": {metric: value or [mean, error]}`, `"constant": {"scores": ...}` | metrics |

What is recognised is taken out of the numbers; what remains is listed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from experiments.frame.html_page.metrics import METRICS, Scores
from experiments.frame.html_page.nested import mean_and_error, of_repetitions, value_of
from rigidities.report import figures
from rigidities.report.figures import Plot
from rigidities.report.rows import MOST_SHOWN, thinned

MOST_PLOTS = 80
"""Plots on one page; what comes after is listed."""
COMPARED = ("rmse", "nll")
"""An entry is a method if it has one of these metrics."""
_KEYS_OF_BINS = {"bin_size", "variance", "mse"}

Path: TypeAlias = tuple[str, ...]
"""The keys that lead to a place in the numbers."""


@dataclass(frozen=True)
class DataSet:
    """Methods on one data set.

    Attributes:
        splits: How many splits were averaged over.
        methods: Metrics by method.
    """

    splits: Any
    methods: Mapping[str, Scores]


@dataclass
class Recognised:
    """What was recognised, with the keys that lead there.

    Attributes:
        comparisons: Methods on data sets.
        plots: Plots of bins and points.
        scores: Metrics by case; the cases of one table belong together.
    """

    comparisons: list[tuple[Path, dict[str, DataSet]]] = field(default_factory=list)
    plots: list[tuple[Path, Plot]] = field(default_factory=list)
    scores: list[tuple[Path, dict[str, Scores]]] = field(default_factory=list)

    @property
    def plot_count(self) -> int:
        """How many plots there are so far, of which a comparison has one for each data set."""
        return len(self.plots) + sum(len(data_sets) for _, data_sets in self.comparisons)


def recognise(
    numbers: Mapping[str, Any], recognised: Recognised, path: Path = ()
) -> dict[str, Any]:
    """Take out of the numbers at a path what is recognised, here and below.

    Args:
        numbers: Nested mappings, which are not changed.
        recognised: Where it is put.
        path: The keys that lead to the numbers.

    Returns:
        What remains.
    """
    remaining = dict(numbers)
    _take_comparison(remaining, recognised, path)
    _take_scores(remaining, recognised, path)
    for key, value in list(remaining.items()):
        if not isinstance(value, Mapping) or of_repetitions(key):
            continue
        plot = _plot(key, value) if recognised.plot_count < MOST_PLOTS else None
        if plot is not None:
            case = path if key in ("bins", "points") else (*path, key)
            recognised.plots.append((case, plot))
            remaining[key] = {}
        else:
            remaining[key] = recognise(value, recognised, (*path, key))
        if numbers[key] and not remaining[key]:
            del remaining[key]
    return remaining


# --- methods on data sets ----------------------------------------------------------------------


def _take_comparison(remaining: dict[str, Any], recognised: Recognised, path: Path) -> None:
    """Take out the data sets on which methods are compared."""
    data_sets = {}
    for name, entry in remaining.items():
        if isinstance(entry, Mapping) and "splits" in entry:
            methods = _methods(entry)
            if methods:
                data_sets[name] = DataSet(entry["splits"], methods)
    if not data_sets or recognised.plot_count + len(data_sets) > MOST_PLOTS:
        return
    recognised.comparisons.append((path, data_sets))
    for name, data_set in data_sets.items():
        remaining[name] = _beside_methods(remaining[name], data_set.methods)


def _methods(entry: Mapping[str, Any]) -> dict[str, Scores]:
    """Known metrics by method, of those entries that are methods."""
    methods: dict[str, Scores] = {}
    for name, values in entry.items():
        if not isinstance(values, Mapping):
            continue
        scores = {}
        for key in METRICS:
            pair = mean_and_error(values.get(key))
            if pair is not None:
                scores[key] = pair
        if not scores.keys().isdisjoint(COMPARED):
            methods[name] = scores
    return methods


def _beside_methods(entry: Mapping[str, Any], methods: Mapping[str, Scores]) -> dict[str, Any]:
    """What a data set has beside the splits and the known metrics of its methods."""
    others = {key: value for key, value in entry.items() if key != "splits" and key not in methods}
    for method, scores in methods.items():
        unknown = {key: value for key, value in entry[method].items() if key not in scores}
        if unknown:
            others[method] = unknown
    return others


# --- metrics of cases --------------------------------------------------------------------------


def _take_scores(remaining: dict[str, Any], recognised: Recognised, path: Path) -> None:
    """Take out metrics: one table for the cases side by side, with the constant bar of each."""
    scores = metrics_of(remaining.get("scores"))
    if scores:
        columns = {"these bars": scores}
        _take_constant(remaining, columns, "constant bar")
        recognised.scores.append((path, columns))
        del remaining["scores"]
    cases = {}
    for name, entry in remaining.items():
        if isinstance(entry, Mapping):
            case_scores = metrics_of(entry.get("scores"))
            if case_scores:
                cases[name] = case_scores
    if len(cases) < 2:
        return
    columns = {}
    for name, case_scores in cases.items():
        columns[name] = case_scores
        others = {key: value for key, value in remaining[name].items() if key != "scores"}
        _take_constant(others, columns, f"{name}, constant bar")
        remaining[name] = others
    recognised.scores.append((path, _without_copies(columns)))


def _take_constant(entry: dict[str, Any], columns: dict[str, Scores], name: str) -> None:
    """Move the metrics of an entry's constant bar into a column of that name."""
    constant = entry.get("constant")
    if not isinstance(constant, Mapping):
        return
    scores = metrics_of(constant.get("scores"))
    if not scores:
        return
    columns[name] = scores
    others = {key: value for key, value in constant.items() if key != "scores"}
    if others:
        entry["constant"] = others
    else:
        del entry["constant"]


def _without_copies(columns: Mapping[str, Scores]) -> dict[str, Scores]:
    """Where all constant bars are one and the same, one column at the end."""
    constants = {name: scores for name, scores in columns.items() if _is_constant(name)}
    different = {repr(scores) for scores in constants.values()}  # as text: a NaN equals no NaN
    if len(constants) < 2 or len(different) > 1:
        return dict(columns)
    others = {name: scores for name, scores in columns.items() if name not in constants}
    return {**others, "constant bar": next(iter(constants.values()))}


def _is_constant(name: str) -> bool:
    return name.endswith(", constant bar")


def metrics_of(entry: Any) -> Scores:
    """Numbers or pairs by name; empty where there is anything else."""
    if not isinstance(entry, Mapping):
        return {}
    scores = {}
    for key, value in entry.items():
        pair = mean_and_error(value)
        if pair is None:
            return {}
        scores[key] = pair
    return scores


# --- plots -------------------------------------------------------------------------------------


def _plot(key: str, entry: Mapping[str, Any]) -> Plot | None:
    """The plot of bins or points; None where an entry is neither."""
    if set(entry) == _KEYS_OF_BINS:
        return _plot_of_bins(entry)
    if key == "points":
        return _plot_of_points(entry)
    return None


def _plot_of_bins(entry: Mapping[str, Any]) -> Plot | None:
    bins = _two_lists(entry, "variance", "mse")
    size = value_of(entry["bin_size"])
    if bins is None or size is None or size < 1:
        return None
    return figures.binned({int(size): bins})


def _plot_of_points(entry: Mapping[str, Any]) -> Plot | None:
    lists = _two_lists(entry, "std", "error")
    if lists is None or not bool(lists[1].any()):
        return None
    std, error = lists
    positions = thinned([std, error.abs()], MOST_SHOWN)
    shown_std, shown_error = std[positions], error[positions]
    # The points may be a sample, so that their place is not the number of a row.
    texts = []
    pairs = zip(shown_std.tolist(), shown_error.tolist(), strict=True)
    for count, (bar, point_error) in enumerate(pairs, start=1):
        texts.append(
            f"point {count} of {len(positions)} shown<br>bar {bar:.3g}<br>error {point_error:.3g}"
        )
    plot = figures.errors(shown_std, shown_error, hover=texts)
    row_count = value_of(entry.get("rows"))
    if row_count is None and len(positions) == len(std):
        return plot
    how_many = f" Shown: {len(positions)} of {int(row_count or len(std))} rows."
    return replace(plot, caption=plot.caption + how_many)


def _two_lists(entry: Mapping[str, Any], first: str, second: str) -> tuple[Tensor, Tensor] | None:
    """Two lists of finite numbers of one length, those of the first above zero; or None."""
    first_numbers = _finite_numbers(entry.get(first))
    second_numbers = _finite_numbers(entry.get(second))
    if first_numbers is None or second_numbers is None:
        return None
    if len(first_numbers) != len(second_numbers) or not bool((first_numbers > 0).all()):
        return None
    return first_numbers, second_numbers


def _finite_numbers(entry: Any) -> Tensor | None:
    """A list of finite numbers, of one or more; else None."""
    if not isinstance(entry, list) or not entry:
        return None
    numbers = []
    for value in entry:
        number = value_of(value)
        if number is None or not math.isfinite(number):
            return None
        numbers.append(number)
    return torch.tensor(numbers, dtype=torch.float64)
