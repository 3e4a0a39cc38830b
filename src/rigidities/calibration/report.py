"""The report of a calibration: its numbers, and what they mean in words.

`CalibrationReport` prints as a page, and says in sentences what to be careful about.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import words
from .calibration import Calibration
from .gain import Gain
from .methods import Full, Method, Paper
from .report_numbers import ReportNumbers
from .rows import Curvature, Rows

__all__ = ["CalibrationReport"]

_FEW_DISTINCT = 30
"""Distinct rows below which copies of them get a warning, not only a remark."""


@dataclass(frozen=True)
class CalibrationReport(ReportNumbers):
    """What a calibration has chosen and how good it is, in numbers; print it to read it in words.

    The attributes are those of `ReportNumbers`.
    """

    @classmethod
    def of(
        cls,
        method: Method,
        calibration: Calibration,
        curvature: Curvature,
        rows: Rows | None,
        errors: Sequence[Tensor],
        *,
        gain: Gain,
        value: float,
        nll: float,
        at_edge: str | None,
        remarks: list[str],
        notices: Sequence[str] = (),
        seen: int = 0,
        steps: Sequence[int] = (),
        early_stopped: bool | None = None,
    ) -> CalibrationReport:
        """The report on a choice, completed with what depends only on the rows.

        Its notices say where a noticeable share of the validation rows is in the training data too,
        where they are copies of a few rows, and where there are very few of them.

        Args:
            method: What was asked.
            calibration: What was chosen.
            curvature: The curvature at the chosen ridge.
            rows: The validation rows, if any.
            errors: The errors of each target's rows, which make the constant bar.
            gain: The gain over the constant bar.
            value: The value of what was minimised.
            nll: The NLL per row, as in the attributes.
            at_edge: The edge of the ridge's range that the ridge lies at, as in `paper.search`.
            remarks: Sentences on the choice.
            notices: Those of them that a user is warned with.
            seen: How many training rows were used.
            steps: As in the attributes.
            early_stopped: As in the attributes.
        """
        copies = words.repeated_rows(rows)
        squares = torch.stack([error.square().mean() for error in errors])
        nll_constant = float(0.5 * (2 * math.pi * math.e * squares).log().mean())
        if isinstance(method, Full) and math.isfinite(gain.mean):
            nll_constant = nll + gain.mean  # on the rows that were left out
        report = cls(
            calibration=calibration,
            method="paper" if isinstance(method, Paper) else "full",
            criterion=method.criterion if isinstance(method, Paper) else None,
            value=value,
            at_edge=at_edge,
            condition=curvature.condition,
            effective_rank=curvature.effective_rank,
            width=curvature.width,
            nll=nll,
            nll_constant=nll_constant,
            constant=squares.sqrt(),
            gain=gain.mean,
            gain_error=gain.error,
            gain_without=gain.without,
            rows=0 if rows is None else rows.count,
            used=0 if rows is None else len(rows),
            samples=0 if rows is None else rows.samples,
            duplicates=0 if rows is None else round(rows.duplicates),
            fixed=method.ridge is not None,
            seen=seen,
            steps=list(steps),
            early_stopped=early_stopped,
            remarks=[*copies, *remarks],
        )
        few_copies = copies if rows is not None and rows.distinct < _FEW_DISTINCT else []
        noticed = (*notices, *few_copies, *report.repeated, *report.few)
        return replace(report, notices=noticed)

    @property
    def warnings(self) -> list[str]:
        """What to be careful about, in sentences."""
        return words.warnings(self)

    @property
    def gravest(self) -> list[str]:
        """Sentences on calibration rows that cannot calibrate: mismatched, or seen in training."""
        return words.gravest(self)

    @property
    def worth(self) -> str:
        """The gain over one constant bar in words, with its standard error."""
        return words.worth(self)

    @property
    def useless(self) -> str:
        """A sentence that the bars were not shown to be better than one constant bar."""
        return words.useless(self)

    @property
    def repeated(self) -> list[str]:
        """A sentence that calibration rows are in the training data too; none where few are."""
        return words.trained_on(self)

    @property
    def few(self) -> list[str]:
        """A sentence that the size of the bars rests on very few rows; none where it does not."""
        return words.few_rows(self)

    def remedy(self, fault: str) -> str:
        """A sentence on what is not in use yet and helps against "uneven", "skew" or "tails"."""
        return words.remedy_for(self, fault)

    def __str__(self) -> str:
        return words.report_text(self)
