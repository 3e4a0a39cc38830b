"""What the page shows for one target, and for several at a glance.

`section_of` turns the metrics and the verdict of a target into texts and plots, and `overview`
makes one line for each of several targets. The template `judgement.html` puts them into the page.
Nothing here is HTML.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..calibration.coverage import Coverage
from ..calibration.report import CalibrationReport
from ..calibration.words import judging, method_text, numbers
from . import figures
from .figures import Plot
from .formatting import exact, number
from .judgement import Judgements, Verdict
from .rows import TargetRows, rows_to_show
from .scores import METRICS, TargetScores, bin_sizes

_MOST_WORST_ROWS = 10
_MOST_WORST_INPUTS = 8
_MOST_OVERVIEW_LINES = 200
"""The overview lists at most this many targets."""
_OVERVIEW_METRICS = ("rmse", "nll", "nll_gain", "coverage", "spearman")


# --- one target --------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoreLine:
    """One metric in the table of metrics, as text.

    Attributes:
        label: Its displayed name.
        sentence: Its explanation.
        bars: Its value for these bars.
        constant: Its value for one constant bar.
        right: Its mean and standard deviation for right bars.
        ideal: Its best value.
    """

    label: str
    sentence: str
    bars: str
    constant: str
    right: str
    ideal: str


@dataclass(frozen=True)
class FifthCell:
    """Coverage in one fifth of the rows, as text.

    Attributes:
        share: Share of the true values that 90 % intervals cover.
        side: "narrow" or "wide" where the bars are wrong there, else empty.
        status: "good", "careful" or "bad".
        values: The range of predictions or bars in the fifth.
    """

    share: str
    side: str
    status: str
    values: str


@dataclass(frozen=True)
class FifthLine:
    """Fifths of one rank, such as "lowest": one cell by prediction, one by bar."""

    name: str
    cells: Sequence[FifthCell]


@dataclass(frozen=True)
class FifthsTable:
    """Coverage by fifths of the rows."""

    header: Sequence[str]
    lines: Sequence[FifthLine]
    caption: str


@dataclass(frozen=True)
class CalibrationChoice:
    """One thing that the calibration chose, with its value and its meaning, as text."""

    name: str
    value: str
    meaning: str


@dataclass(frozen=True)
class WorstRows:
    """The rows that fit their bars least, as text."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class PlainTable:
    """A table that is not about the bars, with its heading; for the page and the console.

    Attributes:
        title: Its heading.
        about: Sentences on what it shows.
        header: Names of its columns.
        rows: Its cells, as text.
    """

    title: str
    about: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def text(self) -> str:
        """The table for the console: first column to the left, numbers to the right."""
        lines = [list(self.header), *[list(row) for row in self.rows]]
        widths = [max(len(line[k]) for line in lines) for k in range(len(self.header))]
        texts = [f"\n{self.title}", *textwrap.wrap(self.about, 100)]
        for line in lines:
            cells = [line[0].ljust(widths[0])]
            cells += [
                cell.rjust(max(width, 10)) for cell, width in zip(line[1:], widths[1:], strict=True)
            ]
            texts.append("  " + "  ".join(cells))
        return "\n".join(texts)


@dataclass(frozen=True)
class TargetSection:
    """Everything that the page shows for one target.

    Attributes:
        identifier: The prefix of the identifiers of its elements.
        name: Name of the target.
        verdict: Its verdict.
        plots: Its plots, by the identifier of the element that each is drawn in.
        hover_texts: Hover texts of the rows that scatter plots show. The plots refer to them by
            `identifier`.
        about_points: A sentence where scatter plots do not show all rows, else empty.
        fifths: Coverage by fifths; None for few rows.
        about_metrics: What the columns of the table of metrics mean.
        scores: The table of metrics.
        calibration: What the calibration chose; empty where it is not known.
        worst_rows: The rows that fit their bars least.
    """

    identifier: str
    name: str
    verdict: Verdict
    plots: Mapping[str, Plot]
    hover_texts: Sequence[str]
    about_points: str
    fifths: FifthsTable | None
    about_metrics: str
    scores: Sequence[ScoreLine]
    calibration: Sequence[CalibrationChoice]
    worst_rows: WorstRows


