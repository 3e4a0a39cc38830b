"""The state of a fit, and everything that changes it.

`FitState` is what a fit knows at one moment: the tie to the model, the statistics of the training
rows, the loss, and the calibration if there is one. It is frozen. `ReadoutFit` stands behind
`LastLayerRigidity` and owns the current state. Every change computes a new state beside the old one
and replaces the old one at the very end, so that an error or an interruption leaves everything as
it was. Changes that read data (`fit`, `partial_fit`, `forget`, `calibrate`, `conformalize`) proceed
in the same way: the data pass through the model batch by batch, the processes of a job put their
results together, and all agree before the new state takes the place of the old one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..calibration.calibration import Calibration
from ..calibration.conformal import Groups
from ..calibration.methods import Full, Method, NoiseFunction
from ..calibration.report import CalibrationReport
from ..data.batches import Batch, BatchFormat, Feed
from ..data.hashes import fingerprint
from ..data.storage import Snapshot, prefixed
from ..losses import NAMED, NO_ERROR_BARS, Loss, loss_name
from ..models.calling import Inputs, Source
from ..models.shadow import held_names, placement
from ..models.threads import Lock
from ..notices import NO_FIT, NotFittedError, notify
from ..posterior.posterior import Posterior
from ..prediction.noise import GivenNoise
from ..readout.copies import CopiedReadout, copied_readout
from ..readout.find import find_readout
from ..readout.reading import Reading, SampleWeight
from ..readout.readout import AnyReadout
from ..statistics.row_sketch import RowSketch
from ..statistics.statistics import Plan, Statistics
from .accumulation import Weighing, accumulated, peek, require_rows, settled
from .binding import Binding, UsersModel, held_still, model_fingerprint
from .calibration_rows import RowReader, of_all, report_on, report_with, require_data
from .distributed import Job, open_job
from .error_bars import ErrorBars
from .frozen import listens
from .gradients.loss import GradientLoss, gradient_scale, gradient_sums
from .merging import as_text, require_alike, require_apart
from .novelty.advice import suggestion
from .novelty.frozen_novelty import watch
from .novelty.novelty import Novelty
from .refit import Refitted, refitted

DEFAULT_RIDGE = 1e-6
"""Ridge before calibration, relative to the Gram's mean diagonal."""

UNCALIBRATED = (
    "The error bars are not calibrated: scale 1 and a default ridge are used. Call calibrate(x, y)."
)
STALE = "Data were added or removed after the calibration. Call calibrate(x, y) again."
VOID_GUARANTEE = " The guarantee of the intervals is void too: call conformalize(x, y) after it."

_LOSSES: dict[str, type[Any]] = {type(loss).__name__: type(loss) for loss in NAMED.values()}
"""Losses that a file can hold, by the names of their classes."""


@dataclass(frozen=True)
class Passing:
    """How calls go through their data.

    Attributes:
        batch_size: Rows per batch where the data are not batches already; None for the default.
        progress: Whether to show a bar; None shows one on a terminal only.
        process_group: The processes that make the call together; None for all of the job, False
            for this process alone.
    """

    batch_size: int | None = None
    progress: bool | None = None
    process_group: Any = None

    @property
    def silent(self) -> Passing:
        """The same without a progress bar."""
        return replace(self, progress=False)

    def shows_progress(self, processes: Job) -> bool | None:
        """Whether this process shows a bar. Unless told otherwise, only the first one does."""
        if self.progress is None and processes.rank > 0:
            return False
        return self.progress


_DEFAULT_PASSING = Passing()


