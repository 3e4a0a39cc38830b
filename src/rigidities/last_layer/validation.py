"""Calibration of a fit: one pass over validation (or training) data, and the report.

`Validation.gathered` passes batches through the model and gathers the residuals of their rows. What
all processes have gathered comes together on the first of them (`Validation.together`), where
`Validation.of_rows` chooses ridge, scale and noise with the package `calibration`, adds the usual
novelty and the scores of conformal rows, and makes the report. Every process gets the same report.

The other functions check and sort what a user passes to `LastLayerRigidity.calibrate`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
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
from ..calibration.residuals import Gathering, Residuals, mismatch
from ..calibration.search import search_report
from ..data.arrays import TARGET_KEYS
from ..data.batches import Batch
from ..data.sketch import RowSketch, row_hashes
from ..data.storage import Snapshot, unprefixed
from ..notices import notify
from ..posterior.posterior import Posterior
from .accumulation import Weighing
from .distributed import Job
from .error_bars import noise_variances
from .merging import combined
from .novelty import Alarm, references, upper
from .readout.reading import Reading, read, with_counts
from .readout.tap import AnyTap
from .statistics.statistics import Statistics

MOST = 1 << 15
"""Most rows that the full model is fitted to."""
UNJUDGED = (
    "It was not possible to check whether these rows are also in the training data: outputs have "
    "no input row of their own (atoms of structures), or batches are objects. Make sure that they "
    "are not."
)


@dataclass(frozen=True)
class ConformalChoices:
    """What a user asks of conformal intervals; as in `LastLayerRigidity.calibrate`.

    Attributes:
        conformal: Rows for conformal scores, the share of the validation rows to set aside for
            them, or None.
        groups: "bar", a function of batches, or None.
        merge_groups: Number of rows below which groups are merged; None for never.
    """

    conformal: Any
    groups: Any
    merge_groups: int | None


@dataclass(frozen=True)
class Validation:
    """The passes of one calibration, and what they need.

    Attributes:
        tap: Reads outputs and features off the model.
        statistics: What the fit has summed.
        posterior: The posterior in whose eigenbasis features are squared.
        weighing: Gives the rows' weights in the loss.
        wanted: What the user asks of the calibration.
        groups: callable(batch) -> labels of rows for conformal scores, if any.
        hashed: Whether rows keep their hashes, and the inputs of the calibration's head, so that
            some of them can be set aside.
        alarm: Measures distances in the layers that the fit has watched, if any.
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
        """Whether the full model is asked for, `Full`."""
        return self.wanted.criterion == AUTO

    def gathered(self, batches: Iterable[Batch], *, compared: bool = True) -> Gathering:
        """Residuals of rows and a sketch of the rows' hashes, from one pass over batches.

        Args:
            batches: The data.
            compared: Whether to count the rows that are also in the training data.

        Raises:
            ValueError: A batch cannot be used; the message names it.
        """
        gathering = Gathering(MOST if self.full else None, RowSketch())
        train_sketch = self.statistics.sketch
        for number, batch in enumerate(batches):
            try:
                hashes = self._add_batch(gathering, batch, hashed=compared or self.hashed)
            except ValueError as problem:
                raise ValueError(f"Batch {number}: {problem}") from problem
            if hashes is None:
                gathering.sketch.void()
                continue
            gathering.sketch.add(hashes)
            if compared and train_sketch.judges:
                gathering.count(hashes.numel(), train_sketch.shared(hashes))
        return gathering

    def _add_batch(self, gathering: Gathering, batch: Batch, *, hashed: bool) -> Tensor | None:
        """Pass one batch through the model and add its rows.

        Args:
            gathering: What the rows are added to.
            batch: The batch.
            hashed: Whether hashes of the input rows are wanted.

        Returns:
            The hashes; None where they are not wanted, or outputs have no input row of their own.
        """
        if self.alarm is None:
            reading = read(self.tap, batch)
            distances = None
        else:
            reading, distances = self.alarm.read(self.tap, batch)
        hashes = reading.hashes(batch) if hashed else None
        self._add(gathering, batch, reading, hashes, distances)
        return hashes

    def together(
        self,
        processes: Job,
        gatherings: tuple[Gathering | None, ...],
        choices: ConformalChoices,
        feature_rounding: float,
    ) -> CalibrationReport:
        """The report of the rows of all processes, the same on every process.

        Args:
            processes: The processes of the call, this one among them.
            gatherings: Rows gathered here: those to fit, those for conformal scores and those of
                the training data.
            choices: What is asked of conformal intervals.
            feature_rounding: The relative error of the features themselves. An error of the Gram
                from mixed precision below this is not worth a warning.
        """
        rows, conformal_rows, train_rows = (
            _gathered(processes, gathering) for gathering in gatherings
        )

        def make() -> CalibrationReport:
            return self.of_rows(rows, conformal_rows, train_rows, choices, feature_rounding)

        if processes.size == 1:
            return make()
        # Functions cannot be sent. Every process has its own, and puts it back.
        state = processes.shared(lambda: _snapshot(make()))
        report = CalibrationReport.from_state(state.header, state.tensors)
        if self.wanted.noise_function is None and self.groups is None:
            return report
        calibration = report.calibration.with_functions(self.wanted.noise_function, self.groups)
        return replace(report, calibration=calibration)

    def of_rows(
        self,
        rows: Gathering | None,
        conformal_rows: Gathering | None,
        train_rows: Gathering | None,
        choices: ConformalChoices,
        feature_rounding: float,
    ) -> CalibrationReport:
        """The report of gathered rows.

        Args:
            rows: Rows to fit.
            conformal_rows: Rows for conformal scores.
            train_rows: Rows of the training data.
            choices: What is asked of conformal intervals.
            feature_rounding: As in `together`.
        """
        fitted, scored = split_conformal(
            self.residuals(rows), self.residuals(conformal_rows), choices.conformal
        )
        train = self.residuals(train_rows)
        report = self.report(fitted, train)
        final = self.posterior.with_ridge(report.ridge).with_scale(report.scale)
        report = report.certified(final.doubt, feature_rounding)
        if self.alarm is not None:
            report = self._with_novelty(report, train if fitted is None else fitted)
        if fitted is not None and self.wanted.criterion != "loo":
            remarks = coverage_remarks(report, fitted, self.posterior.eigenvalues)
            report = replace(report, remarks=[*remarks, *report.remarks])
            report = self._with_mismatch(report, fitted)
        if fitted is not None and not self.wanted.left_out and not fitted.samples:
            report = replace(report, remarks=[*report.remarks, UNJUDGED])
        if scored is None:
            return report
        return self.with_conformal(report, scored, choices)

    def residuals(self, gathering: Gathering | None) -> Residuals | None:
        """The residuals of gathered rows, at least one or two; None if there was no pass."""
        if gathering is None:
            return None
        # With training rows of the fit beside it, a single row will do.
        least = 1 if self.full and self.statistics.sample is not None else 2
        return self._in_units(gathering.residuals(least=least))

    def report(self, residuals: Residuals | None, train: Residuals | None) -> CalibrationReport:
        """Choose ridge, scale and noise; see `LastLayerRigidity.calibrate`.

        Args:
            residuals: Residuals of the rows to fit; None for the full model from training rows.
            train: Residuals of training rows that the user passed, if any.
        """
        wanted = self.wanted
        posterior = self.posterior
        if wanted.ridge is not None:
            posterior.with_ridge(wanted.ridge)  # refuses a ridge that leaves a singular matrix
        zero_curvature = int(self.statistics.gram.zeros.sum())
        if self.full:
            train_residuals = self.sampled() if train is None else train
            return automatic_report(
                residuals,
                train_residuals,
                posterior.eigenvalues,
                posterior.with_ridge,
                wanted,
                evidence=self._evidence(),
                zero_curvature=zero_curvature,
                biases=self._count_columns(
                    residuals if train_residuals is None else train_residuals
                ),
            )
        assert residuals is not None
        score = None
        if wanted.criterion == "evidence" and wanted.ridge is None:
            if self.tap.weights is None:
                raise ValueError(
                    "Paper(criterion='evidence') needs the readout's weights, which features= does "
                    "not give. Use another criterion, or layer=."
                )
            score = self._evidence()
        return search_report(
            residuals,
            posterior.eigenvalues,
            posterior.with_ridge,
            wanted,
            evidence=score,
            zero_curvature=zero_curvature,
        )

    def with_conformal(
        self, report: CalibrationReport, rows: Residuals, choices: ConformalChoices
    ) -> CalibrationReport:
        """The report with conformal scores of rows that fitted nothing else."""
        calibration = report.calibration
        eigenvalues = self.posterior.eigenvalues
        cuts = None
        if choices.groups == "bar":
            # Groups by the size of the bar, cut at quantiles of the training rows' bars.
            sample = self.sampled()
            if sample is None:
                cuts = bar_cuts(None)
            else:
                train_prediction = rows_prediction(calibration, sample, eigenvalues, seen=True)
                cuts = bar_cuts(train_prediction.std)
        prediction = rows_prediction(calibration, rows, eigenvalues)
        conformal = Conformal.of(
            prediction,
            prediction.mean + rows.error,
            labels=rows.extra.get("labels"),
            cuts=cuts,
            function=self.groups,
            merge_below=choices.merge_groups,
        )
        all_remarks = [*report.remarks, *conformal.sentences]
        # `Paper` does not ask about early stopping by itself.
        early_stopping = self.wanted.early_stopping_remark
        if early_stopping and early_stopping not in all_remarks:
            all_remarks.append(early_stopping)
        return replace(
            report, calibration=replace(calibration, conformal=conformal), remarks=all_remarks
        )

    def _with_mismatch(self, report: CalibrationReport, rows: Residuals) -> CalibrationReport:
        """The report, with a warning where targets do not seem to belong to the rows' inputs."""
        sample = self.statistics.sample
        if sample is None:
            return report
        sample.settle()
        if not len(sample.hashes):
            return report
        sentence = mismatch(rows, sample.columns["mean"], sample.columns["residual"])
        if sentence:
            notify(sentence)
        return replace(report, mismatch=sentence)

    def _with_novelty(self, report: CalibrationReport, rows: Residuals | None) -> CalibrationReport:
        """The report with what is a usual distance in each layer, by rows of the calibration."""
        assert self.alarm is not None
        if rows is None:  # there are only rows that the fit kept, without what entered the layers
            return report
        distances = rows.extra["distances"].double()  # (n, L)
        usual = references(distances)
        # In float32, as the novelty of predictions.
        largest = (distances / usual).to(torch.float32).amax(1)
        finite = largest[largest.isfinite()]
        novelty_remarks = []
        if len(finite) < len(largest):
            novelty_remarks.append(
                f"{len(largest) - len(finite)} of {len(largest)} calibration rows have a missing "
                "value where no training row has one. Their novelty is infinite, and they are not "
                "used to find its usual range."
            )
        return replace(
            report,
            novelty=dict(zip(self.alarm.layers, usual.tolist(), strict=True)),
            novelty_usual=float(upper(finite, 0.99)) if len(finite) else 1.0,
            remarks=[*report.remarks, *novelty_remarks],
        )

    def _evidence(self) -> Callable[[Tensor], Tensor] | None:
        """Negative log evidence as a function of ridges; None where the full model lacks it."""
        gram = self.statistics.gram
        weights = self.tap.weights
        if self.full and (weights is None or gram.square is None or gram.cross is None):
            return None
        assert weights is not None
        return evidence(gram, self.posterior, weights, self.tap.biases)

    def _count_columns(self, rows: Residuals | None) -> Tensor | None:
        """Indices of the head's inputs that count what a readout sums.

        They are the columns of its biases, and the counts beside the features where it has none.
        """
        if self.tap.biases is None or rows is None:
            return None
        inputs = rows.extra["inputs"]
        beside_features = torch.arange(self.posterior.width, inputs.shape[-1])
        return torch.cat([self.tap.biases.cpu(), beside_features]).to(inputs.device)

    def _add(
        self,
        gathering: Gathering,
        batch: Batch,
        reading: Reading,
        hashes: Tensor | None,
        distances: Tensor | None,
    ) -> None:
        """Add errors, squared components in the posterior's eigenbasis and weights of a batch.

        Args:
            gathering: What the rows are added to.
            batch: The batch.
            reading: What the model gave for it.
            hashes: Hashes of its input rows, if known.
            distances: Squared distances of its samples in the layers, (N, L), if watched.
        """
        if batch.target is None:
            raise ValueError(
                "there is no target. Calibration needs (x, y), a mapping with one of "
                f"{', '.join(map(repr, TARGET_KEYS))}, or target=lambda b: ...."
            )
        target = reading.output_layout.target_rows(batch.target)
        require_within(target, self.wanted.support)
        features = reading.features.detach()
        mean = reading.output_layout.rows(reading.output.detach())
        error = target.to(torch.float64) - mean
        weight, importance = self.weighing(batch, reading, target)
        weight = self._weight_in_gram(weight, error)
        power = self.posterior.projections(features).square()
        if self.wanted.noise_function is None:
            noise_shape = self.wanted.noise.shape(mean, features)
        else:
            noise_shape = noise_variances(self.wanted.noise_function, batch, reading)

        columns = {"mean": mean}
        if distances is not None:
            rows_per_sample = len(mean) // max(1, len(distances))
            columns["distances"] = distances.repeat_interleave(rows_per_sample, 0)
        if self.full or self.hashed or self.groups is not None:
            columns["inputs"] = with_counts(features, reading.detached().counts)
        if self.hashed:
            if hashes is None:  # without input rows of their own, rows are known by their features
                hashes = row_hashes([features, target], len(features))
            assert hashes is not None
            columns["hashes"] = hashes.repeat_interleave(len(mean) // len(hashes))
        if self.groups is not None:
            labels = group_labels(self.groups, batch.raw, reading.output)
            columns["labels"] = reading.output_layout.rows(labels)
        gathering.add(error, power, weight, noise_shape, importance, **columns)

    def _weight_in_gram(self, weight: Tensor | None, error: Tensor) -> Tensor | None:
        """The weights of rows in the Gram, (n, 1 or K), which the units of targets belong to.

        Args:
            weight: The rows' weights in the loss, (n, 1 or K); None for ones.
            error: The rows' errors, (n, K).
        """
        units = self.statistics.gram_sums.units
        if units is None:
            return weight
        factors = units.factors.to(error).expand_as(error)
        return factors if weight is None else weight * factors

    def sampled(self) -> Residuals | None:
        """The training rows that the fit kept; None where there are none that could be used."""
        sample = self.statistics.sample
        if sample is None or self.wanted.noise_function is not None or not len(sample.hashes):
            return None
        rows = sample.rows
        power = self.posterior.projections(rows.features).square()
        gathering = Gathering(MOST)
        gathering.add(
            rows.residual,
            power,
            self._weight_in_gram(rows.weight, rows.residual),
            None,
            rows.importance,
            mean=rows.mean,
            inputs=with_counts(rows.features, rows.counts),
        )
        return self._in_units(gathering.residuals(least=1))

    def _in_units(self, residuals: Residuals) -> Residuals:
        """Residuals that know the units of their targets."""
        units = self.statistics.gram_sums.units
        if units is None:
            return residuals
        return replace(residuals, units=units.factors[None])


def _gathered(processes: Job, gathering: Gathering | None) -> Gathering | None:
    """What all processes have gathered, on the first of them; None on the others."""

    def pack() -> Snapshot | None:
        if gathering is None:
            return None
        header, tensors = gathering.state()
        return Snapshot(tensors, header)

    def unpack(snapshot: Snapshot | None) -> Gathering | None:
        if snapshot is None:
            return None
        sketch = RowSketch.from_state(unprefixed("sketch", snapshot.tensors))
        return Gathering.from_state(snapshot.header, snapshot.tensors, sketch)

    def merge(snapshots: Iterator[Snapshot | None]) -> Gathering | None:
        return combined(chain([gathering], map(unpack, snapshots)))

    return processes.collected(pack, merge)


def _snapshot(report: CalibrationReport) -> Snapshot:
    """A report without its functions, to be sent to other processes."""
    return Snapshot(report.tensors(), report.header())


def require_within(target: Tensor, support: Support | None) -> None:
    """Refuse a support that targets violate.

    Raises:
        ValueError: Targets lie outside the support.
    """
    low, high = support or (None, None)
    least = -math.inf if low is None else low
    largest = math.inf if high is None else high
    outside = int(((target < least) | (target > largest)).sum())
    if outside > 0:
        finite = target[target.isfinite()]
        raise ValueError(
            f"{outside} targets lie outside support=({low}, {high}): they range from "
            f"{float(finite.min()):.6g} to {float(finite.max()):.6g}. Widen it, or clean the data."
        )


def split_conformal(
    rows: Residuals | None, conformal_rows: Residuals | None, conformal: Any
) -> tuple[Residuals | None, Residuals | None]:
    """Rows that are left to be fitted, and rows for conformal scores.

    Args:
        rows: Validation rows.
        conformal_rows: Rows of other data for conformal scores, if there are any.
        conformal: The share of the validation rows to set aside, if it is a float.

    Raises:
        ValueError: There are no validation rows to take a share of.
    """
    if not isinstance(conformal, float):
        return rows, conformal_rows
    if rows is None:
        raise ValueError("conformal= as a share needs validation data: calibrate(x, y, ...).")
    is_aside = set_aside(rows.extra["hashes"], conformal)
    return rows.subset(~is_aside), rows.subset(is_aside)


def require_groups(groups: Any, conformal: Any, merge_groups: Any) -> None:
    """Refuse groups that are not valid, or that nothing would use.

    Raises:
        ValueError: An option is not valid, or needs another one; see `LastLayerRigidity.calibrate`.
    """
    if groups is None:
        if merge_groups is not None:
            raise ValueError("merge_groups= is for groups. Pass groups= as well, or leave it out.")
        return
    if merge_groups is not None:
        is_integer = isinstance(merge_groups, int) and not isinstance(merge_groups, bool)
        if not is_integer or merge_groups < 1:
            raise ValueError(
                "merge_groups must be the number of rows below which groups are merged, for "
                f"example 50, got {merge_groups!r}."
            )
    if groups != "bar" and not callable(groups):
        raise ValueError(f"groups must be 'bar' or callable(batch), got {groups!r}.")
    if conformal is None:
        raise ValueError(
            "groups= is for conformal intervals. Pass conformal= (rows or a share) as well."
        )


def calibration_data(criterion: str, valid: Any, train: Any) -> tuple[Any, Any]:
    """The data whose rows are fitted, and the training data beside them.

    Leave-one-out takes training data alone, which are then the rows to fit. The full model
    takes either or both, other criteria take validation data alone.

    Raises:
        ValueError: The criterion needs other data.
    """
    if criterion == "loo":
        if train is None or valid is not None:
            raise ValueError(
                "Paper(criterion='loo') uses the training data and no validation data: "
                "calibrate(train=(x, y), method=Paper(criterion='loo'))."
            )
        return train, None
    if criterion == AUTO:
        return valid, train
    if train is not None:
        raise ValueError(
            "train= is for Full and for Paper(criterion='loo'). "
            f"Paper(criterion={criterion!r}) uses validation data: calibrate(x, y)."
        )
    if valid is None:
        raise ValueError(f"Paper(criterion={criterion!r}) needs validation data: calibrate(x, y).")
    return valid, None
