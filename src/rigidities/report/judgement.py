"""Are the bars trustworthy, and what to beware of, in plain words.

The verdict comes from size, as a whole and by fifths, from resolution and ranking. Each statement
is compared with what chance allows for so many independent rows and so many looks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..calibration.coverage import BAD, CAREFUL, GOOD, LEVEL, STATUSES
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
_STRANGE = 1e-3
"""Expected number of rows as far out as a row below which it is named."""
_NAMED = 3
"""Rows that a caution names at most."""
_SHORT = 3.0
"""Standard deviations by which a gain must stay behind that of right bars to be called none."""
_INFLATED = 2.0
"""Multiples of the RMS error beyond which the calibration's constant bar is not taken for fair."""
_CLEARLY_LESS = 0.95
"""Share of the model's RMSE below which that of the distribution's own centre is told."""
_LEANING = 0.65, 0.8
"""Share of the largest errors on one side, from which on they are skewed, and gravely so."""


@dataclass(frozen=True)
class Finding:
    """One answer.

    Attributes:
        subject: what it is about.
        status: good, careful or bad.
        text: sentences.
        reason: why the bars are not simply to be trusted, as the end of a headline; empty where
            they are.
    """

    subject: str
    status: str
    text: str
    reason: str = ""


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

    def plain(self) -> dict[str, Any]:
        """Strings and lists of them, for JSON."""
        findings = [
            {"subject": one.subject, "status": one.status, "text": one.text}
            for one in self.findings
        ]
        return {
            "headline": self.headline,
            "status": self.status,
            "findings": findings,
            "cautions": [one.text for one in self.cautions],
        }

    def __str__(self) -> str:
        found = [f"  {one.subject}: {WORDS[one.status]}. {one.text}" for one in self.findings]
        return "\n".join([self.headline, *found, *(f"  ! {one.text}" for one in self.cautions)])


def judgement(
    judged: Judged, warned: Sequence[Caution] = (), calibration: CalibrationReport | None = None
) -> Verdict:
    """The verdict on some rows, with what to beware of."""
    rows = judged.rows
    findings = (size(rows), by_fifths(rows, calibration), resolution(judged), ranking(judged))
    if len(rows) < FEW:
        few = f"Too few rows for a verdict: {len(rows)}. What follows may be chance."
        return Verdict(few, CAREFUL, findings, tuple(warned))
    against = [caution.grave for caution in warned if caution.grave]
    against += ["larger bars go with smaller errors"] * (findings[3].status == BAD)
    headline, status = _headline(findings[:3], against)
    return Verdict(headline, status, findings, tuple(warned))


def size(rows: Rows) -> Finding:
    """Are the bars too wide or too narrow? By the coverage of 90 % intervals."""
    held, subject = rows.scored.coverage, "Size"
    inside, low, high = (f"{100 * n / held.rows:.1f}" for n in held[1:4])
    text = (
        f"90 % intervals hold {inside} % of the {held.rows} true values; with right bars chance "
        f"gives {low} to {high} %."
    )
    if not held.side:
        lead = "About right." if held.rows >= FEW else "Not visibly wrong."
        return _finding(rows, subject, GOOD, f"{lead} {text}")
    far = "far " if held.status == BAD else ""
    text += f" Errors are {number(held.rms)} bars (RMS)."
    lead = f"A little too {held.side}." if held.status == GOOD else f"Too {held.side}."
    mended = f" To hold 90 % they would have to be {number(held.factor)} times as wide."
    mended = mended if held.factor > 1e-9 else " Nine tenths of the errors are zero."
    reason = f"they are {far}too {held.side}"
    return _finding(rows, subject, held.status, f"{lead} {text}{mended}", reason)


