"""The page of an experiment's numbers: what is recognised is drawn, the rest is listed.

| recognised, at any depth | drawn as |
| --- | --- |
| `{set: {"splits": n, method: {"rmse": [mean, error], "nll": [mean, error]}}}` | tables, dots |
| `"bins": {"bin_size": n, "variance": [...], "mse": [...]}` | errors of bins |
| `"points": {"std": [...], "error": [...]}` | errors against bars |
| `"scores": {metric: value or [mean, error]}` | metrics with explanations |
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import figures
from .document import check_plotly, chooser, page, place
from .figures import Figure
from .markup import Markup, around, joined, table, tag
from .nested import mean_and_error, tables, value_of
from .rows import MOST_SHOWN, thinned
from .scores import METRICS, Scores, plain_score_table

MOST_FIGURES = 80
"""Plots on one page; what comes after is listed."""
_COMPARED = ("rmse", "nll")


def experiment(numbers: Mapping[str, Any], *, title: str = "Results of an experiment") -> str:
    """The page of an experiment's numbers.

    Args:
        numbers: nested mappings, as JSON holds them.
        title: the heading.

    Raises:
        ValueError: there are no numbers in it.
        ModuleNotFoundError: plotly is missing.
    """
    if not _has_number(numbers):
        raise ValueError(
            "Expected an experiment's numbers: nested mappings from names to numbers, got no "
            "number at all."
        )
    check_plotly()
    drawn: dict[str, Figure] = {}
    blocks, rest = _blocks(numbers, (), drawn)
    parts = [tag("h1", title), *blocks]
    if rest:
        heading = "Further numbers" if blocks else "Numbers"
        parts += [tag("h2", heading), tables(rest)]
    return page(title, joined(parts), drawn)


def _blocks(
    numbers: Mapping[str, Any], path: tuple[str, ...], drawn: dict[str, Figure]
) -> tuple[list[Markup], dict[str, Any]]:
    """What is recognised here and below, and the rest."""
    blocks, rest = [], dict(numbers)
    compared = {key: entry for key, entry in numbers.items() if _is_comparison(entry)}
    if compared and len(drawn) + len(compared) <= MOST_FIGURES:
        blocks.append(_comparison(compared, path, drawn))
        for key, entry in compared.items():
            shown = {"splits", *_methods(entry)}
            rest[key] = {name: value for name, value in entry.items() if name not in shown}
    scored = _scored(rest)
    if len(scored) > 1:
        heading = tag("h2", f"Metrics: {_heading(path)}" if path else "Metrics")
        blocks.append(joined([heading, plain_score_table(scored)]))
        for key in scored:
            rest[key] = {inner: value for inner, value in rest[key].items() if inner != "scores"}
    here = []
    for key, recognise in (("scores", _scores), ("bins", _bins), ("points", _points)):
        if isinstance(rest.get(key), Mapping) and len(drawn) < MOST_FIGURES:
            found = recognise(rest[key], path, drawn)
            if found is not None:
                here.append(found)
                del rest[key]
    if here:
        blocks.append(joined([tag("h2", _heading(path)), _side_by_side(here)]))
    for key, value in list(rest.items()):
        if isinstance(value, Mapping):
            inner, left = _blocks(value, (*path, key), drawn)
            blocks += inner
            rest[key] = left
            if numbers[key] and not left:
                del rest[key]
    return blocks, rest


def _side_by_side(parts: list[Markup]) -> Markup:
    plots = [part for part in parts if part.startswith("<figure")]
    others = [part for part in parts if not part.startswith("<figure")]
    grid = [tag("div", *plots, class_="figures")] if plots else []
    return joined([*others, *grid])


def _heading(path: tuple[str, ...]) -> str:
    return " › ".join(path) or "All"


# --- methods on data sets ----------------------------------------------------------------------


def _is_comparison(entry: Any) -> bool:
    return isinstance(entry, Mapping) and "splits" in entry and bool(_methods(entry))


def _methods(entry: Mapping[str, Any]) -> dict[str, dict[str, tuple[float, float | None]]]:
    """Mean and error by method and metric."""
    found = {}
    for method, values in entry.items():
        if isinstance(values, Mapping):
            pairs = {metric: mean_and_error(value) for metric, value in values.items()}
            known = {metric: pair for metric, pair in pairs.items() if pair is not None}
            if any(metric in known for metric in _COMPARED):
                found[method] = known
    return found


def _comparison(
    sets: Mapping[str, Mapping[str, Any]], path: tuple[str, ...], drawn: dict[str, Figure]
) -> Markup:
    by_set = {name: _methods(entry) for name, entry in sets.items()}
    present = {m for methods in by_set.values() for values in methods.values() for m in values}
    shown = [metric for metric in (*_COMPARED, *METRICS) if metric in present]
    shown = list(dict.fromkeys(shown))
    names = {}
    for name, methods in by_set.items():
        panels = _panels(methods, shown)
        label = f"f{len(drawn)}"
        drawn[label] = names[label] = figures.dots(name, panels)
    options = [METRICS[metric].label for metric in shown]
    choice = chooser(list(names), "trace", "Metric", options, options[0])
    grid = (place(key, figure, controls=False) for key, figure in names.items())
    heading = _heading(path) if path else "Methods on data sets"
    less = " Less is better." if set(shown) <= {*_COMPARED, "mae", "crps"} else ""
    return joined(
        [
            tag("h2", heading),
            tag("p", f"Means over splits, with standard errors.{less}", class_="about"),
            *(_comparison_table(metric, by_set, sets) for metric in shown),
            tag("div", choice, class_="controls"),
            tag("div", joined(grid), class_="figures small"),
        ]
    )


def _panels(
    methods: Mapping[str, Mapping[str, tuple[float, float | None]]], shown: list[str]
) -> dict[str, dict[str, tuple[float, float | None]]]:
    """By the metric's label and by method; a metric that this set lacks is empty."""
    return {
        METRICS[metric].label: {
            m: values[metric] for m, values in methods.items() if metric in values
        }
        for metric in shown
    }


