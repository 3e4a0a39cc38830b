"""Are the bars trustworthy, and what to beware of, in plain words.

The verdict comes from size, resolution and ranking. Each statement is compared with what chance
allows for so many rows, taken as independent.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..calibration.report import CalibrationReport
from ..metrics.ranking import retained_rmse
from .markup import around, number
from .rows import Rows
from .scores import Judged, bin_sizes

LEVEL, HALF_WIDTH = 0.9, 1.6448536269514722
TAIL = 0.025
"""How often right bars are called too narrow, and how often too wide."""
FEW = 30
"""Rows below which no verdict is given, and nothing is called good."""
GOOD, CAREFUL, BAD = "good", "careful", "bad"
_FAR = 5.0
"""Multiples of the median bar beyond which a bar is called far out."""
_TAIL = 4.0


@dataclass(frozen=True)
class Finding:
    """One answer: what it is about, a status (good, careful or bad), and sentences."""

    subject: str
    status: str
    text: str


@dataclass(frozen=True)
class Verdict:
    """The headline and the findings behind it."""

    headline: str
    status: str
    findings: tuple[Finding, ...]


def verdict(judged: Judged, grave: Sequence[str] = ()) -> Verdict:
    """The verdict on some rows; `grave` speaks against the bars, as ends of a headline."""
    findings = (size(judged.rows), resolution(judged.rows), ranking(judged))
    count = len(judged.rows)
    if count < FEW:
        few = f"Too few rows for a verdict: {count}. What follows may be chance."
        return Verdict(few, CAREFUL, findings)
    status = max((f.status for f in findings[:2]), key=(GOOD, CAREFUL, BAD).index)
    against = [*grave, *(["larger bars go with smaller errors"] * (findings[2].status == BAD))]
    if status == GOOD and against:
        return Verdict(f"Use these bars with care: {_and(against)}.", CAREFUL, findings)
    return Verdict(_headline(judged.rows, findings[0], findings[1]), status, findings)


def needed_factor(rows: Rows) -> float:
    """What the bars would have to be multiplied with for their 90 % intervals to hold 90 %."""
    rank = min(len(rows), math.ceil(LEVEL * len(rows)))
    return float(rows.z.abs().kthvalue(rank).values) / HALF_WIDTH


def size(rows: Rows) -> Finding:
    """Are the bars too wide or too narrow? By the coverage of 90 % intervals.

    Of up to 35 rows all may lie inside by chance, so that coverage cannot show bars that are too
    wide. There the sum of z² does: with right bars it follows chi-square with N degrees.
    """
    count, subject = len(rows), "Size"
    inside = int((rows.z.abs() <= HALF_WIDTH).sum())
    low, high = held_by_chance(count)
    text = (
        f"90 % intervals hold {100 * inside / count:.1f} % of the {count} true values; with right "
        f"bars chance gives {100 * low / count:.1f} to {100 * high / count:.1f} %."
    )
    squares = rows.z.square()
    chance = torch.special.gammainc(squares.new_tensor(count / 2), squares.sum() / 2)
    crowded = high == count and bool(chance < TAIL)
    if crowded:
        text += f" The RMS of error / bar is {number(float(squares.mean().sqrt()))}, not 1."
    if low <= inside <= high and not crowded:
        lead = "About right." if count >= FEW else "Not visibly wrong."
        return _finding(rows, subject, GOOD, f"{lead} {text}")
    factor = needed_factor(rows)
    off = abs(math.log(max(factor, 1e-9)))
    status = GOOD if off < math.log(1.1) else BAD if off > math.log(1.5) else CAREFUL
    side = "narrow" if inside < low else "wide"
    lead = f"A little too {side}." if status == GOOD else f"Too {side}."
    remedy = f" To hold 90 % they would have to be {number(factor)} times as wide."
    return _finding(rows, subject, status, f"{lead} {text}{remedy}")


def held_by_chance(count: int) -> tuple[int, int]:
    """How few and how many of the true values right 90 % intervals hold, in 95 % of cases.

    Quantiles of the binomial distribution: fewer, as well as more, come in at most 2.5 % of cases.

    Examples:
        >>> held_by_chance(100), held_by_chance(20)  # of 20 all may lie inside
        ((84, 95), (15, 20))
    """
    spread = 12 * math.sqrt(count * LEVEL * (1 - LEVEL)) + 12  # what lies beyond has no weight
    first = max(0, math.floor(LEVEL * count - spread))
    last = min(count, math.ceil(LEVEL * count + spread))
    k = torch.arange(first, last + 1, dtype=torch.float64)
    total = torch.tensor(float(count), dtype=torch.float64)
    ways = torch.lgamma(total + 1) - torch.lgamma(k + 1) - torch.lgamma(total - k + 1)
    chance = (ways + k * math.log(LEVEL) + (total - k) * math.log1p(-LEVEL)).exp().cumsum(0)
    low, high = (int((chance < limit).sum()) for limit in (TAIL, 1 - TAIL))
    return first + low, first + min(high, last - first)


def _finding(rows: Rows, subject: str, status: str, text: str) -> Finding:
    """An answer, which is never good from few rows."""
    return Finding(subject, CAREFUL if status == GOOD and len(rows) < FEW else status, text)


def _and(reasons: Sequence[str]) -> str:
    *others, last = reasons
    return f"{', '.join(others)} and {last}" if others else last


def gain_and_error(rows: Rows) -> tuple[float, float]:
    """Nats per row by which the bars beat the best constant one, and the standard error.

    The error is that of the mean of paired differences; to first order the fit of the constant
    adds nothing to it.
    """
    constant = rows.constant
    if not rows.error.any():
        return -math.inf, math.nan
    each = (constant / rows.std).log() + ((rows.error / constant).square() - rows.z.square()) / 2
    error = float(each.std()) / math.sqrt(len(rows)) if len(rows) > 1 else math.nan
    return float(each.mean()), error


def resolution(rows: Rows) -> Finding:
    """Is it worth having bars that differ from row to row?"""
    if not rows.spread:
        return Finding("Use", CAREFUL, "All bars have the same size: they cannot tell rows apart.")
    gain, error = gain_and_error(rows)
    figures = f"{around(abs(gain), error)} nats per row"
    if math.isinf(gain):
        status, text = BAD, "Every error is zero, so that any bar is too wide."
    elif gain > 2 * error:
        factor = f"the true values are {math.exp(min(gain, 700)):.3g} times as likely under them"
        status, text = GOOD, f"Better than one constant bar by {figures}: row by row, {factor}."
    elif gain < -2 * error:
        status = BAD
        text = (
            f"Worse than one constant bar, by {figures}: their size or their differences between "
            "rows mislead."
        )
    else:
        status = CAREFUL
        text = (
            f"No clear gain over one constant bar: the difference, {around(gain, error)} nats per "
            "row, may be chance."
        )
    return _finding(rows, "Use", status, text)


def ranking(judged: Judged) -> Finding:
    """Do rows with larger bars err more?"""
    rows, subject = judged.rows, "Ranking"
    found = judged.bars["spearman"]
    if math.isnan(found):
        return Finding(subject, CAREFUL, "Bars or errors of one size cannot be ranked.")
    expected, scatter = judged.right["spearman"]
    figures = (
        f"Rank correlation of bar and error {found:.2f}; right bars of these sizes would give "
        f"{expected:.2f} ± {scatter:.2f}, bars that tell nothing 0."
    )
    noise = 2 / math.sqrt(max(1, len(rows) - 1))
    if abs(found) <= noise:
        return Finding(subject, CAREFUL, f"Larger bars do not mark larger errors. {figures}")
    if found < 0:
        return Finding(subject, BAD, f"Larger bars go with smaller errors. {figures}")
    text = f"Larger bars mark larger errors. {figures}{_dropped(rows)}"
    return _finding(rows, subject, GOOD, text)


def _dropped(rows: Rows) -> str:
    """What is won by leaving the most uncertain tenth out."""
    squared = rows.error.square()
    kept = max(1, len(rows) - len(rows) // 10)
    ours, best = (float(retained_rmse(squared, by=by)[kept - 1]) for by in (rows.std, squared))
    whole = float(squared.mean().sqrt())
    if ours >= whole:
        return ""
    return (
        f" Without the tenth of the rows that has the largest bars the RMSE is "
        f"{100 * (1 - ours / whole):.0f} % lower (at best {100 * (1 - best / whole):.0f} %)."
    )


def _headline(rows: Rows, sized: Finding, useful: Finding) -> str:
    side = "narrow" if needed_factor(rows) > 1 else "wide"
    if sized.status == BAD:
        return f"Do not trust these bars as they stand: they are far too {side}."
    if useful.status == BAD:
        return "Do not trust these bars as they stand: one constant bar does better."
    if sized.status == CAREFUL:
        return f"Use these bars with care: they are too {side}."
    if useful.status == CAREFUL:
        return "Right in size, but no better than one constant bar."
    return "These bars can be trusted on rows like these."


# --- what to beware of -------------------------------------------------------------------------


@dataclass(frozen=True)
class Caution:
    """Something to beware of.

    Attributes:
        text: sentences.
        grave: why bars with this flaw must not be called trustworthy, as the end of a headline;
            empty where they may be.
    """

    text: str
    grave: str = ""


def cautions(
    rows: Rows, calibration: CalibrationReport | None = None, reference: Tensor | None = None
) -> list[Caution]:
    """What to beware of, the weightiest first; arguments as in `report.html`."""
    return [
        *([] if calibration is None else _of_calibration(calibration)),
        *_few(rows),
        *(_far_out(rows) if reference is None else _beyond(rows, reference)),
        *_repeated(rows),
        *_outliers(rows),
        *_biased(rows),
    ]


def _of_calibration(report: CalibrationReport) -> Iterator[Caution]:
    if report.stale:
        yield Caution(
            "Data were added or removed since the calibration: calibrate again.",
            "they were calibrated for other data",
        )
    yield from map(Caution, report.warnings)


def _few(rows: Rows) -> Iterator[Caution]:
    if len(rows) < FEW:
        yield Caution(f"There are {len(rows)} rows: every figure on this page may be chance.")
    elif not bin_sizes(len(rows)):
        yield Caution(f"There are {len(rows)} rows, too few for the plot of bins.")


def _beyond(rows: Rows, reference: Tensor) -> Iterator[Caution]:
    """Rows whose bar exceeds what the calibration data had: a sign of unlike inputs."""
    known = len(reference)
    rank = math.ceil(0.999 * known)
    limit = float(reference.kthvalue(rank).values)
    beyond = int((rows.std > limit).sum())
    # the share of like rows beyond this order statistic follows Beta(above, rank): a generous bound
    above = known - rank + 1
    expected = len(rows) * min(1.0, (above + 3 * math.sqrt(above) + 2) / known)
    if beyond > expected + 3 * math.sqrt(expected):
        yield Caution(
            f"{_share(beyond, rows)} have a bar above {number(limit)}, which 99.9 % of the "
            "reference rows stay below: their inputs are unlike those that the bars were "
            "calibrated on.",
            "some rows are unlike those that they were calibrated on",
        )


def _far_out(rows: Rows) -> Iterator[Caution]:
    """Without a reference all one can say is that some bars are much larger than most."""
    median = float(rows.std.median())
    if far := int((rows.std > _FAR * median).sum()):
        yield Caution(
            f"{_share(far, rows)} have a bar more than {_FAR:g} times the median "
            f"({number(median)}): their inputs may be unlike the training data. Look at them in "
            "the plots."
        )


def _repeated(rows: Rows) -> Iterator[Caution]:
    columns = torch.stack([rows.mean, rows.std, rows.target], 1)
    copies = len(rows) - len(torch.unique(columns, dim=0))
    if copies > 0.01 * len(rows):
        yield Caution(
            f"{_share(copies, rows)} repeat an earlier row (same prediction, bar and true value): "
            "what chance allows is more than this page says."
        )


def _outliers(rows: Rows) -> Iterator[Caution]:
    # bars that are too narrow as a whole do not make tails heavy
    limit = _TAIL * max(1.0, needed_factor(rows))
    beyond = int((rows.z.abs() > limit).sum())
    expected = math.erfc(_TAIL / math.sqrt(2)) * len(rows)
    if beyond >= max(3, 5 * expected):
        yield Caution(
            f"{_share(beyond, rows)} err by more than {limit:.2g} bars, where Gaussian errors "
            f"would give {number(expected, 2)}: the errors have heavy tails, or these rows are "
            "faulty."
        )


def _biased(rows: Rows) -> Iterator[Caution]:
    mean = float(rows.z.mean())
    spread = float(rows.z.std()) if len(rows) > 1 else math.inf
    if abs(mean) >= max(0.1, 4 * spread / math.sqrt(len(rows))):
        side = "low" if mean > 0 else "high"
        yield Caution(
            f"The predictions are too {side} on average, by {number(abs(mean))} bars: bars cannot "
            "mend that, the model can.",
            f"the predictions are too {side} on average",
        )


def _share(count: int, rows: Rows) -> str:
    return f"{count} of {len(rows)} rows ({100 * count / len(rows):.2g} %)"
