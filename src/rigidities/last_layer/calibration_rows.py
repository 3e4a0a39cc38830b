"""The rows of a calibration of a fit, and the report on them.

`RowReader` passes batches through the model and collects their rows. `of_all` brings together what
all processes have collected, on the first of them. There `report_on` hands the rows to a method of
the room `calibration` and completes its report with what the fit knows: the error of mixed
precision, the usual novelty, and whether targets seem to belong to their inputs. `report_with` adds
conformal scores of other rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..calibration import words
from ..calibration.calibration import conformalized
from ..calibration.conformal import Groups, group_labels
from ..calibration.coverage import coverage_remarks
from ..calibration.evidence import evidence
from ..calibration.full import fit_full
from ..calibration.methods import Full, Method, NoiseFunction, Support
from ..calibration.paper import Evidence, fit_paper
from ..calibration.report import CalibrationReport
from ..calibration.rows import RowCollector, Rows, fewer_copies, require_within
from ..data.batches import Batch
from ..data.hashes import output_hashes
from ..data.sources import TARGET_KEYS
from ..posterior.posterior import Posterior
from ..prediction.noise import Noise
from ..readout.reading import with_counts
from ..readout.readout import AnyReadout
from ..statistics.row_sketch import RowSketch
from ..statistics.statistics import Statistics
from .accumulation import Weighing
from .distributed import Job
from .error_bars import noise_variances
from .merging import combined
from .novelty.distance import alarm_threshold, usual_distances
from .novelty.novelty import Novelty

MOST = 1 << 15
"""Most validation rows, and rows passed as `train=`, that the full model is fitted to."""
MOST_KEPT = 1 << 16
"""About how many of the rows kept by the fit the full model is fitted to at most."""
UNJUDGED = (
    "It was not possible to check whether these rows are also in the training data: outputs have "
    "no input row of their own (atoms of structures), or batches are objects. Make sure that they "
    "are not."
)


# --- reading rows ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowReader:
    """Passes data through the model, and collects the rows of a calibration.

    Attributes:
        readout: Reads outputs and features off the model.
        statistics: What the fit has summed.
        posterior: The posterior in whose eigenbasis features are squared.
        weighing: Gives the rows' weights in the loss.
        noise: The class of the noise, which gives its shape.
        noise_function: The function that gives the noise variances, for a noise that is known.
        support: The targets' bounds.
        full: Whether rows are for the full model: they keep their features, and are fewer.
        groups: callable(batch) -> labels of rows for conformal scores, if any.
        novelty: Measures distances in the layers that the fit has watched, if any.
    """

    readout: AnyReadout
    statistics: Statistics
    posterior: Posterior
    weighing: Weighing
    noise: type[Noise]
    noise_function: NoiseFunction | None
    support: Support | None
    full: bool
    groups: Groups | None = None
    novelty: Novelty | None = None

    def collected(self, batches: Iterable[Batch], *, compared: bool, hashed: bool) -> RowCollector:
        """The rows of one pass over batches, with a sketch of their hashes.

        Args:
            batches: The data.
            compared: Whether to count the rows that are also in the training data.
            hashed: Whether rows are hashed even if they are not compared.

        Raises:
            ValueError: A batch cannot be used; the message names it.
        """
        collector = RowCollector(MOST if self.full else None, RowSketch())
        train_sketch = self.statistics.sketch
        for number, batch in enumerate(batches):
            try:
                hashes = self._add(collector, batch)
            except ValueError as problem:
                raise ValueError(f"Batch {number}: {problem}") from problem
            if hashes is None or not (compared or hashed):
                collector.sketch.void()
                continue
            collector.sketch.add(hashes)
            if compared and train_sketch.judges:
                collector.count(hashes.numel(), train_sketch.shared(hashes))
        return collector

    def _add(self, collector: RowCollector, batch: Batch) -> Tensor | None:
        """Pass one batch through the model and add its rows.

        Returns:
            Hashes of the input rows; None where outputs have no input row of their own.
        """
        distances = None
        if self.novelty is None:
            reading = self.readout(batch)
        else:
            reading, distances = self.novelty.score(self.readout, batch)
        hashes = reading.labelled_hashes(batch)
        if batch.target is None:
            raise ValueError(
                "there is no target. Calibration needs (x, y), a mapping with one of "
                f"{', '.join(map(repr, TARGET_KEYS))}, or target=lambda b: ...."
            )
        target = reading.output_layout.target_rows(batch.target)
        require_within(target, self.support)
        features = reading.features.detach()
        mean = reading.output_layout.rows(reading.output.detach())
        error = target.to(torch.float64) - mean
        weight, sample_weight = self.weighing(batch, reading, target)
        row_hashes = None
        if hashes is not None and len(error) % max(1, len(hashes)) == 0:
            row_hashes = output_hashes(hashes, len(error), sample_weight)
        units = self.statistics.gram_sums.units
        if units is not None:  # the units of targets belong to the weights in the Gram
            factors = units.factors.to(error).expand_as(error)
            weight = factors if weight is None else weight * factors
        if self.noise_function is None:
            noise_shape = self.noise.shape(mean, features)
        else:
            noise_shape = noise_variances(self.noise_function, batch, reading)
        labels = None
        if self.groups is not None:
            labels = reading.output_layout.rows(
                group_labels(self.groups, batch.raw, reading.output)
            )
        if distances is not None:
            rows_per_sample = len(mean) // max(1, len(distances))
            distances = distances.repeat_interleave(rows_per_sample, 0)
        inputs = None
        if self.full:
            inputs = with_counts(features, reading.detached().bias_counts)
        collector.add(
            error,
            mean,
            self.posterior.projections(features).square(),
            hashes=row_hashes,
            weight=weight,
            shape=noise_shape,
            sample_weight=sample_weight,
            inputs=inputs,
            labels=labels,
            distances=distances,
        )
        return hashes

    def table(self, collector: RowCollector | None, *, trained: bool = False) -> Rows | None:
        """The rows of a collector, at least one or two; None if there was no pass."""
        if collector is None:
            return None
        # With training rows of the fit beside it, a single row will do.
        least = 1 if self.full and self.statistics.kept_rows is not None else 2
        units = self.statistics.gram_sums.units
        return collector.table(
            least=least, trained=trained, units=None if units is None else units.factors[None]
        )

    def conformal_table(self, collector: RowCollector | None) -> Rows | None:
        """The rows of a collector that nothing is fitted to; None if there was no pass."""
        if collector is None:
            return None
        units = self.statistics.gram_sums.units
        return collector.table(
            least=1, to_fit=False, units=None if units is None else units.factors[None]
        )

    def kept_rows(self) -> Rows | None:
        """The training rows that the fit kept, by hash; None where none could be used."""
        sample = self.statistics.kept_rows
        if sample is None or self.noise_function is not None:
            return None
        sample.settle()
        if not len(sample.hashes):
            return None
        # Each row as often as it came, or fewer copies of each.
        columns = sample.repeated(fewer_copies(sample.hashes, sample.counts, MOST_KEPT))
        features = columns["features"]
        weight = columns["weight"]
        units = self.statistics.gram_sums.units
        factors = None
        if units is not None:
            factors = units.factors[None]  # (1, K), in the Gram
            weight = weight * units.factors.to(weight)
        # About that many rows are left, in an order that does not depend on that of the data.
        collector = RowCollector()
        collector.add(
            columns["residual"],
            columns["mean"],
            self.posterior.projections(features).square(),
            weight=weight,
            sample_weight=columns.get("sample_weight"),
            inputs=with_counts(features, columns.get("bias_counts")),
        )
        return collector.table(least=1, trained=True, units=factors)


def of_all(processes: Job, collector: RowCollector | None) -> RowCollector | None:
    """What all processes have collected, on the first of them; None on the others."""
    if collector is not None:
        collector.settle()
    return combined(processes.collected(collector))


# --- the report -----------------------------------------------------------------------------------


def report_on(
    method: Method,
    reader: RowReader,
    rows: Rows | None,
    training: Rows | None,
    *,
    early_stopped: bool | None,
    feature_rounding: float,
) -> CalibrationReport:
    """The report of a method on rows, completed with what the fit knows.

    Args:
        method: What is asked of the calibration.
        reader: What the rows came from.
        rows: The rows to fit; None for the full model from training rows alone.
        training: Training rows that the user passed, if any.
        early_stopped: Whether the validation rows chose the model's checkpoint; None if unknown.
        feature_rounding: The relative error of the features themselves. An error of the Gram from
            mixed precision below this is not worth a warning.

    Raises:
        ValueError: Rounding may change variances by half of themselves or more, or the method
            refuses the rows.
    """
    posterior = reader.posterior
    score = _evidence(method, reader)
    if isinstance(method, Full):
        kept = reader.kept_rows() if training is None else training
        report = fit_full(
            method,
            rows,
            kept,
            posterior,
            evidence=score,
            biases=_count_columns(reader, rows if kept is None else kept),
            early_stopped=early_stopped,
        )
    else:
        assert rows is not None
        report = fit_paper(method, rows, posterior, evidence=score)
    final = posterior.with_ridge(report.ridge).with_scale(report.scale)
    report = replace(
        report,
        early_stopped=early_stopped,
        zero_curvature=int(reader.statistics.gram.zeros.sum()),
        rounding=final.doubt,
    )
    if report.rounding > 0.5:
        raise ValueError(words.rounding(report))
    remarks = report.remarks
    notices = report.notices
    if report.rounding > max(words.LARGEST_DOUBT, feature_rounding):
        notices = (*notices, words.rounding(report))
    novelty_rows = training if rows is None else rows
    if reader.novelty is not None and novelty_rows is not None:
        usual, novelty_usual, novelty_remarks = _usual_novelty(reader.novelty, novelty_rows)
        report = replace(report, novelty=usual, novelty_usual=novelty_usual)
        guard = report.calibration.guard
        if guard is not None:  # it listens to novelty
            distances = guard.reference.new_tensor(list(usual.values()))
            # An alarm below the novelty of usual rows would be one where layers never varied.
            alarm = guard.reference.new_tensor(max(1.0, novelty_usual))
            guard = replace(guard, distances=distances, alarm=alarm)
            report = replace(report, calibration=replace(report.calibration, guard=guard))
        remarks = [*remarks, *novelty_remarks]
    if rows is not None and not rows.trained:
        remarks = [*coverage_remarks(report, rows, posterior.eigenvalues), *remarks]
        sentence = _mismatch(rows, reader.statistics)
        report = replace(report, mismatch=sentence)
        if sentence:
            notices = (*notices, sentence)
        if not rows.samples:
            remarks = [*remarks, UNJUDGED]
    return replace(report, remarks=remarks, notices=notices)


def report_with(
    report: CalibrationReport,
    reader: RowReader,
    rows: Rows | None,
    groups: str | Groups | None,
    *,
    used_twice: float,
) -> CalibrationReport:
    """The report with conformal scores of rows that fitted nothing else.

    Its notices are about these rows alone.

    Args:
        report: The report on a calibration.
        reader: What the rows came from.
        rows: The rows.
        groups: As in `conformalized`.
        used_twice: The share of the rows that the calibration was fitted to as well.
    """
    assert rows is not None, "some process has rows"
    training = reader.kept_rows() if groups == "bar" else None
    calibration = conformalized(
        report.calibration, rows, reader.posterior, groups=groups, training=training
    )
    assert calibration.conformal is not None
    # Sentences on earlier conformal rows make room for those on the new ones.
    former = report.calibration.conformal
    outdated = [] if former is None else former.sentences
    remarks = [remark for remark in report.remarks if remark not in outdated]
    repeated = words.trained_on_conformal(rows) + words.calibrated_on_conformal(used_twice)
    new_remarks = [*calibration.conformal.sentences, *repeated]
    # The method "paper" does not ask about early stopping by itself.
    early_stopping = words.early_stopping(report.early_stopped)
    if early_stopping:
        new_remarks.append(early_stopping)
    if not rows.samples:
        new_remarks.append(UNJUDGED)
    remarks += [remark for remark in new_remarks if remark not in remarks]
    return replace(report, calibration=calibration, remarks=remarks, notices=tuple(repeated))


def _evidence(method: Method, reader: RowReader) -> Evidence | None:
    """The negative log evidence of ridges; None where the method needs none, or it is not known."""
    gram = reader.statistics.gram
    weights = reader.readout.weights
    if isinstance(method, Full):
        if weights is None or gram.square is None or gram.cross is None:
            return None
    elif method.criterion != "evidence" or method.ridge is not None:
        return None
    if weights is None:
        raise ValueError(
            "Paper(criterion='evidence') needs the readout's weights, which features= does not "
            "give. Use another criterion, or layer=."
        )
    return evidence(gram, reader.posterior, weights, reader.readout.biases)


def _count_columns(reader: RowReader, rows: Rows | None) -> Tensor | None:
    """Indices of the head's inputs that count what a readout sums.

    They are the columns of its biases, and the counts beside the features where it has none.
    """
    biases = reader.readout.biases
    if biases is None or rows is None or rows.inputs is None:
        return None
    beside_features = torch.arange(reader.posterior.width, rows.inputs.shape[-1])
    return torch.cat([biases.cpu(), beside_features]).to(rows.inputs.device)


def _usual_novelty(novelty: Novelty, rows: Rows) -> tuple[dict[str, float], float, list[str]]:
    """The distance in each layer that is a novelty of 1, the alarm threshold, remarks on rows."""
    assert rows.distances is not None
    distances = rows.distances.double()  # (n, L)
    usual = usual_distances(distances)
    # In float32, as the novelty of predictions.
    largest = (distances / usual).to(torch.float32).amax(1)
    finite = largest[largest.isfinite()]
    remarks = []
    if len(finite) < len(largest):
        remarks.append(
            f"{len(largest) - len(finite)} of {len(largest)} calibration rows have a missing "
            "value where no training row has one. Their novelty is infinite, and they are not "
            "used to find its usual range."
        )
    by_layer = dict(zip(novelty.names, usual.tolist(), strict=True))
    threshold = alarm_threshold(finite) if len(finite) else 1.0
    return by_layer, threshold, remarks


MISMATCHED = 3.0
"""Times the training rows' errors beyond which errors of the calibration rows are suspicious."""
_NO_BETTER = 1.1
"""Times the spread of the targets beyond which errors are no better than those of a constant."""
_FEWEST = 20
"""With fewer rows, a few bad predictions could decide."""


