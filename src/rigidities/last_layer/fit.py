"""A model, what a fit has learnt about its readout, and everything that changes it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..calibration.report import CalibrationReport
from ..data.batches import Batch
from ..data.feed import Feed
from ..data.slots import InputName
from ..data.storage import read, write
from ..losses import LossLike, loss_for
from ..models.calling import FeatureFunction, ForwardFunction, Source
from ..models.modes import outside_inference_mode
from ..models.shadow import placement
from ..notices import notify
from ..posterior.gram import Gram
from ..posterior.posterior import Posterior
from ..posterior.quadratic import QuadraticForm
from ..prediction.law import Gaussian
from ..prediction.noise import ConstantNoise
from .accumulation import Statistics, Weighing, accumulate, fitted
from .error_bars import ErrorBars
from .gradients.loss import (
    GradientTarget,
    GradientWeight,
    calibration_loss,
    gradient_loss,
    gradient_scale,
)
from .readout.binding import Binding
from .readout.tap import AnyTap
from .rows import SampleWeight
from .snapshot import Snapshot
from .validation import calibrated, calibration_data

if TYPE_CHECKING:
    from typing_extensions import Self

DEFAULT_RIDGE = 1e-6
"""Ridge before calibration, relative to the Gram's mean diagonal."""


class FittedReadout(nn.Module):
    """The model, the fit of its readout and the calibration: the state of `LastLayerRigidity`.

    Here stands what changes that state, and the properties that show it; what it answers stands
    in `LastLayerRigidity`.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        layer: str | list[str] | None = None,
        features: FeatureFunction | None = None,
        forward: ForwardFunction | None = None,
        target: Callable[[Any], Tensor] | None = None,
        output: str | int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}.")
        if layer is not None and features is not None:
            raise ValueError("Give layer= or features=, not both.")
        self.model = model
        self._source = Source(forward, features, output)
        self._layer, self._target = layer, target
        self._binding = Binding(model, self._source, layer)
        self._statistics: Statistics | None = None
        self._weighing: Weighing | None = None
        self._report: CalibrationReport | None = None
        self._posterior: Posterior | None = None
        self._bars: tuple[torch.dtype, ErrorBars] | None = None
        self._said: set[str] = set()

    @outside_inference_mode
    def fit(
        self,
        train: Any,
        *,
        loss: LossLike = "mse",
        sample_weight: SampleWeight | None = None,
        gradients: InputName = None,
        gradient_weight: GradientWeight | None = None,
        gradient_target: GradientTarget | None = None,
        batch_size: int | None = None,
        progress: bool | None = None,
    ) -> Self:
        r"""Accumulate the Gram in one pass over the training data; nothing is factorised.

        Args:
            train: a tuple of tensors (x, y), a Dataset, a DataLoader, or an iterable of batches.
            loss: the loss the model was trained with: "mse", "huber", "log-cosh", "poisson",
                an object of `losses`, or callable(prediction, target) -> one loss per sample.
            sample_weight: callable(batch) -> weights (N,), where the training loss was weighted.
            gradients: position or name of the input by whose derivatives the model was trained
                too ("pos" for forces): half their squared error, times the
            gradient_weight: $\beta$, stood in the loss; a number, by default 1, or
                callable(batch) -> one per row of that input.
            gradient_target: the derivatives' target, where there is one: key or attribute of a
                batch, or callable(batch); forces with their sign changed. `calibrate` then gives
                derivatives a scale of their own.
            batch_size: rows per batch where the data are not batches already; by default a
                loader's own, else 1024.
            progress: show a bar; by default on a terminal only.

        Returns:
            The object itself. An error or interruption leaves it as it was.
        """
        binding = Binding(self.model, self._source, self._layer)
        derivatives = gradient_loss(gradients, gradient_weight, gradient_target)
        weighing = Weighing(loss_for(loss), sample_weight, derivatives)
        feed = replace(self._feed(weighing), inputs=None)
        batches = feed(train, "fit", batch_size=batch_size, progress=progress, any_order=True)
        statistics = fitted(binding, weighing, batches)
        self._binding, self._weighing, self._statistics = binding, weighing, statistics
        self._report = None
        self._forget_derived()
        return self

    @outside_inference_mode
    def partial_fit(
        self, more: Any, *, batch_size: int | None = None, progress: bool | None = None
    ) -> Self:
        """Add data, exactly as if they had been in the fit; marks the calibration stale."""
        if self._statistics is None:
            return self.fit(more, batch_size=batch_size, progress=progress)
        return self._revise(more, batch_size, progress, remove=False)

    @outside_inference_mode
    def forget(
        self, some: Any, *, batch_size: int | None = None, progress: bool | None = None
    ) -> Self:
        """Remove data that were in the fit; marks the calibration stale."""
        return self._revise(some, batch_size, progress, remove=True)

    @outside_inference_mode
    def calibrate(
        self,
        valid: Any = None,
        *,
        train: Any = None,
        criterion: str = "nll",
        ridge: float | None = None,
        noise: str = "none",
        gradients: InputName = None,
        gradient_target: GradientTarget | None = None,
        batch_size: int | None = None,
        progress: bool | None = None,
    ) -> CalibrationReport:
        r"""Choose ridge, scale and noise in one pass over data the model has not seen.

        Args:
            valid: validation data, in any form that `fit` takes.
            train: the training data, for `criterion="loo"`, which needs no validation data.
            criterion: "nll" (default), "bins" (the paper's), "crps", "absolute"; "evidence"
                chooses the ridge from the training data and the scale on `valid`; "loo" uses
                leave-one-out residuals of the training data (optimistic for a net trained end
                to end).
            ridge: fix $\varsigma^2$ instead of choosing it.
            noise: "none" (the paper's); "constant", a noise floor added to the variance; or
                "bayes", where the noise is $\alpha^2$ as in Bayesian linear regression, so that
                the variance is $\alpha^2 (1 + q)$: with `criterion="evidence"` the safest before
                predictions are averaged or subtracted.
            gradients: as in `fit`; by default what the fit was given.
            gradient_target: likewise. With one, derivatives get a scale of their own, from a
                second pass.
            batch_size: as in `fit`.
            progress: as in `fit`.

        Returns:
            What was chosen and how good it is; print it.
        """
        statistics, weighing = self._fitted(), self._known_weighing()
        if gradients is not None or gradient_target is not None:
            judged = calibration_loss(weighing.gradients, gradients, gradient_target)
            weighing = replace(weighing, gradients=judged)
        data = calibration_data(criterion, valid, train)
        data = list(data) if isinstance(data, Iterator) else data
        tap = self._binding.current(thorough=True)
        self._follow_device()
        feed = partial(self._feed(weighing), batch_size=batch_size, progress=progress)
        batches = partial(feed, data, "calibrate", any_order=True)
        with torch.enable_grad():
            report = calibrated(
                tap,
                batches(),
                statistics,
                self.posterior,
                weighing,
                criterion=criterion,
                ridge=ridge,
                noise=noise,
            )
            if weighing.gradients is not None and weighing.gradients.target is not None:
                final = self.posterior.with_ridge(report.ridge).with_scale(report.scale)
                dtype = placement(self.model)[1]
                own = gradient_scale(tap, batches(), final, dtype, weighing.gradients)
                report = replace(report, gradient_scale=own)
            self._report = report
        self._said.discard("stale")
        basis = self.posterior
        self._forget_derived()
        self._posterior = basis.with_ridge(self.ridge).with_scale(self.scale)
        return self._report

    @property
    def gram(self) -> Gram:
        """The accumulated rows."""
        return self._fitted().gram

    @property
    def posterior(self) -> Posterior:
        """Eigenbasis, ridge and scale; factorised once, when first needed."""
        if self._posterior is None:
            posterior = Posterior.from_gram(self.gram, ridge=self.ridge)
            self._posterior = posterior.with_scale(self.scale)
        return self._posterior

    @property
    def ridge(self) -> float:
        r"""$\varsigma^2$: calibrated, or a default relative to the Gram's diagonal."""
        if self._report is not None:
            return self._report.ridge
        return DEFAULT_RIDGE * float(self.gram.diagonal.mean())

    @property
    def scale(self) -> Tensor:
        r"""$\alpha$, one entry per target; ones before calibration."""
        return self._scale_and_noise()[0]

    @property
    def noise(self) -> ConstantNoise:
        """The noise; zero before calibration and with `noise="none"`."""
        return ConstantNoise(self._scale_and_noise()[1])

    @property
    def gradient_scale(self) -> Tensor:
        r"""$\alpha_g$ of derivatives by the inputs: calibrated on their targets, else `scale`."""
        own = None if self._report is None else self._report.gradient_scale
        return self.scale if own is None else own

    @property
    def report(self) -> CalibrationReport | None:
        """The last calibration's report."""
        return self._report

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything but the model's weights to a safetensors file, atomically."""
        self._fitted()
        self._binding.current(thorough=True)
        snapshot = self._snapshot()
        write(path, snapshot.tensors, snapshot.header)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: nn.Module, **options: Any) -> Self:
        """Read a file for the model it was made with.

        Args:
            path: written by `save`.
            model: with the same weights, on any device.
            options: the functions `forward`, `features` and `target` of the fit, which a file
                does not hold.
        """
        snapshot = Snapshot(*read(path))
        options.setdefault("output", snapshot.header["readout"]["output"])
        uq = cls(model, **options)
        uq._take(snapshot)
        uq._binding.current()
        return uq

    def set_loss(
        self,
        loss: LossLike = "mse",
        sample_weight: SampleWeight | None = None,
        *,
        gradients: InputName = None,
        gradient_weight: GradientWeight | None = None,
        gradient_target: GradientTarget | None = None,
    ) -> Self:
        """Give the functions again that a loaded fit was made with and a file does not hold."""
        self._fitted()
        if self._weighing is not None:
            raise ValueError("The loss of this fit is known. To use another, call fit again.")
        derivatives = gradient_loss(gradients, gradient_weight, gradient_target)
        self._weighing = Weighing(loss_for(loss), sample_weight, derivatives)
        return self

    def get_extra_state(self) -> dict[str, Any]:
        """The fit and calibration, inside the `state_dict`."""
        return {} if self._statistics is None else self._snapshot().state()

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Take up a fit from a `state_dict`, whether fitted before or not."""
        if state:
            self._take(Snapshot.from_state(state))
        else:
            self._statistics = self._weighing = self._report = None
            self._forget_derived()

    def train(self, mode: bool = True) -> Self:
        """Set the wrapper's flag alone: the model's is the user's, and predictions use eval."""
        self.training = mode
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if self._statistics is not None:
            self._follow_device()
        return self

    def extra_repr(self) -> str:
        """Where the features come from and how much was learnt."""
        if self._statistics is None:
            return "unfitted"
        state = (
            "uncalibrated" if self._report is None else f"calibrated by {self._report.criterion}"
        )
        return f"{self.gram!r}, {state}"

    def _fitted(self) -> Statistics:
        if self._statistics is None:
            raise ValueError("There is no fit yet. Call fit(train) first.")
        return self._statistics

    def _known_weighing(self) -> Weighing:
        if self._weighing is None:
            raise ValueError(
                "The loss or sample weights of this fit were functions, which a file does not "
                "hold. Call set_loss(loss, sample_weight) with the same ones first."
            )
        return self._weighing

    def _feed(self, weighing: Weighing | None = None) -> Feed:
        gradients = None if weighing is None else weighing.gradients
        return Feed(
            self.model,
            whole=self._source.forward is not None,
            target=self._target,
            inputs=None if self._statistics is None else self._statistics.inputs,
            apart=None if gradients is None else gradients.apart,
        )

    def _batches(
        self,
        data: Any,
        batch_size: int | None,
        what: str,
        progress: bool | None,
        *,
        labelled: bool = False,
    ) -> Iterator[Batch]:
        feed = self._feed(self._weighing)
        feed = feed if labelled else feed.unlabelled()
        return feed(data, what, batch_size=batch_size, progress=progress)

    def _revise(
        self, data: Any, batch_size: int | None, progress: bool | None, *, remove: bool
    ) -> Self:
        statistics, weighing = self._fitted(), self._known_weighing()
        tap = self._binding.current(thorough=True)
        self._follow_device()
        what = "forget" if remove else "partial_fit"
        feed = self._feed(weighing)
        batches = feed(data, what, batch_size=batch_size, progress=progress, any_order=True)
        with torch.enable_grad():
            self._statistics = accumulate(statistics.clone(), tap, batches, weighing, remove=remove)
        if self._report is not None:
            self._report = replace(self._report, stale=True)
        self._forget_derived()
        return self

    def _tap(self) -> AnyTap:
        self._fitted()
        tap = self._binding.current()
        self._follow_device()
        if self._report is None:
            self._say_once(
                "uncalibrated",
                "The error bars are not calibrated: scale 1 and a "
                "default ridge are used. Call calibrate(valid).",
            )
        elif self._report.stale:
            self._say_once(
                "stale",
                "Data were added or removed since the calibration. Call calibrate(valid) again.",
            )
        return tap

    def _scale_and_noise(self) -> tuple[Tensor, Tensor]:
        statistics = self._fitted()
        if self._report is not None:
            return self._report.scale, self._report.noise
        one = torch.ones(statistics.targets, dtype=torch.float64, device=statistics.gram.device)
        return one, torch.zeros_like(one)

    def _error_bars(self) -> ErrorBars:
        dtype = placement(self.model)[1]
        if self._bars is None or self._bars[0] != dtype:
            form = QuadraticForm.of(self.posterior, dtype)
            self._bars = (dtype, ErrorBars(form, self.scale, self.noise, Gaussian()))
        return self._bars[1]

    def _follow_device(self) -> None:
        """Bring the statistics to the model's device; they stay float64."""
        device = placement(self.model)[0]
        statistics = self._fitted()
        if statistics.gram.device == device:
            return
        statistics.gram = statistics.gram.to(device)
        self._report = None if self._report is None else self._report.to(device)
        posterior = self._posterior
        self._forget_derived()
        self._posterior = None if posterior is None else posterior.to(device)

    def _forget_derived(self) -> None:
        self._posterior = self._bars = None

    def _say_once(self, key: str, message: str) -> None:
        if key not in self._said:
            self._said.add(key)
            notify(message)

    def _snapshot(self) -> Snapshot:
        return Snapshot.of(self._fitted(), self._binding.header(), self._weighing, self._report)

    def _take(self, snapshot: Snapshot) -> None:
        binding = Binding(self.model, self._source, self._layer)
        binding.restore(snapshot.header["readout"])
        statistics, weighing, report = snapshot.parts()
        self._binding, self._statistics = binding, statistics
        self._weighing, self._report = weighing, report
        self._forget_derived()
        self._follow_device()
