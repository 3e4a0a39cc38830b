"""Are the bars trustworthy? In plain words, from size, resolution and ranking.

Each statement is compared with what chance allows for so many rows, taken as independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..metrics.ranks import retained_rmse
from .markup import around, number
from .rows import Rows
from .scores import Judged

LEVEL, HALF_WIDTH = 0.9, 1.6448536269514722
TAIL = 0.025
"""How often right bars are called too narrow, and how often too wide."""
FEW = 30
"""Rows below which no verdict is given, and nothing is called good."""
GOOD, CAREFUL, BAD = "good", "careful", "bad"


@dataclass(frozen=True)
class Finding:
    """One answer.

    Attributes:
        subject: what it is about.
        status: good, careful or bad.
        text: sentences.
    """

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
    """The verdict on some rows.

    Args:
        judged: the rows with their metrics.
        grave: what else speaks against the bars, each as the end of a headline.
    """
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
    crowded = high == count and _below_chi_square(rows)
    if crowded:
        text += f" The RMS of error / bar is {number(float(rows.z.square().mean().sqrt()))}, not 1."
    if low <= inside <= high and not crowded:
        lead = "About right." if count >= FEW else "Not visibly wrong."
        return _finding(rows, subject, GOOD, f"{lead} {text}")
    factor = needed_factor(rows)
    small = abs(math.log(max(factor, 1e-9))) < math.log(1.1)
    large = abs(math.log(max(factor, 1e-9))) > math.log(1.5)
    side = "narrow" if inside < low else "wide"
    lead = f"A little too {side}." if small else f"Too {side}."
    remedy = f" To hold 90 % they would have to be {number(factor)} times as wide."
    status = GOOD if small else BAD if large else CAREFUL
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


def _below_chi_square(rows: Rows) -> bool:
    """Whether the sum of z² is smaller than chance allows."""
    half = torch.tensor(len(rows) / 2, dtype=torch.float64)
    return bool(torch.special.gammainc(half, rows.z.square().sum() / 2) < TAIL)


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
    subject = "Use"
    if not rows.spread:
        return Finding(
            subject, CAREFUL, "All bars have the same size: they cannot tell rows apart."
        )
    gain, error = gain_and_error(rows)
    if math.isinf(gain):
        return Finding(subject, BAD, "Every error is zero, so that any bar is too wide.")
    figures = f"{around(abs(gain), error)} nats per row"
    if gain > 2 * error:
        factor = f"the true values are {math.exp(min(gain, 700)):.3g} times as likely under them"
        text = f"Better than one constant bar by {figures}: row by row, {factor}."
        return _finding(rows, subject, GOOD, text)
    if gain < -2 * error:
        return Finding(
            subject,
            BAD,
            f"Worse than one constant bar, by {figures}: their size or their differences between "
            "rows mislead.",
        )
    return Finding(
        subject,
        CAREFUL,
        f"No clear gain over one constant bar: the difference, {around(gain, error)} nats per "
        "row, may be chance.",
    )


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
    if sized.status == BAD:
        side = "narrow" if needed_factor(rows) > 1 else "wide"
        return f"Do not trust these bars as they stand: they are far too {side}."
    if useful.status == BAD:
        return "Do not trust these bars as they stand: one constant bar does better."
    if sized.status == CAREFUL:
        side = "narrow" if needed_factor(rows) > 1 else "wide"
        return f"Use these bars with care: they are too {side}."
    if useful.status == CAREFUL:
        return "Right in size, but no better than one constant bar."
    return "These bars can be trusted on rows like these."
