"""The outcome of a calibration: what was chosen, how good it is, and what needs care.

`CalibrationReport` holds the choice (`Calibration`) and the numbers that a user needs to judge it,
says in sentences what to be careful about, and prints as a page. It goes into files as a header of
plain values and a few tensors. `summary` describes a fit, calibrated or not, in a few lines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..notices import notify
from ..prediction.distribution import Distribution
from .calibration import Calibration, without_prefix

__all__ = ["CalibrationReport", "summary"]

LARGEST_DOUBT = 1e-3
"""Relative error of variances from mixed precision beyond which there is a warning or an error."""

RUNGS = {
    "constant bar": "one constant bar, which widens only for unfamiliar inputs",
    "paper": "the paper's form",
    "constant noise": "constant noise and a Gaussian distribution",
    "heavy tails": "constant noise and heavy tails",
    "noise that follows the inputs": "noise that follows the inputs",
    "full": "the full model",
}
"""The rungs of the ladder of `auto`, the simplest first, and what they are in words."""
_CONSTANT_BAR, _PAPER, _CONSTANT_NOISE, _TAILS, _FEATURE_NOISE, _FULL = RUNGS

_FEW_ROWS = 10
"""Number of calibration rows below which a warning says that they are few."""
_SWAMPED = 0.5
"""Effective rank below which the data determine no direction."""
_NOTICEABLE = 0.01
"""Share of calibration rows that were trained on, at which bars may be too narrow by 0.5 %."""
_APART_FROM_HEADER = ("calibration", "constant", "gradient_scale")
"""Fields of a report that are not plain values."""
_REMEDIES = {
    "uneven": {
        "features": "With calibrate(valid, noise='features') the noise follows the inputs.",
        "groups": "With calibrate(..., conformal=, groups=) intervals are guaranteed per group.",
    },
    "skew": {"tilted": "With calibrate(valid, distribution='tilted') distributions can be skewed."},
    "tails": {
        "student-t": (
            "With calibrate(valid, distribution='student-t') the distribution has heavy tails."
        )
    },
}
"""For each fault, sentences on what helps, by the name that `CalibrationReport.has` gives it."""
_LAST_REMEDY = "Train and calibrate on more rows like these, or try another model."


@dataclass(frozen=True)
class CalibrationReport:
    r"""Chosen ridge, scale, noise and distribution, with what a user needs to judge them.

    Attributes:
        calibration: What was chosen.
        criterion: The criterion's name.
        value: The criterion's value at the choice (smaller is better).
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
        seen: How many training rows `auto` used, with their leave-one-out errors.
        ladder: For `auto`, the cross-validated NLL per row of one constant bar, of the paper's
            form, and of each part of the full model with those before it.
        rung: For `auto`, the entry of `ladder` that was chosen.
        remarks: Sentences on the rows and what followed from them.
        rounding: A bound on the relative error of variances from mixed precision.
        advice: What helps against uneven bars, if the advice for `LastLayerRigidity` does not
            apply; else empty.
        novelty: If the fit recorded layers, the squared distance for each layer that 95 % of the
            calibration rows stay below.
        novelty_usual: The novelty that 99 % of those rows stay below.
        mismatch: A sentence that targets and inputs of the calibration rows do not seem to belong
            together; empty where they do.
    """

    calibration: Calibration
    criterion: str
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
    remarks: list[str] = field(default_factory=list)
    rounding: float = 0.0
    advice: str = ""
    novelty: dict[str, float] = field(default_factory=dict)
    novelty_usual: float = 0.0
    mismatch: str = ""

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
    def warnings(self) -> list[str]:
        """What to be careful about, in sentences."""
        sentences = [*self.gravest, *self.few]
        try_noise = ""
        if self.calibration.noise.name == "none":
            try_noise = " Try noise='constant'."
        if self.useless:
            sentences.append(f"{self.useless}{try_noise}")
        if self.at_edge == "upper":
            sentences.append(
                "The best ridge lies at the upper end of its range: the variance depends only on "
                f"the length of the features, and the ridge may play the role of noise.{try_noise}"
            )
        if self.at_edge == "lower":
            sentences.append(
                "The best ridge lies at the lower end of its range (it is practically zero)."
            )
        if self.effective_rank < _SWAMPED < self.width:
            instead = "a smaller ridge=" if self.advice else "criterion='auto', or a smaller ridge="
            sentences.append(
                "The ridge swamps every direction that the data determine (effective rank "
                f"{self.effective_rank:.2g} of {self.width}): the bars cannot recognise unfamiliar "
                f"inputs. Use {instead}."
            )
        if self.zero_curvature:
            sentences.append(
                f"{self.zero_curvature} training rows have zero curvature and contribute nothing "
                "(with a Huber loss, these are rows with residuals beyond delta)."
            )
        if self.rounding > LARGEST_DOUBT:
            sentences.append(self._rounding_warning)
        return sentences

    @property
    def gravest(self) -> list[str]:
        """Sentences on calibration rows that cannot calibrate: mismatched, or seen in training."""
        mismatch = [self.mismatch] if self.mismatch else []
        return [*mismatch, *self.repeated]

    @property
    def worth(self) -> str:
        """The gain over one constant bar in words, with its standard error."""
        if not math.isfinite(self.gain):
            return "too few rows to compare the bars with one constant bar"
        side = "worse" if self.gain < 0 else "better"
        return (
            f"{abs(self.gain):.3g} ± {self.gain_error:.2g} nats per row {side} than one constant "
            "bar"
        )

    @property
    def varies(self) -> bool:
        """Whether bars differ among rows like the training rows: one constant bar does not."""
        return self.rung != _CONSTANT_BAR

    @property
    def useless(self) -> str:
        """A sentence that the bars were not shown to be better than one constant bar.

        It also says where a single row decides. It is empty where the bars are better, and where
        the gain is not known.
        """
        if not math.isfinite(self.gain):
            return ""
        if not self.varies:
            return (
                f"The error bars are one constant bar (± {numbers(self.constant)}), which widens "
                "only for unfamiliar inputs. No other bars were shown to be better on these rows. "
                "Calibrate on more rows."
            )
        bar = f"one constant bar (± {numbers(self.constant)}, the calibration rows' RMS error)"
        sentence = ""
        if self.gain < 2 * self.gain_error or self.gain < 1e-6:
            verdict = "are not shown to be better than"
            if self.gain < -2 * self.gain_error:
                verdict = "are worse than"
            sentence = (
                f"The error bars {verdict} {bar}: {self.gain:+.3g} ± {self.gain_error:.2g} nats "
                "per row on held-out rows. Use them only to flag inputs far from the training data."
            )
        changes_sign = (self.gain > 0) != (self.gain_without > 0)
        largest = max(abs(self.gain), abs(self.gain_without))
        if changes_sign and largest > 2 * self.gain_error:
            if not sentence:
                sentence = f"The gain over {bar} is {self.gain:+.3g} nats per row."
            sentence += f" A single row decides this: without it, it is {self.gain_without:+.3g}."
        return sentence

    @property
    def repeated(self) -> list[str]:
        """A sentence that calibration rows are in the training data too; none where few are."""
        share = self.duplicates / max(1, self.samples)
        if share < _NOTICEABLE:
            return []
        effect = 1 - math.sqrt(max(0.0, 1 - share))  # if those rows had no error at all
        return [
            f"{self.duplicates} of {self.samples} calibration rows are also in the training data "
            f"({100 * share:.3g} %). If the model has memorised them, the bars are too narrow by "
            f"up to {100 * effect:.3g} %. Calibrate on held-out rows."
        ]

    @property
    def few(self) -> list[str]:
        """A sentence that the size of the bars rests on very few rows; none where it does not."""
        if not 0 < self.rows < _FEW_ROWS:
            return []
        if self.seen:
            doubt = "it is a guess how much larger the errors are than on the training rows"
        else:
            # the relative error of a standard deviation
            doubt = f"the size of the bars is uncertain by {100 / math.sqrt(2 * self.rows):.0f} %"
        return [
            f"The bars were calibrated on only {self.rows} held-out rows: {doubt}. "
            "Calibrate on a hundred rows or more."
        ]

    @property
    def has(self) -> set[str]:
        """Names of the noise and distributions in use or tried in vain, and of groups in use."""
        calibration = self.calibration
        names = {calibration.noise.name, calibration.distribution.name}
        if _TAILS in self.ladder:
            names.add("student-t")
        if _FEATURE_NOISE in self.ladder:
            names.add("features")
        if _FULL in self.ladder:
            names.add("tilted")
        if calibration.conformal is not None and len(calibration.conformal.labels) > 0:
            names.add("groups")
        return names

    def remedy(self, fault: str) -> str:
        """A sentence on what is not in use yet and helps against "uneven", "skew" or "tails"."""
        if self.advice and fault == "uneven":
            return self.advice
        if self.advice and fault == "skew":
            return _LAST_REMEDY
        return remedy(fault, self.has)

    @property
    def _rounding_warning(self) -> str:
        """A sentence on the error of mixed precision, and what to do about it."""
        return (
            "The Gram matrix was computed in mixed precision. At ridge "
            f"{self.ridge:.2g}, rounding may change variances by a relative {self.rounding:.2g}, "
            f"more than {LARGEST_DOUBT:g}. Fit again with precision='double', or pass a larger "
            "ridge=."
        )

    def certified(self, rounding: float, feature_rounding: float) -> CalibrationReport:
        """The report with the error bound of mixed precision, with a warning where it is large.

        Args:
            rounding: A bound on the relative error that mixed precision brings.
            feature_rounding: The relative error of the features themselves. There is no warning
                below it.

        Raises:
            ValueError: Rounding may change variances by half of themselves or more.
        """
        report = replace(self, rounding=rounding)
        if rounding > 0.5:
            raise ValueError(report._rounding_warning)
        if rounding > max(LARGEST_DOUBT, feature_rounding):
            notify(report._rounding_warning)
        return report

    def __str__(self) -> str:
        lines = [
            *self._rows_line,
            *self._choice_lines,
            *self._quality_lines,
            *(f"  {line}" for line in self._ladder_lines),
            *(f"  {line}" for line in self._guard_line),
            *self._novelty_line,
        ]
        if self.duplicates and not self.repeated:  # too few of them for a warning
            lines.append(f"  seen before     {self.duplicates} of {self.samples} rows")
        lines += [f"  ! {sentence}" for sentence in (*self.warnings, *self.remarks)]
        return "\n".join(lines)

    @property
    def _rows_line(self) -> list[str]:
        """A line on the rows it was calibrated on, and the criterion."""
        rows = []
        if self.criterion == "loo":
            rows.append(f"{self.rows} training rows (leave-one-out)")
        elif self.rows or not self.seen:
            used = f" ({self.used} of them used)" if 0 < self.used < self.rows else ""
            rows.append(f"{self.rows} validation rows{used}")
        if self.seen:
            rows.append(f"{self.seen} training rows (leave-one-out)")
        return [
            f'Calibrated on {" and ".join(rows)}, criterion "{self.criterion}" '
            f"({self._value_name} {self.value:.4g})"
        ]

    @property
    def _value_name(self) -> str:
        """What the value of the criterion is."""
        if self.ladder:
            return "cross-validated NLL"
        return {"auto": "NLL", "nll": "NLL", "crps": "CRPS"}.get(self.criterion, "value")

    @property
    def _choice_lines(self) -> list[str]:
        """Lines on ridge, scale and noise."""
        fixed = " (fixed)" if self.fixed else ""
        lines = [
            f"  ridge           {self.ridge:.4g}{fixed}",
            f"  scale           {numbers(self.scale)}",
        ]
        if self.gradient_scale is not None:
            lines.append(f"  of derivatives  {numbers(self.gradient_scale)}")
        noise = numbers(self.noise_level)
        if self.calibration.noise.name == "none":
            noise = "none: the scale includes the noise"
        lines.append(f"  noise variance  {noise}")
        if self.calibration.weighted:
            weight = numbers(self.calibration.weight)
            lines.append(f"  for a weight of {weight}, which is assumed for rows without a weight")
        return lines

    @property
    def _quality_lines(self) -> list[str]:
        """Lines on NLL, gain, distribution and what is known of the curvature."""
        lines = [
            f"  NLL             {self.nll:.4g} on the rows that the bars were fitted to",
            f"  gain            {self.worth} (± {numbers(self.constant)})",
        ]
        if math.isfinite(self.gain):
            lines[-1] += ", cross-validated"
        distribution = self.calibration.distribution
        if distribution.name != "gaussian":
            lines.append(f"  distribution    {distribution_line(distribution)}")
        if math.isfinite(self.effective_rank):
            lines.append(
                f"  effective rank  {self.effective_rank:.1f} of {self.width}, "
                f"condition number {self.condition:.2g}"
            )
        if self.rounding:
            lines.append(f"  rounding        at most {self.rounding:.2g} of a variance")
        return lines

    @property
    def _ladder_lines(self) -> list[str]:
        """The chosen rung, and what each rung gained in cross-validation, in plain words."""
        if not self.ladder or self.rung not in RUNGS:  # files of other versions
            return []
        richest = list(self.ladder)[-1]
        why = "" if self.rung == richest else "; richer models are not shown to be better"
        lines = [f"chosen: {RUNGS[self.rung]}{why}. Cross-validated NLL per row (lower is better):"]
        nll_before = None
        passed = False  # whether the rung that was taken is among those before
        for rung, nll in self.ladder.items():
            # The constant bar and the paper's form do not extend the rung before.
            if nll_before is None or rung in (_CONSTANT_BAR, _PAPER):
                text = f"{nll:.4g} for {RUNGS[rung]}"
            else:
                text = f"{nll - nll_before:+.4f} after adding {self._step_name(rung, richest)}"
            lines.append(f"  {text} (not used)" if passed else f"  {text}")
            nll_before = nll
            if rung == self.rung:
                passed = True
        return lines

    def _step_name(self, rung: str, richest: str) -> str:
        """What a rung adds to the one before."""
        if rung == _FULL and rung == richest:
            return "the shape of the distribution"
        if rung == _CONSTANT_NOISE and self.calibration.noise.name == "given":
            return "the given noise"
        return rung

    @property
    def _guard_line(self) -> list[str]:
        """A line on how the bars behave far from the training rows; none without a guard."""
        guard = self.calibration.guard
        if guard is None:
            return []
        reference = numbers(guard.reference, digits=3)
        lead = "Unfamiliar inputs get wider bars, up to the spread of the targets and beyond."
        if self.calibration.noise.name == "given":  # the noise of a typical row is not known
            return [f"{lead} They widen from q = {reference} on (90 % of training rows are below)."]
        return [
            f"{lead} A typical bar is {numbers(self._usual_std(1.0), digits=3)} at q = {reference} "
            "(90 % of training rows are below), at least "
            f"{numbers(self._usual_std(2.0), digits=3)} at twice that q and at least "
            f"{numbers(self._usual_std(10.0), digits=3)} at ten times that q."
        ]

    def _usual_std(self, times: float) -> Tensor:
        """The bar (K,) of a usual prediction whose q is `times` the guard's reference.

        It has the usual noise, and the prediction is the targets' mean.
        """
        calibration = self.calibration
        guard = calibration.guard
        head = calibration.head
        assert guard is not None
        assert head is not None, "a guard belongs to a head"
        q = times * guard.reference
        second = torch.as_tensor(calibration.distribution.second).to(q)
        squared_scale = self.noise_level / second + head.scale2 * q
        squared_scale = guard.widened(
            squared_scale, q, distance=torch.zeros_like(q), extent=torch.ones_like(q)
        )
        return (squared_scale * second).sqrt()

    @property
    def _novelty_line(self) -> list[str]:
        """A line on what is usual in the layers that the fit has watched; none without such."""
        if not self.novelty:
            return []
        layers = "1 layer" if len(self.novelty) == 1 else f"{len(self.novelty)} layers"
        return [
            f"  novelty         {layers} watched; 1 % of the calibration rows are above "
            f"{self.novelty_usual:.2f}"
        ]

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


def remedy(fault: str, used: set[str], *, sure: bool = True) -> str:
    """A sentence on what the library has against a fault of the bars.

    Args:
        fault: "uneven" coverage, "skew" or "tails".
        used: Names of what is in use already, as in `CalibrationReport.has`.
        sure: Whether these are all; otherwise the sentence mentions the doubt.
    """
    for name, text in _REMEDIES[fault].items():
        # A tilted distribution has the tails of a Student-t.
        in_use = name in used or (name == "student-t" and "tilted" in used)
        if not in_use:
            return text if sure else f"Unless you already use it: {text}"
    return _LAST_REMEDY


def distribution_line(distribution: Distribution) -> str:
    """A distribution's name, with its degrees of freedom where it has any."""
    df = getattr(distribution, "df", None)
    if df is None:
        return distribution.name
    return f"{distribution.name}, {numbers(torch.as_tensor(df))} degrees of freedom"