def by_fifths(rows: Rows, calibration: CalibrationReport | None = None) -> Finding:
    """Are they right for low and high predictions, for small and large bars?"""
    held, wrong, reason = rows.scored.fifths, rows.scored.uneven, ""
    status = max((one.status for one in wrong), key=STATUSES.index, default=GOOD)
    if wrong:
        lead = "A little uneven." if status == GOOD else "Uneven."
        mended = [] if status == GOOD else [_remedy("uneven", rows, calibration)]
        text = " ".join([lead, *(one.sentence for one in wrong[:4]), *mended])
        average = "right on average, but" if rows.scored.coverage.status == GOOD else "they are"
        reason = f"{average} too {wrong[0].side} in the {wrong[0].where}"
    elif held:
        low, high = (100 * f(one.inside / one.rows for one in held) for f in (min, max))
        how = "alike" if rows.scored.coverage.side else "as by chance"
        text = f"Even: {low:.3g} to {high:.3g} % in fifths by prediction and by bar, {how}."
    else:
        text = "Not looked at: there are too few rows, or all are alike."
    return _finding(rows, "Fifths", status, text, reason)


_IN_PYTHON = {
    "bias": "refit() or another model can mend it.",
    "centre": "Take p.centre as the prediction, or mend the output by refit().",
}
"""What helps against faults that no calibration mends."""


def _remedy(fault: str, rows: Rows, calibration: CalibrationReport | None = None) -> str:
    if fault in _IN_PYTHON:
        text = _IN_PYTHON[fault]
    elif calibration is not None:
        text = calibration.remedy(fault)
    else:
        text = remedy(
            fault, {rows.distribution}, sure=bool(rows.distribution) and fault != "uneven"
        )
    return text if rows.helps is None else rows.helps(fault, text)


def _finding(rows: Rows, subject: str, status: str, text: str, reason: str = "") -> Finding:
    """An answer, which is never good from few rows."""
    shown = CAREFUL if status == GOOD and len(rows) < FEW else status
    return Finding(subject, shown, text, reason)


def gain_and_error(rows: Rows) -> tuple[float, float]:
    """Nats per row by which the bars beat one constant bar, `Rows.plain`, and the standard error.

    The error is that of the mean of paired differences; to first order the fit of a constant to
    these very rows adds nothing to it.
    """
    if not rows.error.any() or bool(rows.nll.isinf().any()):
        return -math.inf, math.nan
    each = rows.plain.nll - rows.nll
    error = float(each.std()) / math.sqrt(len(rows)) if len(rows) > 1 else math.nan
    return float(each.mean()), error


def resolution(judged: Judged) -> Finding:
    """Is it worth having bars that differ from row to row?"""
    rows = judged.rows
    if not rows.spread:
        text = "All bars have the same size: they cannot tell rows apart."
        return Finding("Use", CAREFUL, text, "they are no better than one constant bar")
    if math.isinf(gain_and_error(rows)[0]):
        text = "Every error is zero, so that any bar is too wide."
        if rows.error.any():
            text = "Some true values lie where their distribution says that none can."
        return _finding(rows, "Use", BAD, text, "one constant bar does better")
    rows, note = _fairly_compared(rows)
    gain, error = gain_and_error(rows)
    which = f"one constant bar ({number(rows.constant_bar)}, {rows.which_constant}, Gaussian)"
    figures = f"{around(abs(gain), error)} nats per row"
    decided = _decided_by_one_row(rows) + note
    side = _side(gain, error, rows)
    if side == "better":
        factor = f"the true values are {math.exp(min(gain, 700)):.3g} times as likely under them"
        text = f"Better than {which} by {figures}: row by row, {factor}."
        return _finding(rows, "Use", GOOD, text + decided)
    if side == "worse":
        text = (
            f"Worse than {which}, by {figures}: their size or their differences between rows "
            "mislead."
        )
        return _finding(rows, "Use", BAD, text + decided, "one constant bar does better")
    # Is the gain less than right bars would show, or are the rows too few to show any?
    redrawn = [replace(rows, target=each.rows.target) for each in judged.redrawn]
    drawn = torch.tensor([gain_and_error(each)[0] for each in redrawn]).double()
    expected, scatter = float(drawn.mean()), float(drawn.std())
    right = f"right bars of these sizes would give {around(expected, scatter)} on such rows"
    text = f"the difference, {around(gain, error)} nats per row, may be chance; {right}."
    if gain < expected - _SHORT * scatter:
        text, reason = f"No better than {which}: {text}", "they are no better than one constant bar"
    else:
        text = f"Not shown to be better than {which}: {text} More rows would tell."
        reason = "they are not shown to be better than one constant bar"
    return _finding(rows, "Use", CAREFUL, text + decided, reason)


