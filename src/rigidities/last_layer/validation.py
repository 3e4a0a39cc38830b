"""Calibration of a fit: one pass over validation (or training) data, and the report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ..calibration.calibration import CalibrationOptions, Support
from ..calibration.conformal import Conformal, Groups, bar_cuts, group_labels, set_aside
from ..calibration.coverage import coverage_remarks, rows_prediction
from ..calibration.criteria import AUTO
from ..calibration.evidence import evidence
from ..calibration.full_model.automatic import automatic_report
from ..calibration.report import CalibrationReport
from ..calibration.residuals import Gathering, Residuals
from ..calibration.search import search_report
from ..data.arrays import TARGET_KEYS
from ..data.batches import Batch
from ..data.sketch import RowSketch, row_hashes
from ..data.storage import Snapshot, unprefixed
from ..posterior.posterior import Posterior
from .accumulation import Weighing
from .distributed import Job
from .error_bars import head_inputs, noise_variances
from .merging import combined
from .novelty import Alarm, references, upper
from .readout.reading import Reading, read
from .readout.tap import AnyTap
from .statistics.statistics import Statistics

Parts = tuple[Gathering | None, ...]
MOST = 1 << 15
"""Rows that the full model is fitted to at most."""
UNJUDGED = (
    "Whether these rows stand in the training data too cannot be judged: outputs have no input row "
    "of their own (atoms of structures), or batches are objects. Make sure that they do not."
)


@dataclass(frozen=True)
class Validation:
    """The passes of one calibration, and what they need.

    Attributes:
        groups: callable(batch) -> labels of rows for conformal scores, if any.
        hashed: whether rows keep their hashes, and what predicts them, to be set aside.
        alarm: where the fit has watched layers, what measures distances in them.
    """

    tap: AnyTap
    statistics: Statistics
    posterior: Posterior
    weighing: Weighing
    wanted: CalibrationOptions
    groups: Groups | None = None
    hashed: bool = False
    alarm: Alarm | None = None

    @property
    def full(self) -> bool:
        """Whether the full model is asked for."""
        return self.wanted.criterion == AUTO

    def gathered(self, batches: Iterable[Batch], *, compared: bool = True) -> Gathering:
        """Residuals of rows, compared with the training data, and the rows' hashes."""
        found, known = Gathering(MOST if self.full else None, RowSketch()), self.statistics
        for number, batch in enumerate(batches):
            try:
                distances = None
                if self.alarm is None:
                    reading = read(self.tap, batch)
                else:
                    reading, distances = self.alarm.read(self.tap, batch)
                hashes = None
                if compared or self.hashed:
                    hashes = reading.hashes(batch)
                self._add(found, batch, reading, hashes, distances)
            except ValueError as problem:
                raise ValueError(f"Batch {number}: {problem}") from problem
            if hashes is None:
                found.sketch.void()
                continue
            found.sketch.add(hashes)
            if compared and known.sketch.judges:  # rows that stand in the training data too
                found.count(hashes.numel(), known.sketch.shared(hashes))
        return found

    def together(
        self,
        others: Job,
        own: Parts,
        conformal: Any,
        groups: Any,
        merge_groups: int | None,
        digits: float,
    ) -> CalibrationReport:
        """The report of the rows of all processes, the same on every one.

        Args:
            others: the processes.
            own: rows gathered here: to fit, for conformal scores, of the training data.
            conformal: as in `LastLayerRigidity.calibrate`.
            groups: likewise.
            merge_groups: likewise.
            digits: error of variances by products of mixed precision that features have anyway.
        """
        rows, apart, seen = (_gathered(others, gathering) for gathering in own)

        def made() -> CalibrationReport:
            return self.of_rows(rows, apart, seen, conformal, groups, merge_groups, digits)

        if others.size == 1:
            return made()
        state = others.shared(lambda: _state(made()))
        report = CalibrationReport.from_state(state.header, state.tensors)
        if self.wanted.noise_function is None and self.groups is None:
            return report
        whole = report.calibration.with_functions(self.wanted.noise_function, self.groups)
        return replace(report, calibration=whole)

    def of_rows(
        self,
        rows: Gathering | None,
        apart: Gathering | None,
        seen: Gathering | None,
        conformal: Any,
        groups: Any,
        merge_groups: int | None,
        digits: float,
    ) -> CalibrationReport:
        """The report of rows to fit, for conformal scores and of the training data."""
        fitted, scored = conformal_rows(self.residuals(rows), self.residuals(apart), conformal)
        trained = self.residuals(seen)
        report = self.report(fitted, trained)
        final = self.posterior.with_ridge(report.ridge).with_scale(report.scale)
        report = report.certified(final.doubt, digits)
        if self.alarm is not None:
            report = self._with_novelty(report, trained if fitted is None else fitted)
        if fitted is not None and self.wanted.criterion != "loo":
            said = coverage_remarks(report, fitted, self.posterior.eigenvalues)
            report = replace(report, remarks=[*said, *report.remarks])
        if fitted is not None and not self.wanted.left_out and not fitted.samples:
            report = replace(report, remarks=[*report.remarks, UNJUDGED])
        if scored is None:
            return report
        return self.guaranteed(report, scored, groups, merge_groups)

    def residuals(self, found: Gathering | None) -> Residuals | None:
        """What was gathered, of which there must be some."""
        least = 1 if self.full and self.statistics.sample is not None else 2
        return None if found is None else found.residuals(least=least)

    def report(self, residuals: Residuals | None, train: Residuals | None) -> CalibrationReport:
        """Choose ridge, scale and noise; see `LastLayerRigidity.calibrate`."""
        wanted, posterior = self.wanted, self.posterior
        if wanted.ridge is not None:
            posterior.with_ridge(wanted.ridge)
        zeros = int(self.statistics.gram.zeros.sum())
        common = (posterior.eigenvalues, posterior.with_ridge, wanted)
        if self.full:
            seen = self.sampled() if train is None else train
            score = self._evidence()
            return automatic_report(
                residuals,
                seen,
                *common,
                evidence=score,
                zero_curvature=zeros,
                biases=self._count_columns(residuals if seen is None else seen),
            )
        assert residuals is not None
        score = None
        if wanted.criterion == "evidence" and wanted.ridge is None:
            if self.tap.weights is None:
                raise ValueError("criterion='evidence' needs the readout's weights, not features=.")
            score = self._evidence()
        return search_report(residuals, *common, evidence=score, zero_curvature=zeros)

    def guaranteed(
        self, report: CalibrationReport, apart: Residuals, groups: Any, merge_groups: int | None
    ) -> CalibrationReport:
        """The report with conformal scores of rows that were set apart."""
        chosen, lam = report.calibration, self.posterior.eigenvalues
        cuts = None
        if groups == "bar":
            seen = self.sampled()
            cuts = bar_cuts(
                None if seen is None else rows_prediction(chosen, seen, lam, seen=True).std
            )
        found, labels = rows_prediction(chosen, apart, lam), apart.extra.get("labels")
        conformal = Conformal.of(
            found,
            found.mean + apart.error,
            labels=labels,
            cuts=cuts,
            function=self.groups,
            merge_below=merge_groups,
        )
        remarks = [*report.remarks, *conformal.sentences]
        stopping = self.wanted.early_stopping_remark
        if stopping and stopping not in remarks:  # of a criterion that does not ask by itself
            remarks.append(stopping)
        return replace(report, calibration=replace(chosen, conformal=conformal), remarks=remarks)

    def _with_novelty(self, report: CalibrationReport, rows: Residuals | None) -> CalibrationReport:
        """The report with what is a usual distance in each layer, by rows of the calibration."""
        assert self.alarm is not None
        if rows is None:  # the rows that the fit kept have passed the layers long ago
            return report
        distances = rows.extra["distances"].double()
        usual = references(distances)
        largest = (distances / usual).to(torch.float32).amax(1)  # as predictions have it
        known = largest[largest.isfinite()]
        remarks = report.remarks
        if len(known) < len(largest):
            remarks = [
                *remarks,
                f"{len(largest) - len(known)} of {len(largest)} calibration rows lack a number "
                "that no training row lacked: their novelty is infinite, and they do not say what "
                "is usual.",
            ]
        return replace(
            report,
            novelty=dict(zip(self.alarm.layers, usual.tolist(), strict=True)),
            novelty_usual=float(upper(known, 0.99)) if len(known) else 1.0,
            remarks=remarks,
        )

    def _evidence(self) -> Callable[[Tensor], Tensor] | None:
        """Of ridges; for the full model None where it is not known."""
        gram, weights = self.statistics.gram, self.tap.weights
        if self.full and (weights is None or gram.square is None or gram.cross is None):
            return None
        assert weights is not None
        return evidence(gram, self.posterior, weights, self.tap.biases)

    def _count_columns(self, rows: Residuals | None) -> Tensor | None:
        """Columns of a head's inputs that count what a readout sums: its biases, or their like."""
        if self.tap.biases is None or rows is None:
            return None
        inputs = rows.extra["inputs"]
        counts = torch.arange(self.posterior.width, inputs.shape[-1])  # beside the features
        return torch.cat([self.tap.biases.cpu(), counts]).to(inputs.device)

    def _add(
        self,
        found: Gathering,
        batch: Batch,
        reading: Reading,
        hashes: Tensor | None,
        distances: Tensor | None,
    ) -> None:
        """Errors, squared components in the posterior's eigenbasis and weights of a batch."""
        target, weighing = reading.target_rows(batch.target), self.weighing
        if target is None:
            raise ValueError(
                "there is no target; calibration needs (x, y), a mapping with one of "
                f"{', '.join(map(repr, TARGET_KEYS))}, or target=lambda b: ...."
            )
        require_within(target, self.wanted.support)
        features, mean = reading.features.detach(), reading.rows(reading.output.detach())
        error = target.to(torch.float64) - mean
        weight, importance = weighing(batch, reading, target)
        power = self.posterior.projections(features).square()
        given = self.wanted.noise_function
        shape = self.wanted.noise.shape(mean, features)
        shape = shape if given is None else noise_variances(given, batch, reading)
        kept = {"mean": mean}
        if distances is not None:
            each = len(mean) // max(1, len(distances))  # output rows of a sample
            kept["distances"] = distances.repeat_interleave(each, 0)
        if self.full or self.hashed or self.groups is not None:
            kept["inputs"] = head_inputs(reading.detached())
        if self.hashed:
            if hashes is None:  # no input row of their own: known by their bits
                hashes = row_hashes([features, target], len(features))
            assert hashes is not None
            kept["hashes"] = hashes.repeat_interleave(len(mean) // len(hashes))
        if self.groups is not None:
            labels = group_labels(self.groups, batch.raw, reading.output)
            kept["labels"] = reading.rows(labels)
        found.add(error, power, weight, shape, importance, **kept)

    def sampled(self) -> Residuals | None:
        """The training rows that the fit kept; None where there are none that could be used."""
        sample = self.statistics.sample
        if sample is None or self.wanted.noise_function is not None or not len(sample.hashes):
            return None
        rows, found = sample.rows, Gathering(MOST)
        inputs = head_inputs(rows)
        power = self.posterior.projections(rows.features).square()
        kept = {"mean": rows.mean, "inputs": inputs}
        found.add(rows.residual, power, rows.weight, None, rows.importance, **kept)
        return found.residuals(least=1)


def _gathered(others: Job, gathering: Gathering | None) -> Gathering | None:
    """What all processes have gathered, on the first of them; None on the others."""

    def packed() -> Snapshot | None:
        if gathering is None:
            return None
        header, tensors = gathering.state()
        return Snapshot(tensors, header)

    def unpacked(part: Snapshot | None) -> Gathering | None:
        if part is None:
            return None
        sketch = RowSketch.from_state(unprefixed("sketch", part.tensors))
        return Gathering.from_state(part.header, part.tensors, sketch)

    return others.collected(
        packed, lambda parts: combined(chain([gathering], map(unpacked, parts)))
    )


def _state(report: CalibrationReport) -> Snapshot:
    """Without its functions, which need not be sent."""
    return Snapshot(report.tensors(), report.header())


def require_within(target: Tensor, support: Support | None) -> None:
    """Refuse a support that targets violate."""
    low, high = support or (None, None)
    least, most = -math.inf if low is None else low, math.inf if high is None else high
    beyond = int(((target < least) | (target > most)).sum())
    if beyond:
        known = target[target.isfinite()]
        raise ValueError(
            f"{beyond} targets lie outside support=({low}, {high}): they go from "
            f"{float(known.min()):.6g} to {float(known.max()):.6g}. Widen it, or clean the data."
        )


def conformal_rows(
    rows: Residuals | None, apart: Residuals | None, given: Any
) -> tuple[Residuals | None, Residuals | None]:
    """Rows left to be fitted, and those for conformal scores: other data, or a share of them."""
    if not isinstance(given, float):
        return rows, apart
    if rows is None:
        raise ValueError("conformal= as a share needs validation data: calibrate(x, y, ...).")
    which = set_aside(rows.extra["hashes"], given)
    return rows.subset(~which), rows.subset(which)


def require_groups(groups: Any, conformal: Any, merge_groups: Any) -> None:
    """Refuse groups that are none, or that nothing would use."""
    if groups is None:
        if merge_groups is not None:
            raise ValueError("merge_groups= is for groups: give groups= too, or leave it out.")
        return
    if merge_groups is not None and (
        not isinstance(merge_groups, int) or isinstance(merge_groups, bool) or merge_groups < 1
    ):
        raise ValueError(
            "merge_groups is the number of rows below which groups are merged, 50 say, got "
            f"{merge_groups!r}."
        )
    if groups != "bar" and not callable(groups):
        raise ValueError(f"groups must be 'bar' or callable(batch), got {groups!r}.")
    if conformal is None:
        raise ValueError("groups= is for conformal intervals: give conformal=rows too, or a share.")


def calibration_data(criterion: str, valid: Any, train: Any) -> tuple[Any, Any]:
    """Validation and training data as the criterion takes them; the first are passed over.

    Leave-one-out takes training data alone, `auto` either or both, others validation data alone.
    """
    if criterion == "loo":
        if train is None or valid is not None:
            raise ValueError(
                "criterion='loo' takes the training data and no validation data: "
                "calibrate(train=(x, y), criterion='loo')."
            )
        return train, None
    if criterion == AUTO:
        return valid, train
    if train is not None:
        raise ValueError(
            f"train= is for criterion='loo' and 'auto'; {criterion!r} takes validation data."
        )
    if valid is None:
        raise ValueError(f"criterion={criterion!r} needs validation data: calibrate(x, y).")
    return valid, None
