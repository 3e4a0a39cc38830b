"""What a fit has learnt of a model's readout, its calibration, what changes them, and files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._version import __version__
from ..calibration.calibration import Calibration, Wanted
from ..calibration.report import CalibrationReport
from ..data.batches import Batch
from ..data.feed import Feed
from ..data.sketch import RowSketch
from ..data.slots import InputName
from ..data.storage import Snapshot, prefixed, unprefixed
from ..losses import NAMED, Loss
from ..models.shadow import placement
from ..notices import NO_FIT, NotFittedError, notify
from ..posterior.gram import Gram
from ..posterior.posterior import Posterior
from ..posterior.quadratic import QuadraticForm
from .accumulation import Statistics, Weighing, accumulate
from .error_bars import ErrorBars
from .gradients.loss import GradientLoss, GradientTarget, calibration_loss, gradient_scale
from .readout.binding import Binding
from .readout.tap import AnyTap
from .validation import calibrated, calibration_data

DEFAULT_RIDGE = 1e-6
"""Ridge before calibration, relative to the Gram's mean diagonal."""

_LOSSES: dict[str, type[Any]] = {type(one).__name__: type(one) for one in NAMED.values()}


class ReadoutFit:
    """The state behind `LastLayerRigidity`; an error or interruption leaves it as it was.

    Args:
        binding: the tie to the model.
        target: callable(batch) -> target, where given.
    """

    def __init__(self, binding: Binding, target: Callable[[Any], Tensor] | None) -> None:
        self.binding, self.model, self.target = binding, binding.model, target
        self.statistics: Statistics | None = None
        self.weighing: Weighing | None = None
        self.report: CalibrationReport | None = None
        self._posterior: Posterior | None = None
        self._bars: tuple[torch.dtype, ErrorBars] | None = None
        self._said: set[str] = set()

    def fit(self, train: Any, weighing: Weighing, **options: Any) -> None:
        """Accumulate the Gram over the training data."""
        binding = self.binding.restored()
        feed = replace(self.feed(weighing), inputs=None, kind=None)
        batches = feed(train, "fit", any_order=True, **options)
        statistics = accumulate(None, binding.find, batches, weighing)
        if self.target is None:
            statistics.say_unlabelled()
        self.binding, self.weighing, self.statistics = binding, weighing, statistics
        self.report = None
        self._forget_derived()

    def revise(self, data: Any, *, remove: bool, **options: Any) -> None:
        """Add data, or take them out."""
        statistics, weighing, tap = self.known(), self.known_weighing(), self._thorough_tap()
        what = "forget" if remove else "partial_fit"
        batches = self.feed(weighing)(data, what, any_order=True, **options)
        own = statistics.clone()
        self.statistics = accumulate(own, lambda _: tap, batches, weighing, remove=remove)
        if self.report is not None:
            self.report = replace(self.report, stale=True)
        self._forget_derived()

    def calibrate(
        self,
        valid: Any,
        train: Any,
        wanted: Wanted,
        *,
        gradients: InputName,
        gradient_target: GradientTarget | None,
        **options: Any,
    ) -> CalibrationReport:
        """Choose ridge, scale and noise; see `LastLayerRigidity.calibrate`."""
        statistics, weighing = self.known(), self.known_weighing()
        if gradients is not None or gradient_target is not None:
            judged = calibration_loss(weighing.gradients, gradients, gradient_target)
            weighing = replace(weighing, gradients=judged)
        data = calibration_data(wanted.criterion, valid, train)
        data = list(data) if isinstance(data, Iterator) else data
        tap = self._thorough_tap()
        batches = partial(self.feed(weighing), data, "calibrate", any_order=True, **options)
        with torch.enable_grad():
            report = calibrated(tap, batches(), statistics, self.posterior, weighing, wanted)
            final = self.posterior.with_ridge(report.ridge).with_scale(report.scale)
            if weighing.gradients is not None and weighing.gradients.target is not None:
                dtype = placement(self.model)[1]
                own = gradient_scale(tap, batches(), final, dtype, weighing.gradients)
                report = replace(report, gradient_scale=own)
        self.report = report
        self._said.discard("stale")
        self._forget_derived()
        self._posterior = final
        return report

    def known(self) -> Statistics:
        """What the data left.

        Raises:
            NotFittedError: nothing yet.
        """
        if self.statistics is None:
            raise NotFittedError(NO_FIT.format("fit(train)"))
        return self.statistics

    def known_weighing(self) -> Weighing:
        """The loss and weights of the fit.

        Raises:
            ValueError: they were functions, and the fit comes from a file.
        """
        if self.weighing is None:
            raise ValueError(
                "The loss or sample weights of this fit were functions, which a file does not "
                "hold. Call set_loss(loss, sample_weight) with the same ones first."
            )
        return self.weighing

    @property
    def calibration(self) -> Calibration:
        """What was chosen; before that, scale 1, no noise and a ridge relative to the Gram."""
        if self.report is not None:
            return self.report.calibration
        known = self.known()
        ridge = DEFAULT_RIDGE * float(known.gram.diagonal.mean())
        return Calibration.unscaled(ridge, known.targets, known.gram.device)

    @property
    def gradient_scale(self) -> Tensor:
        """Of derivatives by the inputs: calibrated on their targets, else the scale."""
        own = None if self.report is None else self.report.gradient_scale
        return self.calibration.scale if own is None else own

    @property
    def posterior(self) -> Posterior:
        """Factorised once, when first needed."""
        if self._posterior is None:
            chosen = self.calibration
            posterior = Posterior.from_gram(self.known().gram, ridge=chosen.ridge)
            self._posterior = posterior.with_scale(chosen.scale)
        return self._posterior

    @property
    def bars(self) -> ErrorBars:
        """Error bars in the model's precision."""
        dtype = placement(self.model)[1]
        if self._bars is None or self._bars[0] != dtype:
            form = QuadraticForm.of(self.posterior, dtype)
            self._bars = (dtype, ErrorBars(form, self.calibration))
        return self._bars[1]

    def tap(self) -> AnyTap:
        """The readout of the fit; warns once where the bars are uncalibrated or stale.

        Raises:
            ValueError: there is no fit, or the model's weights have changed.
        """
        self.known()
        tap = self.binding.current()
        self.follow_device()
        if self.report is None:
            self.say_once(
                "uncalibrated",
                "The error bars are not calibrated: scale 1 and a "
                "default ridge are used. Call calibrate(valid).",
            )
        elif self.report.stale:
            self.say_once(
                "stale",
                "Data were added or removed since the calibration. Call calibrate(valid) again.",
            )
        return tap

    def feed(self, weighing: Weighing | None = None) -> Feed:
        """How data reach the model, for the loss of the fit or another."""
        weighing = self.weighing if weighing is None else weighing
        gradients, known = None if weighing is None else weighing.gradients, self.statistics
        return Feed(
            self.model,
            whole=self.binding.source.forward is not None,
            target=self.target,
            inputs=None if known is None else known.inputs,
            apart=None if gradients is None else gradients.apart,
            kind=None if known is None else known.kind,
        )

    def batches(
        self, data: Any, what: str, batch_size: int | None, progress: bool | None
    ) -> Iterator[Batch]:
        """Batches of data whose targets are of no interest."""
        feed = self.feed().unlabelled()
        return feed(data, what, batch_size=batch_size, progress=progress)

    def follow_device(self) -> None:
        """Bring the statistics to the model's device; they stay float64."""
        if self.statistics is None:
            return
        device = placement(self.model)[0]
        if self.statistics.gram.device == device:
            return
        self.statistics.gram = self.statistics.gram.to(device)
        self.report = None if self.report is None else self.report.to(device)
        posterior = self._posterior
        self._forget_derived()
        self._posterior = None if posterior is None else posterior.to(device)

    def say_once(self, key: str, message: str) -> None:
        """Warn, unless it was said before."""
        if key not in self._said:
            self._said.add(key)
            notify(message)

    def snapshot(self) -> Snapshot:
        """Everything but the model."""
        known, report = self.known(), self.report
        tensors = prefixed("gram", known.gram.state()) | prefixed("sketch", known.sketch.state())
        if report is not None:
            tensors |= prefixed("calibration", report.tensors())
        header = {
            "library": __version__,
            "readout": self.binding.header(),
            "targets": known.targets,
            "inputs": known.inputs,
            "batch": known.kind,
            "loss": _loss_state(self.weighing),
            "calibration": None if report is None else report.header(),
        }
        return Snapshot(tensors, header)

    def take(self, given: Snapshot | None) -> None:
        """Take up a fit from a snapshot; None for no fit."""
        if given is None:
            self.statistics = self.weighing = self.report = None
        else:
            binding = self.binding.restored(given.header["readout"])
            self.statistics, self.weighing, self.report = _parts(given)
            self.binding = binding
        self._forget_derived()
        self.follow_device()

    def _thorough_tap(self) -> AnyTap:
        tap = self.binding.current(thorough=True)
        self.follow_device()
        return tap

    def _forget_derived(self) -> None:
        self._posterior = self._bars = None