def section_of(
    scores: TargetScores,
    verdict: Verdict,
    *,
    identifier: str,
    most_points: int,
    calibration: CalibrationReport | None,
) -> TargetSection:
    """Everything that the page shows for one target.

    Args:
        scores: Its rows and metrics.
        verdict: Its verdict.
        identifier: Short name, unique on the page.
        most_points: The largest number of rows in a scatter plot.
        calibration: What `calibrate` returned, if it is known.
    """
    rows = scores.rows
    positions = rows_to_show(rows, most_points)
    mean = rows.mean[positions]
    std = rows.std[positions]
    target = rows.target[positions]
    plots = [figures.errors(std, target - mean, hover=identifier)]
    if bin_sizes(len(rows)):
        plots.append(figures.binned(figures.all_bins(rows)))
    plots.append(figures.coverage(rows))
    plots.append(figures.parity(mean, std, target, hover=identifier))
    if rows.bars_differ and bool(rows.error.any()):
        plots.append(figures.sparsification(rows))
    plots.append(figures.histogram(rows))
    return TargetSection(
        identifier=identifier,
        name=rows.name,
        verdict=verdict,
        plots={f"{identifier}-{plot.name}": plot for plot in plots},
        hover_texts=figures.hover_texts(rows, positions),
        about_points=_about_points(rows, len(positions)),
        fifths=_fifths_table(rows),
        about_metrics=_about_metrics(scores),
        scores=_score_lines(scores),
        calibration=_calibration_choices(calibration),
        worst_rows=_worst_rows(rows),
    )


def _about_points(rows: TargetRows, count: int) -> str:
    """A sentence on the rows that scatter plots show, where these are not all."""
    if count == len(rows):
        return ""
    return (
        f"Scatter plots show {count} of the {len(rows)} rows: those with the largest bars and "
        "errors, and a random sample of the rest. Metrics, bins and curves use all rows."
    )


def _fifths_table(rows: TargetRows) -> FifthsTable | None:
    """Coverage by fifths of the rows; None for few rows."""
    fifths = rows.scored.fifths
    if not fifths:
        return None
    # Five by prediction and then five by bar; either five are missing where all values are equal.
    groups = [fifths[i : i + 5] for i in range(0, len(fifths), 5)]
    header = ["Fifth"]
    for group in groups:
        header.append("by bar" if "bar" in group[0].where else "by prediction")
    lines = []
    for fifths_of_rank in zip(*groups, strict=True):
        rank = fifths_of_rank[0].where.split()[0]  # "lowest", of "lowest fifth of the bars (...)"
        lines.append(FifthLine(rank, [_fifth_cell(fifth) for fifth in fifths_of_rank]))
    first = fifths[0]
    low = f"{100 * first.low / first.rows:.3g} %"
    high = f"{100 * first.high / first.rows:.3g} %"
    caption = (
        f"The share of true values that 90 % intervals cover in each fifth of the rows. Chance "
        f"allows {low} to {high}."
    )
    return FifthsTable(header, lines, caption)


def _fifth_cell(fifth: Coverage) -> FifthCell:
    """The cell of one fifth."""
    return FifthCell(
        share=f"{100 * fifth.inside / fifth.rows:.3g} %",
        side=fifth.side,
        status=fifth.status,
        values=fifth.where.partition(" (")[2][:-1],  # what stands in brackets
    )


def _about_metrics(scores: TargetScores) -> str:
    """What the columns of the table of metrics mean."""
    rows = scores.rows
    sentences = [
        f"“Constant bar” is one Gaussian bar for all rows, {number(rows.constant_bar)}: "
        f"{rows.constant_bar_source}.",
        "“Right bars” is the score that these bars would get if the true values followed them: "
        "mean and standard deviation over redrawn true values.",
    ]
    if rows.prediction is None:
        sentences.append("All figures treat the bars as standard deviations of Gaussians.")
    else:
        sentences.append(
            f"All figures use the predicted distribution of each row ({rows.distribution})."
        )
    if bin_sizes(len(rows)):
        sentences.append(f"The last three metrics use bins of {scores.bin_size} rows.")
    return " ".join(sentences)


def _score_lines(scores: TargetScores) -> list[ScoreLine]:
    """Every metric, beside its value for a constant bar and for right bars."""
    lines = []
    for key, metric in METRICS.items():
        if key not in scores.bars:
            continue
        constant = metric.text(scores.constant[key]) if key in scores.constant else "-"
        right_mean, right_spread = scores.right[key]
        lines.append(
            ScoreLine(
                label=metric.label_at(scores.level),
                sentence=metric.sentence,
                bars=metric.text(scores.bars[key]),
                constant=constant,
                right=metric.text(right_mean, right_spread),
                ideal=metric.ideal_at(scores.level),
            )
        )
    return lines


