"""What a report says about one target, and about several at a glance."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..calibration.coverage import Coverage
from ..calibration.report import CalibrationReport, numbers
from . import figures
from .document import place
from .figures import Figure, hover_texts
from .judgement import WORDS, Caution, Verdict
from .markup import Markup, escaped, joined, number, table, tag
from .rows import Rows, shown
from .scores import METRICS, Judged, bin_sizes, score_table

_WORST = 10
_OVERVIEW = ("rmse", "nll", "nll_gain", "coverage", "spearman")


@dataclass
class Drawn:
    """The plots of a page, by name, and the hover texts that they share."""

    figures: dict[str, Figure] = field(default_factory=dict)
    hovers: dict[str, list[str]] = field(default_factory=dict)


def section(
    judged: Judged,
    verdict: Verdict,
    drawn: Drawn,
    *,
    name: str,
    most: int,
    calibration: CalibrationReport | None,
    alone: bool = True,
) -> Markup:
    """Verdict, cautions, metrics and plots of one target; the plots are added to the page's.

    Identifiers begin with `name`, scatter plots show at most so many points, and a target that is
    alone need not be named.
    """
    rows = judged.rows
    return joined(
        [
            *([] if alone else [tag("h2", rows.name)]),
            verdict_box(verdict),
            caution_box(verdict.cautions),
            tag("h2", "Plots"),
            _plots(rows, name, most, drawn),
            tag("h2", "Metrics"),
            tag("p", _about_metrics(judged), class_="about"),
            score_table(judged),
            *([_choices(calibration)] if calibration is not None else []),
            tag("h2", "Rows to look at"),
            _worst(rows),
        ]
    )


def verdict_box(judged: Verdict) -> Markup:
    """The verdict and its findings, for the top of a section."""
    items = []
    for f in judged.findings:
        status = tag("span", WORDS[f.status], class_=f"status {f.status}")
        items.append(tag("li", tag("strong", f"{f.subject}: "), status, ". ", f.text))
    return tag("div", headline(judged), tag("ul", *items), class_=f"verdict {judged.status}")


def headline(judged: Verdict) -> Markup:
    """The verdict in one sentence."""
    return tag("h2", judged.headline)


def caution_box(found: Sequence[Caution]) -> Markup:
    """What to beware of; nothing where there is nothing."""
    if not found:
        return Markup()
    items = joined(tag("li", caution.text) for caution in found)
    return tag("div", tag("h3", "Beware"), tag("ul", items), class_="cautions")


def overview(targets: Sequence[Judged], verdicts: Sequence[Verdict]) -> Markup:
    """One line per target."""
    labels = [METRICS[key].at(targets[0].level) for key in _OVERVIEW]
    header = ["Target", *labels, "Size of the bars", "Verdict"]
    body = []
    for judged, verdict in zip(targets, verdicts, strict=False):  # the first of very many targets
        values, sized = judged.bars, verdict.findings[0]
        cells = [METRICS[key].text(values[key]) for key in _OVERVIEW]
        status = tag("span", sized.text.partition(".")[0], class_=f"status {sized.status}")
        whole = tag("span", WORDS[verdict.status], class_=f"status {verdict.status}")
        body.append([judged.rows.name, *cells, status, whole])
    return table(header, body, label="All targets")


def _plots(rows: Rows, name: str, most: int, drawn: Drawn) -> Markup:
    index = shown(rows, most)
    drawn.hovers[name] = hover_texts(rows, index)
    mean, std, target = rows.mean[index], rows.std[index], rows.target[index]
    hover = {"rows": name}
    found = [figures.errors(std, target - mean, hover)]
    if bin_sizes(len(rows)):
        found.append(figures.binned(figures.all_bins(rows)))
    found += [figures.coverage(rows), figures.parity(mean, std, target, hover)]
    if rows.spread and bool(rows.error.any()):
        found.append(figures.sparsification(rows))
    found.append(figures.histogram(rows))
    named = {f"{name}-{figure.name}": figure for figure in found}
    drawn.figures.update(named)
    placed = [place(key, figure) for key, figure in named.items()]
    at = 1 + [figure.name for figure in found].index("coverage")
    grid = tag("div", *placed[:at], *_fifths(rows), *placed[at:], class_="figures")
    return joined([_thinning(rows, len(index)), grid])


def _fifths(rows: Rows) -> Iterator[Markup]:
    """The table of coverage by fifths, beside the plots; none for few rows."""
    if not (found := rows.scored.fifths):
        return
    groups = [found[i : i + 5] for i in range(0, len(found), 5)]
    body = [[line[0].where.split()[0], *map(_held, line)] for line in zip(*groups, strict=True)]
    low, high = (f"{100 * n / found[0].rows:.3g} %" for n in found[0][2:4])
    caption = f"What 90 % intervals hold in each fifth of the rows; chance allows {low} to {high}."
    header = ["Fifth", *(f"by {'bar' if 'bar' in g[0].where else 'prediction'}" for g in groups)]
    content = (
        tag("h3", "Do they in every part of the rows?"),
        table(header, body, label="By fifths"),
    )
    yield tag("figure", *content, tag("figcaption", caption))


def _held(one: Coverage) -> Markup:
    status = tag("span", f" too {one.side}", class_=f"status {one.status}") if one.side else ""
    values = one.where.partition(" (")[2][:-1]
    share = f"{100 * one.inside / one.rows:.3g} %"
    return joined([share, status, tag("span", values, class_="note")])


def _thinning(rows: Rows, count: int) -> Markup:
    if count == len(rows):
        return Markup()
    return tag(
        "p",
        f"Scatter plots show {count} of the {len(rows)} rows: those with the largest bars and "
        "errors, and a random sample of the rest. Metrics, bins and curves use all rows.",
        class_="about",
    )


def _about_metrics(judged: Judged) -> str:
    rows, bins = judged.rows, ""
    distribution = "All figures are those of the bars as standard deviations of Gaussians."
    if rows.prediction is not None:
        distribution = f"All figures are those of the distribution ({rows.distribution}) around each prediction."
    if bin_sizes(len(rows)):
        bins = f" The last three use bins of {judged.bin_size} rows."
    return (
        f"“Constant bar” is one Gaussian bar for all rows, {number(rows.constant_bar)}: "
        f"{rows.which_constant}. “Right bars” is what these bars would score if true values "
        f"followed them, mean and standard deviation over redrawn errors. {distribution}{bins}"
    )


def _choices(report: CalibrationReport) -> Markup:
    """What the calibration chose."""
    constant, gain = number(report.nll_constant, 4), number(report.gain)
    lines = [
        ("Criterion", report.criterion, f"chose what follows, on {report.rows} rows"),
        ("Ridge ς²", number(report.ridge, 4), "added to the diagonal of the Gram matrix"),
        ("Scale α", numbers(report.scale), "what the bars are multiplied with"),
        ("Noise variance", numbers(report.noise), "what more data would not remove"),
        ("NLL there", number(report.nll, 4), f"a constant bar has {constant}, the gain is {gain}"),
    ]
    if math.isfinite(report.effective_rank):
        rank = f"{report.effective_rank:.1f} of {report.width}"
        lines.append(("Effective rank", rank, "directions that the training data determine"))
    if math.isfinite(report.condition):
        lines.append(("Condition number", number(report.condition), "of Gram matrix and ridge"))
    body = [[name, value, tag("span", what, class_="note")] for name, value, what in lines]
    header = ["Choice", "Value", "What it is"]
    return joined([tag("h2", "Calibration"), table(header, body, label="Calibration")])


def _worst(rows: Rows) -> Markup:
    """The rows that fit their bars least."""
    index = rows.z.abs().topk(min(_WORST, len(rows))).indices.tolist()
    inputs = list(rows.inputs)[:8]
    header = ["Row", "Prediction", "Bar", "True value", "Error / bar", *inputs]
    body = []
    for i in index:
        values = (f"{float(part[i]):.4g}" for part in (rows.mean, rows.std, rows.target))
        others = (_cell(rows.inputs[key][i]) for key in inputs)
        body.append([rows.number(i), *values, f"{float(rows.error[i] / rows.std[i]):.2f}", *others])
    note = tag("p", "Those with the largest errors in units of their bars.", class_="about")
    return joined([note, table(header, body, label="Rows with the largest errors")])


def _cell(value: object) -> Markup:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return escaped(text if len(text) <= 40 else text[:39] + "…")
