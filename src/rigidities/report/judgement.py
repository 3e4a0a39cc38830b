"""Whether error bars can be trusted, in plain words.

`judgement` asks four questions about the rows of one target, and each gives a `Finding`:

| finding | question |
| --- | --- |
| `size` | Do 90 % intervals cover 90 % of the true values? |
| `by_fifths` | Do they cover 90 % in each fifth of the rows, sorted by prediction or bar? |
| `resolution` | Are the bars better than one constant bar for all rows? |
| `ranking` | Do rows with larger bars have larger errors? |

Every answer allows for chance, given the number of independent rows and of targets. Findings and
cautions together make the `Verdict`, with a headline. `Judgements` holds the verdicts of all
targets, and knows which target does worst.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..calibration.coverage import BAD, CAREFUL, GOOD, STATUSES
from ..calibration.report import CalibrationReport
from ..metrics.ranking import retained_rmse
from .cautions import FEW, MOST_NAMED, Caution, cautions, in_words, remedy_for, sigmas_of_tail
from .formatting import around, number
from .rows import TargetRows
from .scores import TargetScores

STATUS_WORDS = {GOOD: "good", CAREFUL: "with care", BAD: "not good"}
_SHORTFALL = 3.0
"""Bars are called no better than a constant one where their gain is this many standard deviations
below that of right bars."""
_INFLATED = 2.0
"""The calibration's constant bar is not a fair comparison beyond this many times the RMS error."""


@dataclass(frozen=True)
class Finding:
    """The answer to one question about the bars.

    Attributes:
        subject: What it is about.
        status: "good", "careful" or "bad".
        text: Sentences.
        reason: Why the bars cannot simply be trusted, as the end of a headline. Empty where they
            can.
        checked: Whether the rows allow an answer. If not, the status does not count against them.
    """

    subject: str
    status: str
    text: str
    reason: str = ""
    checked: bool = True

    @property
    def status_word(self) -> str:
        """The status as it is printed."""
        return STATUS_WORDS[self.status] if self.checked else "not checked"


@dataclass(frozen=True)
class Verdict:
    """Whether error bars can be trusted; `print` gives all of it.

    Attributes:
        headline: The verdict in one sentence.
        status: "good", "careful" or "bad".
        findings: The answers behind it: size, fifths, use and ranking.
        cautions: What to be careful about.
    """

    headline: str
    status: str
    findings: tuple[Finding, ...]
    cautions: tuple[Caution, ...] = ()

    def about(self, name: str) -> Verdict:
        """The same verdict, with findings that name their target."""
        findings = [
            replace(finding, subject=f"{finding.subject} of {name}") for finding in self.findings
        ]
        return replace(self, findings=tuple(findings))

    def plain(self) -> dict[str, Any]:
        """Strings and lists of them, for JSON."""
        findings = [
            {"subject": finding.subject, "status": finding.status, "text": finding.text}
            for finding in self.findings
        ]
        return {
            "headline": self.headline,
            "status": self.status,
            "findings": findings,
            "cautions": [caution.text for caution in self.cautions],
        }

    def __str__(self) -> str:
        lines = [self.headline]
        for finding in self.findings:
            lines.append(f"  {finding.subject}: {finding.status_word}. {finding.text}")
        for caution in self.cautions:
            lines.append(f"  ! {caution.text}")
        return "\n".join(lines)


def judgement(
    scores: TargetScores,
    all_cautions: Sequence[Caution] = (),
    calibration: CalibrationReport | None = None,
) -> Verdict:
    """The verdict on the rows of one target.

    Args:
        scores: The rows and their metrics.
        all_cautions: What to be careful about. Grave cautions lower the verdict.
        calibration: What `calibrate` returned, so that remedies in use are not suggested again.
    """
    rows = scores.rows
    size_finding = size(rows)
    fifths_finding = by_fifths(rows, calibration)
    use_finding = resolution(scores)
    ranking_finding = ranking(scores)
    findings = (size_finding, fifths_finding, use_finding, ranking_finding)
    if len(rows) < FEW:
        headline = f"Too few rows for a verdict: {len(rows)}. The figures below may be chance."
        return Verdict(headline, CAREFUL, findings, tuple(all_cautions))
    grave = [caution.grave for caution in all_cautions if caution.grave]
    if ranking_finding.status == BAD:
        grave.append("larger bars go with smaller errors")
    headline, status = _headline(size_finding, fifths_finding, use_finding, grave)
    return Verdict(headline, status, findings, tuple(all_cautions))


