"""One HTML page that says how far error bars can be trusted; it works without a network.

The page opens with a verdict in plain words, says what to beware of, and shows interactive plots
and metrics beside those of a constant bar and of right bars. Needs the
extra `report`.

`html` takes arrays, `write` a fitted and calibrated object with labelled data, `experiment` the
numbers of an experiment; `save` puts any of these pages into a file. `verdict` gives the verdict
alone, without the extra.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..calibration.coverage import LEVEL
from ..calibration.report import CalibrationReport
from ..data.arrays import with_target
from ..metrics.alignment import Values, aligned, as_tensor, of_prediction
from ..prediction.prediction import Prediction
from .document import checked_place, page, require_plotly
from .document import write_page as save
from .experiments.page import experiment
from .judgement import Caution, Judgements, Verdict
from .markup import Markup, joined, tag
from .rows import MOST_SHOWN, Bars, Helps, labelled, rows_of, shape_of
from .scores import Judged
from .target_section import Drawn, caution_box, headline, overview, section

__all__ = ["Verdict", "experiment", "html", "save", "verdict", "write"]

TITLE = "Can the error bars be trusted?"
MOST_TARGETS = 12
"""Targets with a section of their own; the others stand in the overview."""
_MOST_LISTED = 200
_UNCALIBRATED = Caution(
    "The error bars are not calibrated: their scale means nothing. Call calibrate(valid) first.",
    "they are not calibrated",
)


def judged(
    prediction: Prediction | Values,
    target: Values,
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
    helps: Helps | None = None,
) -> Judgements:
    """All targets judged once, for whatever tells of them: the arguments are those of `html`.

    `row_numbers` are those of rows that do not follow one another. `helps` says what helps against
    a fault, where it is not what the library has in Python.
    """
    if isinstance(prediction, Prediction) == (std is not None):
        raise TypeError("Expected a Prediction and no std=, or means and std=. Give one of these.")
    bars = prediction if std is None else std
    parts = rows_of(prediction, bars, target, names=names, inputs=inputs, first=first_row)
    constants = _constants(constant, calibration, len(parts))
    parts = [
        replace(part, calibrated_bar=bar, helps=helps, numbers=row_numbers)
        for part, bar in zip(parts, constants, strict=True)
    ]
    return Judgements(
        targets=[Judged(part, level=level) for part in parts],
        calibration=calibration,
        references=_reference(reference, len(parts)),
        further=[one if isinstance(one, Caution) else Caution(one) for one in cautions],
    )


def verdict(
    prediction: Prediction | Values,
    target: Values,
    *,
    std: Values | None = None,
    names: Sequence[str] | None = None,
    calibration: CalibrationReport | None = None,
    constant: Values | None = None,
    reference: Values | None = None,
    first_row: int = 0,
) -> Verdict:
    """Whether error bars can be trusted, in words to print; of several targets the worst.

    Args:
        prediction: what `predict` gave, judged by its own distribution; or means, (N,) or (N, K).
        target: true values, shaped alike, of rows that neither fit nor calibration has seen.
        std: the error bars of means, shaped alike: standard deviations of Gaussians.
        names: of the targets.
        calibration: what `calibrate` returned, so that no remedy is named that is in use already,
            and the bars are compared with the constant bar of the calibration rows.
        constant: as in `html`.
        reference: as in `html`.
        first_row: the number of the first row.

    Examples:
        >>> import torch
        >>> mean = torch.arange(40.0)
        >>> verdict(mean, mean + 1, std=mean * 0 + 0.1).headline
        'Do not trust these bars as they stand: they are far too narrow.'
    """
    options: dict[str, Any] = {"names": names, "calibration": calibration}
    options |= {"constant": constant, "reference": reference, "first_row": first_row}
    return judged(prediction, target, std=std, **options).verdict


@of_prediction
def html(
    mean: Values,
    std: Values,
    target: Values,
    *,
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
    """The report of predictions, given with their bars or as one `Prediction`, and true values.

    Args:
        mean: predictions, (N,) or (N, K) for K targets; or what `predict` gave, which stands for
            `std` too, html(p, target), and is judged by its own distribution.
        std: their error bars, shaped alike and above zero: standard deviations of Gaussians.
        target: true values, shaped alike, of rows that neither fit nor calibration has seen.
        title: the heading.
        names: of the targets.
        inputs: what else to show at a row: columns by name, or an array (N, D).
        calibration: what `calibrate` returned.
        constant: the one bar for all rows that the bars are compared with, of each target: the RMS
            error of calibration rows. By default that of the calibration; where it is not known,
            the RMS error of these very rows, which is the best there can be.
        reference: error bars on rows like those of the calibration, (M,) or (M, K). Test rows
            with larger ones are reported as unlike them.
        cautions: further sentences to warn with.
        first_row: the number of the first row.
        level: of the intervals in the table of metrics; the verdict is on those of 90 %.

    Returns:
        The page.

    Raises:
        ValueError: shapes that differ, or values that are not finite or not above zero.
        ModuleNotFoundError: plotly is missing.
    """
    options: dict[str, Any] = {"names": names, "inputs": inputs, "calibration": calibration}
    options |= {"constant": constant, "reference": reference, "cautions": cautions}
    options |= {"first_row": first_row, "level": level}
    bars = None if isinstance(mean, Prediction) else std
    return page_of(judged(mean, target, std=bars, **options), title)


def page_of(found: Judgements, title: str = TITLE) -> str:
    """The page of targets that were judged."""
    require_plotly()
    parts = [one.rows for one in found.targets]
    # the first targets have sections, and the worst in any case
    chosen = [*range(min(MOST_TARGETS, len(parts)))]
    if found.worst not in chosen:
        chosen[-1] = found.worst
    drawn, sections = Drawn(), []
    for k in chosen:
        content = section(
            found.targets[k],
            found.verdicts[k],
            drawn,
            name=f"t{k}",
            most=max(500, MOST_SHOWN // len(chosen)),
            calibration=found.calibration,
            alone=len(parts) == 1,
        )
        sections.append(tag("section", content, data_target=f"t{k}", aria_label=parts[k].name))
    what = parts[0].name if len(parts) == 1 else f"{len(parts)} targets"
    about = f"{len(parts[0])} rows of {what}. Rows are counted from {parts[0].first}."
    if parts[0].numbers:
        about = (
            f"{len(parts[0])} rows of {what}. Rows have the numbers that they have in the table."
        )
    head = joined([tag("h1", title), tag("p", about, class_="about")])
    whole = joined([head, _several(found, chosen), *sections])
    return page(title, whole, drawn.figures, drawn.hovers)


def write(
    path: str | os.PathLike[str],
    uq: Bars,
    x: Any,
    y: Any = None,
    *,
    reference: Any = None,
    title: str = TITLE,
    names: Sequence[str] | None = None,
    inputs: Mapping[str, Sequence[Any]] | Values | None = None,
    first_row: int = 0,
    progress: bool | None = None,
) -> Path:
    """Write the report of a fitted and calibrated object on labelled data.

    Args:
        path: the file; its folder must exist.
        uq: a `LastLayerRigidity`. (The page of a `Prediction` is `save(path, html(p, target))`.)
        x: test data which nothing has seen before, labelled, in any form that `fit` takes.
        y: their targets, as in `fit`.
        reference: rows like those of the calibration, in any form that `predict` takes: test rows
            with larger bars are reported as unlike them.
        title: the heading.
        names: of the targets.
        inputs: as in `html`; by default the model's inputs, where they are few numbers.
        first_row: the number of the first row.
        progress: show a bar; by default on a terminal only.

    Returns:
        The file.
    """
    checked_place(path)
    require_plotly()
    options: dict[str, Any] = {"names": names, "inputs": inputs, "first_row": first_row}
    found = judged_on(uq, with_target(x, y), reference=reference, progress=progress, **options)
    return save(path, page_of(found, title))


def judged_on(
    uq: Bars, data: Any, *, reference: Any = None, progress: bool | None = None, **options: Any
) -> Judgements:
    """A fitted object judged on labelled data, in one pass; options as those of `judged`."""
    if isinstance(uq, Prediction):
        raise TypeError(
            "write takes a fitted uq and data. Of a Prediction: save(path, html(p, y))."
        )
    found = labelled(uq, data, progress)
    if options.get("inputs") is None:
        options["inputs"] = found["inputs"]
    if reference is not None:
        options["reference"] = uq.predict(reference, progress=progress).std
    if uq.report is None:
        options["cautions"] = [_UNCALIBRATED]
    return judged(found["mean"], found["target"], calibration=uq.report, **options)


def _constants(
    given: Values | None, calibration: CalibrationReport | None, targets: int
) -> list[float | None]:
    """The constant bar of the calibration rows, of each target; None where it is not known."""
    if given is not None:
        bars = as_tensor(given).double().flatten().tolist()
        if len(bars) != targets or not all(0 < bar < math.inf for bar in bars):
            raise ValueError(
                f"Expected constant= as {targets} finite bars above zero, one for each target, "
                f"got {bars}."
            )
        return bars
    known = getattr(calibration, "constant", None)
    if known is None or len(known) != targets or not bool((known > 0).all()):
        return [None] * targets
    return [float(bar) for bar in known]


def _reference(values: Values | None, targets: int) -> list[Tensor | None]:
    if values is None:
        return [None] * targets
    (flat,) = aligned(std=values)
    shape = shape_of(values)
    if targets > 1 and (len(shape) != 2 or shape[1] != targets):
        raise ValueError(f"Expected a reference of shape (M, {targets}), got {shape}.")
    return list(flat.reshape(-1, targets).T)


def _several(found: Judgements, chosen: Sequence[int]) -> Markup:
    """The worst verdict, the overview of several targets and the list to choose one from."""
    parts = [one.rows for one in found.targets]
    if len(parts) == 1:
        return Markup()
    notes = []
    if len(parts) > len(chosen):
        listed = min(len(parts), _MOST_LISTED)
        text = f"The table lists {listed} of {len(parts)} targets, the sections {len(chosen)}."
        notes.append(tag("p", text, class_="about"))
    options = (
        tag("option", parts[k].name, value=f"t{k}", selected=k == found.worst) for k in chosen
    )
    choice = tag("label", "Target ", tag("select", *options, data_sections=True))
    return joined(
        [
            # its findings stand in the section of the worst target, which is shown first
            tag("div", headline(found.verdict), class_=f"verdict {found.verdict.status}"),
            caution_box(found.verdict.cautions),
            tag("h2", "All targets"),
            overview(found.targets[:_MOST_LISTED], found.verdicts),
            *notes,
            tag("div", choice, class_="controls"),
        ]
    )