def numbers(tensor: Tensor, most: int = 6, *, digits: int = 4) -> str:
    """Entries as text with this many significant digits, at most the first `most` of them."""
    text = ", ".join(f"{value:.{digits}g}" for value in tensor.flatten()[:most].tolist())
    if tensor.numel() > most:
        text += f", ... ({tensor.numel()} targets)"
    return text


UNFITTED = {"fit": "not fitted yet: call fit(x, y) with the training data"}
"""The lines of a summary before any fit."""


def summary(
    title: str,
    fit_lines: dict[str, str],
    calibration: Calibration | None = None,
    report: CalibrationReport | None = None,
    guarantee: str = "calibrate(x, y, conformal=0.3)",
) -> str:
    """A fit described in a few lines: what is known, how good it is, what to do next.

    Args:
        title: The first line.
        fit_lines: What is known of the fit, by name.
        calibration: What is in use, if there is a fit.
        report: How it was chosen, if it was calibrated.
        guarantee: The call that guarantees the coverage of intervals.
    """
    lines = dict(fit_lines)
    if calibration is not None:
        lines |= _calibration_lines(calibration, report)
    if calibration is not None and report is not None:
        if calibration.conformal is None:
            lines["intervals"] = f"no guarantee; {guarantee} gives one"
        elif report.stale:
            lines["intervals"] = f"the guarantee is void: call {guarantee} again"
        else:
            lines["intervals"] = "guaranteed by p.interval(0.9)"
    return "\n".join([title, *(f"  {name:<14}{text}" for name, text in lines.items())])


