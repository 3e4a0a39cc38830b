"""The outcome of a calibration in numbers: what was chosen, how good it is, and on which rows.

`ReportNumbers` holds the choice (`Calibration`) and the numbers that a user needs to judge it. It
goes into files as a header of plain values and a few tensors. The module `words` puts the numbers
into sentences, and `report.CalibrationReport` is both.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .calibration import Calibration, without_prefix

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ReportNumbers"]

_APART_FROM_HEADER = ("calibration", "constant", "gradient_scale", "notices")
"""Fields of a report that are not plain values, or not for files."""


@dataclass(frozen=True)
class ReportNumbers:
    r"""Chosen ridge, scale, noise and distribution, and the numbers by which to judge them.

    Attributes:
        calibration: What was chosen.
        method: "full" or "paper".
        criterion: The criterion of the method "paper"; None for "full".
        value: The value of what was minimised, at the choice: of the criterion, or the NLL.
        at_edge: "lower" or "upper" if the best ridge lies at that end of its range, else None.
        condition: The condition number of $G + \varsigma^2 I$.
        effective_rank: How many directions the data determine.
        width: The number of features.
        nll: The negative log-likelihood per row: for the method "full" of rows that were left out,
            if there were enough, and for "paper" of the rows that the bars were fitted to.
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
        steps: For the method "full", how many steps each target's distribution was fitted away from
            one that is the same for all rows, as cross-validation has chosen; 0 for that one.
        early_stopped: Whether the validation rows chose the model's checkpoint; None if unknown.
        remarks: Sentences on the rows and what followed from them.
        rounding: A bound on the relative error of variances from mixed precision.
        advice: What helps against uneven bars, if the advice for `LastLayerRigidity` does not
            apply; else empty.
        novelty: If the fit recorded layers, the squared distance for each layer that is a novelty
            of 1. 95 % of the calibration rows stay below it in every layer at once.
        novelty_usual: A threshold for `p.novelty`: about 1 % of new rows like the calibration rows
            exceed it. With n < 99 calibration rows it is the largest of them, which about one new
            row in n + 1 exceeds.
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
    steps: list[int] = field(default_factory=list)
    early_stopped: bool | None = None
    remarks: list[str] = field(default_factory=list)
    rounding: float = 0.0
    advice: str = ""
    novelty: dict[str, float] = field(default_factory=dict)
    novelty_usual: float = 0.0
    mismatch: str = ""
    notices: tuple[str, ...] = field(default=(), compare=False)

    @property
    def novel_share(self) -> float:
        """About the share of new rows like the calibration rows that exceed `novelty_usual`.

        It is about 1 %, or 1 / (n + 1) with n < 199 calibration rows. With one layer this is the
        mean over calibrations. With several it is a little more (5 to 6 % instead of 4.8 % for
        n = 20), since the same rows set the unit of each layer.
        """
        count = self.used or self.rows or self.seen
        return max(1, (count + 1) // 100) / (count + 1)

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
        """Whether bars differ among rows like the training rows.

        They differ by q alone where no step away from one distribution for all rows was shown to be
        better.
        """
        follows = any(self.steps) or self.calibration.noise.name == "given"
        return self.method == "paper" or follows

    @property
    def has(self) -> set[str]:
        """Names of the noise and the distribution, and whether there are groups."""
        calibration = self.calibration
        names = {calibration.noise.name, calibration.distribution.name}
        if calibration.conformal is not None and len(calibration.conformal.labels) > 0:
            names.add("groups")
        return names

    def to(self, device: torch.device) -> Self:
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
    def from_state(cls, header: dict[str, Any], tensors: dict[str, Tensor]) -> Self:
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