def _headline(
    size_finding: Finding, fifths_finding: Finding, use_finding: Finding, grave: Sequence[str]
) -> tuple[str, str]:
    """The verdict in one sentence, and its status.

    Where the bars cannot be trusted, the headline gives one reason. Otherwise it gives all reasons
    for care.

    Args:
        size_finding: Whether the bars are right as a whole.
        fifths_finding: Whether they are right in every fifth.
        use_finding: Whether they are better than one constant bar.
        grave: Further reasons for care.
    """
    for finding in (size_finding, fifths_finding, use_finding):
        if finding.status == BAD:
            return f"Do not trust these bars as they stand: {finding.reason}.", BAD
    reasons = []
    # A wrong size explains wrong fifths, so one of the two reasons is enough.
    if size_finding.status == CAREFUL:
        reasons.append(size_finding.reason)
    elif fifths_finding.status == CAREFUL:
        reasons.append(fifths_finding.reason)
    of_wrong_size = bool(reasons)
    reasons.extend(grave)
    no_use = use_finding.status == CAREFUL
    if reasons:
        # A wrong size already says that the bars are of no use.
        if no_use and not of_wrong_size:
            reasons.append(use_finding.reason)
        return f"Use these bars with care: {in_words(reasons)}.", CAREFUL
    if not no_use:
        return "These bars can be trusted on rows like these.", GOOD
    if "not shown" in use_finding.reason:
        headline = (
            "The bars have the right size, as far as these rows can tell, but are not shown to be "
            "better than one constant bar."
        )
        return headline, CAREFUL
    return "The bars have the right size, but are no better than one constant bar.", CAREFUL


def _careful_if_few(
    rows: TargetRows, subject: str, status: str, text: str, reason: str = ""
) -> Finding:
    """A finding, with "careful" in place of "good" where there are few rows."""
    if status == GOOD and len(rows) < FEW:
        status = CAREFUL
    return Finding(subject, status, text, reason)


# --- size, as a whole and in fifths ------------------------------------------------------------


def size(rows: TargetRows) -> Finding:
    """Are the bars too wide or too narrow, judging by the coverage of 90 % intervals?"""
    coverage = rows.scored.coverage
    inside = 100 * coverage.inside / coverage.rows
    low = 100 * coverage.low / coverage.rows
    high = 100 * coverage.high / coverage.rows
    counts = (
        f"90 % intervals cover {inside:.1f} % of the {coverage.rows} true values. If the bars are "
        f"right, chance gives {low:.1f} to {high:.1f} %."
    )
    if not coverage.side:
        lead = "About right." if coverage.rows >= FEW else "No fault is visible."
        return _careful_if_few(rows, "Size", GOOD, f"{lead} {counts}")
    if coverage.status == GOOD:
        lead = f"A little too {coverage.side}."
    else:
        lead = f"Too {coverage.side}."
    errors = f"Errors are {number(coverage.rms)} bars (RMS)."
    if coverage.factor > 1e-9:
        factor = f"To cover 90 % the bars would have to be {number(coverage.factor)} times as wide."
    else:
        factor = "At least 90 % of the errors are zero."
    reason = f"they are too {coverage.side}"
    if coverage.status == BAD:
        reason = f"they are far too {coverage.side}"
    text = f"{lead} {counts} {errors} {factor}"
    return _careful_if_few(rows, "Size", coverage.status, text, reason)


