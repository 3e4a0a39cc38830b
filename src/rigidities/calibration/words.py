"""The outcome of a calibration in words: warnings, remarks, the printed report and the summary.

Every function here turns numbers into sentences; none computes or decides anything else. The
numbers are those of a `ReportNumbers`, of the rows, or of what a method found on its way.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..prediction.distribution import Distribution
from ..prediction.mixture import Mixture
from .calibration import Calibration
from .report_numbers import ReportNumbers
from .rows import Rows

__all__ = ["numbers", "remedy", "report_text", "summary"]

LARGEST_DOUBT = 1e-3
"""Relative error of variances from mixed precision beyond which there is a warning or an error."""

_FEW_ROWS = 10
"""Number of calibration rows below which a warning says that they are few."""
_SWAMPED = 0.5
"""Effective rank below which the data determine no direction."""
_NOTICEABLE = 0.01
"""Share of calibration rows that were trained on, at which bars may be too narrow by 0.5 %."""
_REMEDIES = {
    "uneven": {
        "features": "With calibrate(x, y, method=rg.Full()) the bars follow the inputs.",
        "groups": "With conformalize(x, y, groups=) intervals are guaranteed per group.",
    },
    "skew": {"mixture": "With calibrate(x, y, method=rg.Full()) distributions can be skewed."},
    "tails": {
        "student-t": (
            'With calibrate(x, y, method=rg.Paper(distribution="student-t")) the distribution has '
            "heavy tails."
        )
    },
}
"""For each fault, sentences on what helps, by the name that `ReportNumbers.has` gives it."""
_LAST_REMEDY = "Train and calibrate on more rows like these, or try another model."


# --- the rows of a calibration --------------------------------------------------------------------


def repeated_rows(rows: Rows | None) -> list[str]:
    """A sentence that half of the rows or more are copies of others; none where fewer are."""
    if rows is None or 2 * rows.distinct > rows.hashed or rows.hashed < 2:
        return []
    return [
        f"Only {rows.distinct} of {rows.hashed} calibration rows are distinct. If the others "
        "are copies rather than independent observations, the bars rest on those few rows."
    ]


def far_rows(
    residuals: list[tuple[int, float, float]], count: int, far: float, prefix: str = ""
) -> str:
    """A sentence that names validation rows whose residuals are cut off.

    Args:
        residuals: Place in the data, residual, and its size in robust units, of the farthest rows.
        count: How many rows there are beyond the reach.
        far: Number of robust units beyond which rows are named.
        prefix: What to call the target, where there are several.
    """
    listed = ", ".join(
        f"{number} (residual {residual:.3g}, {units:.2g} units)"
        for number, residual, units in residuals
    )
    if count > len(residuals):
        listed += f" and {count - len(residuals)} more"
    return (
        f"{prefix}Some validation rows (counted from 0) have residuals beyond {far:g} robust "
        f"units: {listed}. Each is treated as if it were at {far:g} units. Check their targets."
    )


def mismatched_rows(error: float, training_error: float, prefix: str = "") -> str:
    """A sentence that targets do not seem to belong to the rows' inputs, by two RMS errors."""
    return (
        f"{prefix}The calibration rows have an RMS error of {error:.3g}, the training "
        f"rows of {training_error:.3g}. One constant prediction would be better. Check that "
        "the calibration targets are in the same order as their inputs, and in the same unit "
        "as in the fit. If they are, the model has memorised its training rows, or these rows "
        "are unlike them."
    )


def target_prefix(target: int, targets: int) -> str:
    """Words that name a sentence's target; empty where there is one target."""
    return f"Target {target}: " if targets > 1 else ""


def early_stopping(early_stopped: bool | None) -> str:
    """What early stopping on the validation rows means, or a question whether there was any.

    Empty where there was none.
    """
    if early_stopped is False:
        return ""
    effect = "90 % intervals may cover up to 3 percentage points too little"
    if early_stopped:
        return (
            "These validation rows chose the checkpoint (early stopping), so their errors are "
            f"optimistic: {effect}. Calibrate on rows that were used for nothing else."
        )
    return (
        "Did these validation rows choose the checkpoint (early stopping)? If so, their errors "
        f"are optimistic, and {effect}. Answer with calibrate(..., early_stopped=True) or "
        "early_stopped=False."
    )