def _mismatch(rows: Rows, statistics: Statistics) -> str:
    """A sentence where the rows' targets do not seem to belong to their inputs; else empty.

    Errors far larger than those of the training rows are not enough: a network may have memorised
    its training rows. But even such a network predicts better than a constant. Targets in another
    order have errors of 1.4 times their spread, and targets in another unit, by a factor of two or
    more, have errors larger than the smaller of the two spreads. Medians of absolute errors must
    differ as much as RMS errors, so that single rows cannot decide.
    """
    sample = statistics.kept_rows
    if sample is None:
        return ""
    sample.settle()
    if not len(sample.hashes):
        return ""
    training_mean = sample.columns["mean"]  # (m, K)
    training_error = sample.columns["residual"]
    sentences = []
    for k in range(rows.targets):
        known = rows.error[:, k].isfinite()
        training_known = training_error[:, k].isfinite()
        error = rows.error[known, k]
        seen_error = training_error[training_known, k].to(error)
        if len(error) < _FEWEST or len(seen_error) < _FEWEST:
            continue
        target = rows.mean[known, k].to(error) + error
        seen_target = training_mean[training_known, k].to(error) + seen_error
        spread = min(float(target.std()), float(seen_target.std()))
        is_typical = error.abs().median() > MISMATCHED * seen_error.abs().median()
        rms = float(error.square().mean().sqrt())
        seen_rms = float(seen_error.square().mean().sqrt())
        if bool(is_typical) and rms > MISMATCHED * seen_rms and rms > _NO_BETTER * spread:
            prefix = words.target_prefix(k, rows.targets)
            sentences.append(words.mismatched_rows(rms, seen_rms, prefix))
    return " ".join(sentences)


# --- what a user passes ---------------------------------------------------------------------------


def require_data(method: Method, valid: Any, train: Any) -> None:
    """Refuse data that a method does not use, or that lack what it needs.

    Leave-one-out takes training data alone. The full model takes validation data, training data or
    both, or the rows that the fit kept. Other criteria take validation data alone.

    Raises:
        ValueError: The method needs other data.
    """
    if isinstance(method, Full):
        return
    if method.criterion == "loo":
        if train is None or valid is not None:
            raise ValueError(
                "criterion='loo' uses the training data and no validation data: "
                "calibrate(train=(x, y), method=rigidities.Paper(criterion='loo'))."
            )
        return
    if train is not None:
        raise ValueError(
            "train= is for Full and for Paper(criterion='loo'); "
            f"Paper(criterion={method.criterion!r}) uses validation data."
        )
    if valid is None:
        raise ValueError(f"criterion={method.criterion!r} needs validation data: calibrate(x, y).")