def by_fifths(rows: TargetRows, calibration: CalibrationReport | None = None) -> Finding:
    """Are the bars right for low and high predictions, for small and large bars?"""
    scored = rows.scored
    if scored.uneven:
        return _uneven(rows, calibration)
    if scored.fifths:
        shares = [100 * fifth.inside / fifth.rows for fifth in scored.fifths]
        how = "Chance explains the differences."
        if scored.coverage.side:
            how = "One factor would correct all of them."
        text = (
            f"Even. 90 % intervals cover {min(shares):.3g} to {max(shares):.3g} % in each fifth of "
            f"the rows, sorted by prediction or by bar. {how}"
        )
    else:
        text = "There are too few rows for fifths, or all rows are alike."
    finding = _careful_if_few(rows, "Fifths", GOOD, text)
    return replace(finding, checked=bool(scored.fifths))


def _uneven(rows: TargetRows, calibration: CalibrationReport | None) -> Finding:
    """The finding where some fifths are wrong; its status is that of the worst."""
    wrong_fifths = rows.scored.uneven
    status = max((fifth.status for fifth in wrong_fifths), key=STATUSES.index)
    sentences = ["A little uneven." if status == GOOD else "Uneven."]
    sentences += [fifth.sentence for fifth in wrong_fifths[:4]]
    if status != GOOD:
        sentences.append(remedy_for("uneven", rows, calibration))
    worst = wrong_fifths[0]
    where = f"too {worst.side} in the {worst.where}"
    if rows.scored.coverage.status == GOOD:
        reason = f"they are right on average, but {where}"
    else:
        reason = f"they are {where}"
    return _careful_if_few(rows, "Fifths", status, " ".join(sentences), reason)


# --- use: the comparison with one constant bar -------------------------------------------------


def gain_and_error(rows: TargetRows) -> tuple[float, float]:
    """Nats per row by which the bars beat one constant bar, and the standard error of that.

    The constant bar is that of `TargetRows.with_constant_bar`. The error is that of the mean of
    paired differences. To first order, fitting the constant to these rows adds nothing to it.

    Returns:
        Minus infinity and NaN where every error is zero, or a true value is impossible.
    """
    if not rows.error.any() or bool(rows.nll.isinf().any()):
        return -math.inf, math.nan
    gains = rows.with_constant_bar.nll - rows.nll  # (N,)
    if len(rows) == 1:
        return float(gains.mean()), math.nan
    return float(gains.mean()), float(gains.std()) / math.sqrt(len(rows))


def resolution(scores: TargetScores) -> Finding:
    """Is it worth having bars that differ from row to row?"""
    rows = scores.rows
    if not rows.bars_differ:
        text = "All bars have the same size, so they cannot tell rows apart."
        return Finding("Use", CAREFUL, text, "they are no better than one constant bar")
    if math.isinf(gain_and_error(rows)[0]):
        if rows.error.any():
            text = "Some true values are impossible under their distribution."
        else:
            text = "Every error is zero, so any bar is too wide."
        return Finding("Use", BAD, text, "one constant bar does better")
    rows, note = _fairly_compared(rows)
    notes = _decided_by_one_row(rows) + note
    gain, error = gain_and_error(rows)
    constant = (
        f"one constant bar ({number(rows.constant_bar)}, {rows.constant_bar_source}, Gaussian)"
    )
    difference = f"{around(abs(gain), error)} nats per row"
    side = _side(gain, error, rows)
    if side == "better":
        times = math.exp(min(gain, 700))  # beyond 700 the exponential overflows
        text = (
            f"Better than {constant} by {difference}: on (geometric) average a true value is "
            f"{times:.3g} times as likely under these bars."
        )
        return _careful_if_few(rows, "Use", GOOD, text + notes)
    if side == "worse":
        text = (
            f"Worse than {constant} by {difference}: the size of the bars, or how it varies "
            "between rows, is misleading."
        )
        return Finding("Use", BAD, text + notes, "one constant bar does better")
    # Is the gain less than right bars would show, or are the rows too few to show any?
    expected, scatter = _gain_of_right_bars(scores, rows)
    text = (
        f"the difference of {around(gain, error)} nats per row may be chance. If bars of these "
        f"sizes were right, it would be {around(expected, scatter)} on such rows."
    )
    if gain < expected - _SHORTFALL * scatter:
        text = f"No better than {constant}: {text}"
        reason = "they are no better than one constant bar"
    else:
        text = f"Not shown to be better than {constant}: {text} More rows are needed to tell."
        reason = "they are not shown to be better than one constant bar"
    return Finding("Use", CAREFUL, text + notes, reason)


