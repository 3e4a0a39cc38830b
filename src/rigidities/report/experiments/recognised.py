"""What a page can draw or compare in an experiment's numbers, wherever it stands in them.

| recognised, at any depth | as |
| --- | --- |
| `{set: {"splits": n, method: {"rmse": [mean, error], "nll": [mean, error]}}}` | comparison |
| a mapping of exactly `bin_size`, `variance` and `mse` | errors of bins |
| `"points": {"std": [...], "error": [...]}` | errors against bars |
| `"scores": {metric: value or [mean, error]}`, `"constant": {"scores": ...}` | metrics |

What is recognised is taken out of the numbers; what stays is listed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .. import figures
from ..figures import Figure
from ..rows import MOST_SHOWN, thinned
from ..scores import METRICS, Scores
from .nested import mean_and_error, repeated, value_of

MOST_FIGURES = 80
"""Plots on one page; what comes after is listed."""
COMPARED = ("rmse", "nll")
_BINS = {"bin_size", "variance", "mse"}

Path = tuple[str, ...]
Methods = Mapping[str, Scores]
"""Mean and error by method and metric."""


@dataclass
class Recognised:
    """What was found, with the keys that lead there.

    Attributes:
        comparisons: by data set, the splits and the methods' metrics.
        plots: bins and points.
        scores: metrics by case; the cases of one table belong together.
    """

    comparisons: list[tuple[Path, dict[str, tuple[Any, Methods]]]] = field(default_factory=list)
    plots: list[tuple[Path, Figure]] = field(default_factory=list)
    scores: list[tuple[Path, dict[str, Scores]]] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Plots so far."""
        return len(self.plots) + sum(len(sets) for _, sets in self.comparisons)


def recognise(numbers: Mapping[str, Any], found: Recognised, path: Path = ()) -> dict[str, Any]:
    """Take out of the numbers at a path what is recognised, here and below; return the rest."""
    rest = dict(numbers)
    _take_comparison(rest, found, path)
    _take_scores(rest, found, path)
    for key, value in list(rest.items()):
        if not isinstance(value, Mapping) or repeated(key):
            continue
        below = path if key in ("bins", "points") else (*path, key)
        figure = _figure(key, value) if found.count < MOST_FIGURES else None
        if figure is not None:
            found.plots.append((below, figure))
        rest[key] = {} if figure is not None else recognise(value, found, (*path, key))
        if numbers[key] and not rest[key]:
            del rest[key]
    return rest


def _take_comparison(rest: dict[str, Any], found: Recognised, path: Path) -> None:
    compared: dict[str, tuple[Any, Methods]] = {
        key: (entry["splits"], methods)
        for key, entry in rest.items()
        if isinstance(entry, Mapping) and "splits" in entry and (methods := _methods(entry))
    }
    if not compared or found.count + len(compared) > MOST_FIGURES:
        return
    found.comparisons.append((path, compared))
    for key, (_, taken) in compared.items():
        others = {k: value for k, value in rest[key].items() if k != "splits" and k not in taken}
        for method, scores in taken.items():
            unknown = {k: value for k, value in rest[key][method].items() if k not in scores}
            others |= {method: unknown} if unknown else {}
        rest[key] = others


def _methods(entry: Mapping[str, Any]) -> dict[str, Scores]:
    """Known metrics by method, of those entries that are methods."""
    found: dict[str, Scores] = {}
    for method, values in entry.items():
        own = values if isinstance(values, Mapping) else {}
        found[method] = {key: p for key in METRICS if (p := mean_and_error(own.get(key)))}
    return {name: known for name, known in found.items() if not known.keys().isdisjoint(COMPARED)}


def _take_scores(rest: dict[str, Any], found: Recognised, path: Path) -> None:
    """One table for the cases that stand side by side, with the constant bar of each."""
    own = metrics_of(rest.get("scores"))
    if own:
        columns = {"these bars": own}
        _take_constant(rest, columns, "constant bar")
        found.scores.append((path, columns))
        del rest["scores"]
    cases = {
        key: known
        for key, value in rest.items()
        if isinstance(value, Mapping) and (known := metrics_of(value.get("scores")))
    }
    if len(cases) < 2:
        return
    columns = {}
    for key, known in cases.items():
        columns[key] = known
        entry = {inner: value for inner, value in rest[key].items() if inner != "scores"}
        _take_constant(entry, columns, f"{key}, constant bar")
        rest[key] = entry
    found.scores.append((path, _without_copies(columns)))


def _take_constant(entry: dict[str, Any], columns: dict[str, Scores], name: str) -> None:
    constant = entry.get("constant")
    if not isinstance(constant, Mapping) or not (known := metrics_of(constant.get("scores"))):
        return
    columns[name] = known
    entry["constant"] = {key: value for key, value in constant.items() if key != "scores"}
    if not entry["constant"]:
        del entry["constant"]


def _without_copies(columns: Mapping[str, Scores]) -> dict[str, Scores]:
    """Where all constant bars are one and the same, one column at the end."""
    constant = {key: value for key, value in columns.items() if key.endswith(", constant bar")}
    if len(constant) < 2 or len(set(map(repr, constant.values()))) > 1:  # nan equals no nan
        return dict(columns)
    others = {key: value for key, value in columns.items() if key not in constant}
    return {**others, "constant bar": next(iter(constant.values()))}


def metrics_of(entry: Any) -> Scores:
    """Numbers or pairs by name; empty where there is anything else."""
    if not isinstance(entry, Mapping):
        return {}
    known = {key: pair for key, value in entry.items() if (pair := mean_and_error(value))}
    return known if len(known) == len(entry) else {}


def _figure(key: str, entry: Mapping[str, Any]) -> Figure | None:
    if set(entry) != _BINS:
        return _points(entry) if key == "points" else None
    pair, size = _lists(entry, "variance", "mse"), value_of(entry["bin_size"])
    if pair is None or size is None or size < 1:
        return None
    return figures.binned({int(size): pair})


def _points(entry: Mapping[str, Any]) -> Figure | None:
    pair = _lists(entry, "std", "error")
    if pair is None or not bool(pair[1].any()):
        return None
    std, error = pair
    kept = thinned([std, error.abs()], MOST_SHOWN)
    figure = figures.errors(std[kept], error[kept], {})
    if (of := value_of(entry.get("rows"))) is not None or len(kept) < len(std):
        some = f" Shown: {len(kept)} of {int(of or len(std))} rows."
        figure = replace(figure, caption=figure.caption + some)
    # the points may be a sample, so that their place is not the number of a row
    texts = [
        f"point {i} of {len(kept)} shown<br>bar {s:.3g}<br>error {e:.3g}"
        for i, (s, e) in enumerate(zip(std[kept].tolist(), error[kept].tolist(), strict=True), 1)
    ]
    for trace in figure.traces[""]:
        if trace["hoverinfo"] == "text":
            picks = trace["meta"].get("picks", range(len(texts)))
            trace["hovertext"] = [texts[i] for i in picks]
    return figure


def _lists(entry: Mapping[str, Any], *keys: str) -> tuple[Tensor, Tensor] | None:
    """Two lists of finite numbers of one length, those of the first above zero; or None."""
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
    return (first, second) if len(first) == len(second) and bool((first > 0).all()) else None