def _fairly_compared(rows: Rows) -> tuple[Rows, str]:
    """Rows beside a constant bar that is worth beating, and a sentence on the other one.

    A few outlying calibration rows make a constant bar that anything beats: then it is that of
    these very rows.
    """
    fair = replace(rows, calibrated_bar=None)
    ratio = rows.constant_bar / fair.constant_bar
    if not ratio > _INFLATED:
        return rows, ""
    note = (
        f" {rows.which_constant.capitalize().replace('rms', 'RMS')}, {number(rows.constant_bar)}, "
        f"is {number(ratio)} times that, as a few outlying rows make it: the gain over it is "
        f"{around(*gain_and_error(rows))} nats per row."
    )
    return fair, note


def _side(gain: float, error: float, rows: Rows) -> str:
    """Whether bars are "better" or "worse" than a constant one beyond chance; empty if neither."""
    if gain > 2 * error:
        return "better"
    if gain < -_sigmas(0.02, rows) * error:
        return "worse"
    return ""


def _decided_by_one_row(rows: Rows) -> str:
    """A sentence where the comparison comes out otherwise without a single row, else nothing."""
    if len(rows) < FEW:
        return ""
    each = rows.plain.nll - rows.nll
    row = int((each - each.median()).abs().argmax())
    others = rows.without(row)
    (gain, error), (left, scatter) = gain_and_error(rows), gain_and_error(others)
    same = _side(gain, error, rows) == _side(left, scatter, others)
    if same or not abs(gain - left) > 2 * scatter:
        return ""
    direction = "better" if left > 0 else "worse"
    return (
        f" One row makes the difference: without row {rows.number(row)}, whose error is "
        f"{number(abs(float(rows.error[row] / rows.std[row])))} bars, the bars are {direction} by "
        f"{around(abs(left), scatter)} nats per row."
    )


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
        lead = "Larger bars do not mark larger errors."
        if found >= expected - 2 * scatter:
            lead = "Larger bars are not shown to mark larger errors: these rows cannot tell."
        return Finding(subject, CAREFUL, f"{lead} {figures}")
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


def _headline(findings: Sequence[Finding], against: Sequence[str]) -> tuple[str, str]:
    """In one sentence, and its status; every reason unless the bars are not to be trusted.

    The findings are those on size, fifths and use; `against` are further reasons for care.
    """
    *sizes, use = findings
    if bad := [one.reason for one in findings if one.status == BAD]:
        return f"Do not trust these bars as they stand: {bad[0]}.", BAD
    wrong = [one.reason for one in sizes if one.status == CAREFUL]
    dull = [use.reason] if use.status == CAREFUL else []
    if wrong or against:
        *others, last = [*wrong[:1], *against, *(dull if not wrong else [])]
        listed = f"{', '.join(others)} and {last}" if others else last
        return f"Use these bars with care: {listed}.", CAREFUL
    if not dull:
        return "These bars can be trusted on rows like these.", GOOD
    if "not shown" in use.reason:
        text = "Right in size, as far as these rows tell, but not shown to be better than one"
        return f"{text} constant bar.", CAREFUL
    return "Right in size, but no better than one constant bar.", CAREFUL


