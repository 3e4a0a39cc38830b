"""One HTML page that shows whether error bars can be trusted; it works offline.

The page starts with a verdict in plain words, lists what to be careful about, and shows interactive
plots and metrics. Metrics are compared with those of one constant bar, and with those that these
bars would have if they were right (true values are drawn from them).

| function | takes | returns |
| --- | --- | --- |
| `verdict` | a `Prediction`, or means and bars, with true values | the verdict, to print |
| `html` | the same | the page, as text |
| `save` | a path and a page | the path, after writing the page there |
| `write` | a path, a fitted and calibrated object, labelled data | the path, as `save` |

Pages need the extra `report`; the verdict does not.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..calibration.coverage import LEVEL
from ..calibration.report import CalibrationReport
from ..data.sources import with_target
from ..last_layer.rigidity import LastLayerRigidity
from ..metrics.alignment import Values, aligned, as_tensor
from ..prediction.prediction import Prediction
from .cautions import Caution
from .document import checked_place, page, require_extra, save
from .figures import Plot, hover_texts
from .judgement import STATUS_WORDS, Judgements, Verdict
from .rows import (
    MOST_SHOWN,
    Advice,
    TargetRows,
    labelled_prediction,
    shape_of,
    target_rows,
)
from .scores import TargetScores
from .target_section import PlainTable, TargetSection, overview, section_of

__all__ = ["Verdict", "html", "save", "verdict", "write"]


def __dir__() -> list[str]:
    return sorted(__all__)


TITLE = "Can the error bars be trusted?"
MOST_TARGETS = 12
"""At most this many targets get their own section; the others are only in the overview."""
_FEWEST_POINTS = 100
"""A scatter plot may always show this many rows, however many targets share the page."""
_MOST_HOVER_TEXT = 280_000
"""Characters of hover texts on a page, about. They keep the page of one target below 1.5 MB."""
_UNCALIBRATED = Caution(
    "The error bars are not calibrated, so their size is arbitrary. Call calibrate(x, y) first.",
    "they are not calibrated",
)


def verdict(
    prediction: Prediction | Values,
    target: Any,
    *,
    std: Values | None = None,
    names: Sequence[str] | None = None,
    calibration: CalibrationReport | None = None,
    constant: Values | None = None,
    reference: Values | None = None,
    first_row: int = 0,
) -> Verdict:
    """Judge whether error bars can be trusted; print the result to read it.

    With several targets, the verdict is about the worst one.

    Args:
        prediction: What `predict` returned, judged by its own distribution; or means, (N,) or
            (N, K) for K targets.
        target: True values of the same shape, for rows used in neither fit nor calibration; or
            labelled data that contain them in the same order: (x, y), a list of batches, a
            DataLoader that does not shuffle.
        std: The error bars of means, of the same shape and above zero: standard deviations of
            Gaussians.
        names: Names of the targets.
        calibration: What `calibrate` returned. With it, remedies that are already in use are not
            suggested, and the bars are compared with the constant bar of the calibration rows.
        constant: The one bar for all rows that the bars are compared with, as in `html`.
        reference: Error bars on rows like those of the calibration, as in `html`.
        first_row: Number of the first row.

    Returns:
        The verdict, with its headline, findings and cautions.

    Raises:
        TypeError: There are means without bars, or a `Prediction` and bars; or batches are of a
            type that contains no target.
        ValueError: Shapes differ, values are not finite or not above zero, or a loader shuffles.

    Examples:
        >>> import torch
        >>> mean = torch.arange(40.0)
        >>> verdict(mean, mean + 1, std=mean * 0 + 0.1).headline
        'Do not trust these bars as they stand: they are far too narrow.'
    """
    judgements = judge(
        prediction,
        target,
        std=std,
        names=names,
        calibration=calibration,
        constant=constant,
        reference=reference,
        first_row=first_row,
    )
    return judgements.verdict


def html(
    prediction: Prediction | Values,
    target: Any,
    *,
    std: Values | None = None,
    title: str = TITLE,
    names: Sequence[str] | None = None,
    inputs: Mapping[str, Sequence[Any]] | Values | None = None,
    calibration: CalibrationReport | None = None,
    constant: Values | None = None,
    reference: Values | None = None,
    cautions: Sequence[str | Caution] = (),
    first_row: int = 0,
    level: float = LEVEL,
) -> str:
    """The page on predictions, their error bars and true values.

    Args:
        prediction: What `predict` returned, judged by its own distribution; or means, (N,) or
            (N, K) for K targets.
        target: True values of the same shape, for rows used in neither fit nor calibration; or
            labelled data that contain them in the same order: (x, y), a list of batches, a
            DataLoader that does not shuffle.
        std: The error bars of means, of the same shape and above zero: standard deviations of
            Gaussians.
        title: The heading.
        names: Names of the targets.
        inputs: What else to show for a row: columns by name, or an array (N, D).
        calibration: What `calibrate` returned.
        constant: For each target, one constant bar to compare the bars with: the RMS error of the
            calibration rows. By default it comes from the calibration. If it is not known, the RMS
            error of these rows is used, which no other constant bar can beat.
        reference: Error bars on rows like those of the calibration, (M,) or (M, K). Test rows
            with larger bars are reported as unlike them.
        cautions: Further warnings to show.
        first_row: Number of the first row.
        level: Level of the intervals in the table of metrics. The verdict always uses 90 %.

    Returns:
        The page.

    Raises:
        TypeError: There are means without bars, or a `Prediction` and bars; or batches are of a
            type that contains no target.
        ValueError: Shapes differ, values are not finite or not above zero, or a loader shuffles.
        ModuleNotFoundError: Plotly or Jinja is missing.
    """
    judgements = judge(
        prediction,
        target,
        std=std,
        names=names,
        inputs=inputs,
        calibration=calibration,
        constant=constant,
        reference=reference,
        cautions=cautions,
        first_row=first_row,
        level=level,
    )
    return page_of(judgements, title)


def write(
    path: str | os.PathLike[str],
    uq: LastLayerRigidity,
    x: Any,
    y: Any = None,
    *,
    reference: Any = None,
    title: str = TITLE,
    names: Sequence[str] | None = None,
    inputs: Mapping[str, Sequence[Any]] | Values | None = None,
    first_row: int = 0,
) -> Path:
    """Write the page on a fitted and calibrated object and labelled data.

    Args:
        path: The file. Its folder must exist.
        uq: A fitted and calibrated `LastLayerRigidity`. (For a `Prediction` use `save(path, html(p,
            target))`.)
        x: Labelled test data, used in neither fit nor calibration, in any form that `fit` accepts.
        y: Their targets, as in `fit`.
        reference: Rows like those of the calibration, in any form that `predict` accepts. Test rows
            with larger bars are reported as unlike them.
        title: The heading.
        names: Names of the targets.
        inputs: What else to show for a row, as in `html`; by default the model's inputs, if they
            are only a few numbers.
        first_row: Number of the first row.

    Returns:
        The file.

    Raises:
        OSError: The file cannot be written there.
        TypeError: `uq` is a `Prediction`.
        ValueError: The data have no targets, or targets of another shape.
        ModuleNotFoundError: Plotly or Jinja is missing.
    """
    checked_place(path)
    require_extra()
    judgements = judge_predictor(
        uq,
        with_target(x, y),
        reference=reference,
        names=names,
        inputs=inputs,
        first_row=first_row,
    )
    return save(path, page_of(judgements, title))


# --- what verdict, page and commands share -----------------------------------------------------


def judge(
    prediction: Prediction | Values,
    target: Any,
    *,
    std: Values | None = None,
    names: Sequence[str] | None = None,
    inputs: Mapping[str, Sequence[Any]] | Values | None = None,
    calibration: CalibrationReport | None = None,
    constant: Values | None = None,
    reference: Values | None = None,
    cautions: Sequence[str | Caution] = (),
    first_row: int = 0,
    row_numbers: Sequence[int] = (),
    level: float = LEVEL,
    advice: Advice | None = None,
) -> Judgements:
    """Judge all targets once; the verdict, the page and the commands all use the result.

    The arguments are those of `html`, and two more.

    Args:
        prediction: As in `html`.
        target: As in `html`.
        std: As in `html`.
        names: As in `html`.
        inputs: As in `html`.
        calibration: As in `html`.
        constant: As in `html`.
        reference: As in `html`.
        cautions: As in `html`.
        first_row: As in `html`.
        row_numbers: Numbers of all rows, where they are not consecutive.
        level: As in `html`.
        advice: Returns the remedy for a fault, if it differs from the library's own, which is for
            use in Python.
    """
    all_rows = target_rows(
        prediction,
        target,
        std=std,
        names=names,
        inputs=inputs,
        first_row=first_row,
        row_numbers=row_numbers,
    )
    constant_bars = _constant_bars(constant, calibration, len(all_rows))
    targets = []
    for rows, constant_bar in zip(all_rows, constant_bars, strict=True):
        rows = replace(rows, calibrated_bar=constant_bar, advice=advice)
        targets.append(TargetScores(rows, level=level))
    further_cautions = [
        caution if isinstance(caution, Caution) else Caution(caution) for caution in cautions
    ]
    return Judgements(
        targets=targets,
        calibration=calibration,
        references=_reference_bars(reference, len(targets)),
        further_cautions=further_cautions,
    )


def judge_predictor(
    predictor: LastLayerRigidity | Prediction,
    data: Any,
    *,
    reference: Any = None,
    names: Sequence[str] | None = None,
    inputs: Mapping[str, Sequence[Any]] | Values | None = None,
    first_row: int = 0,
    advice: Advice | None = None,
) -> Judgements:
    """Judge a fitted object on labelled data, in one pass.

    Args:
        predictor: The fitted object; a `Prediction` is refused with a hint.
        data: Labelled data in any form that `fit` accepts.
        reference: Rows like those of the calibration, in any form that `predict` accepts.
        names: Names of the targets.
        inputs: As in `html`; by default the model's inputs, where they are only a few numbers.
        first_row: Number of the first row.
        advice: Returns the remedy for a fault, as in `judge`.
    """
    if isinstance(predictor, Prediction):
        raise TypeError(
            "write expects a fitted uq and data. For a Prediction, use save(path, html(p, y))."
        )
    labelled = labelled_prediction(predictor, data)
    reference_bars = None
    if reference is not None:
        reference_bars = predictor.predict(reference).std
    calibration = predictor.calibration_report
    return judge(
        labelled.prediction,
        labelled.target,
        names=names,
        inputs=labelled.inputs if inputs is None else inputs,
        calibration=calibration,
        reference=reference_bars,
        cautions=[_UNCALIBRATED] if calibration is None else (),
        first_row=first_row,
        advice=advice,
    )


def page_of(judgements: Judgements, title: str = TITLE, tables: Sequence[PlainTable] = ()) -> str:
    """The page on judged targets, as HTML text.

    Args:
        judgements: All targets.
        title: The heading.
        tables: Further tables, which stand at the end.
    """
    require_extra()
    target_count = len(judgements.targets)
    # The first targets get sections, and the worst target in any case.
    chosen = list(range(min(MOST_TARGETS, target_count)))
    if judgements.worst_target not in chosen:
        chosen[-1] = judgements.worst_target
    sections = [
        section_of(
            judgements.targets[k],
            judgements.verdicts[k],
            identifier=_identifier(k),
            most_points=_most_points(judgements.targets[k].rows, len(chosen)),
            calibration=judgements.calibration,
        )
        for k in chosen
    ]
    all_targets = None
    if target_count > 1:
        all_targets = overview(judgements, _identifier(judgements.worst_target), len(sections))
    return page(
        "judgement.html",
        title=title,
        plots=_all_plots(sections),
        hover_texts={section.identifier: section.hover_texts for section in sections},
        about=_about(judgements),
        overview=all_targets,
        sections=sections,
        status_words=STATUS_WORDS,
        tables=tables,
    )


def _most_points(rows: TargetRows, section_count: int) -> int:
    """How many rows a scatter plot shows, so that their hover texts do not fill the page."""
    from jinja2.utils import htmlsafe_json_dumps

    sample = torch.arange(0, len(rows), 1 + len(rows) // 50)
    texts = hover_texts(rows, sample)
    # JSON in a page writes "<" and the like with six characters.
    length = sum(len(str(htmlsafe_json_dumps(text))) for text in texts) / len(texts)
    most = min(MOST_SHOWN, int(_MOST_HOVER_TEXT / length)) // section_count
    return max(_FEWEST_POINTS, most)


def _identifier(target_index: int) -> str:
    """The prefix of all identifiers in a target's section."""
    return f"t{target_index}"