def _parts(given: Snapshot) -> tuple[Statistics, Weighing | None, CalibrationReport | None]:
    """What a snapshot holds; no weighing where the loss or weights were functions.

    Raises:
        ValueError: something is missing, or this version does not know it.
    """
    try:
        gram = Gram.from_state(unprefixed("gram", given.tensors))
        sketch = RowSketch.from_state(unprefixed("sketch", given.tensors))
        counts = (given.header["targets"], given.header["inputs"])
        statistics = Statistics(gram, sketch, *counts, given.header.get("batch"))
        report = given.part("calibration", CalibrationReport.from_state)
        return statistics, _loss_from(given.header["loss"]), report
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"The fit is incomplete: {error} is missing or wrong. Save it again from the "
            "fitted object."
        ) from error


def _loss_state(weighing: Weighing | None) -> dict[str, Any] | None:
    """Name and settings of a loss that a file can hold."""
    if weighing is None:
        return None
    name, gradients = type(weighing.loss).__name__, weighing.gradients
    if weighing.sample_weight is not None or name not in _LOSSES:
        return None
    if gradients is not None and any(callable(value) for value in vars(gradients).values()):
        return None
    state = {"name": name, "settings": vars(weighing.loss)}
    return state if gradients is None else {**state, "gradients": vars(gradients)}


def _loss_from(state: dict[str, Any] | None) -> Weighing | None:
    if state is None:
        return None
    loss: Loss = _LOSSES[state["name"]](**state["settings"])
    gradients = state.get("gradients")
    return Weighing(loss, gradients=None if gradients is None else GradientLoss(**gradients))
