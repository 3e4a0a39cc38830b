"""The outcome of a calibration in numbers: what was chosen, how good it is, and on which rows.

`CalibrationReport` holds the choice (`Calibration`) and the numbers that a user needs to judge it.
It goes into files as a header of plain values and a few tensors. The module `words` puts the
numbers into sentences: what to be careful about, and the text that a report prints as.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from . import words
from .calibration import Calibration, without_prefix
from .gain import Gain
from .methods import Method, Paper
from .rows import Rows

__all__ = ["CalibrationReport", "Curvature"]

_FEW_DISTINCT = 30
"""Distinct rows below which copies of them get a warning, not only a remark."""
_APART_FROM_HEADER = ("calibration", "constant", "gradient_scale", "notices")
"""Fields of a report that are not plain values, or not for files."""


class Curvature(Protocol):
    """What a calibration asks of a posterior: its eigenvalues, and a few numbers at its ridge."""

    @property
    def eigenvalues(self) -> Tensor:
        """Those of the basis of the rows' powers, (D,) or (K, D)."""

    @property
    def condition(self) -> float:
        """The condition number at the ridge."""

    @property
    def effective_rank(self) -> float:
        """How many directions the data determine at the ridge."""

    @property
    def width(self) -> int:
        """The number of features."""

    def with_ridge(self, ridge: float) -> Curvature:
        """The same with another ridge."""