def _all_plots(sections: Sequence[TargetSection]) -> dict[str, Plot]:
    """The plots of all sections, by the identifiers of their elements."""
    plots: dict[str, Plot] = {}
    for section in sections:
        plots.update(section.plots)
    return plots


def _about(judgements: Judgements) -> str:
    """A sentence on how many rows there are, of which target, and how they are numbered."""
    rows = judgements.targets[0].rows
    name = rows.name
    if len(judgements.targets) > 1:
        name = f"{len(judgements.targets)} targets"
    counted = f"Rows are counted from {rows.first_row}."
    if rows.row_numbers:
        counted = "Row numbers are those of the table."
    return f"{len(rows)} rows of {name}. {counted}"


def _constant_bars(
    constant: Values | None, calibration: CalibrationReport | None, target_count: int
) -> list[float | None]:
    """For each target, the constant bar of the calibration rows; None where it is not known."""
    if constant is not None:
        bars = as_tensor(constant).double().flatten()
        if len(bars) != target_count or not bool(((bars > 0) & bars.isfinite()).all()):
            raise ValueError(
                f"Expected constant= as {target_count} finite bars above zero, one for each "
                f"target, got {bars.tolist()}."
            )
        return list(bars.tolist())
    calibrated = None if calibration is None else calibration.constant
    if calibrated is None or len(calibrated) != target_count or not bool((calibrated > 0).all()):
        return [None] * target_count
    return [float(bar) for bar in calibrated]


def _reference_bars(reference: Values | None, target_count: int) -> list[Tensor | None]:
    """For each target, bars on rows like those of the calibration, (M,); None where unknown."""
    if reference is None:
        return [None] * target_count
    (bars,) = aligned(std=reference)
    shape = shape_of(reference)
    if target_count > 1 and (len(shape) != 2 or shape[1] != target_count):
        raise ValueError(f"Expected a reference of shape (M, {target_count}), got {shape}.")
    return list(bars.reshape(-1, target_count).T)