@dataclass(frozen=True)
class FitState:
    """What a fit knows at one moment.

    Only its caches, of the posterior and the error bars, are filled later, so that any number of
    threads may read it.

    Attributes:
        binding: The tie to the model.
        statistics: The sums, hashes and sample of the training rows; nothing is added to them.
        weighing: The loss and the sample weights. None where they were functions and the state
            comes from a file, which cannot hold functions.
        novelty: What entered the layers in the training rows; None where no layer is watched.
        report: The last calibration; None before one.
        cached_posterior: The factorised Gram; None until it is first needed.
        calibration_sketch: A sketch of the rows that the calibration was fitted to, by which
            `conformalize` recognises them; None where it is not known, as after loading, and on all
            processes but the first.
        device: Where the statistics are.
        batch_format: What the batches of later calls consist of, beside their targets.
    """

    binding: Binding
    statistics: Statistics
    weighing: Weighing | None
    novelty: Novelty | None = None
    report: CalibrationReport | None = None
    cached_posterior: Posterior | None = None
    calibration_sketch: RowSketch | None = None
    device: torch.device = field(init=False)
    batch_format: BatchFormat = field(init=False)
    _bars: dict[torch.dtype, ErrorBars] = field(default_factory=dict, init=False, repr=False)
    _lock: Lock = field(default_factory=Lock, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", self.statistics.gram_sums.sums.device)
        batch_format = BatchFormat(
            whole=self.binding.user_model.source.forward is not None,
            inputs=self.statistics.inputs,
            derivative_target_key=_derivative_target_key(self.weighing),
            kind=self.statistics.kind,
            columns=self.statistics.columns,
        )
        object.__setattr__(self, "batch_format", batch_format)

    @property
    def calibration(self) -> Calibration:
        """The calibration; before one, scale 1, no noise and a ridge relative to the Gram."""
        if self.report is not None:
            return self.report.calibration
        gram = self.statistics.gram
        ridge = DEFAULT_RIDGE * float(gram.diagonal.mean())
        return Calibration.unscaled(ridge, self.statistics.targets, gram.device)

    @property
    def gradient_scale(self) -> Tensor:
        """The scale of derivatives: calibrated on their targets, else `scale`."""
        if self.report is not None and self.report.gradient_scale is not None:
            return self.report.gradient_scale
        return self.calibration.scale

    @property
    def posterior(self) -> Posterior:
        """The posterior, factorised once, when first needed."""
        with self._lock:
            if self.cached_posterior is None:
                calibration = self.calibration
                unscaled = Posterior.from_gram(self.statistics.gram, ridge=calibration.ridge)
                posterior = unscaled.with_scale(calibration.scale)
                # The class is frozen for its readers; this only fills a cache, under the lock.
                object.__setattr__(self, "cached_posterior", posterior)
            assert self.cached_posterior is not None
            return self.cached_posterior

    def bars(self, readout: AnyReadout) -> ErrorBars:
        """The error bars in the precision of the readout's model."""
        _, dtype = readout.placement
        if dtype not in self._bars:
            with self._lock:
                self._bars[dtype] = ErrorBars.of(self.posterior, self.calibration, dtype)
        return self._bars[dtype]

    @property
    def usual_novelty(self) -> Tensor | None:
        """The usual squared distance in each layer, (L,); None if no rows have shown it yet."""
        if self.novelty is None or self.report is None or not self.report.novelty:
            return None
        usual = [self.report.novelty[name] for name in self.novelty.names]
        return torch.tensor(usual, dtype=torch.float64, device=self.device)

    def read(self, readout: AnyReadout, batch: Batch) -> tuple[Reading, Tensor | None]:
        """What the model gives for a batch, and the novelty of its N samples if it is known."""
        usual = self.usual_novelty
        if self.novelty is None or usual is None:
            return readout(batch), None
        reading, scores = self.novelty.score(readout, batch, usual)
        return reading, scores.amax(1)  # over the layers

    @property
    def probe(self) -> Inputs | None:
        """A few inputs of the fit, in the model's precision; None where none were kept."""
        probes = self.binding.probes
        return None if probes is None else probes.placed(self.binding.user_model.model)

    def copied_readout(self, readout: AnyReadout, outputs: Sequence[str]) -> CopiedReadout:
        """A copy of the readout for a frozen module, with hooks where its bars listen to novelty.

        Args:
            readout: The readout.
            outputs: Names of what the frozen module gives.

        Raises:
            ValueError: The readout or the novelty cannot be copied.
        """
        model = self.binding.user_model.model
        probe = self.probe
        copied = copied_readout(model, readout, self.statistics.targets, probe)
        usual = self.usual_novelty
        if self.novelty is not None and usual is not None and listens(self.calibration, outputs):
            watch(copied, readout, self.novelty, usual, probe)
        return copied

    def require_novelty(self) -> Novelty:
        """What entered the layers in the training rows.

        Raises:
            ValueError: The fit has not watched the layers.
        """
        if self.novelty is None:
            raise ValueError(
                "This fit did not record what enters the layers. Call fit(x, y, novelty=True), "
                "then calibrate(x, y)."
            )
        return self.novelty

    def properties(self, loss: Any) -> dict[str, Any]:
        """The properties that fits to parts of the data must agree in; see `merging.REMEDIES`.

        Args:
            loss: The loss and weights, in any form that can be compared.
        """
        gram = self.statistics.gram
        source = self.binding.user_model.source
        readout = {
            **self.binding.header(),
            "forward": as_text(source.forward),
            "features": as_text(source.features),
            "output": as_text(source.output),
            "width": gram.width,
            "targets": self.statistics.targets,
        }
        fingerprint_of_weights = readout.pop("fingerprint")
        readout.pop("weights", None)  # the names of those that the fingerprint is of
        readout.pop("differentiates", None)  # it says how the model is run, not what is read
        watched_layers = [] if self.novelty is None else self.novelty.header()["layers"]
        return {
            # By name, so that an error shows only the layers that differ.
            "novelty": {layer["name"]: layer for layer in watched_layers},
            "weights": fingerprint_of_weights,
            "readout": readout,
            "loss": loss,
            "precision": gram.precision,
            "data": [self.statistics.inputs, self.statistics.kind],
        }

    def require_error_bars(self) -> None:
        """Refuse a fit whose loss is not one of regression, so that it has no error bars.

        Raises:
            ValueError: The loss is not smallest where the output equals the target.
        """
        if self.statistics.label_loss is not None:
            raise ValueError(NO_ERROR_BARS.format(self.statistics.label_loss))

    def require_weighing(self, name: str = "this fit") -> Weighing:
        """The loss and weights of the fit.

        Raises:
            ValueError: They were functions, and the state comes from a file.
        """
        if self.weighing is None:
            raise ValueError(
                f"The loss or weights of {name} were functions, which a file cannot "
                "contain. Load it with the same functions: LastLayerRigidity.load(path, model, "
                "loss=..., sample_weight=..., gradient_loss=...)."
            )
        return self.weighing

    def with_rows(self, statistics: Statistics, novelty: Novelty | None) -> FitState:
        """The state after rows were added or removed, which makes the calibration stale."""
        report = None
        if self.report is not None:
            report = replace(self.report, stale=True)
        return replace(
            self, statistics=statistics, novelty=novelty, report=report, cached_posterior=None
        )

    def to(self, device: torch.device) -> FitState:
        """The same state on another device; statistics stay float64."""
        report = self.report
        if report is not None:
            report = report.to(device)
        posterior = self.cached_posterior
        if posterior is not None:
            posterior = posterior.to(device)
        return replace(
            self,
            statistics=self.statistics.to(device),
            novelty=None if self.novelty is None else self.novelty.to(device),
            report=report,
            cached_posterior=posterior,
        )

    def snapshot(self, *, probes: bool = True, rows: bool = False) -> Snapshot:
        """Everything but the model, as tensors and a header.

        Args:
            probes: Whether a few inputs of the fit are included.
            rows: Whether the sample of training rows is included.

        Raises:
            ValueError: `rows` is set, and the fit keeps none.
        """
        if rows and self.statistics.kept_rows is None:
            raise ValueError(
                "This fit keeps no rows: it had no targets or keep_rows=0, or was loaded from a "
                "file without them. Call fit(x, y) again, or save with rows=False."
            )
        binding = self.binding.snapshot(probes=probes)
        statistics = self.statistics.snapshot(rows=rows)
        tensors = {**statistics.tensors, **binding.tensors}
        header = {
            "kind": "fit",
            **statistics.header,
            "loss": _weighing_header(self.weighing),
            **binding.header,
        }
        if self.novelty is not None:
            tensors.update(prefixed("novelty", self.novelty.state()))
            header["novelty"] = self.novelty.header()
        if self.report is not None:
            tensors.update(self.report.tensors())
            header.update(self.report.header())
        return Snapshot(tensors, header)

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot, user_model: UsersModel) -> FitState:
        """The state that a snapshot holds, tied to a model."""
        device = user_model.placement[0]
        snapshot = snapshot.to(device)
        header = snapshot.header
        statistics = Statistics.from_snapshot(snapshot, device)
        report = None
        if header.get("report") is not None:
            report = CalibrationReport.from_state(header, snapshot.tensors)
        return cls(
            binding=Binding.from_snapshot(user_model, snapshot),
            statistics=statistics,
            weighing=_weighing_from_header(header["loss"]),
            novelty=snapshot.part("novelty", Novelty.from_state),
            report=report,
        )