def zero_features(barless: int, rows: int) -> str:
    """A sentence that some rows have no bar in the paper's form."""
    return (
        f"The features of {barless} of {rows} rows are zero: the "
        "readout's weights do not affect their outputs (a final ReLU or clamp, an empty sum). "
        "Without noise such rows have error bars of zero, so they were left out of the "
        'calibration. With method="full", or method=rg.Paper(noise="constant"), their bar is '
        "the noise."
    )


def limited_ridge(ridge: float) -> str:
    """A sentence that a ridge that swamps every direction was limited to this one."""
    return (
        "The best ridge would swamp every direction of the features, and the bars could "
        f"not recognise unfamiliar inputs. The ridge is limited to {ridge:.4g}, where the "
        "data determine one direction."
    )


def training_rows(used: int, memorised: int, *, noise_is_given: bool) -> list[str]:
    """A sentence on why training rows were not used; none where they were.

    Args:
        used: How many training rows were used.
        memorised: How many were left aside, since each decides most of its own prediction.
        noise_is_given: Whether the noise is a function, which training rows in memory lack.
    """
    if memorised:
        return [
            f"The {memorised} training rows were not used: each decides most of its own "
            "prediction, so its residual says little. Only the validation rows were used."
        ]
    if used:
        return []
    why = "The fit kept no training rows (keep_rows=0, or a file saved without rows=True)"
    if noise_is_given:
        why = "The noise of training rows is not known"
    return [f"{why}: only the validation rows were used."]


NO_VALIDATION_ROWS = (
    "There were no validation rows. Leave-one-out errors of training rows are optimistic "
    "for a network trained end to end. Calibrate on held-out rows."
)
TARGETS_ON_GRID = (
    "The targets lie on a grid that is coarse compared with the residuals. Scale and centre of the "
    "distribution follow the inputs, but its shape does not: it would learn the grid. NLL and gain "
    "count the probability of each target's cell."
)


# --- a report -------------------------------------------------------------------------------------


def method_text(report: ReportNumbers) -> str:
    """The method, and its criterion where it has one."""
    if report.criterion is None:
        return f'method "{report.method}"'
    return f'method "{report.method}", criterion "{report.criterion}"'


def warnings(report: ReportNumbers) -> list[str]:
    """What to be careful about."""
    sentences = [*gravest(report), *few_rows(report)]
    try_noise = ""
    if report.calibration.noise.name == "none":
        try_noise = ' Try method=rg.Paper(noise="constant").'
    no_use = useless(report)
    if no_use:
        sentences.append(f"{no_use}{try_noise}")
    if report.at_edge == "upper":
        sentences.append(
            "The best ridge lies at the upper end of its range: the variance depends only on "
            f"the length of the features, and the ridge may play the role of noise.{try_noise}"
        )
    if report.at_edge == "lower":
        sentences.append(
            "The best ridge lies at the lower end of its range (it is practically zero)."
        )
    if report.effective_rank < _SWAMPED < report.width:
        instead = "method=rg.Full(ridge=...) with a smaller ridge"
        if report.method == "paper":
            instead = "method=rg.Paper(ridge=...) with a smaller ridge"
            if not report.advice:
                instead = f'method="full", or {instead}'
        sentences.append(
            "The ridge swamps every direction that the data determine (effective rank "
            f"{report.effective_rank:.2g} of {report.width}): the bars cannot recognise unfamiliar "
            f"inputs. Use {instead}."
        )
    if report.zero_curvature:
        sentences.append(
            f"{report.zero_curvature} training rows have zero curvature and contribute nothing "
            "(with a Huber loss, these are rows with residuals beyond delta)."
        )
    if report.rounding > LARGEST_DOUBT:
        sentences.append(rounding(report))
    return sentences


def gravest(report: ReportNumbers) -> list[str]:
    """Sentences on calibration rows that cannot calibrate: mismatched, or seen in training."""
    mismatch = [report.mismatch] if report.mismatch else []
    return [*mismatch, *trained_on(report)]


def worth(report: ReportNumbers) -> str:
    """The gain over one constant bar, with its standard error."""
    if not math.isfinite(report.gain):
        return "too few rows to compare the bars with one constant bar"
    side = "worse" if report.gain < 0 else "better"
    return (
        f"{abs(report.gain):.3g} ± {report.gain_error:.2g} nats per row {side} than one constant "
        "bar"
    )


