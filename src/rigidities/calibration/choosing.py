"""From residuals to a report: the choice of ridge, scale and noise, and what is said of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..notices import notify
from .calibration import Wanted
from .evidence import most_evident_ridge
from .gain import FEWEST_ROWS, Gain, constant_nll
from .gathering import Residuals
from .objective import Choice, Objective, search
from .report import CalibrationReport

Evidence = Callable[[Tensor], Tensor]
BARLESS = (
    "The features of {} of {} rows are zero: the readout's weights do not move their outputs (a "
    "final ReLU or clamp, an empty sum). Without noise such rows have error bars of zero, and they "
    "were left out of the calibration. criterion='auto' or noise='constant' gives them the noise."
)
_FEW = 30
"""Distinct rows below which copies of them get a warning, not only a remark."""
FEW = 1000
"""Rows up to which cross-validation chooses the ridge again in every fold: of more, one number that
all rows have chosen flatters by less than a thousandth of a nat."""


def chosen(
    residuals: Residuals,
    eigenvalues: Tensor,
    solved: Callable[[float], Any],
    wanted: Wanted,
    *,
    least: float = -math.inf,
    evidence: Evidence | None = None,
    zero_curvature: int = 0,
) -> CalibrationReport:
    """Choose, and judge the choice on the same rows.

    Args:
        residuals: of data.
        eigenvalues: (D,) or (K, D), of the basis that the residuals' powers stand in.
        solved: the curvature at a ridge, of which the report tells condition, effective_rank and
            width: a `Posterior`, say.
        wanted: by which criterion, and what.
        least: ridges up to here are not searched.
        evidence: negative log evidence of ridges, which then choose it.
        zero_curvature: training rows without weight, for the report.
    """
    objective = Objective(residuals, eigenvalues, wanted, least)
    if evidence is not None and wanted.ridge is None:
        ridge, value, edge = most_evident_ridge(evidence, float(eigenvalues.max()))
        choice = replace(search(objective, ridge)[0], value=value)
    else:
        choice, edge = search(objective, wanted.ridge)
    if (
        distribution := objective.likeliest_distribution(choice)
    ) != wanted.distribution:  # its tails are found afterwards
        wanted = replace(wanted, distribution=distribution)
        objective = replace(objective, wanted=wanted)
        choice = search(objective, choice.ridge)[0]
    searched = wanted.ridge is None and evidence is None
    errors = [column[column.isfinite()] for column in objective.standing(choice)[0].unbind(1)]
    found: dict[str, Any] = {"value": choice.value, "zero_curvature": zero_curvature}
    found |= {"calibration": objective.calibration(choice), "at_edge": edge}
    found |= {"nll": float(objective.nll(choice).nanmean())}
    if (count := int(objective.barless.any(1).sum())) > 0:
        said = BARLESS.format(count, len(objective.barless))
        notify(said)
        found |= {"remarks": [said]}
    gain = _gain(objective, choice, errors, again=searched and len(residuals.error) <= FEW)
    return reported(solved(choice.ridge), wanted, residuals, errors, gain, **found)


def _gain(objective: Objective, choice: Choice, errors: list[Tensor], *, again: bool) -> Gain:
    """Over one constant bar, on rows left out; not known where that leaves too few."""
    if min(map(len, errors)) < FEWEST_ROWS:
        return Gain()
    try:
        columns = objective.left_out_nll(choice, again=again).unbind(1)
    except ValueError:  # the other rows have no error, or no variance
        return Gain()
    known = [column[column.isfinite()] for column in columns]
    if any(len(nll) != len(error) for nll, error in zip(known, errors, strict=True)):
        return Gain()
    return Gain.of([constant_nll(e) - nll for e, nll in zip(errors, known, strict=True)])


def reported(
    final: Any,
    wanted: Wanted,
    residuals: Residuals | None,
    errors: list[Tensor],
    gain: Gain,
    **found: Any,
) -> CalibrationReport:
    """What was found, beside what was wanted, the final curvature and the validation rows, if any.

    `errors` of each target's rows make the constant bar, over which the `gain` is. It warns where
    enough of the validation rows stand in the training data too, where they are copies of few, and
    where they are very few.
    """
    own = {name: getattr(final, name) for name in ("condition", "effective_rank", "width")}
    rows: dict[str, Any] = {"rows": 0}
    if residuals is not None:
        counts = {"samples": residuals.samples, "duplicates": round(residuals.duplicates)}
        rows = {"rows": residuals.rows, "used": len(residuals.error), **counts}
        found["remarks"] = [*residuals.repeated, *found.get("remarks", [])]
        if residuals.distinct < _FEW:
            for sentence in residuals.repeated:
                notify(sentence)
    fixed = wanted.ridge is not None
    squares = torch.stack([error.square().mean() for error in errors])
    report = CalibrationReport(
        criterion=wanted.criterion,
        fixed=fixed,
        constant=squares.sqrt(),
        nll_constant=float(0.5 * (2 * math.pi * math.e * squares).log().mean()),
        gain=gain.mean,
        gain_error=gain.error,
        gain_without=gain.without,
        **own,
        **rows,
        **found,
    )
    for sentence in (*report.repeated, *report.few):
        notify(sentence)
    return report
