"""The page of an experiment's numbers: plots first, then metrics, then everything else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .. import figures
from ..document import chooser, page, place, require_plotly
from ..figures import Figure
from ..markup import Markup, around, joined, table, tag, words
from ..scores import METRICS, glossary, plain_score_table
from .nested import tables, value_of
from .recognised import COMPARED, Methods, Path, Recognised, recognise

_ABOUT = (
    "The numbers of an experiment. Plots can be zoomed, and tell more when one points at them; "
    "a ± b is a mean and its standard error."
)


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
        what = "Expected an experiment's numbers"
        raise ValueError(f"{what}: nested mappings from names to numbers, got no number at all.")
    require_plotly()
    found, drawn = Recognised(), dict[str, Figure]()
    rest = recognise(numbers, found)
    parts = [_comparison(path, sets, drawn) for path, sets in found.comparisons]
    parts += [*_plots(found, drawn), *_scores(found)]
    if rest:
        parts.append(("Further numbers" if parts else "Numbers", tables(rest)))
    headings = (
        joined([tag("h2", heading, id=f"part{k}"), content])
        for k, (heading, content) in enumerate(parts)
    )
    links = (tag("li", tag("a", name, href=f"#part{k}")) for k, (name, _) in enumerate(parts))
    top = [tag("h1", title), tag("p", _ABOUT, class_="about")]
    if len(parts) > 1:
        top.append(tag("nav", tag("ul", joined(links)), aria_label="On this page"))
    return page(title, joined([*top, *headings]), drawn)


def readable(paths: Sequence[Path]) -> tuple[str, list[str]]:
    """What all paths share, and what each has of its own, in words.

    Examples:
        >>> readable([("shown", "paper", "inside"), ("shown", "best_bins", "inside")])
        ('shown, inside', ['paper', 'best bins'])
        >>> readable([("a", "b"), ("a",)])
        ('a', ['b', ''])
    """
    length = min(map(len, paths))
    alike = len({len(path) for path in paths}) == 1
    common = [k for k in range(length) if len({path[k] for path in paths}) == 1]
    if not alike:  # positions correspond from the beginning alone
        common = [k for k in common if all(j in common for j in range(k))]
    if len(set(paths)) == 1:
        common = []
    shared = ", ".join(words(paths[0][k]) for k in common)
    own = (" › ".join(words(p) for k, p in enumerate(path) if k not in common) for path in paths)
    return shared, list(own)


def _cases(paths: Sequence[Path], *before: Markup, contents: Iterable[Markup]) -> Markup:
    """What stands under each path, below what is said of all."""
    shared, own = readable(paths)
    under = tag("p", f"Found under “{shared}”.", class_="about") if shared else Markup()
    heads = (tag("h3", name, class_="case") if name else Markup() for name in own)
    parts = (joined(pair) for pair in zip(heads, contents, strict=True))
    return joined([under, *before, *parts])


def _comparison(
    path: Path, sets: Mapping[str, tuple[Any, Methods]], drawn: dict[str, Figure]
) -> tuple[str, Markup]:
    present = {key for _, methods in sets.values() for scores in methods.values() for key in scores}
    shown = list(dict.fromkeys(key for key in (*COMPARED, *METRICS) if key in present))
    names = {}
    for name, (_, methods) in sets.items():
        label = f"f{len(drawn)}"
        panels = {  # empty for a metric that this set lacks
            METRICS[key].label: {m: found[key] for m, found in methods.items() if key in found}
            for key in shown
        }
        drawn[label] = names[label] = figures.dots(name, panels)
    options = [METRICS[metric].label for metric in shown]
    choice = chooser(list(names), "Metric", options, options[0])
    grid = (place(key, figure, controls=False) for key, figure in names.items())
    less = " Less is better." if set(shown) <= {*COMPARED, "mae", "crps"} else ""
    content = [
        tag("p", f"Means over splits, with standard errors.{less}", class_="about"),
        tag("div", choice, class_="controls"),
        tag("div", joined(grid), class_="figures small"),
        *(_comparison_table(metric, sets) for metric in shown),
        glossary(shown),
    ]
    heading = " › ".join(map(words, path)) if path else "Methods on data sets"
    return heading, joined(content)


def _comparison_table(metric: str, sets: Mapping[str, tuple[Any, Methods]]) -> Markup:
    methods = list(dict.fromkeys(m for _, found in sets.values() for m in found))
    body = []
    for name, (splits, found) in sets.items():
        pairs = (found.get(method, {}).get(metric) for method in methods)
        cells = ("" if pair is None else around(*pair) for pair in pairs)
        body.append([name, str(splits), *cells])
    label = METRICS[metric].label
    return joined([tag("h3", label), table(["Data set", "Splits", *methods], body, label=label)])


def _plots(found: Recognised, drawn: dict[str, Figure]) -> Iterator[tuple[str, Markup]]:
    """Bins and points, those of one case side by side."""
    if not found.plots:
        return
    cases: dict[Path, list[Markup]] = {}
    for path, figure in found.plots:
        label = f"f{len(drawn)}"
        drawn[label] = figure
        cases.setdefault(path, []).append(place(label, figure))
    contents = (tag("div", *plots, class_="figures") for plots in cases.values())
    yield "Plots", _cases(list(cases), contents=contents)


def _scores(found: Recognised) -> Iterator[tuple[str, Markup]]:
    """All metrics, each explained once."""
    if not found.scores:
        return
    contents = (plain_score_table(columns) for _, columns in found.scores)
    used = [key for _, columns in found.scores for scores in columns.values() for key in scores]
    paths = [path for path, _ in found.scores]
    yield "Metrics", _cases(paths, glossary(used), contents=contents)


def _has_number(entry: Any) -> bool:
    members = entry.values() if isinstance(entry, Mapping) else entry
    inside = members if isinstance(entry, (Mapping, list)) else ()
    return value_of(entry) is not None or any(map(_has_number, inside))
