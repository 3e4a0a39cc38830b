r"""From features to error bars: $\sigma^2 = \alpha^2 q + \text{noise} / c$."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..calibration.calibration import Calibration
from ..models.modes import unmixed
from ..posterior.quadratic import QuadraticForm
from ..prediction.prediction import Prediction
from .readout.reading import Reading


@dataclass(frozen=True)
class Spread:
    """One batch: the reading, with q (M, 1 or K) in place of its features, and the noise.

    Attributes:
        from_inputs: variance that uncertain inputs bring, shaped like the output, if any.
    """

    reading: Reading
    noise: Tensor
    from_inputs: Tensor | None = None


@dataclass(frozen=True)
class ErrorBars:
    """Everything that a prediction needs once the calibration is known.

    Attributes:
        form: the quadratic form q in the model's precision.
        calibration: scale, noise and law.
    """

    form: QuadraticForm
    calibration: Calibration

    def spread(self, reading: Reading, weight: Tensor | None = None) -> Spread:
        """What must be computed batch by batch; `weight` is c, (M, 1) or (M, K)."""
        reading.check_targets(len(self.calibration.scale))
        with unmixed(reading.features):
            q = self.form(reading.features)
        q = q[:, None] if q.ndim == 1 else q
        mean = reading.rows(reading.output)
        noise = self.calibration.noise_variance(mean, reading.features, weight)
        return Spread(replace(reading, features=q), noise)

    def std(self, spread: Spread) -> Tensor:
        """The standard deviation of one batch, shaped and typed like the output."""
        q, output = spread.reading.features, spread.reading.output
        variance = self.calibration.epistemic(q) + spread.noise.to(q)
        return spread.reading.unrows(variance.sqrt().to(output.dtype))

    def prediction(self, spreads: Sequence[Spread]) -> Prediction:
        """The predictions of consecutive batches."""
        if not spreads:
            raise ValueError("There is nothing to predict: no batches were given.")
        reading = Reading.join([spread.reading for spread in spreads])
        noise = torch.cat([spread.noise for spread in spreads])
        q = reading.features
        inputs = [spread.from_inputs for spread in spreads if spread.from_inputs is not None]
        dtype = torch.promote_types(reading.output.dtype, torch.float32)  # half has too few digits
        return Prediction(
            mean=reading.output,
            epistemic=reading.unrows(self.calibration.epistemic(q).to(dtype)),
            noise=reading.unrows(noise.to(dtype)),
            rigidity=reading.unrows((1 / q).to(dtype)),
            from_inputs=torch.cat(inputs).to(dtype) if inputs else q.new_zeros(()),
            law=self.calibration.law,
        )