def _gain_of_right_bars(scores: TargetScores, rows: TargetRows) -> tuple[float, float]:
    """Mean and standard deviation of the gain if true values followed the bars of these rows."""
    gains = []
    for redrawn in scores.redrawn:
        gain, _ = gain_and_error(replace(rows, target=redrawn.rows.target))
        gains.append(gain)
    drawn_gains = torch.tensor(gains).double()
    return float(drawn_gains.mean()), float(drawn_gains.std())


def _fairly_compared(rows: TargetRows) -> tuple[TargetRows, str]:
    """Rows with a constant bar that is hard enough to beat, and a sentence where it was replaced.

    A few outliers among the calibration rows make a constant bar that anything beats. Then the
    constant bar of these rows is taken instead.
    """
    fair_rows = replace(rows, calibrated_bar=None)
    ratio = rows.constant_bar / fair_rows.constant_bar
    if not ratio > _INFLATED:
        return rows, ""
    source = rows.constant_bar_source.removeprefix("the ")
    gain, error = gain_and_error(rows)
    note = (
        f" The {source}, {number(rows.constant_bar)}, is {number(ratio)} times as large, because "
        f"of a few outliers. The gain over it is {around(gain, error)} nats per row."
    )
    return fair_rows, note


def _side(gain: float, error: float, rows: TargetRows) -> str:
    """Whether bars are "better" or "worse" than a constant one beyond chance; "" if neither."""
    if gain > 2 * error:
        return "better"
    if gain < -sigmas_of_tail(0.02, rows) * error:
        return "worse"
    return ""


def _decided_by_one_row(rows: TargetRows) -> str:
    """A sentence where leaving out a single row changes the outcome of the comparison, else ""."""
    if len(rows) < FEW:
        return ""
    gains = rows.with_constant_bar.nll - rows.nll
    outlier = int((gains - gains.median()).abs().argmax())
    other_rows = rows.without(outlier)
    gain, error = gain_and_error(rows)
    other_gain, other_error = gain_and_error(other_rows)
    same_side = _side(gain, error, rows) == _side(other_gain, other_error, other_rows)
    if same_side or not abs(gain - other_gain) > 2 * other_error:
        return ""
    error_in_bars = abs(float(rows.error[outlier] / rows.std[outlier]))
    direction = "better" if other_gain > 0 else "worse"
    return (
        f" One row makes the difference: without row {rows.row_number(outlier)}, whose error is "
        f"{number(error_in_bars)} bars, the bars are {direction} by "
        f"{around(abs(other_gain), other_error)} nats per row."
    )


# --- ranking -----------------------------------------------------------------------------------


def ranking(scores: TargetScores) -> Finding:
    """Do rows with larger bars have larger errors?"""
    rows = scores.rows
    correlation = scores.spearman
    if math.isnan(correlation):
        return Finding("Ranking", CAREFUL, "All bars or all errors are equal: there is no ranking.")
    drawn = torch.tensor([redrawn.spearman for redrawn in scores.redrawn]).double()
    expected = float(drawn.mean())
    scatter = float(drawn.std())
    comparison = (
        f"The rank correlation of bar and error is {correlation:.2f}; {expected:.2f} ± "
        f"{scatter:.2f} is expected if the bars are right, and 0 if they carry no information."
    )
    chance = 2 / math.sqrt(max(1, len(rows) - 1))
    if abs(correlation) <= chance:
        if correlation >= expected - 2 * scatter:
            lead = "These rows cannot show whether larger bars mark larger errors."
        else:
            lead = "Larger bars do not mark larger errors."
        return Finding("Ranking", CAREFUL, f"{lead} {comparison}")
    if correlation < 0:
        text = f"Larger bars go with smaller errors. {comparison}"
        return Finding("Ranking", BAD, text)
    text = f"Larger bars mark larger errors. {comparison}{_without_largest_bars(rows)}"
    return _careful_if_few(rows, "Ranking", GOOD, text)