class ReadoutFit:
    """The fit behind `LastLayerRigidity`: its current state, and all that changes it.

    Changes run one after the other, even if several threads make them. During a change, other
    threads read the state before it. An error or interruption leaves that state in place.

    Args:
        user_model: The user's model, how it is called, and where its readout is.
        target: callable(batch) -> target, where batches are not of a known form.

    Attributes:
        user_model: As given.
        model: The user's model.
        target: As given.
        state: What the fit knows; None before a fit.
    """

    def __init__(self, user_model: UsersModel, target: Callable[[Any], Tensor] | None) -> None:
        self.user_model = user_model
        self.model = user_model.model
        self.target = target
        self.state: FitState | None = None
        self._notices_given: set[str] = set()
        self._change_lock = Lock()  # held during a whole change
        self._state_lock = Lock()  # held while the state is replaced
        self._is_changing = False

    # Reading the state.

    def require_state(self, whose: str = "") -> FitState:
        """The state. Where there is no fit, the error names `whose` fit is missing."""
        if self.state is None:
            raise NotFittedError(NO_FIT.format(f"fit(x, y){whose}"))
        return self.state

    def ready(self, *, error_bars: bool = False) -> tuple[AnyReadout, FitState]:
        """The readout and the state for a prediction.

        It warns once where the error bars are uncalibrated or stale.

        Args:
            error_bars: Whether error bars of the target are wanted, which not every loss has. The
                posterior alone suffices for everything else.

        Raises:
            ValueError: There is no fit, the model has changed since, or there are no error bars.
        """
        state = self.state or self.require_state()  # which raises
        is_for_labels = state.statistics.label_loss is not None
        if error_bars and is_for_labels:
            state.require_error_bars()
        readout = state.binding.current()
        device, _ = readout.placement
        if state.device != device:
            state = self.on_device()
            readout = state.binding.current()
        if is_for_labels:
            return readout, state  # it cannot be calibrated, and a likelihood has scale 1
        if state.report is None:
            self.notify_once("uncalibrated", UNCALIBRATED)
        elif state.report.stale:
            has_guarantee = state.report.calibration.conformal is not None
            self.notify_once("stale", STALE + VOID_GUARANTEE if has_guarantee else STALE)
        return readout, state

    def feed(self, passing: Passing = _DEFAULT_PASSING, weighing: Weighing | None = None) -> Feed:
        """How data reach the model.

        Args:
            passing: Rows per batch, and whether there is a progress bar.
            weighing: The loss; by default that of the fit.
        """
        state = self.state
        if state is None:
            # A user's forward= takes the whole batch as its one input.
            batch_format = BatchFormat(whole=self.user_model.source.forward is not None)
        else:
            batch_format = state.batch_format
        batch_format = replace(batch_format, target=self.target)
        if weighing is not None:
            key = _derivative_target_key(weighing)
            batch_format = replace(batch_format, derivative_target_key=key)
        return Feed(self.model, batch_format, passing.batch_size, passing.progress)

    def batches(
        self,
        data: Any,
        call: str,
        passing: Passing,
        once: bool = False,
    ) -> Iterator[Batch]:
        """Batches of data whose targets are ignored.

        Args:
            data: What the user gave.
            call: The name of the user's call, for messages.
            passing: How to go through them.
            once: Whether each row comes once, whatever a distributed sampler repeats.
        """
        return self.feed(passing).unlabelled()(data, call, once=once)

    def on_device(self) -> FitState:
        """The state, brought to the model's device first."""
        state = self.require_state()
        device = placement(self.model)[0]
        if state.device == device:
            return state
        with self._state_lock:
            if self.state is state:  # otherwise another thread has replaced it meanwhile
                self.state = state.to(device)
            return self.require_state()

    def notify_once(self, key: str, message: str) -> None:
        """Warn, unless the notice of this key was given before."""
        if key not in self._notices_given:
            self._notices_given.add(key)
            notify(message)

    # Changing the rows.

    def fit(
        self,
        train: Any,
        weighing: Weighing,
        plan: Plan,
        passing: Passing,
        *,
        with_novelty: bool,
    ) -> None:
        """Accumulate the statistics of the training data; see `LastLayerRigidity.fit`."""
        if not isinstance(with_novelty, bool):
            raise ValueError(f"novelty must be True or False, got {with_novelty!r}.")

        # The model may be moved until this call has the fit to itself: its device is read after.
        with (
            self._exclusive(),
            open_job(passing.process_group, "fit", placement(self.model)[0]) as processes,
        ):
            if processes.size > 1:
                processes.properties = self._properties_before_fit(weighing, plan, with_novelty)
            # The form of the data is learnt anew: it may be another one than in an earlier fit.
            batch_format = BatchFormat(
                whole=self.user_model.source.forward is not None,
                target=self.target,
                derivative_target_key=_derivative_target_key(weighing),
            )
            progress = passing.shows_progress(processes)
            feed = Feed(self.model, batch_format, passing.batch_size, progress)
            first, batches = peek(feed(train, "fit", any_order=True))
            binding = None
            statistics = None
            novelty = None
            if first is not None:
                found_readout = find_readout(
                    self.model, self.user_model.source, self.user_model.layer, first
                )
                if found_readout.notice:
                    notify(found_readout.notice)
                if with_novelty:
                    novelty = Novelty.begin(found_readout.readout, first)
                with held_still(self.model):
                    statistics = accumulated(
                        found_readout.readout,
                        batches,
                        weighing,
                        plan,
                        novelty=novelty,
                        first_reading=found_readout.reading,
                    )
                binding = Binding.of(self.user_model, found_readout)
            if processes.size > 1:
                binding, statistics = self._fit_of_all(
                    processes, binding, statistics, novelty, weighing
                )
            if with_novelty:
                novelty = processes.novelty(novelty)
            statistics = settled(statistics)
            assert binding is not None
            if self.target is None:
                statistics.warn_of_missing_targets()
            if novelty is not None:
                novelty.require_finite()
            state = FitState(binding, statistics, weighing, novelty)
            processes.agree()
            self._replace_state(state)

    def _fit_of_all(
        self,
        processes: Job,
        binding: Binding | None,
        statistics: Statistics | None,
        novelty: Novelty | None,
        weighing: Weighing,
    ) -> tuple[Binding, Statistics]:
        """The binding of the first process that had data, and the statistics of all processes.

        Args:
            processes: The processes of the job.
            binding: This process's tie to the model; None where it had no rows.
            statistics: The statistics of this process's rows; None where it had none.
            novelty: What entered the layers in these rows; None where none are watched.
            weighing: The loss and weights.
        """
        # This process's binding, with the properties that must agree with those of others.
        description = None
        if statistics is not None and binding is not None:
            state = FitState(binding, statistics, weighing, novelty)
            description = (binding.snapshot(), state.properties(as_text(weighing)))
        bindings: dict[int, Snapshot] = {}
        properties = []
        for rank, other in enumerate(processes.gathered(description)):
            if other is not None:
                bindings[rank], properties_of_rank = other
                properties.append(properties_of_rank)
        if not bindings:
            require_rows(None)
        require_alike(properties, [f"Rank {rank}" for rank in bindings])
        statistics_of_all = require_rows(processes.statistics(statistics))

        first_rank = min(bindings)
        first = bindings[first_rank]
        # A process without data has found no readout. The others take over the first one's binding
        # where it brings probes, so that all of them keep the same probes.
        is_other_rank = processes.rank != first_rank
        if binding is None or (is_other_rank and "probes" in first.header):
            binding = Binding.from_snapshot(self.user_model, first)
        binding.current()  # refuses a model that differs from the first process's
        return binding, statistics_of_all

    def partial_fit(self, data: Any, passing: Passing) -> None:
        """Add rows to the fit."""
        group = passing.process_group
        with self._exclusive(), self.job(group, "partial_fit", options=True) as processes:
            readout, state = self._checked_state()
            weighing = state.require_weighing()
            batches = self._labelled_batches(data, "partial_fit", weighing, passing, processes)
            fitted = state.statistics
            plan = fitted.plan(fitted.gram.precision)

            # Rows of one process go straight into a copy of the statistics.
            into = fitted.clone() if processes.size == 1 else None
            added_novelty = None if state.novelty is None else state.novelty.empty()
            with held_still(self.model):
                statistics = accumulated(
                    readout, batches, weighing, plan, into=into, novelty=added_novelty
                )
            if processes.size > 1:
                added = require_rows(processes.statistics(statistics))
                statistics = fitted.clone().merge(added)
            statistics = settled(statistics)
            novelty = state.novelty
            if novelty is not None:
                added_novelty = processes.novelty(added_novelty)
                assert added_novelty is not None
                novelty = novelty.clone().merge(added_novelty)
                novelty.require_finite()
            processes.agree()
            self._replace_state(state.with_rows(statistics, novelty))

    def forget(self, data: Any, *, check: bool, passing: Passing) -> None:
        """Remove rows from the fit; `check` refuses rows that are not in it."""
        group = passing.process_group
        with self._exclusive(), self.job(group, "forget", options=check) as processes:
            readout, state = self._checked_state()
            weighing = state.require_weighing()
            batches = self._labelled_batches(data, "forget", weighing, passing, processes)
            fitted = state.statistics

            plan = fitted.plan("auto")
            removed_novelty = None if state.novelty is None else state.novelty.empty()
            with held_still(self.model):
                removed = accumulated(readout, batches, weighing, plan, novelty=removed_novelty)
            removed = require_rows(processes.statistics(removed))
            statistics = fitted.without(removed, check=check)
            novelty = state.novelty
            if novelty is not None:
                removed_novelty = processes.novelty(removed_novelty)
                assert removed_novelty is not None
                novelty = novelty.without(removed_novelty)
            processes.agree()
            self._replace_state(state.with_rows(statistics, novelty))

    def merge(self, others: Mapping[str, ReadoutFit], *, check: bool) -> None:
        """Add the rows of other fits, each under its name in errors."""
        with self._exclusive():
            states = {"this fit": self.on_device()}
            for name, other in others.items():
                states[name] = other.require_state(f" of {name}")
            self._replace_state(_merged(states.items(), check=check))

    # Changing the calibration.

    def calibrate(
        self,
        valid: Any,
        train: Any,
        method: Method,
        early_stopped: bool | None,
        passing: Passing,
    ) -> None:
        """Choose ridge, scale, noise and distribution; see `LastLayerRigidity.calibrate`."""
        options = as_text([method, early_stopped])
        group = passing.process_group
        with self._exclusive(), self.job(group, "calibrate", options) as processes:
            self.require_state().require_error_bars()
            weighing = self.require_state().require_weighing()
            require_data(method, valid, train)
            # Leave-one-out judges the training rows themselves.
            left_out = not isinstance(method, Full) and method.criterion == "loo"
            judged_data = train if left_out else valid
            # Derivatives are calibrated where their targets are known.
            gradient_loss = weighing.gradients
            if gradient_loss is not None and gradient_loss.target is None:
                gradient_loss = None
            if gradient_loss is not None and isinstance(judged_data, Iterator):
                judged_data = list(judged_data)  # they are read a second time below
            readout, state = self._checked_state()
            reader = RowReader(
                readout,
                state.statistics,
                state.posterior,
                weighing,
                noise=method.noise_class,
                noise_function=method.noise_function,
                support=method.support,
                full=isinstance(method, Full),
                novelty=state.novelty,
            )
            dtype = placement(self.model)[1]

            judged = None
            training = None
            hashed = processes.size > 1  # to find rows that several processes have
            if judged_data is not None:
                judged = reader.collected(
                    self._labelled_batches(judged_data, "calibrate", weighing, passing, processes),
                    compared=not left_out,
                    hashed=hashed,
                )
            if train is not None and not left_out:
                training = reader.collected(
                    self._labelled_batches(train, "calibrate", weighing, passing, processes),
                    compared=False,
                    hashed=hashed,
                )
            judged = of_all(processes, judged)
            training = of_all(processes, training)

            report: CalibrationReport | None = None
            if processes.rank == 0:
                report = report_on(
                    method,
                    reader,
                    reader.table(judged, trained=left_out),
                    reader.table(training, trained=True),
                    early_stopped=early_stopped,
                    # A feature is rounded a few times on its way through the model.
                    feature_rounding=4 * torch.finfo(dtype).eps,
                )
                if state.novelty is None:
                    sentence = suggestion(readout, state.probe)
                    if sentence:
                        report = replace(report, remarks=[*report.remarks, sentence])
            report = _report_of_first(processes, report, method.noise_function, None)
            for notice in report.notices:
                notify(notice)
            posterior = state.posterior.with_ridge(report.ridge).with_scale(report.scale)
            if gradient_loss is not None:
                sums = gradient_sums(
                    readout,
                    self._labelled_batches(judged_data, "calibrate", weighing, passing, processes),
                    posterior,
                    dtype,
                    gradient_loss,
                )
                scale = _gradient_scale_of_all(processes, sums)
                report = replace(report, gradient_scale=scale.to(report.scale.device))
            processes.agree()
            calibration_sketch = None
            if judged is not None and not left_out:
                calibration_sketch = judged.sketch
                calibration_sketch.settle()
            self._replace_state(
                replace(
                    state,
                    report=report,
                    cached_posterior=posterior,
                    calibration_sketch=calibration_sketch,
                )
            )
            self._notices_given.discard("stale")

    def conformalize(self, data: Any, groups: str | Groups | None, passing: Passing) -> None:
        """Guarantee the coverage of intervals; see `LastLayerRigidity.conformalize`."""
        if groups is not None and groups != "bar" and not callable(groups):
            raise ValueError(f"groups must be 'bar' or callable(batch), got {groups!r}.")
        with (
            self._exclusive(),
            self.job(passing.process_group, "conformalize", as_text(groups)) as processes,
        ):
            self.require_state().require_error_bars()
            weighing = self.require_state().require_weighing()
            readout, state = self._checked_state()
            if state.report is None:
                raise ValueError(
                    "There is no calibration yet: call calibrate(x, y) first, then conformalize "
                    "with rows that were used for neither."
                )
            if state.report.stale:
                raise ValueError(
                    "Data were added or removed after the calibration: call calibrate(x, y) "
                    "again, then conformalize."
                )
            if data is None:
                raise ValueError("Conformal intervals need rows of their own: conformalize(x, y).")
            report = state.report
            noise = report.calibration.noise
            noise_function = None
            if isinstance(noise, GivenNoise):
                noise_function = noise.known_function()
            group_function = groups if callable(groups) else None
            reader = RowReader(
                readout,
                state.statistics,
                state.posterior,
                weighing,
                noise=type(noise),
                noise_function=noise_function,
                support=report.calibration.support,
                full=report.method == "full",
                groups=group_function,
                novelty=state.novelty,
            )
            batches = self._labelled_batches(data, "conformalize", weighing, passing, processes)
            collector = reader.collected(batches, compared=True, hashed=True)
            collector_of_all = of_all(processes, collector)

            used_twice = 0.0
            if collector_of_all is not None and state.calibration_sketch is not None:
                collector_of_all.sketch.settle()
                hashes = collector_of_all.sketch.hashes
                used_twice = state.calibration_sketch.shared(hashes) / max(1, len(hashes))
            new_report: CalibrationReport | None = None
            if processes.rank == 0:
                new_report = report_with(
                    report,
                    reader,
                    reader.conformal_table(collector_of_all),
                    groups,
                    used_twice=used_twice,
                )
            report = _report_of_first(processes, new_report, noise_function, group_function)
            for notice in report.notices:
                notify(notice)
            processes.agree()
            self._replace_state(replace(state, report=report))

    def refit(self, valid: Any, *, add: bool, passing: Passing) -> tuple[ReadoutFit, Refitted]:
        """The fit of a copy of the model with another readout; see `LastLayerRigidity.refit`."""
        # Without rows to judge by, nothing is exchanged between processes.
        group = False if valid is None else passing.process_group
        with self.job(group, "refit", options=add) as processes:
            _, state = self._checked_state()
            weighing = state.require_weighing()

            def valid_batches() -> Iterator[Batch]:
                return self._labelled_batches(valid, "refit", weighing, passing, processes)

            binding, statistics, report = refitted(
                state.binding,
                state.statistics,
                state.posterior,
                weighing,
                None if valid is None else valid_batches,
                add=add,
                processes=processes,
            )
        fit = ReadoutFit(binding.user_model, self.target)
        # What enters the layers does not depend on the readout, but the rows of `valid` were not
        # watched: a novelty of some of the rows would be wrong for all.
        has_new_rows = add and valid is not None
        novelty = None if has_new_rows else state.novelty
        fit.state = FitState(binding, statistics, weighing, novelty)
        return fit, report

    # Files, and the functions that files cannot hold.

    def restore(self, snapshot: Snapshot | None) -> None:
        """Replace the state by that of a snapshot; None for no fit."""
        with self._exclusive():
            if snapshot is None:
                self._replace_state(None)
                return
            with snapshot.opened():
                state = FitState.from_snapshot(snapshot, self.user_model)
            self._replace_state(state)

    def set_weighing(
        self,
        loss: Loss | None,
        sample_weight: SampleWeight | None,
        gradients: GradientLoss | None,
    ) -> None:
        """Set the loss and weights that a file could not hold; see `LastLayerRigidity.load`.

        Raises:
            ValueError: The file holds others, or functions of the fit are still missing.
        """
        with self._exclusive():
            state = self.require_state()
            known = state.weighing
            if known is not None:
                has_same_loss = loss is None or loss == known.loss
                has_same_gradients = gradients is None or gradients == known.gradients
                if has_same_loss and has_same_gradients and sample_weight is None:
                    return
                raise ValueError(
                    f"The loss of this fit is already known: {loss_name(known.loss)}, "
                    f"gradient_loss={known.gradients}, no sample_weight. Load without loss=, "
                    "sample_weight= and gradient_loss=. To use another loss, call fit again."
                )
            if loss is None:
                raise ValueError(
                    "A file cannot contain functions, and the loss or weights of this fit were "
                    "some. Pass the whole of them to load, also loss= (loss='mse' if it was that)."
                )
            self._replace_state(replace(state, weighing=Weighing(loss, sample_weight, gradients)))

    def set_functions(self, noise: NoiseFunction | None, groups: Groups | None) -> None:
        """Set the functions of the calibration that a file could not hold."""
        with self._exclusive():
            state = self.require_state()
            if state.report is None:
                raise ValueError("This fit is not calibrated. Load it without noise= and groups=.")
            calibration = state.report.calibration.with_functions(noise, groups)
            report = replace(state.report, calibration=calibration)
            self._replace_state(replace(state, report=report))

    # Helpers of all changes.

    @contextmanager
    def job(self, process_group: Any, call: str, options: Any) -> Iterator[Job]:
        """The processes that make a call on an existing fit together.

        They must agree in the model, the loss, the rows and the calibration of the fit.

        Args:
            process_group: As in `Passing`.
            call: The name of the call.
            options: The options of the call, in which they must agree too; True if it has none.
        """
        with open_job(process_group, call, placement(self.model)[0]) as processes:
            if processes.size > 1:
                processes.properties = {**self._properties_of_fit(call), "options": options}
            yield processes

    def _properties_of_fit(self, call: str) -> dict[str, Any]:
        """The properties that the fits of all processes must agree in for a call."""
        state = self.require_state()
        has_kept_rows = state.statistics.kept_rows is not None
        uncalibrated = replace(state, report=None).snapshot(probes=False, rows=has_kept_rows)
        properties = state.properties(as_text(state.weighing))
        properties["rows"] = fingerprint(uncalibrated.tensors.items())
        properties["calibration"] = None
        if state.report is not None and call != "calibrate":  # which replaces the calibration
            report_tensors = state.report.tensors()
            report_text = as_text(state.report.header())
            properties["calibration"] = [fingerprint(report_tensors.items()), report_text]
        return properties

    def _properties_before_fit(
        self, weighing: Weighing, plan: Plan, with_novelty: bool
    ) -> dict[str, Any]:
        """The properties that the processes of a new fit must agree in, even without any rows."""
        source = self.user_model.source
        readout = {
            "layer": self.user_model.layer,
            "target": as_text(self.target),
            "forward": as_text(source.forward),
            "features": as_text(source.features),
            "output": as_text(source.output),
        }
        return {
            "weights": model_fingerprint(self.model, held_names(self.model)),
            "readout": readout,
            "loss": as_text(weighing),
            "precision": plan.precision,
            "sample": plan.keep_rows,
            "novelty": with_novelty,
        }

    def _labelled_batches(
        self, data: Any, call: str, weighing: Weighing, passing: Passing, processes: Job
    ) -> Iterator[Batch]:
        """Batches of data with their targets, in any order."""
        shown = replace(passing, progress=passing.shows_progress(processes))
        return self.feed(shown, weighing)(data, call, any_order=True)

    def _checked_state(self) -> tuple[AnyReadout, FitState]:
        """The readout and the state, after a thorough look at the model's weights and outputs."""
        state = self.on_device()
        return state.binding.current(thorough=True), state

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Let one change run at a time.

        A change inside another one, in the same thread, would be lost, and is refused.
        """
        with self._change_lock:
            if self._is_changing:
                raise ValueError(
                    "fit, partial_fit, forget, merge, calibrate or conformalize was called while "
                    "another of these calls was running, from its data or functions. Let one call "
                    "end before the next begins."
                )
            self._is_changing = True
            try:
                yield
            finally:
                self._is_changing = False

    def _replace_state(self, state: FitState | None) -> None:
        with self._state_lock:
            self.state = state


def merge_files(paths: Sequence[Path], out: Path, say: Callable[[str], None], check: bool) -> None:
    """Write the fit to the rows of all files' fits; no model is needed.

    Args:
        paths: Files of fits.
        out: The file to write.
        say: Called with a line of text about each file.
        check: Whether fits that share a row are refused.
    """
    no_model = UsersModel(nn.Identity(), Source(), None)

    def read() -> Iterator[tuple[str, FitState]]:
        # One file at a time is in memory.
        for path in paths:
            snapshot = Snapshot.read(path, holds="fit")
            with snapshot.opened():
                state = FitState.from_snapshot(snapshot, no_model)
            rows = state.statistics.gram.count
            hashed = state.statistics.sketch.share
            say(f"{path}: {rows:,} rows, {hashed:.1%} of them known by hash")
            yield str(path), state

    merged = _merged(read(), check=check)
    merged.snapshot(rows=merged.statistics.kept_rows is not None).write(out)
    say(f"Wrote {out}: {merged.statistics.gram.count:,} rows. Load it, then calibrate(x, y).")


def _merged(states: Iterable[tuple[str, FitState]], *, check: bool) -> FitState:
    """The first state with the rows of all others.

    Args:
        states: Pairs of a name for errors and a state.
        check: Whether states that share a row are refused.
    """
    remaining = iter(states)
    first_name, first = next(remaining)
    statistics = first.statistics.clone()
    novelty = None if first.novelty is None else first.novelty.clone()
    sketches = {first_name: first.statistics.sketch}
    for name, other in remaining:
        properties = []
        for state_name, state in ((first_name, first), (name, other)):
            weighing = state.require_weighing(state_name)
            properties.append(state.properties(vars(weighing)))
        require_alike(properties, [first_name, name])
        statistics.merge(other.statistics)
        if novelty is not None and other.novelty is not None:
            novelty.merge(other.novelty)
        sketches[name] = other.statistics.sketch
    if check:
        require_apart(sketches)
    if statistics.kept_rows is None and statistics.gram.square is not None:
        notify(
            "Not every part keeps a sample of its rows, so the merged fit keeps none and "
            "calibrate() can only use validation rows. Save each part with save(path, rows=True)."
        )
    return first.with_rows(statistics, novelty)


def _derivative_target_key(weighing: Weighing | None) -> str | None:
    """The key of an entry of a batch that holds targets of derivatives, and is no input."""
    if weighing is None or weighing.gradients is None:
        return None
    return weighing.gradients.derivative_target_key


def _report_of_first(
    processes: Job,
    report: CalibrationReport | None,
    noise: NoiseFunction | None,
    groups: Groups | None,
) -> CalibrationReport:
    """The report that the first process has made, on every process; only that one has its notices.

    Functions cannot be sent. Every process has its own, of the noise and of groups, and puts it
    back.

    Args:
        processes: The processes of the call.
        report: The report; None on all processes but the first.
        noise: The function of the noise, if there is one.
        groups: The function of conformal groups, if there is one.
    """
    if processes.size == 1:
        assert report is not None
        return report
    part = None
    notices: tuple[str, ...] = ()
    if report is not None:
        part = Snapshot(report.tensors(), report.header())
        notices = report.notices
    state = processes.from_first(part)
    report = replace(CalibrationReport.from_state(state.header, state.tensors), notices=notices)
    if noise is None and groups is None:
        return report
    return replace(report, calibration=report.calibration.with_functions(noise, groups))


def _gradient_scale_of_all(processes: Job, sums: Tensor) -> Tensor:
    """The scale of derivatives, which the first process computes from the sums of all."""
    sums_of_all = [process_sums.cpu() for process_sums in processes.collected(sums)]
    scale = None
    if processes.rank == 0:
        scale = gradient_scale(sums_of_all)
    return processes.from_first(scale)


def _weighing_header(weighing: Weighing | None) -> dict[str, Any] | None:
    """The loss and weights as a file holds them; None where any of them is a function."""
    if weighing is None or weighing.sample_weight is not None:
        return None
    name = type(weighing.loss).__name__
    if name not in _LOSSES:
        return None
    header = {"name": name, "settings": vars(weighing.loss)}
    if weighing.gradients is not None:
        settings = vars(weighing.gradients)
        if any(callable(value) for value in settings.values()):
            return None
        header["gradients"] = settings
    return header


def _weighing_from_header(header: dict[str, Any] | None) -> Weighing | None:
    """The loss and weights that a file holds; None where they were functions."""
    if header is None:
        return None
    name = header["name"]
    if name not in _LOSSES:
        raise ValueError(
            f"The loss {name!r} of this file is not known here, only {', '.join(_LOSSES)}."
        )
    loss: Loss = _LOSSES[name](**header["settings"])
    gradients = None
    if header.get("gradients") is not None:
        gradients = GradientLoss(**header["gradients"])
    return Weighing(loss, gradients=gradients)
