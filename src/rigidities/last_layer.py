r"""`LastLayerRigidity`: error bars for a trained torch model.

$$ \sigma^2(x) = \alpha^2\, f(x)^\top (G + \varsigma^2 I)^{-1} f(x) \; [+ \text{noise}] $$

with $f$ the derivatives of the output by the readout's weights (for a linear last layer, its
input), $G = \sum_i w_i f_i f_i^\top$ over the training data. `fit` accumulates G, `calibrate`
chooses $\alpha$, $\varsigma^2$ and the noise, `predict` uses them.

Reference: F. Bigi, S. Chong, M. Ceriotti, F. Grasselli, "A prediction rigidity formalism for
low-cost uncertainties in trained neural networks" (2024), Sec. 3.5.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .accumulation import (
    SampleWeight,
    Statistics,
    Weighing,
    accumulate,
    fitted,
    sample_weights,
)
from .batches import Batch, Reader, raw_batches
from .binding import Binding
from .calibrated import CalibrationReport
from .calibrating import calibrated, calibration_data
from .error_bars import ErrorBars
from .gram import Gram
from .likelihood import ConstantNoise, Gaussian
from .losses import LossLike, loss_for
from .posterior import Posterior
from .prediction import Prediction
from .progress import progressing
from .quadratic import QuadraticForm
from .shadow import placement
from .snapshot import Snapshot
from .source import FeatureFunction, ForwardFunction, Source
from .storage import read, write

DEFAULT_RIDGE = 1e-6
"""Ridge before calibration, relative to the Gram's mean diagonal."""