def _without_largest_bars(rows: TargetRows) -> str:
    """A sentence on how much the RMSE falls without the most uncertain tenth, else ""."""
    squared_error = rows.error.square()
    remaining = max(1, len(rows) - len(rows) // 10)
    by_bar = float(retained_rmse(squared_error, by=rows.std)[remaining - 1])
    by_error = float(retained_rmse(squared_error, by=squared_error)[remaining - 1])
    rmse = float(squared_error.mean().sqrt())
    if by_bar >= rmse:
        return ""
    return (
        f" Dropping the 10 % of rows with the largest bars lowers the RMSE by "
        f"{100 * (1 - by_bar / rmse):.0f} % (at best {100 * (1 - by_error / rmse):.0f} %)."
    )


# --- all targets -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Judgements:
    """All targets of some rows, each judged once, for the verdict, console, files and page.

    Attributes:
        targets: Rows and metrics of each target.
        calibration: What `calibrate` returned, if it is known.
        references: For each target, bars on rows like those of the calibration; None if unknown.
        further_cautions: More to be careful about, for every target.
    """

    targets: Sequence[TargetScores]
    calibration: CalibrationReport | None = None
    references: Sequence[Tensor | None] = ()
    further_cautions: Sequence[Caution] = ()

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """The verdict on each target."""
        references = self.references or [None] * len(self.targets)
        verdicts = []
        for scores, reference in zip(self.targets, references, strict=True):
            all_cautions = [
                *self.further_cautions,
                *cautions(scores.rows, self.calibration, reference),
            ]
            verdicts.append(judgement(scores, all_cautions, self.calibration))
        return verdicts

    @cached_property
    def worst_target(self) -> int:
        """Index of the target with the worst verdict.

        Targets are compared by their status, then by how many findings are bad, then by how wrong
        the size of the bars is.
        """

        def badness(k: int) -> tuple[float, ...]:
            """What target k is compared by; larger is worse."""
            verdict = self.verdicts[k]
            bad_findings = sum(finding.status == BAD for finding in verdict.findings)
            size_fault = self.targets[k].rows.scored.coverage.off
            return STATUSES.index(verdict.status), bad_findings, size_fault

        return max(range(len(self.targets)), key=badness)

    @cached_property
    def verdict(self) -> Verdict:
        """The verdict on the worst target, with the cautions of all targets."""
        worst = self.verdicts[self.worst_target]
        count = len(self.targets)
        if count == 1:
            return worst
        name = self.targets[self.worst_target].rows.name
        if all(verdict.headline == worst.headline for verdict in self.verdicts):
            whose = "Both targets" if count == 2 else f"All {count} targets"
        else:
            whose = f"{name}, the worst of {count} targets"
        return replace(
            worst.about(name),
            headline=f"{whose}: {worst.headline}",
            cautions=tuple(self._named_cautions()),
        )

    def _named_cautions(self) -> list[Caution]:
        """The cautions of all targets, those of the worst first, each with its target's name.

        A caution that all targets share stands once and without a name. Of the other targets the
        grave cautions come first, and at most `MOST_NAMED` are listed.
        """
        texts_of_targets = [{c.text for c in verdict.cautions} for verdict in self.verdicts]
        shared_texts = set.intersection(*texts_of_targets)

        def named(k: int) -> list[Caution]:
            """Cautions of target k."""
            name = self.targets[k].rows.name
            return [
                Caution(f"{name}: {caution.text}", caution.grave)
                for caution in self.verdicts[k].cautions
                if caution.text not in shared_texts
            ]

        worst = self.worst_target
        shared = [c for c in self.verdicts[worst].cautions if c.text in shared_texts]
        others: list[Caution] = []
        for k in range(len(self.targets)):
            if k != worst:
                others += named(k)
        others.sort(key=lambda caution: not caution.grave)  # stable: grave ones first
        return [*shared, *named(worst), *others[:MOST_NAMED]]