@dataclass(frozen=True)
class CalibrationReport:
    r"""Chosen ridge, scale, noise and distribution, with what a user needs to judge them.

    Attributes:
        calibration: What was chosen.
        method: "full" or "paper".
        criterion: The criterion of the method "paper"; None for "full".
        value: The value of what was minimised, at the choice: of the criterion, or the NLL.
        at_edge: "lower" or "upper" if the best ridge lies at that end of its range, else None.
        condition: The condition number of $G + \varsigma^2 I$.
        effective_rank: How many directions the data determine.
        width: The number of features.
        nll: The negative log-likelihood per row, on the rows that the bars were fitted to.
        nll_constant: The same for one constant bar, a Gaussian of the rows' root mean square error.
        constant: The standard deviation of that constant bar, one entry per target.
        gain: Nats per row by which the bars are better than one constant bar, cross-validated: both
            are judged on calibration rows that they were not fitted to. NaN with fewer than three
            rows.
        gain_error: The standard error of the gain.
        gain_without: The gain without the one row that moves it most.
        rows: How many calibration rows there were (predictions, where a sample has several).
        fixed: Whether the ridge was not searched, because the user passed it or the form of the
            curvature fixes it.
        samples: How many calibration samples were compared with the training data.
        duplicates: How many of them are also in the training data.
        zero_curvature: How many training rows have no weight in the loss, counted for each target
            that has its own weights.
        stale: Whether data were added or removed after the calibration.
        used: How many of the calibration rows were used. If there are very many, an evenly spread
            share is used.
        gradient_scale: The scale of derivatives, one entry per target, if it was calibrated.
        seen: How many training rows the method "full" used, with their leave-one-out errors.
        ladder: For the method "full", the cross-validated NLL per row of one constant bar, of the
            paper's form, and of each part of the full model with those before it.
        rung: For the method "full", the entry of `ladder` that was chosen.
        early_stopped: Whether the validation rows chose the model's checkpoint; None if unknown.
        remarks: Sentences on the rows and what followed from them.
        rounding: A bound on the relative error of variances from mixed precision.
        advice: What helps against uneven bars, if the advice for `LastLayerRigidity` does not
            apply; else empty.
        novelty: If the fit recorded layers, the squared distance for each layer that 95 % of the
            calibration rows stay below.
        novelty_usual: The novelty that 99 % of those rows stay below.
        mismatch: A sentence that targets and inputs of the calibration rows do not seem to belong
            together; empty where they do.
        notices: Sentences that the caller of a calibration is to be warned with; not in files.
    """

    calibration: Calibration
    method: str
    criterion: str | None
    value: float
    at_edge: str | None
    condition: float
    effective_rank: float
    width: int
    nll: float
    nll_constant: float
    constant: Tensor
    gain: float
    gain_error: float
    gain_without: float
    rows: int
    fixed: bool = False
    samples: int = 0
    duplicates: int = 0
    zero_curvature: int = 0
    stale: bool = False
    used: int = 0
    gradient_scale: Tensor | None = None
    seen: int = 0
    ladder: dict[str, float] = field(default_factory=dict)
    rung: str = ""
    early_stopped: bool | None = None
    remarks: list[str] = field(default_factory=list)
    rounding: float = 0.0
    advice: str = ""
    novelty: dict[str, float] = field(default_factory=dict)
    novelty_usual: float = 0.0
    mismatch: str = ""
    notices: tuple[str, ...] = field(default=(), compare=False)

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
        ladder: dict[str, float] | None = None,
        rung: str = "",
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
            nll: The NLL per row on the rows that were fitted to.
            at_edge: The edge of the ridge's range that the ridge lies at, as in `paper.search`.
            remarks: Sentences on the choice.
            notices: Those of them that a user is warned with.
            seen: How many training rows were used.
            ladder: The cross-validated NLL of each rung, if there are rungs.
            rung: The rung that was taken.
            early_stopped: As in the attributes.
        """
        copies = words.repeated_rows(rows)
        squares = torch.stack([error.square().mean() for error in errors])
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
            nll_constant=float(0.5 * (2 * math.pi * math.e * squares).log().mean()),
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
            ladder={} if ladder is None else ladder,
            rung=rung,
            early_stopped=early_stopped,
            remarks=[*copies, *remarks],
        )
        few_copies = copies if rows is not None and rows.distinct < _FEW_DISTINCT else []
        noticed = (*notices, *few_copies, *report.repeated, *report.few)
        return replace(report, notices=noticed)

    @property
    def ridge(self) -> float:
        r"""$\varsigma^2$."""
        return self.calibration.ridge

    @property
    def scale(self) -> Tensor:
        r"""$\alpha$, one entry per target."""
        return self.calibration.scale

    @property
    def noise_level(self) -> Tensor:
        """Noise variance (its level, where it has a shape), one entry per target."""
        return self.calibration.noise.level

    @property
    def varies(self) -> bool:
        """Whether bars differ among rows like the training rows: one constant bar does not."""
        return self.rung != words.CONSTANT_BAR

    @property
    def has(self) -> set[str]:
        """Names of the noise and distributions in use or tried in vain, and of groups in use."""
        calibration = self.calibration
        names = {calibration.noise.name, calibration.distribution.name}
        if words.TAILS in self.ladder:
            names.add("student-t")
        if words.FEATURE_NOISE in self.ladder:
            names.add("features")
        if words.FULL in self.ladder:
            names.add("tilted")
        if calibration.conformal is not None and len(calibration.conformal.labels) > 0:
            names.add("groups")
        return names

    # What the numbers mean, in sentences.

    @property
    def warnings(self) -> list[str]:
        """What to be careful about, in sentences."""
        return words.warnings(self)

    @property
    def gravest(self) -> list[str]:
        """Sentences on calibration rows that cannot calibrate: mismatched, or seen in training."""
        mismatch = [self.mismatch] if self.mismatch else []
        return [*mismatch, *self.repeated]

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

    # Devices and files.

    def to(self, device: torch.device) -> CalibrationReport:
        """The same report on another device."""
        gradient_scale = self.gradient_scale
        if gradient_scale is not None:
            gradient_scale = gradient_scale.to(device)
        return replace(
            self,
            calibration=self.calibration.to(device),
            constant=self.constant.to(device),
            gradient_scale=gradient_scale,
        )

    def header(self) -> dict[str, Any]:
        """Plain values for a file's header: of the calibration, and of the report on it."""
        values = {}
        for name, value in vars(self).items():
            if name not in _APART_FROM_HEADER:
                values[name] = value
        return {"calibration": self.calibration.header(), "report": values}

    def tensors(self) -> dict[str, Tensor]:
        """The tensors for a file, with the part of the header they belong to as a prefix."""
        tensors = {}
        for name, tensor in self.calibration.tensors().items():
            tensors[f"calibration.{name}"] = tensor
        tensors["report.constant"] = self.constant
        if self.gradient_scale is not None:
            tensors["report.gradient_scale"] = self.gradient_scale
        return tensors

    @classmethod
    def from_state(cls, header: dict[str, Any], tensors: dict[str, Tensor]) -> CalibrationReport:
        """The report that `header` and `tensors` came from.

        Raises:
            ValueError: The noise or the distribution is not known here.
        """
        calibration_tensors = without_prefix("calibration", tensors)
        return cls(
            calibration=Calibration.from_state(header["calibration"], calibration_tensors),
            constant=tensors["report.constant"],
            gradient_scale=tensors.get("report.gradient_scale"),
            **header["report"],
        )