class LastLayerRigidity(nn.Module):
    """Error bars for a trained `nn.Module`, which is never changed.

    Args:
        model: the trained model.
        layer: name (or names) of the readout layer; by default the last linear map before the
            output is found on the first batch.
        features: callable(model, *inputs) -> (N, D), instead of a readout layer.
        forward: callable(model, batch) -> output, for batches that are not (x, y).
        target: callable(batch) -> target.
        output: key, index or attribute of the output, where the model returns several.

    Examples:
        >>> _ = torch.manual_seed(0)
        >>> x = torch.linspace(-1, 1, 50)[:, None]
        >>> y = 2 * x + 0.1 * torch.randn(50, 1)
        >>> model = nn.Linear(1, 1)
        >>> with torch.no_grad():
        ...     _, _ = model.weight.fill_(2.0), model.bias.fill_(0.0)
        >>> uq = LastLayerRigidity(model).fit((x[::2], y[::2]))
        >>> report = uq.calibrate((x[1::2], y[1::2]))
        >>> mean, std = uq(torch.tensor([[0.0], [5.0]]))
        >>> mean.shape == std.shape, bool(std[1] > std[0])
        (True, True)
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

    def fit(
        self,
        train: Any,
        *,
        loss: LossLike = "mse",
        sample_weight: SampleWeight | None = None,
        batch_size: int | None = None,
        progress: bool | None = None,
    ) -> LastLayerRigidity:
        """Accumulate the Gram in one pass over the training data; nothing is factorised.

        Args:
            train: a tuple of tensors (x, y), a Dataset, a DataLoader, or an iterable of batches.
            loss: the loss the model was trained with: "mse", "huber", "log-cosh", "poisson",
                an object of `losses`, or callable(prediction, target) -> one loss per sample.
            sample_weight: callable(batch) -> weights (N,), where the training loss was weighted.
            batch_size: rows per batch where the data are not batches already; by default a
                loader's own, else 1024.
            progress: show a bar; by default on a terminal only.

        Returns:
            The object itself. An error or interruption leaves it as it was.
        """
        binding = Binding(self.model, self._source, self._layer)
        weighing = Weighing(loss_for(loss), sample_weight)
        batches = self._batches(train, batch_size, "fit", progress, any_order=True)
        statistics = fitted(binding, weighing, batches)
        self._binding, self._weighing, self._statistics = binding, weighing, statistics
        self._report = None
        self._forget_derived()
        return self

    def partial_fit(
        self, more: Any, *, batch_size: int | None = None, progress: bool | None = None
    ) -> LastLayerRigidity:
        """Add data, exactly as if they had been in the fit; marks the calibration stale."""
        if self._statistics is None:
            return self.fit(more, batch_size=batch_size, progress=progress)
        return self._revise(more, batch_size, progress, remove=False)

    def forget(
        self, some: Any, *, batch_size: int | None = None, progress: bool | None = None
    ) -> LastLayerRigidity:
        """Remove data that were in the fit; marks the calibration stale."""
        return self._revise(some, batch_size, progress, remove=True)

    def calibrate(
        self,
        valid: Any = None,
        *,
        train: Any = None,
        criterion: str = "nll",
        ridge: float | None = None,
        noise: str = "none",
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
            noise: "none" (the paper's) or "constant", a noise floor added to the variance.
            batch_size: as in `fit`.
            progress: as in `fit`.

        Returns:
            What was chosen and how good it is; print it.
        """
        statistics, weighing = self._fitted(), self._known_weighing()
        data = calibration_data(criterion, valid, train)
        tap = self._binding.current(thorough=True)
        self._follow_device()
        with torch.enable_grad():
            self._report = calibrated(
                tap,
                self._batches(data, batch_size, "calibrate", progress, any_order=True),
                statistics,
                self.posterior,
                weighing,
                criterion=criterion,
                ridge=ridge,
                noise=noise,
            )
        self._said.discard("stale")
        basis = self.posterior
        self._forget_derived()
        self._posterior = basis.with_ridge(self.ridge).with_scale(self.scale)
        return self._report

    def forward(self, *inputs: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, each shaped like the model's output."""
        reading = self._tap()(*inputs, **keywords)
        bars = self._error_bars()
        return reading.output, bars.std(bars.spread(reading))

    def predict(
        self,
        data: Any,
        *,
        sample_weight: SampleWeight | None = None,
        batch_size: int | None = None,
        progress: bool | None = None,
    ) -> Prediction:
        """Predictions with error bars for inputs or batches (targets in them are ignored).

        Args:
            data: a tensor of inputs, or anything that `fit` takes.
            sample_weight: callable(batch) -> loss weights c, by which the noise is divided.
            batch_size: as in `fit`.
            progress: as in `fit`.
        """
        tap, bars = self._tap(), self._error_bars()
        spreads = []
        with torch.enable_grad():
            for batch in self._batches(data, batch_size, "predict", progress):
                reading = tap(*batch.args, **batch.kwargs)
                spreads.append(bars.spread(reading, sample_weights(sample_weight, batch, reading)))
        return bars.prediction(spreads)

    @property
    def rounding(self) -> float:
        """Bound on the relative rounding error of the variances that `uq(x)` gives.

        See `QuadraticForm.rounding`; rounding errors within a sum are taken as independent.
        """
        self._tap()
        return self._error_bars().form.rounding

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
    def load(
        cls, path: str | os.PathLike[str], model: nn.Module, **options: Any
    ) -> LastLayerRigidity:
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
        self, loss: LossLike = "mse", sample_weight: SampleWeight | None = None
    ) -> LastLayerRigidity:
        """Give the functions again that a loaded fit was made with and a file does not hold."""
        self._fitted()
        if self._weighing is not None:
            raise ValueError("The loss of this fit is known. To use another, call fit again.")
        self._weighing = Weighing(loss_for(loss), sample_weight)
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

    def train(self, mode: bool = True) -> LastLayerRigidity:
        """Set the wrapper's flag alone: the model's is the user's, and predictions use eval."""
        self.training = mode
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LastLayerRigidity:
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

    def _batches(
        self,
        data: Any,
        size: int | None,
        what: str,
        progress: bool | None,
        *,
        any_order: bool = False,
    ) -> Iterator[Batch]:
        reader = Reader(
            *placement(self.model),
            whole=self._source.forward is not None,
            target=self._target,
            inputs=None if what == "fit" or self._statistics is None else self._statistics.inputs,
        )
        raw, total = raw_batches(data, size, any_order=any_order)
        return map(reader, progressing(raw, total, what, progress))

    def _revise(
        self, data: Any, batch_size: int | None, progress: bool | None, *, remove: bool
    ) -> LastLayerRigidity:
        statistics, weighing = self._fitted(), self._known_weighing()
        tap = self._binding.current(thorough=True)
        self._follow_device()
        what = "forget" if remove else "partial_fit"
        batches = self._batches(data, batch_size, what, progress, any_order=True)
        with torch.enable_grad():
            self._statistics = accumulate(statistics.clone(), tap, batches, weighing, remove=remove)
        if self._report is not None:
            self._report = replace(self._report, stale=True)
        self._forget_derived()
        return self

    def _tap(self) -> Any:
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
            warnings.warn(message, stacklevel=4)

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