def useless(report: ReportNumbers) -> str:
    """A sentence that the bars were not shown to be better than one constant bar.

    It also says where a single row decides. It is empty where the bars are better, and where
    the gain is not known.
    """
    gain = report.gain
    if not math.isfinite(gain):
        return ""
    is_shown = gain >= 2 * report.gain_error and gain >= 1e-6
    if not report.varies and not is_shown:
        sentence = (
            f"The error bars are nearly one constant bar (± {numbers(report.constant)}), which "
            "widens for unfamiliar inputs."
        )
        if report.calibration.noise.name == "constant":  # nothing else was tried
            return sentence
        return (
            f"{sentence} Bars that follow the inputs were not shown to be better on these rows. "
            "Calibrate on more rows."
        )
    bar = f"one constant bar (± {numbers(report.constant)}, the calibration rows' RMS error)"
    sentence = ""
    if not is_shown:
        verdict = "are not shown to be better than"
        if gain < -2 * report.gain_error and gain < -1e-6:  # beyond rounding
            verdict = "are worse than"
        sentence = (
            f"The error bars {verdict} {bar}: {gain:+.3g} ± {report.gain_error:.2g} nats "
            "per row on held-out rows. Use them only to flag inputs far from the training data."
        )
    changes_sign = (gain > 0) != (report.gain_without > 0)
    largest = max(abs(gain), abs(report.gain_without))
    if changes_sign and largest > 2 * report.gain_error:
        if not sentence:
            sentence = f"The gain over {bar} is {gain:+.3g} nats per row."
        sentence += f" A single row decides this: without it, it is {report.gain_without:+.3g}."
    return sentence


def trained_on(report: ReportNumbers) -> list[str]:
    """A sentence that calibration rows are in the training data too; none where few are."""
    share = report.duplicates / max(1, report.samples)
    if share < _NOTICEABLE:
        return []
    effect = 1 - math.sqrt(max(0.0, 1 - share))  # if those rows had no error at all
    return [
        f"{report.duplicates} of {report.samples} calibration rows are also in the training data "
        f"({100 * share:.3g} %). If the model has memorised them, the bars are too narrow by "
        f"up to {100 * effect:.3g} %. Calibrate on held-out rows."
    ]


def trained_on_conformal(rows: Rows) -> list[str]:
    """A sentence that conformal rows are in the training data too; none where few are."""
    share = rows.duplicates / max(1, rows.samples)
    if share < _NOTICEABLE:
        return []
    return [
        f"{round(rows.duplicates)} of {rows.samples} conformal rows are also in the training data "
        f"({100 * share:.3g} %). If the model has memorised them, the guarantee is void for new "
        "rows. Call conformalize with held-out rows."
    ]


def calibrated_on_conformal(share: float) -> list[str]:
    """A sentence that a share of the conformal rows also calibrated the bars; none if few did."""
    if share < _NOTICEABLE:
        return []
    return [
        f"{100 * share:.3g} % of the conformal rows also calibrated the bars, which voids the "
        "guarantee. Call conformalize with rows that calibrate has not used."
    ]


def few_rows(report: ReportNumbers) -> list[str]:
    """A sentence that the size of the bars rests on very few rows; none where it does not."""
    if not 0 < report.rows < _FEW_ROWS:
        return []
    if report.seen:
        doubt = "it is a guess how much larger the errors are than on the training rows"
    else:
        # the relative error of a standard deviation
        doubt = f"the size of the bars is uncertain by {100 / math.sqrt(2 * report.rows):.0f} %"
    return [
        f"The bars were calibrated on only {report.rows} held-out rows: {doubt}. "
        "Calibrate on a hundred rows or more."
    ]


def rounding(report: ReportNumbers) -> str:
    """A sentence on the error of mixed precision, and what to do about it."""
    return (
        "The Gram matrix was computed in mixed precision. At ridge "
        f"{report.ridge:.2g}, rounding may change variances by a relative {report.rounding:.2g}, "
        f"more than {LARGEST_DOUBT:g}. Fit again with precision='double', or choose a larger "
        "ridge: calibrate(..., method=rg.Full(ridge=...))."
    )