def _comparison_table(
    metric: str,
    by_set: Mapping[str, Mapping[str, Mapping[str, tuple[float, float | None]]]],
    sets: Mapping[str, Mapping[str, Any]],
) -> Markup:
    methods = list(dict.fromkeys(m for found in by_set.values() for m in found))
    body = []
    for name, found in by_set.items():
        cells = [_pair(found.get(method, {}).get(metric)) for method in methods]
        body.append([name, str(sets[name]["splits"]), *cells])
    label = METRICS[metric].label
    return joined([tag("h3", label), table(["Data set", "Splits", *methods], body, label=label)])


def _pair(pair: tuple[float, float | None] | None) -> str:
    return "" if pair is None else around(*pair)


# --- scores, bins and points -------------------------------------------------------------------


def _scores(entry: Mapping[str, Any], path: tuple[str, ...], _: dict[str, Figure]) -> Markup | None:
    known = _metrics(entry)
    return plain_score_table({"Value": known}) if known else None


def _metrics(entry: Any) -> Scores:
    """Numbers or pairs by name; empty where there is anything else."""
    if not isinstance(entry, Mapping):
        return {}
    pairs = {key: mean_and_error(value) for key, value in entry.items()}
    known = {key: pair for key, pair in pairs.items() if pair is not None}
    return known if len(known) == len(entry) else {}


def _scored(numbers: Mapping[str, Any]) -> dict[str, Scores]:
    """The metrics of those entries that have some, to be compared in one table."""
    found = {}
    for key, value in numbers.items():
        if isinstance(value, Mapping) and (known := _metrics(value.get("scores"))):
            found[key] = known
    return found


def _bins(
    entry: Mapping[str, Any], path: tuple[str, ...], drawn: dict[str, Figure]
) -> Markup | None:
    pair = _lists(entry, "variance", "mse")
    size = value_of(entry.get("bin_size"))
    if pair is None or size is None or size < 1 or not bool((pair[0] > 0).all()):
        return None
    return _placed(figures.binned({int(size): pair}), path, drawn)


def _points(
    entry: Mapping[str, Any], path: tuple[str, ...], drawn: dict[str, Figure]
) -> Markup | None:
    pair = _lists(entry, "std", "error")
    if pair is None or not bool((pair[0] > 0).all()) or not bool(pair[1].any()):
        return None
    std, error = pair
    kept = thinned([std, error.abs()], MOST_SHOWN)
    figure = figures.errors(std[kept], error[kept], {})
    if (of := value_of(entry.get("rows"))) is not None or len(kept) < len(std):
        some = f" Shown: {len(kept)} of {int(of or len(std))} rows."
        figure = replace(figure, caption=figure.caption + some)
    texts = [
        f"row {i}<br>bar {s:.3g}<br>error {e:.3g}"
        for i, s, e in zip(kept.tolist(), std[kept].tolist(), error[kept].tolist(), strict=True)
    ]
    figure.traces[""][0]["hovertext"] = texts
    return _placed(figure, path, drawn)


def _placed(figure: Figure, path: tuple[str, ...], drawn: dict[str, Figure]) -> Markup:
    name = f"f{len(drawn)}"
    drawn[name] = figure
    return place(name, figure)


def _lists(entry: Mapping[str, Any], *keys: str) -> tuple[Tensor, Tensor] | None:
    """Two lists of finite numbers of one length, or None."""
    found = []
    for key in keys:
        listed = entry.get(key)
        if not isinstance(listed, list) or not listed:
            return None
        values = [value_of(value) for value in listed]
        if any(value is None or not math.isfinite(value) for value in values):
            return None
        found.append(torch.tensor(values, dtype=torch.float64))
    first, second = found
    return (first, second) if len(first) == len(second) else None


def _has_number(entry: Any) -> bool:
    return value_of(entry) is not None or any(map(_has_number, _children(entry)))


def _children(entry: Any) -> Iterator[Any]:
    if isinstance(entry, Mapping):
        yield from entry.values()
    elif isinstance(entry, list):
        yield from entry