def _calibration_choices(calibration: CalibrationReport | None) -> list[CalibrationChoice]:
    """What the calibration chose; nothing where it is not known."""
    if calibration is None:
        return []
    constant = number(calibration.nll_constant, 4)
    gain = number(calibration.gain)
    choices = [
        CalibrationChoice(
            "Method",
            method_text(calibration),
            f"made the choices below, on {calibration.rows} rows",
        ),
        CalibrationChoice(
            "Ridge ς²", number(calibration.ridge, 4), "added to the diagonal of the Gram matrix"
        ),
        CalibrationChoice(
            "Scale α", numbers(calibration.scale), "multiplies the epistemic part of the bars"
        ),
        CalibrationChoice(
            "Noise variance",
            numbers(calibration.noise_level),
            "what more data would not remove",
        ),
        CalibrationChoice(
            "NLL",
            number(calibration.nll, 4),
            f"{judging(calibration)} ({constant} for one constant bar); the cross-validated gain "
            f"is {gain}",
        ),
    ]
    if math.isfinite(calibration.effective_rank):
        rank = f"{calibration.effective_rank:.1f} of {calibration.width}"
        meaning = "directions that the training data determine"
        choices.append(CalibrationChoice("Effective rank", rank, meaning))
    if math.isfinite(calibration.condition):
        condition = number(calibration.condition)
        choices.append(
            CalibrationChoice("Condition number", condition, "of Gram matrix plus ridge")
        )
    return choices


def _worst_rows(rows: TargetRows) -> WorstRows:
    """The rows whose true values lie furthest out in their distributions."""
    positions = rows.z.abs().topk(min(_MOST_WORST_ROWS, len(rows))).indices.tolist()
    inputs = list(rows.inputs)[:_MOST_WORST_INPUTS]
    header = ["Row", "Prediction", "Bar", "True value", "Error / bar", *inputs]
    lines = []
    for row in positions:
        line = [
            str(rows.row_number(row)),
            exact(float(rows.mean[row]), 4),
            exact(float(rows.std[row]), 4),
            exact(float(rows.target[row]), 4),
            f"{float(rows.error[row] / rows.std[row]):.2f}",
        ]
        line += [_input_text(rows.inputs[name][row]) for name in inputs]
        lines.append(line)
    return WorstRows(header, lines)


def _input_text(value: object, most: int = 40) -> str:
    """An input for a cell of a table, shortened where it is long."""
    text = exact(value, 4) if isinstance(value, float) else str(value)
    if len(text) <= most:
        return text
    return text[: most - 1] + "…"


# --- several targets ---------------------------------------------------------------------------


@dataclass(frozen=True)
class OverviewLine:
    """One target in the overview, as text.

    Attributes:
        name: Name of the target.
        values: Its metrics.
        size: The first sentence of the finding on the size of its bars.
        size_status: "good", "careful" or "bad".
        status: The status of its verdict.
    """

    name: str
    values: Sequence[str]
    size: str
    size_status: str
    status: str


@dataclass(frozen=True)
class Overview:
    """Several targets at a glance.

    Attributes:
        verdict: The verdict on all targets, which is that of the worst.
        worst: Identifier of the section of the worst target.
        header: Header of the table.
        lines: One line for each target.
        note: A sentence where not all targets have a section, else empty.
    """

    verdict: Verdict
    worst: str
    header: Sequence[str]
    lines: Sequence[OverviewLine]
    note: str


def overview(judgements: Judgements, worst: str, section_count: int) -> Overview:
    """Several targets at a glance.

    Args:
        judgements: All targets.
        worst: Identifier of the section of the worst target.
        section_count: How many targets have a section.
    """
    target_count = len(judgements.targets)
    targets = judgements.targets[:_MOST_OVERVIEW_LINES]
    metrics = [METRICS[key] for key in _OVERVIEW_METRICS]
    labels = [metric.label_at(targets[0].level) for metric in metrics]
    lines = []
    for scores, verdict in zip(targets, judgements.verdicts[:_MOST_OVERVIEW_LINES], strict=True):
        size = verdict.findings[0]
        lines.append(
            OverviewLine(
                name=scores.rows.name,
                values=[METRICS[key].text(scores.bars[key]) for key in _OVERVIEW_METRICS],
                size=size.text.partition(".")[0],
                size_status=size.status,
                status=verdict.status,
            )
        )
    note = ""
    if target_count > section_count:
        note = (
            f"The table lists {len(targets)} of {target_count} targets; {section_count} of them "
            "have a section below."
        )
    return Overview(
        verdict=judgements.verdict,
        worst=worst,
        header=["Target", *labels, "Size of the bars", "Verdict"],
        lines=lines,
        note=note,
    )