@dataclass(frozen=True)
class Judgements:
    """All targets of some rows, each judged once: what verdict, scores and page take alike.

    Attributes:
        targets: rows and metrics of each.
        calibration: what `calibrate` returned, if known.
        references: bars on rows like those of the calibration, of each target; None if unknown.
        further: more to warn of, for every target.
    """

    targets: Sequence[Judged]
    calibration: CalibrationReport | None = None
    references: Sequence[Tensor | None] = ()
    further: Sequence[Caution] = field(default_factory=tuple)

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """Of each target."""
        references = self.references or [None] * len(self.targets)
        found = []
        for judged, reference in zip(self.targets, references, strict=True):
            warned = [*self.further, *cautions(judged.rows, self.calibration, reference)]
            found.append(judgement(judged, warned, self.calibration))
        return found

    @cached_property
    def worst(self) -> int:
        """Which target fares worst: by status, by how many findings are bad, by the bars' size."""

        def badness(k: int) -> tuple[float, ...]:
            verdict = self.verdicts[k]
            bad = sum(one.status == BAD for one in verdict.findings)
            return STATUSES.index(verdict.status), bad, self.targets[k].rows.scored.coverage.off

        return max(range(len(self.targets)), key=badness)

    @cached_property
    def verdict(self) -> Verdict:
        """Of several targets the worst, with grave cautions of the others."""
        worst, count = self.verdicts[self.worst], len(self.targets)
        if count == 1:
            return worst
        names = [judged.rows.name for judged in self.targets]
        whose = f"{names[self.worst]}, the worst of {count} targets"
        if all(one.headline == worst.headline for one in self.verdicts):
            whose = f"All {count} targets"
        known = {one.text for one in worst.cautions}
        others: list[Caution] = []
        for name, verdict in zip(names, self.verdicts, strict=True):
            for one in verdict.cautions:
                if one.grave and one.text not in known and len(others) < _NAMED:
                    others.append(Caution(f"{name}: {one.text}", one.grave))
        return replace(
            worst.about(names[self.worst]),
            headline=f"{whose}: {worst.headline}",
            cautions=(*worst.cautions, *others),
        )


# --- what to beware of -------------------------------------------------------------------------