def remedy_for(report: ReportNumbers, fault: str) -> str:
    """A sentence on what is not in use yet and helps against "uneven", "skew" or "tails"."""
    if report.advice and fault == "uneven":
        return report.advice
    if report.advice and fault == "skew":
        return _LAST_REMEDY
    return remedy(fault, report.has)


def remedy(fault: str, used: set[str], *, sure: bool = True) -> str:
    """A sentence on what the library has against a fault of the bars.

    Args:
        fault: "uneven" coverage, "skew" or "tails".
        used: Names of what is in use already, as in `ReportNumbers.has`.
        sure: Whether these are all; otherwise the sentence mentions the doubt.
    """
    for name, text in _REMEDIES[fault].items():
        # A mixture has the tails of a Student-t.
        in_use = name in used or (name == "student-t" and "mixture" in used)
        if not in_use:
            return text if sure else f"Unless you already use it: {text}"
    return _LAST_REMEDY


# --- the text of a report -------------------------------------------------------------------------


def report_text(report: ReportNumbers) -> str:
    """A report as it prints."""
    lines = [
        _rows_line(report),
        *_choice_lines(report),
        *_quality_lines(report),
        *_steps_line(report),
        *(f"  {line}" for line in _guard_line(report)),
        *_novelty_line(report),
    ]
    if report.duplicates and not trained_on(report):  # too few of them for a warning
        lines.append(f"  seen before     {report.duplicates} of {report.samples} rows")
    lines += [f"  ! {sentence}" for sentence in (*warnings(report), *report.remarks)]
    return "\n".join(lines)


def _rows_line(report: ReportNumbers) -> str:
    """A line on the rows it was calibrated on, and the method."""
    rows = []
    if report.criterion == "loo":
        rows.append(f"{report.rows} training rows (leave-one-out)")
    elif report.rows or not report.seen:
        used = f" ({report.used} of them used)" if 0 < report.used < report.rows else ""
        rows.append(f"{report.rows} validation rows{used}")
    if report.seen:
        rows.append(f"{report.seen} training rows (leave-one-out)")
    value_name = "value"
    if report.steps and math.isfinite(report.gain):
        value_name = "cross-validated NLL"
    elif report.criterion in (None, "nll"):
        value_name = "NLL"
    return (
        f"Calibrated on {' and '.join(rows)}, {method_text(report)} "
        f"({value_name} {report.value:.4g})"
    )


def _choice_lines(report: ReportNumbers) -> list[str]:
    """Lines on ridge, scale and noise."""
    fixed = " (fixed)" if report.fixed else ""
    lines = [
        f"  ridge           {report.ridge:.4g}{fixed}",
        f"  scale           {numbers(report.scale)}",
    ]
    if report.gradient_scale is not None:
        lines.append(f"  of derivatives  {numbers(report.gradient_scale)}")
    noise = numbers(report.noise_level)
    if report.calibration.noise.name == "none":
        noise = "none: the scale includes the noise"
    lines.append(f"  noise variance  {noise}")
    if report.calibration.weighted:
        weight = numbers(report.calibration.weight)
        lines.append(f"  for a weight of {weight}, which is assumed for rows without a weight")
    return lines


def _quality_lines(report: ReportNumbers) -> list[str]:
    """Lines on NLL, gain, distribution and what is known of the curvature."""
    lines = [
        f"  NLL             {report.nll:.4g} {judging(report)}",
        f"  gain            {worth(report)} (± {numbers(report.constant)})",
    ]
    if math.isfinite(report.gain):
        lines[-1] += ", cross-validated"
    distribution = report.calibration.distribution
    if distribution.name != "gaussian":
        lines.append(f"  distribution    {distribution_line(distribution)}")
    if math.isfinite(report.effective_rank):
        lines.append(
            f"  effective rank  {report.effective_rank:.1f} of {report.width}, "
            f"condition number {report.condition:.2g}"
        )
    if report.rounding:
        lines.append(f"  rounding        at most {report.rounding:.2g} of a variance")
    return lines


def judging(report: ReportNumbers) -> str:
    """Which rows the NLL is of."""
    if report.steps and math.isfinite(report.gain):
        return "on rows that were left out"
    return "on the rows that the bars were fitted to"


