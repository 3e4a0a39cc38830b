"""Are the bars trustworthy, and what to beware of, in plain words.

The verdict comes from size, as a whole and by fifths, from resolution and ranking. Each statement
is compared with what chance allows for so many independent rows and so many looks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..calibration.coverage import BAD, CAREFUL, GOOD, LEVEL, STATUSES, Scored
from ..calibration.report import CalibrationReport, remedy
from ..metrics.ranking import retained_rmse
from .markup import around, number
from .rows import Rows
from .scores import Judged

FEW = 30
"""Rows below which no verdict is given, and nothing is called good."""
WORDS = {GOOD: "good", CAREFUL: "with care", BAD: "not good"}
_FAR = 5.0
"""Multiples of the median bar beyond which a bar is called far out."""
_TAIL = 3.0
_LEANING = 0.65, 0.8
"""Share of the largest errors on one side, from which on they are skewed, and gravely so."""


@dataclass(frozen=True)
class Finding:
    """One answer: what it is about, a status (good, careful or bad), and sentences."""

    subject: str
    status: str
    text: str


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


@dataclass(frozen=True)
class Verdict:
    """The headline, its status (good, careful or bad), the findings behind it, and cautions."""

    headline: str
    status: str
    findings: tuple[Finding, ...]
    cautions: tuple[Caution, ...] = ()

    def about(self, name: str) -> Verdict:
        """With findings that say which target they are of."""
        named = (replace(one, subject=f"{one.subject} of {name}") for one in self.findings)
        return replace(self, findings=tuple(named))

    def __str__(self) -> str:
        found = [f"  {one.subject}: {WORDS[one.status]}. {one.text}" for one in self.findings]
        return "\n".join([self.headline, *found, *(f"  ! {one.text}" for one in self.cautions)])


def judgement(
    judged: Judged, warned: Sequence[Caution] = (), calibration: CalibrationReport | None = None
) -> Verdict:
    """The verdict on some rows, with what to beware of."""
    rows = judged.rows
    findings = (size(rows), by_fifths(rows, calibration), resolution(rows), ranking(judged))
    if len(rows) < FEW:
        few = f"Too few rows for a verdict: {len(rows)}. What follows may be chance."
        return Verdict(few, CAREFUL, findings, tuple(warned))
    against = [caution.grave for caution in warned if caution.grave]
    against += ["larger bars go with smaller errors"] * (findings[3].status == BAD)
    headline, status = _headline(rows.scored, [f.status for f in findings[:3]], against)
    return Verdict(headline, status, findings, tuple(warned))


def size(rows: Rows) -> Finding:
    """Are the bars too wide or too narrow? By the coverage of 90 % intervals."""
    held, subject = rows.scored.held, "Size"
    inside, low, high = (f"{100 * n / held.rows:.1f}" for n in held[1:4])
    text = (
        f"90 % intervals hold {inside} % of the {held.rows} true values; with right bars chance "
        f"gives {low} to {high} %."
    )
    if not held.side:
        lead = "About right." if held.rows >= FEW else "Not visibly wrong."
        return _finding(rows, subject, GOOD, f"{lead} {text}")
    text += f" Errors are {number(held.rms)} bars (RMS)."
    lead = f"A little too {held.side}." if held.status == GOOD else f"Too {held.side}."
    mended = f" To hold 90 % they would have to be {number(held.factor)} times as wide."
    mended = mended if held.factor > 1e-9 else " Nine tenths of the errors are zero."
    return _finding(rows, subject, held.status, f"{lead} {text}{mended}")


def by_fifths(rows: Rows, calibration: CalibrationReport | None = None) -> Finding:
    """Are they right for low and high predictions, for small and large bars?"""
    held, wrong = rows.scored.fifths, rows.scored.uneven
    status = max((one.status for one in wrong), key=STATUSES.index, default=GOOD)
    if wrong:
        lead = "A little uneven." if status == GOOD else "Uneven."
        mended = [] if status == GOOD else [_remedy("uneven", rows, calibration)]
        text = " ".join([lead, *(one.sentence for one in wrong[:4]), *mended])
    elif held:
        low, high = (100 * f(one.inside / one.rows for one in held) for f in (min, max))
        how = "alike" if rows.scored.held.side else "as by chance"
        text = f"Even: {low:.3g} to {high:.3g} % in fifths by prediction and by bar, {how}."
    else:
        text = "Not looked at: there are too few rows, or all are alike."
    return _finding(rows, "Fifths", status, text)


def _remedy(fault: str, rows: Rows, calibration: CalibrationReport | None) -> str:
    if calibration is not None:
        return calibration.remedy(fault)
    return remedy(fault, {rows.law}, sure=bool(rows.law) and fault != "uneven")


def _finding(rows: Rows, subject: str, status: str, text: str) -> Finding:
    """An answer, which is never good from few rows."""
    return Finding(subject, CAREFUL if status == GOOD and len(rows) < FEW else status, text)


def gain_and_error(rows: Rows) -> tuple[float, float]:
    """Nats per row by which the bars beat the best constant one, and the standard error.

    The error is that of the mean of paired differences; to first order the fit of the constant
    adds nothing to it.
    """
    if not rows.error.any() or bool(rows.nll.isinf().any()):
        return -math.inf, math.nan
    each = rows.nll_constant - rows.nll
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
        if rows.error.any():
            text = "Some true values lie where their law says that none can."
    elif gain > 2 * error:
        factor = f"the true values are {math.exp(min(gain, 700)):.3g} times as likely under them"
        status, text = GOOD, f"Better than one constant bar by {figures}: row by row, {factor}."
    elif gain < -_sigmas(0.02, rows) * error:
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
    found = judged.spearman
    if math.isnan(found):
        return Finding(subject, CAREFUL, "Bars or errors of one size cannot be ranked.")
    drawn = torch.tensor([each.spearman for each in judged.redrawn]).double()
    expected, scatter = float(drawn.mean()), float(drawn.std())
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


def _headline(found: Scored, statuses: Sequence[str], against: Sequence[str]) -> tuple[str, str]:
    """In one sentence, and its status; every reason unless the bars are not to be trusted."""
    far, lead = "far " * (statuses[0] == BAD), "they are "
    lead = "right on average, but " if statuses[0] == GOOD else lead
    where = lead + "".join(f"too {one.side} in the {one.where}" for one in found.uneven[:1])
    reasons = [f"they are {far}too {found.held.side}", where, "one constant bar does better"]
    if bad := [why for why, status in zip(reasons, statuses, strict=True) if status == BAD]:
        return f"Do not trust these bars as they stand: {bad[0]}.", BAD
    sized = [why for why, status in zip(reasons[:2], statuses, strict=False) if status == CAREFUL]
    dull = ["they are no better than one constant bar"] * (statuses[2] == CAREFUL)
    if sized or against:
        *others, last = [*sized[:1], *against, *(dull if not sized else [])]
        listed = f"{', '.join(others)} and {last}" if others else last
        return f"Use these bars with care: {listed}.", CAREFUL
    if dull:
        return "Right in size, but no better than one constant bar.", CAREFUL
    return "These bars can be trusted on rows like these.", GOOD


# --- what to beware of -------------------------------------------------------------------------


def cautions(
    rows: Rows, calibration: CalibrationReport | None = None, reference: Tensor | None = None
) -> list[Caution]:
    """What to beware of, the weightiest first; arguments as in `report.html`."""
    return [
        *([] if calibration is None else _of_calibration(calibration)),
        *_unknown(rows),
        *_few(rows),
        *(_far_out(rows) if reference is None else _beyond(rows, reference)),
        *_repeated(rows),
        *_outliers(rows, calibration),
        *_skewed(rows, calibration),
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
        yield Caution(f"There are {len(rows)} rows: every figure may be chance.")


def _unknown(rows: Rows) -> Iterator[Caution]:
    if rows.law not in ("", "gaussian") and rows.prediction is None:
        yield Caution(
            f"The law {rows.law!r} has no probabilities (its `cdf`, and `mirrored` unless it is "
            "symmetric): the bars are judged as standard deviations of Gaussians."
        )


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
            f"({number(median)}): their inputs may be unlike the training data. Look at them."
        )


def _repeated(rows: Rows) -> Iterator[Caution]:
    values = _kinds(rows.target)
    if int(values.max()) + 1 == len(rows):  # which is soon seen
        return
    pairs = _kinds(rows.mean, rows.std)
    alone, both = (int(kinds.max()) + 1 for kinds in (pairs.maximum(values), _kinds(pairs, values)))
    copies = len(rows) - both
    # where few predictions meet few values, rows that are alike need not be copies
    if copies > 0.01 * len(rows) and both <= 1.01 * alone:
        yield Caution(
            f"{_share(copies, rows)} repeat an earlier row (same prediction, bar and true value): "
            "chance allows more than is said here."
        )


def _kinds(*columns: Tensor) -> Tensor:
    """The number of the kind that each row is of: rows of one kind are alike in all columns."""
    kinds = torch.zeros(len(columns[0]), dtype=torch.long)
    for column in columns:
        both = kinds * len(column) + torch.unique(column, return_inverse=True)[1]
        kinds = torch.unique(both, return_inverse=True)[1]
    return kinds


def _outliers(rows: Rows, calibration: CalibrationReport | None) -> Iterator[Caution]:
    # bars that are too narrow as a whole do not make tails heavy
    factor = max(0.8, rows.scored.held.factor)
    share = math.erfc(_TAIL / math.sqrt(2))
    beyond = int((rows.scored.reach(1 - share) > factor).sum())
    expected = share * len(rows)
    where = f"err by more than {_TAIL * factor:.2g} bars, where Gaussian errors"
    if rows.prediction is not None:
        where = f"lie outside 99.7 % intervals of bars {factor:.2g} times as wide, where their law"
    if beyond >= max(4.0, 2 * expected, expected + 4 * math.sqrt(expected)):
        yield Caution(
            f"{_share(beyond, rows)} {where} would give {number(expected, 2)}: the errors have "
            f"heavy tails, or these rows are faulty. {_remedy('tails', rows, calibration)}"
        )


def _skewed(rows: Rows, calibration: CalibrationReport | None) -> Iterator[Caution]:
    """Whether the largest errors lie on one side; a bias alone does not count."""
    z = rows.z - rows.z.median()  # which single far rows do not move
    far = z[z.abs().topk(len(rows) - math.ceil(LEVEL * len(rows)) + 1).indices]
    above = int((far > 0).sum())
    share = max(above, len(far) - above) / len(far)
    if share >= _LEANING[0] and 2 * share - 1 > _sigmas(0.0013, rows) / math.sqrt(len(far)):
        side = "above" if 2 * above > len(far) else "below"
        yield Caution(
            f"Of the tenth of the rows that errs most, in units of its bars, {100 * share:.0f} % "
            f"lie {side} their predictions: the errors are skewed, and one end of an interval is "
            f"passed more often than the other. {_remedy('skew', rows, calibration)}",
            "the errors are skewed" * (share >= _LEANING[1]),
        )


def _biased(rows: Rows) -> Iterator[Caution]:
    p = rows.scored.p
    error = rows.scored.error - (p.centre - p.mean) / p.std
    mean, spread = float(error.mean()), float(error.std()) if len(rows) > 1 else math.inf
    if abs(mean) >= max(0.1, 4 * spread / math.sqrt(len(rows))):
        side = "low" if mean > 0 else "high"
        yield Caution(
            f"The predictions are too {side} on average, by {number(abs(mean))} bars: a bias, "
            "which bars cannot mend, but refit() or another model can.",
            f"the predictions are too {side} on average",
        )


def _sigmas(tail: float, rows: Rows) -> float:
    """How many standard errors chance passes as rarely, for all targets together."""
    return -float(torch.special.ndtri(torch.tensor(tail / rows.looks, dtype=torch.float64)))


def _share(count: int, rows: Rows) -> str:
    return f"{count} of {len(rows)} rows ({100 * count / len(rows):.3g} %)"