def cautions(
    rows: Rows, calibration: CalibrationReport | None = None, reference: Tensor | None = None
) -> list[Caution]:
    """What to beware of, the weightiest first; arguments as in `report.html`."""
    return [
        *([] if calibration is None else _of_calibration(calibration)),
        *_unknown(rows),
        *_few(rows),
        *_far_rows(rows),
        *_off_centre(rows),
        *(_far_out(rows) if reference is None else _beyond(rows, reference)),
        *([] if calibration is None else _novel(rows, calibration)),
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


def _far_rows(rows: Rows) -> Iterator[Caution]:
    """Single rows that their distribution all but excludes, by number."""
    scored = rows.scored
    # bars that are too narrow as a whole make no single row strange
    factor = max(1.0, scored.coverage.factor)
    variances = (scored.p.epistemic, scored.p.noise, scored.p.from_inputs)
    epistemic, noise, from_inputs = (factor**2 * part for part in variances)
    wider = replace(scored.p, epistemic=epistemic, noise=noise, from_inputs=from_inputs)
    tail = wider.tail(scored.p.mean + scored.error * scored.p.std)
    far = (tail * len(rows) * rows.looks < _STRANGE).nonzero()[:, 0]
    if len(far) == 0:
        return
    worst = far[scored.error[far].abs().argsort(descending=True)][:_NAMED].tolist()
    named = [f"row {rows.number(i)} by {number(abs(float(scored.error[i])))} bars" for i in worst]
    listed = named[0] if len(named) == 1 else f"{', '.join(named[:-1])} and {named[-1]}"
    more = f" {_share(len(far), rows)} do." if len(far) > len(named) else ""
    yield Caution(
        f"Far outside: {listed}.{more} So many rows of their distribution would have such an error in fewer "
        "than one of a thousand cases. Is the true value wrong, or the input unlike the others?",
        f"row {rows.number(worst[0])} lies far outside"
        if len(far) == 1
        else f"{len(far)} rows lie far outside",
    )


def _off_centre(rows: Rows) -> Iterator[Caution]:
    """Whether the distribution's own centre predicts clearly better than the model's output."""
    free = rows.scored.p  # without bounds, which move the centre of every distribution
    if len(rows) < FEW or not bool((free.centre != free.mean).any()):
        return
    moved = rows.target - rows.own.centre.detach().double()
    saved = rows.error.square() - moved.square()
    error = float(saved.std()) / math.sqrt(len(rows))
    ours, theirs = (float(part.square().mean().sqrt()) for part in (rows.error, moved))
    if not (float(saved.mean()) > 4 * error and theirs < _CLEARLY_LESS * ours):
        return
    bias, spread = float(rows.error.mean()), float(rows.error.std()) / math.sqrt(len(rows))
    side = "low" if bias > 0 else "high"
    yield Caution(
        f"The distribution's own centre predicts better than the model's output: RMSE {number(theirs)} "
        f"against {number(ours)}. On average the output is too {side}, by "
        f"{around(abs(bias), spread)}, so that mean ± std is off the intervals, which know it. "
        f"{_remedy('centre', rows)}"
    )


def _unknown(rows: Rows) -> Iterator[Caution]:
    if rows.distribution not in ("", "gaussian") and rows.prediction is None:
        yield Caution(
            f"The distribution {rows.distribution!r} has no probabilities (its `cdf`, and `mirrored` unless it is "
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


def _novel(rows: Rows, calibration: CalibrationReport) -> Iterator[Caution]:
    """More rows than chance allows that some layer of the network has not seen the like of."""
    usual = calibration.novelty_usual  # one calibration row in a hundred is above it
    if rows.novelty is None or not usual:
        return
    novel = rows.novelty > usual
    count, expected = int(novel.sum()), 0.01 * len(rows)
    # Chance draws these rows, and drew those of the calibration, whose hundredth it is.
    chance = math.sqrt(expected * (1 + len(rows) / max(1, calibration.rows)))
    if count < expected + 3 * chance + 1:
        return
    errors = float(rows.scored.error[novel].square().mean().sqrt())
    yield Caution(
        f"{_share(count, rows)} are novel to some layer of the network: above {number(usual)}, as "
        f"one calibration row in a hundred is. Their errors are {number(errors)} bars (RMS). "
        "uq.novelty(x) names the layers."
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
    factor = max(0.8, rows.scored.coverage.factor)
    share = math.erfc(_TAIL / math.sqrt(2))
    beyond = int((rows.scored.reach(1 - share) > factor).sum())
    expected = share * len(rows)
    where = f"err by more than {_TAIL * factor:.2g} bars, where Gaussian errors"
    if rows.prediction is not None:
        where = f"lie outside 99.7 % intervals of bars {factor:.2g} times as wide, where their distribution"
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
    scored, p = rows.scored, rows.scored.p
    shift = (p.centre - p.mean) / p.std  # of the distribution's own centre, in bars
    error = scored.error - shift
    mean, spread = float(error.mean()), float(error.std()) if len(rows) > 1 else math.inf
    if abs(mean) >= max(0.1, 4 * spread / math.sqrt(len(rows))):
        side = "low" if mean > 0 else "high"
        apart = (scored.error - shift) * p.std
        bias, doubt = float(apart.mean()), float(apart.std()) / math.sqrt(len(rows))
        yield Caution(
            f"The predictions are too {side} on average, by {number(abs(mean))} bars "
            f"({around(abs(bias), doubt)}): a bias, which bars cannot mend. "
            f"{_remedy('bias', rows)}",
            f"the predictions are too {side} on average",
        )


def _sigmas(tail: float, rows: Rows) -> float:
    """How many standard errors chance passes as rarely, for all targets together."""
    return -float(torch.special.ndtri(torch.tensor(tail / rows.looks, dtype=torch.float64)))


def _share(count: int, rows: Rows) -> str:
    return f"{count} of {len(rows)} rows ({100 * count / len(rows):.3g} %)"
