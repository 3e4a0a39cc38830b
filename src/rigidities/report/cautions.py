"""What to be careful about in some rows, in plain words.

`cautions` looks at the rows of one target, at the calibration and at reference bars, and returns a
`Caution` for everything that a user of the bars should know besides the verdict: rows unlike those
of the calibration, single rows far outside, heavy tails, skewed errors, biased predictions. A grave
caution keeps the bars from being called trustworthy. Every check allows for chance, given the
number of independent rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..calibration.coverage import LEVEL
from ..calibration.report import CalibrationReport
from ..calibration.words import remedy
from .formatting import around, number
from .rows import TargetRows

FEW = 30
"""With fewer rows there is no verdict, and nothing is called good."""
MOST_NAMED = 3
"""A caution names at most this many rows."""
_FAR_OUT = 5.0
"""A bar beyond this many times the median bar is called far out."""
_TAIL_SIGMAS = 3.0
"""Errors beyond this many bars are in the tails, where bars are right as a whole."""
_STRANGE = 1e-3
"""A row is named if fewer than this many rows are expected to lie as far outside."""
_CLEARLY_LESS = 0.95
"""The distribution's centre is reported as better below this share of the model's RMSE."""
_SKEWED = 0.65
"""Errors are called skewed if this share of the largest ones lies on one side."""
_GRAVELY_SKEWED = 0.8
"""From this share on, the skew is a grave caution."""
_AGAINST_FAULTS_OF_THE_MODEL = {
    "bias": "Use refit(), or another model.",
    "centre": "Use p.centre as the prediction, or correct the output with refit().",
}
"""What helps against faults that calibration cannot correct."""


@dataclass(frozen=True)
class Caution:
    """Something to be careful about.

    Attributes:
        text: Sentences.
        grave: Why bars with this flaw must not be called trustworthy, as the end of a headline.
            Empty where they may be.
    """

    text: str
    grave: str = ""


def cautions(
    rows: TargetRows,
    calibration: CalibrationReport | None = None,
    reference: Tensor | None = None,
) -> list[Caution]:
    """Everything to be careful about, the most important first.

    Args:
        rows: The rows of one target.
        calibration: What `calibrate` returned, if it is known.
        reference: Bars on rows like those of the calibration, (M,), if there are any.
    """
    checks = [
        _unknown_distribution(rows),
        _few_rows(rows),
        _rows_far_outside(rows),
        _better_centre(rows),
        _unlike_reference(rows, reference),
        _novel(rows, calibration),
        _repeated(rows),
        _heavy_tails(rows, calibration),
        _skewed(rows, calibration),
        _biased(rows),
    ]
    raised = [caution for caution in checks if caution is not None]
    return _of_calibration(calibration) + raised


def remedy_for(fault: str, rows: TargetRows, calibration: CalibrationReport | None = None) -> str:
    """A sentence on what helps against a fault.

    Args:
        fault: Its name: "uneven", "skew", "tails", "bias" or "centre".
        rows: The rows with the fault. Their `advice`, if any, has the last word.
        calibration: What `calibrate` returned, so that remedies in use are not suggested again.
    """
    if fault in _AGAINST_FAULTS_OF_THE_MODEL:
        text = _AGAINST_FAULTS_OF_THE_MODEL[fault]
    elif calibration is not None:
        text = calibration.remedy(fault)
    else:
        # Without a calibration, the distribution is known by name, but not the form of the noise.
        sure = bool(rows.distribution) and fault != "uneven"
        text = remedy(fault, {rows.distribution}, sure=sure)
    if rows.advice is None:
        return text
    return rows.advice(fault, text)


def sigmas_of_tail(tail: float, rows: TargetRows) -> float:
    """How many standard errors chance exceeds with this probability, over all targets together.

    Args:
        tail: The probability, on one side.
        rows: The rows of one target, which know the number of targets.
    """
    probability = torch.tensor(tail / rows.target_count, dtype=torch.float64)
    return -float(torch.special.ndtri(probability))


def _of_calibration(calibration: CalibrationReport | None) -> list[Caution]:
    """The warnings of the calibration itself."""
    if calibration is None:
        return []
    warnings = [Caution(text) for text in calibration.warnings]
    if not calibration.stale:
        return warnings
    stale = Caution(
        "Data were added or removed after the calibration. Calibrate again.",
        "they were calibrated for other data",
    )
    return [stale, *warnings]


def _unknown_distribution(rows: TargetRows) -> Caution | None:
    """Whether the rows have a distribution whose probabilities cannot be computed."""
    if rows.distribution in ("", "gaussian") or rows.prediction is not None:
        return None
    return Caution(
        f"The distribution {rows.distribution!r} has no probabilities (it lacks `cdf`, or "
        "`mirrored` if it is not symmetric). The bars are judged as standard deviations of "
        "Gaussians."
    )


def _few_rows(rows: TargetRows) -> Caution | None:
    """Whether there are too few rows for a verdict."""
    if len(rows) >= FEW:
        return None
    return Caution(f"There are only {len(rows)} rows: every figure may be chance.")


def _rows_far_outside(rows: TargetRows) -> Caution | None:
    """Names single rows whose true value their distribution all but excludes."""
    scored = rows.scored
    # Bars that are too narrow as a whole make no single row strange, so they are widened first.
    factor = max(1.0, scored.coverage.factor)
    widened = replace(
        scored.p,
        epistemic=factor**2 * scored.p.epistemic,
        noise=factor**2 * scored.p.noise,
        from_inputs=factor**2 * scored.p.from_inputs,
    )
    target = scored.p.mean + scored.error * scored.p.std
    tail = widened.tail(target)  # (N,), the probability of an error as large
    far = (tail * len(rows) * rows.target_count < _STRANGE).nonzero()[:, 0]
    if len(far) == 0:
        return None
    farthest_first = far[scored.error[far].abs().argsort(descending=True)]
    named_rows = farthest_first[:MOST_NAMED].tolist()
    names = [
        f"row {rows.row_number(row)} by {number(abs(float(scored.error[row])))} bars"
        for row in named_rows
    ]
    more = ""
    if len(far) > len(names):
        more = f" {_count_and_share(len(far), rows)} do."
    grave = f"{len(far)} rows lie far outside"
    if len(far) == 1:
        grave = f"row {rows.row_number(named_rows[0])} lies far outside"
    return Caution(
        f"Far outside: {in_words(names)}.{more} Among so many rows, an error this large has a "
        "probability below 1 in 1000 under the predicted distribution. Check whether the true "
        "value is wrong or the input is unlike the others.",
        grave,
    )


def _better_centre(rows: TargetRows) -> Caution | None:
    """Whether the distribution's own centre predicts clearly better than the model's output."""
    unbounded = rows.scored.p  # bounds would move the centre of every distribution
    if len(rows) < FEW or not bool((unbounded.centre != unbounded.mean).any()):
        return None
    error_of_centre = rows.target - rows.predictive.centre.detach().double()
    saved = rows.error.square() - error_of_centre.square()
    standard_error = float(saved.std()) / math.sqrt(len(rows))
    rmse_of_output = float(rows.error.square().mean().sqrt())
    rmse_of_centre = float(error_of_centre.square().mean().sqrt())
    beyond_chance = float(saved.mean()) > 4 * standard_error
    if not (beyond_chance and rmse_of_centre < _CLEARLY_LESS * rmse_of_output):
        return None
    bias = float(rows.error.mean())
    error_of_bias = float(rows.error.std()) / math.sqrt(len(rows))
    side = "low" if bias > 0 else "high"
    return Caution(
        f"The centre of the distribution predicts better than the model's output: its RMSE is "
        f"{number(rmse_of_centre)} instead of {number(rmse_of_output)}. On average the output is "
        f"too {side} by {around(abs(bias), error_of_bias)}. The intervals correct for this; "
        f"mean ± std does not. {remedy_for('centre', rows)}"
    )


def _unlike_reference(rows: TargetRows, reference: Tensor | None) -> Caution | None:
    """Whether more bars are large than there should be on inputs like those of the calibration.

    Without a reference, only bars much larger than most can be reported.
    """
    if reference is None:
        median = float(rows.std.median())
        count = int((rows.std > _FAR_OUT * median).sum())
        if count == 0:
            return None
        return Caution(
            f"{_count_and_share(count, rows)} have a bar more than {_FAR_OUT:g} times the median "
            f"({number(median)}): their inputs may be unlike the training data. Check them."
        )
    reference_count = len(reference)
    rank = math.ceil(0.999 * reference_count)
    limit = float(reference.kthvalue(rank).values)
    count = int((rows.std > limit).sum())
    # For rows like the reference, the share beyond this order statistic follows
    # Beta(above, rank); this is a generous upper bound on it.
    above = reference_count - rank + 1
    share = min(1.0, (above + 3 * math.sqrt(above) + 2) / reference_count)
    expected = len(rows) * share
    if count <= expected + 3 * math.sqrt(expected):
        return None
    return Caution(
        f"{_count_and_share(count, rows)} have a bar above {number(limit)}. Of the reference rows, "
        "99.9 % stay below that: the inputs of these rows are unlike those that the bars were "
        "calibrated on.",
        "some rows are unlike those that the bars were calibrated on",
    )


def _novel(rows: TargetRows, calibration: CalibrationReport | None) -> Caution | None:
    """Whether more rows than chance allows are novel to some layer of the network."""
    if calibration is None or rows.novelty is None:
        return None
    limit = calibration.novelty_usual
    if not limit:
        return None
    is_novel = rows.novelty > limit
    count = int(is_novel.sum())
    expected = calibration.novel_share * len(rows)
    # Both these rows and the calibration rows, of which the most novel set the limit, are random.
    used = calibration.used or calibration.rows
    chance = math.sqrt(expected * (1 + len(rows) / max(1, used)))
    if count < expected + 3 * chance + 1:
        return None
    rms_error = float(rows.scored.error[is_novel].square().mean().sqrt())
    return Caution(
        f"{_count_and_share(count, rows)} are novel to some layer of the network: their novelty "
        f"is above {number(limit)}, as for only {100 * calibration.novel_share:.2g} % of rows like "
        "those of the calibration. Their errors are "
        f"{number(rms_error)} bars (RMS). uq.novelty(x) names the layers."
    )


def _repeated(rows: TargetRows) -> Caution | None:
    """Whether rows are copies of others, so that the role of chance is underestimated."""
    target_kinds = _kinds(rows.target)
    if _kind_count(target_kinds) == len(rows):  # the usual case, which is quick to decide
        return None
    prediction_kinds = _kinds(rows.mean, rows.std)
    row_kinds = _kinds(prediction_kinds, target_kinds)
    copies = len(rows) - _kind_count(row_kinds)
    # Where predictions and targets take few values, equal rows need not be copies. Then there are
    # many more combinations than different predictions or targets.
    most_kinds = _kind_count(prediction_kinds.maximum(target_kinds))
    if copies <= 0.01 * len(rows) or _kind_count(row_kinds) > 1.01 * most_kinds:
        return None
    return Caution(
        f"{_count_and_share(copies, rows)} repeat an earlier row (same prediction, bar and true "
        "value), so chance allows more than the figures here say."
    )


def _kinds(*columns: Tensor) -> Tensor:
    """A number for each row, (N,), the same for rows that are equal in all columns."""
    kinds = torch.zeros(len(columns[0]), dtype=torch.long)
    for column in columns:
        column_kinds = torch.unique(column, return_inverse=True)[1]
        combined = kinds * len(column) + column_kinds
        kinds = torch.unique(combined, return_inverse=True)[1]
    return kinds


def _kind_count(kinds: Tensor) -> int:
    """How many kinds of rows there are, from what `_kinds` returns."""
    return int(kinds.max()) + 1


def _heavy_tails(rows: TargetRows, calibration: CalibrationReport | None) -> Caution | None:
    """Whether more errors are very large than the distribution predicts."""
    # Bars that are too narrow as a whole do not mean heavy tails, so they are widened first.
    factor = max(0.8, rows.scored.coverage.factor)
    share = math.erfc(_TAIL_SIGMAS / math.sqrt(2))
    count = int((rows.scored.reach(1 - share) > factor).sum())
    expected = share * len(rows)
    if count < max(4.0, 2 * expected, expected + 4 * math.sqrt(expected)):
        return None
    if rows.prediction is None:
        where = f"have errors beyond {_TAIL_SIGMAS * factor:.2g} bars; Gaussian errors"
    else:
        where = (
            f"lie outside 99.7 % intervals (with bars {factor:.2g} times as wide); their "
            "distribution"
        )
    return Caution(
        f"{_count_and_share(count, rows)} {where} would give {number(expected, 2)}. The errors "
        f"have heavy tails, or these rows are faulty. {remedy_for('tails', rows, calibration)}"
    )


def _skewed(rows: TargetRows, calibration: CalibrationReport | None) -> Caution | None:
    """Whether most of the largest errors lie on one side, after removal of a bias."""
    centred = rows.z - rows.z.median()  # the median is robust against outliers
    largest_count = len(rows) - math.ceil(LEVEL * len(rows)) + 1
    largest = centred[centred.abs().topk(largest_count).indices]
    above = int((largest > 0).sum())
    share = max(above, len(largest) - above) / len(largest)
    chance = sigmas_of_tail(0.0013, rows) / math.sqrt(len(largest))
    if share < _SKEWED or 2 * share - 1 <= chance:
        return None
    side = "above" if 2 * above > len(largest) else "below"
    grave = "the errors are skewed" if share >= _GRAVELY_SKEWED else ""
    return Caution(
        f"Of the 10 % of rows with the largest errors in units of their bars, {100 * share:.0f} % "
        f"lie {side} their predictions. The errors are skewed: true values fall outside one end "
        f"of the intervals more often than the other. {remedy_for('skew', rows, calibration)}",
        grave,
    )


def _biased(rows: TargetRows) -> Caution | None:
    """Whether the predictions are too high or too low on average.

    Errors are measured from the distribution's centre, which may differ from the prediction.
    """
    p = rows.scored.p
    error_in_bars = rows.scored.error - (p.centre - p.mean) / p.std
    mean = float(error_in_bars.mean())
    spread = float(error_in_bars.std()) if len(rows) > 1 else math.inf
    if abs(mean) < max(0.1, 4 * spread / math.sqrt(len(rows))):
        return None
    error = error_in_bars * p.std
    bias = float(error.mean())
    standard_error = float(error.std()) / math.sqrt(len(rows))
    side = "low" if mean > 0 else "high"
    return Caution(
        f"The predictions are too {side} on average, by {number(abs(mean))} bars "
        f"({around(abs(bias), standard_error)}). Error bars cannot fix this bias. "
        f"{remedy_for('bias', rows)}",
        f"the predictions are too {side} on average",
    )


def in_words(entries: Sequence[str]) -> str:
    """A list in words.

    Examples:
        >>> in_words(["a"]), in_words(["a", "b", "c"])
        ('a', 'a, b and c')
    """
    if len(entries) == 1:
        return entries[0]
    return f"{', '.join(entries[:-1])} and {entries[-1]}"


def _count_and_share(count: int, rows: TargetRows) -> str:
    """A count as text, such as "3 of 100 rows (3 %)"."""
    return f"{count} of {len(rows)} rows ({100 * count / len(rows):.3g} %)"