def _calibration_lines(
    calibration: Calibration, report: CalibrationReport | None
) -> dict[str, str]:
    """Ridge, scale, noise and distribution, and how good they are."""
    if report is None:
        origin = "as given or by default"
    elif report.fixed:
        origin = "fixed"
    else:
        origin = f"chosen by {report.criterion}"
    noise = calibration.noise.name
    if bool(calibration.noise.level.any()):
        noise += f", variance {numbers(calibration.noise.level)}"
    lines = {
        "ridge": f"{calibration.ridge:.4g}, {origin}",
        "scale": numbers(calibration.scale),
        "noise": noise,
        "distribution": distribution_line(calibration.distribution),
    }
    if report is None:
        lines["calibrated"] = "not yet: call calibrate(x, y) with held-out rows"
        return lines
    rows = f"on {report.rows:,} rows"
    if report.seen:
        rows += f" and {report.seen:,} training rows (leave-one-out)"
    lines["calibrated"] = f"{rows}, {report.worth}"
    if report.stale:
        lines["calibrated"] += "; stale: call calibrate again"
    if report.gravest:
        lines["caution"] = f"! {' '.join(report.gravest)}"
    notes = len(report.warnings) + len(report.remarks)
    if notes:
        lines["notes"] = f"{notes}: print(uq.calibration_report) shows them"
    return lines
