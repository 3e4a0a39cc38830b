"""The page of an experiment's numbers: plots first, then metrics, then everything else.

Its parts are objects with text and plots alone, which the template `experiment.html` shows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from experiments.frame.html_page.metrics import METRICS, Metric, Scores, glossary, words
from experiments.frame.html_page.nested import Block, TableBlock, blocks, value_of
from experiments.frame.html_page.plots import methods_plot
from experiments.frame.html_page.recognised import (
    COMPARED,
    DataSet,
    Path,
    Recognised,
    recognise,
)
from rigidities.report.document import page
from rigidities.report.figures import Plot
from rigidities.report.formatting import around

_ABOUT = (
    "The numbers of an experiment. You can zoom the plots, and point at them to see values. "
    "a ± b is a mean and its standard error."
)
_LESS_IS_BETTER = {*COMPARED, "mae", "crps"}


@dataclass(frozen=True)
class Comparison:
    """Methods on data sets: a plot for each data set, and a table for each metric.

    Attributes:
        heading: Its heading.
        about: What the numbers are.
        metrics: Labels of the metrics, of which one is chosen for all plots.
        plots: Plots by their identifiers.
        tables: Tables by the label of their metric.
        glossary: The metrics, which are explained.
    """

    heading: str
    about: str
    metrics: Sequence[str]
    plots: Mapping[str, Plot]
    tables: Mapping[str, TableBlock]
    glossary: Sequence[Metric]
    kind: str = "comparison"


@dataclass(frozen=True)
class PlotCase:
    """Plots that stand side by side, by their identifiers, and what sets their case apart."""

    name: str
    plots: Mapping[str, Plot]


@dataclass(frozen=True)
class PlotsPart:
    """All plots of bins and points; `shared` is what the keys of all cases have in common."""

    shared: str
    cases: Sequence[PlotCase]
    heading: str = "Plots"
    kind: str = "plots"


@dataclass(frozen=True)
class ScoreLine:
    """One metric in a table of metrics: its label, its values in each column, its best value."""

    label: str
    values: Sequence[str]
    ideal: str


@dataclass(frozen=True)
class ScoreCase:
    """One table of metrics, and what sets its case apart."""

    name: str
    header: Sequence[str]
    lines: Sequence[ScoreLine]


@dataclass(frozen=True)
class MetricsPart:
    """All tables of metrics, each metric explained once."""

    shared: str
    cases: Sequence[ScoreCase]
    glossary: Sequence[Metric]
    heading: str = "Metrics"
    kind: str = "metrics"


@dataclass(frozen=True)
class NumbersPart:
    """What is neither drawn nor compared."""

    heading: str
    blocks: Sequence[Block]
    kind: str = "numbers"


Part: TypeAlias = "Comparison | PlotsPart | MetricsPart | NumbersPart"


def experiment_page(numbers: Mapping[str, Any], *, title: str = "Results of an experiment") -> str:
    """The page of an experiment's numbers.

    Args:
        numbers: Nested mappings, as JSON holds them.
        title: The heading.

    Raises:
        ValueError: There are no numbers in it.
        ModuleNotFoundError: Plotly or Jinja is missing.
    """
    if not _has_number(numbers):
        raise ValueError(
            "Expected an experiment's numbers: nested mappings from names to numbers, got no "
            "number at all."
        )
    recognised = Recognised()
    remaining = recognise(numbers, recognised)
    plots: dict[str, Plot] = {}
    parts: list[Part] = []
    for path, data_sets in recognised.comparisons:
        parts.append(_comparison(path, data_sets, plots))
    if recognised.plots:
        parts.append(_plots_part(recognised.plots, plots))
    if recognised.scores:
        parts.append(_metrics_part(recognised.scores))
    if remaining:
        heading = "Further numbers" if parts else "Numbers"
        parts.append(NumbersPart(heading, blocks(remaining)))
    return page(
        "experiment.html",
        template_package=__package__,
        title=title,
        plots=plots,
        about=_ABOUT,
        parts=parts,
    )


def _has_number(entry: Any) -> bool:
    """Whether there is a number anywhere in nested mappings and lists."""
    if isinstance(entry, Mapping):
        return any(_has_number(value) for value in entry.values())
    if isinstance(entry, list):
        return any(_has_number(value) for value in entry)
    return value_of(entry) is not None


def _added(plot: Plot, plots: dict[str, Plot]) -> str:
    """Add a plot to those of the page, and give the identifier of its element."""
    identifier = f"f{len(plots)}"
    plots[identifier] = plot
    return identifier


# --- methods on data sets ----------------------------------------------------------------------


def _comparison(path: Path, data_sets: Mapping[str, DataSet], plots: dict[str, Plot]) -> Comparison:
    """Methods on data sets; the plots are added to those of the page."""
    present = set()
    for data_set in data_sets.values():
        for scores in data_set.methods.values():
            present.update(scores)
    keys = [key for key in dict.fromkeys([*COMPARED, *METRICS]) if key in present]
    identifiers = {}
    for name, data_set in data_sets.items():
        panels = {}
        for key in keys:
            panels[METRICS[key].label] = {
                method: scores[key] for method, scores in data_set.methods.items() if key in scores
            }
        plot = methods_plot(name, panels)
        identifiers[_added(plot, plots)] = plot
    about = "Means over splits, with standard errors."
    if set(keys) <= _LESS_IS_BETTER:
        about += " Lower is better."
    return Comparison(
        heading=" › ".join(words(key) for key in path) or "Methods on data sets",
        about=about,
        metrics=[METRICS[key].label for key in keys],
        plots=identifiers,
        tables={METRICS[key].label: _comparison_table(key, data_sets) for key in keys},
        glossary=glossary(keys),
    )


def _comparison_table(key: str, data_sets: Mapping[str, DataSet]) -> TableBlock:
    """One metric of all methods on all data sets."""
    methods = list(
        dict.fromkeys(method for data_set in data_sets.values() for method in data_set.methods)
    )
    rows = []
    for name, data_set in data_sets.items():
        row = [name, str(data_set.splits)]
        for method in methods:
            pair = data_set.methods.get(method, {}).get(key)
            row.append("" if pair is None else around(pair[0], pair[1]))
        rows.append(row)
    return TableBlock(["Data set", "Splits", *methods], rows, label=METRICS[key].label)


# --- plots and metrics of cases ----------------------------------------------------------------


def _plots_part(paths_and_plots: Sequence[tuple[Path, Plot]], plots: dict[str, Plot]) -> PlotsPart:
    """Plots of bins and points, those of one case side by side, added to those of the page."""
    cases: dict[Path, dict[str, Plot]] = {}
    for path, plot in paths_and_plots:
        cases.setdefault(path, {})[_added(plot, plots)] = plot
    shared, names = shared_and_different(list(cases))
    return PlotsPart(
        shared=shared,
        cases=[PlotCase(name, case) for name, case in zip(names, cases.values(), strict=True)],
    )


def _metrics_part(paths_and_columns: Sequence[tuple[Path, Mapping[str, Scores]]]) -> MetricsPart:
    """A table of metrics for each case."""
    paths = [path for path, _ in paths_and_columns]
    shared, names = shared_and_different(paths)
    cases = []
    used: list[str] = []
    for name, (_, columns) in zip(names, paths_and_columns, strict=True):
        keys = list(dict.fromkeys(key for scores in columns.values() for key in scores))
        lines = [_score_line(key, columns) for key in keys]
        header = ["Metric", *(words(column) for column in columns), "Ideal"]
        cases.append(ScoreCase(name, header, lines))
        used += keys
    return MetricsPart(shared=shared, cases=cases, glossary=glossary(used))


def _score_line(key: str, columns: Mapping[str, Scores]) -> ScoreLine:
    """One metric in all columns; one that is not known has its key as a label."""
    metric = METRICS.get(key, Metric(label=words(key), ideal="", sentence=""))
    values = []
    for scores in columns.values():
        if key in scores:
            value, error = scores[key]
            values.append(metric.text(value, error))
        else:
            values.append("")
    return ScoreLine(metric.label, values, metric.ideal)


def shared_and_different(paths: Sequence[Path]) -> tuple[str, list[str]]:
    """What all paths share, and what sets each apart, in words.

    Examples:
        >>> shared_and_different([("shown", "paper", "inside"), ("shown", "best_bins", "inside")])
        ('shown, inside', ['paper', 'best bins'])
        >>> shared_and_different([("a", "b"), ("a",)])
        ('a', ['b', ''])
    """
    common = _common_positions(paths)
    shared = ", ".join(words(paths[0][position]) for position in common)
    different = []
    for path in paths:
        keys = [words(key) for position, key in enumerate(path) if position not in common]
        different.append(" › ".join(keys))
    return shared, different


def _common_positions(paths: Sequence[Path]) -> list[int]:
    """Positions at which all paths have the same key; none where all paths are one."""
    if len(set(paths)) == 1:
        return []
    lengths = {len(path) for path in paths}
    common = []
    for position in range(min(lengths)):
        if len({path[position] for path in paths}) == 1:
            common.append(position)
        elif len(lengths) > 1:
            # Positions of paths of different lengths correspond from the beginning alone.
            break
    return common
