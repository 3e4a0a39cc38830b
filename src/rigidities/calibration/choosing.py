"""From residuals to a report: the choice of ridge, scale and noise, and what is said of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..notices import notify
from .calibration import Wanted
from .evidence import most_evident_ridge
from .gathering import Residuals
from .objective import Objective, search
from .report import CalibrationReport

Evidence = Callable[[Tensor], Tensor]


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
    if (law := objective.likeliest_law(choice)) != wanted.law:  # its tails are found afterwards
        wanted = replace(wanted, law=law)
        objective = replace(objective, wanted=wanted)
        choice = search(objective, choice.ridge)[0]
    nll, constant = objective.nll(choice)
    found: dict[str, Any] = {"value": choice.value, "nll": nll, "nll_constant": constant}
    found |= {"calibration": objective.calibration(choice), "at_edge": edge}
    found |= {"zero_curvature": zero_curvature}
    return reported(solved(choice.ridge), wanted, residuals, **found)


def reported(
    final: Any, wanted: Wanted, residuals: Residuals | None, **found: Any
) -> CalibrationReport:
    """What was found, beside what was wanted, the final curvature and the validation rows, if any.

    It warns where enough of these stand in the training data too, and where they are very few.
    """
    own = {name: getattr(final, name) for name in ("condition", "effective_rank", "width")}
    rows: dict[str, Any] = {"rows": 0}
    if residuals is not None:
        counts = {"samples": residuals.samples, "duplicates": round(residuals.duplicates)}
        rows = {"rows": residuals.rows, "used": len(residuals.error), **counts}
    fixed = wanted.ridge is not None
    report = CalibrationReport(criterion=wanted.criterion, fixed=fixed, **own, **rows, **found)
    for sentence in (*report.repeated, *report.few):
        notify(sentence)
    return report
