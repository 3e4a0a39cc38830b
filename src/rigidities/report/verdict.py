"""Are the bars trustworthy? In plain words, from size, resolution and ranking.

Each statement is compared with what chance allows for so many rows, taken as independent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..ranks import retained_rmse
from .markup import around, number
from .rows import Rows
from .scores import Judged

LEVEL, HALF_WIDTH = 0.9, 1.6448536269514722
FEW = 30
"""Rows below which no verdict is given."""
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


def verdict(judged: Judged) -> Verdict:
    """The verdict on some rows."""
    findings = (size(judged.rows), resolution(judged.rows), ranking(judged))
    count = len(judged.rows)
    if count < FEW:
        few = f"Too few rows for a verdict: {count}. What follows may be chance."
        return Verdict(few, CAREFUL, findings)
    status = max((f.status for f in findings[:2]), key=(GOOD, CAREFUL, BAD).index)
    return Verdict(_headline(judged.rows, findings[0], findings[1]), status, findings)


def needed_factor(rows: Rows) -> float:
    """What the bars would have to be multiplied with for their 90 % intervals to hold 90 %."""
    rank = min(len(rows), math.ceil(LEVEL * len(rows)))
    return float(rows.z.abs().kthvalue(rank).values) / HALF_WIDTH


def size(rows: Rows) -> Finding:
    """Are the bars too wide or too narrow? By the coverage of 90 % intervals."""
    count = len(rows)
    observed = float((rows.z.abs() <= HALF_WIDTH).double().mean())
    factor = needed_factor(rows)
    chance = 1.96 * math.sqrt(LEVEL * (1 - LEVEL) / count)
    low, high = LEVEL - chance, min(1.0, LEVEL + chance)
    text = (
        f"90 % intervals hold {100 * observed:.1f} % of the {count} true values; with right bars "
        f"chance gives {100 * low:.1f} to {100 * high:.1f} %."
    )
    if low <= observed <= high:
        return Finding("Size", GOOD, f"About right. {text}")
    small = abs(math.log(max(factor, 1e-9))) < math.log(1.1)
    large = abs(math.log(max(factor, 1e-9))) > math.log(1.5)
    side = "narrow" if observed < LEVEL else "wide"
    lead = f"A little too {side}." if small else f"Too {side}."
    remedy = f" To hold 90 % they would have to be {number(factor)} times as wide."
    status = GOOD if small else BAD if large else CAREFUL
    return Finding("Size", status, f"{lead} {text}{remedy}")


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
        return Finding(subject, GOOD, text)
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
    return Finding(subject, GOOD, f"Larger bars mark larger errors. {figures}{_dropped(rows)}")


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
