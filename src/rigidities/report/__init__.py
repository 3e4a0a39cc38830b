"""One HTML page that says how far error bars can be trusted; it works without a network.

The page opens with a verdict in plain words, says what to beware of, and shows interactive plots
and metrics beside those of a constant bar and of right bars. Needs the
extra `report`.

`html` takes arrays, `write` a fitted and calibrated object with labelled data, `experiment` the
numbers of an experiment; `save` puts any of these pages into a file. `verdict` gives the verdict
alone, without the extra.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from ..calibration.coverage import STATUSES
from ..calibration.report import CalibrationReport
from ..data.arrays import with_target
from ..metrics.alignment import Values, aligned, of_prediction
from ..prediction.prediction import Prediction
from .document import checked_place, page, require_plotly
from .document import write_page as save
from .experiments.page import experiment
from .judgement import Caution, Verdict, judgement
from .judgement import cautions as cautions_of
from .markup import Markup, joined, tag
from .rows import MOST_SHOWN, Bars, Rows, labelled, rows_of, shape_of
from .scores import Judged
from .target_section import Drawn, overview, section

__all__ = ["Verdict", "experiment", "html", "save", "verdict", "write"]

MOST_TARGETS = 12
"""Targets with a section of their own; the others stand in the overview."""
_MOST_LISTED = 200
_UNCALIBRATED = Caution(
    "The error bars are not calibrated: their scale means nothing. Call calibrate(valid) first.",
    "they are not calibrated",
)


def verdict(
    prediction: Prediction | Values,
    target: Values,
    *,
    std: Values | None = None,
    calibration: CalibrationReport | None = None,
) -> Verdict:
    """Whether error bars can be trusted, in words to print; of several targets the worst.

    Args:
        prediction: what `predict` gave, judged by its own law; or means, (N,) or (N, K).
        target: true values, shaped alike, of rows that neither fit nor calibration has seen.
        std: the error bars of means, shaped alike: standard deviations of Gaussians.
        calibration: what `calibrate` returned, so that no remedy is named that is in use already.

    Examples:
        >>> import torch
        >>> mean = torch.arange(40.0)
        >>> verdict(mean, mean + 1, std=mean * 0 + 0.1).headline
        'Do not trust these bars as they stand: they are far too narrow.'
    """
    if isinstance(prediction, Prediction) == (std is not None):
        raise TypeError("Expected a Prediction and no std=, or means and std=. Give one of these.")
    found = {
        rows.name: judgement(Judged(rows), cautions_of(rows, calibration), calibration)
        for rows in rows_of(prediction, prediction if std is None else std, target)
    }
    name, worst = max(found.items(), key=lambda pair: STATUSES.index(pair[1].status))
    if len(found) == 1:
        return worst
    alike = all(one.headline == worst.headline for one in found.values())
    whose = f"All {len(found)} targets" if alike else name
    return replace(worst.about(name), headline=f"{whose}: {worst.headline}")


@of_prediction
def html(
    mean: Values,
    std: Values,
    target: Values,
    *,
    title: str = "Can the error bars be trusted?",
    names: Sequence[str] | None = None,
    inputs: Mapping[str, Sequence[Any]] | Values | None = None,
    calibration: CalibrationReport | None = None,
    reference: Values | None = None,
    cautions: Sequence[str | Caution] = (),
    first_row: int = 0,
) -> str:
    """The report of predictions, given with their bars or as one `Prediction`, and true values.

    Args:
        mean: predictions, (N,) or (N, K) for K targets; or what `predict` gave, which stands for
            `std` too, html(p, target), and is judged by its own law.
        std: their error bars, shaped alike and above zero: standard deviations of Gaussians.
        target: true values, shaped alike, of rows that neither fit nor calibration has seen.
        title: the heading.
        names: of the targets.
        inputs: what else to show at a row: columns by name, or an array (N, D).
        calibration: what `calibrate` returned.
        reference: error bars on rows like those of the calibration, (M,) or (M, K). Test rows
            with larger ones are reported as unlike them.
        cautions: further sentences to warn with.
        first_row: the number of the first row.

    Returns:
        The page.

    Raises:
        ValueError: shapes that differ, or values that are not finite or not above zero.
        ModuleNotFoundError: plotly is missing.
    """
    require_plotly()
    parts = rows_of(mean, std, target, names=names, inputs=inputs, first=first_row)
    limits = _reference(reference, len(parts))
    chosen = parts[:MOST_TARGETS]
    drawn, sections = Drawn(), []
    options: dict[str, Any] = {"calibration": calibration, "further": cautions}
    options |= {"most": max(500, MOST_SHOWN // len(chosen)), "alone": len(parts) == 1}
    for k, rows in enumerate(chosen):
        content = section(rows, drawn, name=f"t{k}", reference=limits[k], **options)
        sections.append(tag("section", content, data_target=f"t{k}", aria_label=rows.name))
    what = parts[0].name if len(parts) == 1 else f"{len(parts)} targets"
    about = f"{len(parts[0])} rows of {what}. Rows are counted from {parts[0].first}."
    head = joined([tag("h1", title), tag("p", about, class_="about")])
    whole = joined([head, _several(parts), *sections])
    return page(title, whole, drawn.figures, drawn.hovers)


def write(
    path: str | os.PathLike[str],
    uq: Bars,
    x: Any,
    y: Any = None,
    *,
    reference: Any = None,
    title: str = "Can the error bars be trusted?",
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
    if isinstance(uq, Prediction):
        raise TypeError(
            "write takes a fitted uq and data. Of a Prediction: save(path, html(p, y))."
        )
    options = labelled(uq, with_target(x, y), progress) | {"title": title, "names": names}
    options |= {"first_row": first_row} | ({} if inputs is None else {"inputs": inputs})
    if reference is not None:
        options["reference"] = uq.predict(reference, progress=progress).std
    options["cautions"] = [_UNCALIBRATED] if uq.report is None else []
    return save(path, html(calibration=uq.report, **options))


def _reference(values: Values | None, targets: int) -> list[Tensor | None]:
    if values is None:
        return [None] * targets
    (flat,) = aligned(std=values)
    shape = shape_of(values)
    if targets > 1 and (len(shape) != 2 or shape[1] != targets):
        raise ValueError(f"Expected a reference of shape (M, {targets}), got {shape}.")
    return list(flat.reshape(-1, targets).T)


def _several(parts: Sequence[Rows]) -> Markup:
    """The overview of several targets and the list to choose one from."""
    if len(parts) == 1:
        return Markup()
    notes = []
    if len(parts) > MOST_TARGETS:
        listed = min(len(parts), _MOST_LISTED)
        text = f"The table lists {listed} of {len(parts)} targets, the sections {MOST_TARGETS}."
        notes.append(tag("p", text, class_="about"))
    names = [rows.name for rows in parts[:MOST_TARGETS]]
    options = (tag("option", name, value=f"t{k}") for k, name in enumerate(names))
    choice = tag("label", "Target ", tag("select", *options, data_sections=True))
    controls = tag("div", choice, class_="controls")
    return joined([tag("h2", "All targets"), overview(parts[:_MOST_LISTED]), *notes, controls])