def _steps_line(report: ReportNumbers) -> list[str]:
    """A line on how far the distribution follows the inputs; none for the method "paper"."""
    if not report.steps:
        return []
    if not any(report.steps):
        return [f"  follows         {_follows(report)}"]
    steps = ", ".join(f"{step}" for step in report.steps[:6])
    more = f", ... ({len(report.steps)} targets)" if len(report.steps) > 6 else ""
    return [f"  follows         the inputs, after {steps}{more} steps (chosen on left-out rows)"]


def _follows(report: ReportNumbers) -> str:
    """What the distribution follows where it takes no step towards the inputs, and why."""
    noise = report.calibration.noise.name
    if noise == "given":
        return "q and the given noise"
    if noise == "constant":
        return "q alone, with one noise for all rows"
    if not math.isfinite(report.gain):
        return "q alone: the rows are too few to choose more"
    return "q alone: no step towards the inputs was shown to be better"


def _guard_line(report: ReportNumbers) -> list[str]:
    """A line on how the bars behave far from the training rows; none without a guard."""
    calibration = report.calibration
    if calibration.guard is None:
        return []
    reference = numbers(calibration.guard.reference, digits=3)
    lead = "Unfamiliar inputs get wider bars, up to the spread of the targets and beyond."
    # Training rows fix what is usual, where there are any.
    below = "90 % of training rows are below" if report.seen else "90 % of these rows are below"
    if calibration.noise.name == "given":  # the noise of a typical row is not known
        return [f"{lead} They widen from q = {reference} on ({below})."]
    usual, doubled, tenfold = (
        numbers(calibration.usual_std(times), digits=3) for times in (1.0, 2.0, 10.0)
    )
    return [
        f"{lead} A typical bar is {usual} at q = {reference} "
        f"({below}), at least "
        f"{doubled} at twice that q and at least {tenfold} at ten times that q."
    ]


def _novelty_line(report: ReportNumbers) -> list[str]:
    """A line on what is usual in the layers that the fit has watched; none without such."""
    if not report.novelty:
        return []
    layers = "1 layer" if len(report.novelty) == 1 else f"{len(report.novelty)} layers"
    return [
        f"  novelty         {layers} watched; about {100 * report.novel_share:.2g} % of new rows "
        f"like these are above {report.novelty_usual:.2f}"
    ]


def distribution_line(distribution: Distribution) -> str:
    """A distribution's name, with its degrees of freedom or components where it has any."""
    if isinstance(distribution, Mixture):
        return f"mixture of {distribution.logit.shape[-1]} Student-t"
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


# --- the summary of a fit -------------------------------------------------------------------------

UNFITTED = {"fit": "not fitted yet: call fit(x, y) with the training data"}
"""The lines of a summary before any fit."""


def summary(
    title: str,
    fit_lines: dict[str, str],
    calibration: Calibration | None = None,
    report: ReportNumbers | None = None,
) -> str:
    """A fit described in a few lines: what is known, how good it is, what to do next.

    Args:
        title: The first line.
        fit_lines: What is known of the fit, by name.
        calibration: What is in use, if there is a fit.
        report: How it was chosen, if it was calibrated.
    """
    lines = dict(fit_lines)
    if calibration is not None:
        lines |= _calibration_lines(calibration, report)
    if calibration is not None and report is not None:
        if calibration.conformal is None:
            lines["intervals"] = "no guarantee; conformalize(x, y) gives one"
        elif report.stale:
            lines["intervals"] = "the guarantee is void: call calibrate and conformalize again"
        else:
            lines["intervals"] = "guaranteed by p.interval(0.9)"
    return "\n".join([title, *(f"  {name:<14}{text}" for name, text in lines.items())])


def _calibration_lines(calibration: Calibration, report: ReportNumbers | None) -> dict[str, str]:
    """Ridge, scale, noise and distribution, and how good they are."""
    if report is None:
        origin = "as given or by default"
    elif report.fixed:
        origin = "fixed"
    else:
        origin = f"chosen by {method_text(report)}"
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
    lines["calibrated"] = f"{rows}, {worth(report)}"
    if report.stale:
        lines["calibrated"] += "; stale: call calibrate again"
    if gravest(report):
        lines["caution"] = f"! {' '.join(gravest(report))}"
    notes = len(warnings(report)) + len(report.remarks)
    if notes:
        lines["notes"] = f"{notes}: print(uq.calibration_report) shows them"
    return lines
